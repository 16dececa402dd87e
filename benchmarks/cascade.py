"""How often the promise of a cascade is broken, and how many rows it passes on, over 200 samples of each case.

Planted cases have confidences and differences of known kinds. With --data, which has folders of record pairs (the
files of Ditto's entity matching sets: left, right and label between tabs), a small and a large model score yes and no
for all pairs, and then 200 samples are drawn of their answers. `planted` as the large model answers with the labels.

    python benchmarks/cascade.py
    python benchmarks/cascade.py --data DIR --small demo --large gemma-3-270m-q4_k_m.gguf --work-dir DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from recording import result_path, write

import batchgen
from batchgen.job.cascade.answers import AnswerColumns
from batchgen.job.cascade.bound import Floats, Target, choose_threshold, draw_rows

SEEDS = 200
PLANTED = "planted"
CHOICES = ("no", "yes")
_ROWS = (1_000, 20_000)
_TEMPLATE = "A: {{ a }}\nB: {{ b }}\nAre A and B the same? Answer yes or no."
Bools = npt.NDArray[np.bool_]


def planted(rows: int) -> dict[str, tuple[Floats, Bools]]:
    """Confidences and differences of each kind."""
    rng = np.random.default_rng(0)
    calibrated, unrelated, values = rng.beta(6, 1, rows), rng.random(rows), rng.integers(1, 6, rows) / 5
    wrong = rng.random(rows) < 0.08
    return {
        "confidence is the probability to agree": (calibrated, rng.random(rows) > calibrated),
        "confidence says nothing": (unrelated, rng.random(rows) < 0.06),
        "most confident where wrong": (np.where(wrong, 0.99, 0.98 * rng.random(rows)), wrong),
        "five values": (values, rng.random(rows) < np.where(values == 0.4, 0.4, 0.01)),
    }


def measured(confidences: Floats, differs: Bools, target: Target) -> dict[str, Any]:
    """The number of samples that break the promise, and the mean share of rows that the large model answers."""
    rows, broken, large, agreed = len(confidences), 0, [], []
    draws = target.default_draws(rows)
    for seed in range(SEEDS):
        sample = draw_rows(confidences, draws, seed)
        threshold = choose_threshold(confidences, sample, differs[sample.rows], target)
        of_small = confidences >= threshold.least_confidence
        of_small[sample.rows] = False
        agreed.append(1.0 - float(np.mean(of_small & differs)))
        broken += agreed[-1] < target.agree
        large.append(1.0 - float(of_small.mean()))
    ranked = np.cumsum(differs[np.argsort(-confidences, kind="stable")]) / rows
    possible = float(np.mean(ranked <= 1.0 - target.agree))
    return {
        "rows": rows,
        "draws": draws,
        "differ": float(differs.mean()),
        "broken": broken,
        "samples": SEEDS,
        "large_share": float(np.mean(large)),
        "least_large_share": 1.0 - possible,
        "agreed": float(np.mean(agreed)),
    }


def pairs_of(folder: Path) -> pa.Table:
    """The record pairs of all files of a data set: columns a, b and label."""
    lines = [line for path in sorted(folder.glob("*.txt")) for line in path.read_text().splitlines() if line]
    left, right, label = zip(*(line.split("\t") for line in lines), strict=True)
    return pa.table({"a": left, "b": right, "label": [int(value) for value in label]})


def scored(model: str, pairs: Path, output: Path) -> tuple[Floats, list[int]]:
    """The confidences of a model in its answers over the pairs, and the answers."""
    report = batchgen.run(
        model, pairs, output, task="score", choices=CHOICES, prompt_template=_TEMPLATE, progress="plain"
    )
    columns = AnswerColumns(prefix="", scores=True, is_json=False, within=0.0)
    table = pq.read_table(report["output"])
    return columns.confidences(table), columns.answers(table)


def of_data(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The figures of each data set, by its name."""
    found = {}
    for folder in sorted(path for path in args.data.iterdir() if path.is_dir()):
        table = pairs_of(folder)
        pairs = args.work_dir / f"{folder.name}.parquet"
        pq.write_table(table, pairs)
        confidences, answers = scored(args.small, pairs, args.work_dir / f"{folder.name}.small.parquet")
        if args.large == PLANTED:
            others = table["label"].to_pylist()
        else:
            _, others = scored(args.large, pairs, args.work_dir / f"{folder.name}.large.parquet")
        differs = np.array([a != b for a, b in zip(answers, others, strict=True)])
        found[folder.name] = measured(confidences, differs, target)
        print(folder.name, json.dumps(found[folder.name]), flush=True)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agree", type=float, default=0.95)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--data", type=Path, help="folder with a folder of files for each data set")
    parser.add_argument("--small", default="demo")
    parser.add_argument("--large", default=PLANTED, help="a model, or planted [default: planted]")
    parser.add_argument("--work-dir", type=Path, default=Path("."))
    parser.add_argument("--output", type=Path, default=result_path("cascade"))
    return parser.parse_args()


def main() -> None:
    args = _parse()
    target = Target(args.agree, args.confidence)
    result = json.loads(args.output.read_text()) if args.output.exists() else {"planted": {}, "data": {}}
    for rows in _ROWS:
        for name, (confidences, differs) in planted(rows).items():
            result["planted"][f"{name}, {rows:,} rows"] = measured(confidences, differs, target)
    if args.data is not None:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        models = f"{Path(args.small).stem} before {Path(args.large).stem}"
        result["data"][models] = of_data(args, target)
    kept = {name: result[name] for name in ("planted", "data")}
    write(args.output, {"target": {"agree": target.agree, "confidence": target.confidence}} | kept)
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
