"""Build the imputation and error detection recipes: one table of restaurants, split, with a question a row.

    python recipes/data_wrangling/build_restaurants.py [SOURCE] [--split test] [--output-dir DIR]

The table holds the Fodor's listings among the pairs of SOURCE/Fodors-Zagats/*.txt (default: data/ beside this
script), each restaurant once, split by `random.Random(SPLIT_SEED)`. Written are imputation_<split>.parquet and
error_detection_<split>.parquet, and <recipe>/prompt.jinja, whose examples come from the train split alone.
"""

from __future__ import annotations

import itertools
import random
import string
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from build_command import build_command
from build_dataset import read_pairs
from few_shot import Prompt

Record = dict[str, str]

SPLIT_SEED = 0
SPLIT_ROWS = {"test": 100, "valid": 60}  # the others are the train split

# Typos: attributes that hold one of few values, so that a reader can tell what is right.
CHECKED = ("city", "type")
ERROR_SHARE = 0.3
TYPO_SEED = 0


# Wording, number of examples and seed were chosen on the valid split (see each recipe's README.md).
IMPUTATION = Prompt(
    instruction="""\
Each entry is a restaurant, the area code of its phone number, and its city.

""",
    entry="""\
{{ name }}, {{ type }}, {{ addr }}
{{ phone[:3] }}:""",
    shots=48,
    seed=1,
)
# A value has an error where its right spelling is another: a small model repairs a word better than it judges one.
ERROR_DETECTION = Prompt(
    instruction="""\
Some values of a table of restaurants have a spelling error. Each entry shows a value and its right spelling.

""",
    entry="{{ value }} ->",
    shots=120,
    hard=40,  # with a typo
    seed=1,
)


def read_table(source: Path) -> list[Record]:
    """The Fodor's listing of every restaurant in the pairs, in the order of the raw files, each once."""
    table: dict[tuple, Record] = {}
    for name in ("train", "valid", "test"):
        for pair in read_pairs(source / "Fodors-Zagats" / f"{name}.txt"):
            table.setdefault(tuple(pair.left.items()), pair.left)
    return list(table.values())


def split_table(table: list[Record]) -> dict[str, list[Record]]:
    """{"test", "valid", "train": records}: disjoint, and the same everywhere."""
    shuffled = random.Random(SPLIT_SEED).sample(table, len(table))
    splits, start = {}, 0
    for name, rows in SPLIT_ROWS.items():
        splits[name], start = shuffled[start : start + rows], start + rows
    return splits | {"train": shuffled[start:]}


def imputation_questions(records: list[Record]) -> list[dict]:
    """Each record without its city, which is the label."""
    return [{k: v for k, v in r.items() if k != "city"} | {"label": r["city"]} for r in records]


def typo(value: str, rng: random.Random) -> str:
    """`value` with one letter replaced, left out, doubled, or swapped with the next one."""
    places = [i for i, character in enumerate(value) if character.isalpha()]
    while True:
        i, kind = rng.choice(places), rng.choice(("replace", "drop", "double", "swap"))
        if kind == "replace":
            changed = value[:i] + rng.choice(string.ascii_lowercase) + value[i + 1 :]
        elif kind == "drop":
            changed = value[:i] + value[i + 1 :]
        elif kind == "double":
            changed = value[:i] + value[i] + value[i:]
        else:
            changed = value[:i] + value[i : i + 2][::-1] + value[i + 2 :]
        if changed != value:
            return changed


def error_questions(records: list[Record], table: list[Record], split: str) -> list[dict]:
    """Each record with typos in some of its CHECKED values, once for each of these; label: it has a typo.

    A value that only one record of the table has is not asked about: nothing tells whether it is right.
    """
    rng = random.Random(f"{TYPO_SEED} {split}")
    known = {attribute: Counter(r[attribute] for r in table) for attribute in CHECKED}
    questions = []
    for record in records:
        dirty = dict(record)
        for attribute in CHECKED:
            if rng.random() < ERROR_SHARE and known[attribute][record[attribute]] > 1:
                while dirty[attribute] in known[attribute]:  # a typo that gives another right value is none
                    dirty[attribute] = typo(record[attribute], rng)
        for attribute in CHECKED:
            if known[attribute][record[attribute]] > 1:
                value, correct = dirty[attribute], record[attribute]
                asked = {"attribute": attribute, "value": value, "correct": correct, "label": value != correct}
                questions.append(dirty | asked)
    return questions


def imputation_examples(train: list[Record]) -> list[tuple[Record, str]]:
    """Cities in turn, so that the rarer ones have their share."""
    rng = random.Random(IMPUTATION.seed)
    of_city: dict[str, list[Record]] = {}
    for question in rng.sample(imputation_questions(train), len(train)):
        of_city.setdefault(question["label"], []).append(question)
    rounds = itertools.zip_longest(*of_city.values())
    chosen = [question for turn in rounds for question in turn if question is not None][: IMPUTATION.shots]
    rng.shuffle(chosen)
    return [(question, question["label"]) for question in chosen]


def error_examples(train: list[Record], table: list[Record]) -> list[tuple[dict, str]]:
    """Every value once, then others, and some with a typo."""
    rng = random.Random(ERROR_DETECTION.seed)
    questions = error_questions(train, table, "train")
    wrong = [q for q in questions if q["label"]]
    right = rng.sample([q for q in questions if not q["label"]], len(questions) - len(wrong))
    first = {q["value"]: q for q in reversed(right)}.values()
    others = [q for q in right if not any(q is f for f in first)]
    chosen = [*first, *others][: ERROR_DETECTION.shots - ERROR_DETECTION.hard]
    chosen += rng.sample(wrong, ERROR_DETECTION.hard)
    rng.shuffle(chosen)
    return [(question, question["correct"]) for question in chosen]


def to_table(questions: list[dict], name: str) -> pa.Table:
    """Columns id ("<name>-0000") and those of the questions; label: text, or whether there is an error."""
    rows = [{"id": f"{name}-{i:04d}", **question} for i, question in enumerate(questions)]
    return pa.Table.from_pylist(rows)


def build(source: Path, output_dir: Path, split: str = "test") -> list[Path]:
    """Write every file; returns their paths. The same source gives the same bytes (with the same pyarrow)."""
    table = read_table(source)
    records = split_table(table)
    asked = {
        "imputation": imputation_questions(records[split]),
        "error_detection": error_questions(records[split], table, split),
    }
    templates = {
        "imputation": IMPUTATION.template(imputation_examples(records["train"])),
        "error_detection": ERROR_DETECTION.template(error_examples(records["train"], table)),
    }
    written = []
    for name, questions in asked.items():
        (output_dir / name).mkdir(parents=True, exist_ok=True)
        written += [output_dir / f"{name}_{split}.parquet", output_dir / name / "prompt.jinja"]
        pq.write_table(to_table(questions, f"{name}_{split}"), written[-2])
        written[-1].write_text(templates[name], encoding="utf-8", newline="\n")
    return written


if __name__ == "__main__":
    build_command(build, __doc__)
