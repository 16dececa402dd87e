"""How often the promise of a cascade is broken, and how many rows it passes on, over 200 samples of each case.

Planted cases have confidences and differences of known kinds. With --data, which has folders of record pairs (the
files of Ditto's entity matching sets: left, right and label between tabs), a small and a large model score yes and no
for all pairs, and then 200 samples are drawn of their answers. `planted` as the large model answers with the labels.
With --time a cascade of the two is run too, beside the job of the large model alone, and what was planned beforehand.
Each data set is written when it is done, and the same command goes on with the others.

    python benchmarks/cascade.py
    python benchmarks/cascade.py --data DIR --small demo --large gemma-3-270m-q4_k_m.gguf --work-dir DIR
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
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


def scored(model: str, pairs: Path, output: Path, **options: Any) -> tuple[Floats, list[int], dict[str, Any]]:
    """The confidences of a model in its answers over the pairs, the answers, and the report."""
    how = {"task": "score", "choices": CHOICES, "prompt_template": _TEMPLATE, "progress": "plain"}
    report = batchgen.run(model, pairs, output, **how, **options)
    columns = AnswerColumns(prefix="", scores=True, is_json=False, within=0.0)
    table = pq.read_table(report["output"])
    return columns.confidences(table), columns.answers(table), report


def planned(args: argparse.Namespace, pairs: Path) -> dict[str, Any]:
    """The plan of a cascade, before anything is run."""
    command = [Path(sys.executable).with_name("batchgen"), "plan", "-m", args.large, "--cascade", args.small]
    command += ["-i", pairs, "--prompt-template", _TEMPLATE, "--task", "score", "--json", "--progress", "none"]
    command += [word for choice in CHOICES for word in ("--choices", choice)]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def cascaded(args: argparse.Namespace, pairs: Path, others: list[int], alone_s: float, plan: dict) -> dict[str, Any]:
    """The report of a cascade over the pairs.

    Args:
        args: The arguments.
        pairs: The input.
        others: The large model's answers.
        alone_s: Seconds of the large model's job over all pairs.
        plan: The plan of the cascade.
    """
    output = args.work_dir / f"{pairs.stem}.cascade.parquet"
    started = time.perf_counter()
    _, answers, report = scored(
        args.large, pairs, output, cascade=args.small, agree=args.agree, confidence=args.confidence
    )
    wall_s, of = time.perf_counter() - started, report["cascade"]
    share = (of["large_rows"] - of["sampled_rows"]) / max(1, of["large_rows"] - of["sampled_rows"] + of["rows_saved"])
    known = [0.0, *map(float, plan["rest_s"])]
    rest_s = np.interp(share, known, [0.0, *plan["rest_s"].values()])
    return {
        "passed_share": of["passed_share"],
        "agree_estimate": of["agree_estimate"],
        "agreed": float(np.mean([a == b for a, b in zip(answers, others, strict=True)])),
        "wall_s": wall_s,
        "small_s": of["small_s"],
        "large_s": of["large_s"],
        "large_alone_s": alone_s,
        "predicted_s": float(plan["small_s"] + plan["sample_s"] + rest_s),
        "predicted_large_alone_s": plan["large_alone_s"],
    }


def of_data(args: argparse.Namespace, target: Target, folder: Path) -> dict[str, Any]:
    """The figures of a data set. folder: the folder of its files."""
    pairs = args.work_dir / f"{folder.name}.parquet"
    table = pairs_of(folder)
    pq.write_table(table, pairs)
    plan = planned(args, pairs) if args.time else None
    confidences, answers, _ = scored(args.small, pairs, args.work_dir / f"{folder.name}.small.parquet")
    started = time.perf_counter()
    if args.large == PLANTED:
        others = table["label"].to_pylist()
    else:
        _, others, _ = scored(args.large, pairs, args.work_dir / f"{folder.name}.large.parquet")
    alone_s = time.perf_counter() - started
    differs = np.array([a != b for a, b in zip(answers, others, strict=True)])
    found = measured(confidences, differs, target)
    return found if plan is None else found | {"job": cascaded(args, pairs, others, alone_s, plan)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agree", type=float, default=0.95)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--data", type=Path, help="folder with a folder of files for each data set")
    parser.add_argument("--small", default="demo")
    parser.add_argument("--large", default=PLANTED, help="a model, or planted [default: planted]")
    parser.add_argument("--time", action="store_true", help="run a cascade of the two models too, and time it")
    parser.add_argument("--work-dir", type=Path, default=Path("."))
    parser.add_argument("--output", type=Path, default=result_path("cascade"))
    args = parser.parse_args()
    if args.time and args.large == PLANTED:
        parser.error("--time is for two models: give --large")
    return args


def main() -> None:
    args = _parse()
    target = Target(args.agree, args.confidence)
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    result: dict[str, Any] = {name: before.get(name, {}) for name in ("planted", "data")}
    for rows in _ROWS:
        for name, (confidences, differs) in planted(rows).items():
            result["planted"][f"{name}, {rows:,} rows"] = measured(confidences, differs, target)
    stated = {"target": {"agree": target.agree, "confidence": target.confidence}}
    if args.data is not None:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        models = f"{Path(args.small).stem} before {Path(args.large).stem}"
        sets = result["data"].setdefault(models, {})
        for folder in sorted(path for path in args.data.iterdir() if path.is_dir()):
            if folder.name not in sets:
                sets[folder.name] = of_data(args, target, folder)
                print(folder.name, json.dumps(sets[folder.name]), flush=True)
                write(args.output, stated | result)
    write(args.output, stated | result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
