"""Precision, recall and F1 of a batchgen output file of yes/no answers.

    python recipes/data_wrangling/score.py out.parquet [--json]

Reads the columns `label` (true for a match), `text` (the model's answer) and `error`. A row that failed, or
whose answer is neither yes nor no, counts as "no" and is reported. Needs pyarrow only.
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
    """`score` of an output file, with its "failed" and "unparsable" rows. Raises ValueError, OSError."""
    try:
        with pq.ParquetFile(path) as file:
            wanted = [name for name in ("label", "text", "error") if name in file.schema_arrow.names]
            table = file.read(columns=wanted)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
    text_types = (types.is_string, types.is_large_string, types.is_null)
    labels = _column(table, path, "label", "true/false or 0/1", types.is_boolean, types.is_integer)
    texts = _column(table, path, "text", "one text a row", *text_types)
    errors = _column(table, path, "error", "text", *text_types)
    if not labels:
        raise ValueError(f"{path} has no rows")
    wrong = next((i for i, label in enumerate(labels) if label not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"{path}, row {wrong}: the label is {labels[wrong]}, not true/false or 0/1")
    answers = [
        parse_answer(text) if error is None and text is not None else None
        for text, error in zip(texts, errors, strict=True)
    ]
    failed = sum(error is not None or text is None for text, error in zip(texts, errors, strict=True))
    return score([bool(label) for label in labels], answers) | {
        "failed": failed,
        "unparsable": answers.count(None) - failed,
    }


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
