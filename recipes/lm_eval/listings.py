"""Documents of the tasks in this folder, out of the tables of `recipes/data_wrangling`: nothing is downloaded.

lm_eval calls these with what `--model_args` and `--metadata` say; they need none of it.
"""

import random
from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset

TABLES = Path(__file__).resolve().parents[1] / "data_wrangling"
NAMES = ("fodors_zagats", "beer", "itunes_amazon")
CHOICES = 4
SHOTS = 6  # restaurants
PAGE_RECORDS = (3, 8, 20, 45)  # of the longest pages not all fits 2,048 tokens


def pairs(table: str) -> list[tuple[dict, dict, bool]]:
    """(left record, right record, whether they are the same) of each row; records without empty fields."""
    found = []
    for row in pq.read_table(TABLES / f"{table}_test.parquet").to_pylist():
        sides = [{k.removeprefix(s): v for k, v in row.items() if k.startswith(s) and v} for s in ("left_", "right_")]
        found.append((*sides, row["label"]))
    return found


def line(record: dict[str, str]) -> str:
    return "; ".join(record.values())


def same_thing(**_) -> dict[str, Dataset]:
    """A listing, and four of another catalogue: the one of the same thing, and those with most words in common with it.

    The first of each table is an example.
    """
    splits = {"train": [], "test": []}
    rng = random.Random(0)
    for table in NAMES:
        rows, docs = pairs(table), []
        for left, right, same in rows:
            if same:
                words = set(line(left).split())
                others = sorted({line(r) for _, r, _ in rows if r != right})
                others.sort(key=lambda other: -len(words & set(other.split())))
                choices = rng.sample([line(right), *others[: CHOICES - 1]], CHOICES)
                docs.append({"listing": line(left), "choices": choices, "answer": choices.index(line(right))})
        splits["train"].append(docs[0])
        splits["test"] += docs[1:]
    return {name: Dataset.from_list(docs) for name, docs in splits.items()}


def restaurants(**_) -> dict[str, Dataset]:
    """Restaurants, each once: some under "train", the others under "test"."""
    records = list({line(r): r for left, right, _ in pairs("fodors_zagats") for r in (left, right)}.values())
    records = [r for r in records if {"name", "addr", "city", "phone"} <= r.keys()]
    return {"train": Dataset.from_list(records[:SHOTS]), "test": Dataset.from_list(records[SHOTS:])}


def pages(**_) -> dict[str, Dataset]:
    """Pages of catalogues: a line a record, as many as `PAGE_RECORDS` has it by turns."""
    texts = []
    for table in NAMES:
        lines = list(dict.fromkeys(line(r) for left, right, _ in pairs(table) for r in (left, right)))
        while lines:
            count = PAGE_RECORDS[len(texts) % len(PAGE_RECORDS)]
            texts.append("\n".join(lines[:count]))
            lines = lines[count:]
    return {"test": Dataset.from_dict({"text": texts})}
