"""The metric of a batchgen output file, told by its columns.

    python recipes/data_wrangling/score.py out.parquet [--json]

Reads `label`, `text` (the model's answer) and `error`:

- label true/false: precision, recall and F1 of yes/no answers. A row that failed, or whose answer is neither, counts
  as "no" and is reported;
- label true/false, with columns `value` and `correct`: the same for answers that are the right spelling of `value`,
which
  say that it has an error by being another one; and the share of rows where the answer is `correct`;
- label text: accuracy, the share of rows where the answer is the label.

Case and blanks around an answer do not count. Needs pyarrow only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types


def parse_answer(text: str) -> bool | None:
    """True for an answer that begins with "yes", False for "no", in any case; None for anything else."""
    match = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    return None if match is None else match[1].lower() == "yes"


def score(labels: list[bool], answers: list[bool | None]) -> dict[str, float]:
    """Counts and rates of answers (None: no usable answer, counted as no) against labels of the same length.

    A rate with nothing to divide by is 0.
    """
    pairs = [(label, answer is True) for label, answer in zip(labels, answers, strict=True)]
    tp, fp = pairs.count((True, True)), pairs.count((False, True))
    fn, tn = pairs.count((True, False)), pairs.count((False, False))
    return {
        "rows": len(pairs),
        "true_positives": tp,
        "false_positives": fp,
        "false_negatives": fn,
        "true_negatives": tn,
        "precision": tp / (tp + fp) if tp + fp else 0.0,
        "recall": tp / (tp + fn) if tp + fn else 0.0,
        "f1": 2 * tp / (2 * tp + fp + fn) if tp else 0.0,
    }


def accuracy(labels: list[str], answers: list[str | None]) -> dict[str, float]:
    """The share of answers (None: none, counted as wrong) that are their label."""
    right = sum(a is not None and _plain(a) == _plain(b) for a, b in zip(answers, labels, strict=True))
    return {"rows": len(labels), "right": right, "accuracy": right / len(labels)}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


TypeCheck = Callable[[pa.DataType], bool]


def _column(table: pa.Table, path: str, name: str, what: str, *type_checks: TypeCheck) -> list:
    """The values of a column, if its type passes one of the checks. Raises ValueError."""
    if name not in table.column_names:
        raise ValueError(f"{path} has no column {name!r}: give what batchgen run wrote for a labelled input")
    column = table.column(name)
    if not any(check(column.type) for check in type_checks):
        raise ValueError(f"{path}: column {name!r} must hold {what}, not {column.type}")
    return column.to_pylist()


def score_file(path: str) -> dict[str, float]:
    """The metric of an output file, with its "failed" and, for yes/no, "unparsable" rows.

    Raises:
        ValueError: the file is no output of a recipe.
        OSError: it cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            names = ("label", "text", "error", "value", "correct")
            table = file.read(columns=[name for name in names if name in file.schema_arrow.names])
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
    is_text = (types.is_string, types.is_large_string)
    what = "true/false, 0/1 or text"
    labels = _column(table, path, "label", what, types.is_boolean, types.is_integer, *is_text)
    texts = _column(table, path, "text", "one text a row", *is_text, types.is_null)
    errors = _column(table, path, "error", "text", *is_text, types.is_null)
    if not labels:
        raise ValueError(f"{path} has no rows")
    texts = [text if error is None else None for text, error in zip(texts, errors, strict=True)]
    failed = {"failed": texts.count(None)}
    if isinstance(labels[0], str):
        return accuracy(labels, texts) | failed
    wrong = next((i for i, label in enumerate(labels) if label not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"{path}, row {wrong}: the label is {labels[wrong]}, not true/false or 0/1")
    labels = [bool(label) for label in labels]
    if "correct" in table.column_names:
        values = _column(table, path, "value", "text", *is_text)
        repaired = accuracy(_column(table, path, "correct", "text", *is_text), texts)
        answers = [
            None if text is None else _plain(text) != _plain(value) for text, value in zip(texts, values, strict=True)
        ]
        return score(labels, answers) | {"repaired": repaired["accuracy"]} | failed
    answers = [None if text is None else parse_answer(text) for text in texts]
    return score(labels, answers) | failed | {"unparsable": answers.count(None) - failed["failed"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", help="Parquet file written by batchgen run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        result = score_file(args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"score: {error}")
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name.replace('_', ' '):<16}{shown:>7}")


if __name__ == "__main__":
    main()
