"""Accuracy of the data wrangling recipes in each format of weights and KV, and with attention budgets.

The jobs of recipes/data_wrangling run on the demo model in fp32, as published, and then with one option each. A metric
is F1 of a yes/no question, or the part of the answers that are right.

    python benchmarks/format_accuracy.py                      # writes benchmarks/results/format_accuracy.json
    python benchmarks/format_accuracy.py --only "int8 KV"     # this format anew; others stay
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from recording import joined, result_path, write

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "data_wrangling"))

from run import run
from score import score_file

FORMATS = {
    "fp32": (),
    "int8 weights": ("--weights", "int8"),
    "int4 weights": ("--weights", "int4"),
    "int8 KV": ("--kv-cache-dtype", "int8"),
    "int5 KV": ("--kv-cache-dtype", "int5"),
    "int4 KV": ("--kv-cache-dtype", "int4"),
    "half of the context": ("--attention-budget", "50%"),
    "a fifth of the context": ("--attention-budget", "20%"),
}
# Recipes with their metric.
RECIPES = {"fodors_zagats": "f1", "imputation": "accuracy", "error_detection": "f1"}


def measured(options: tuple[str, ...]) -> dict[str, float]:
    """The metric of each recipe's job with these options."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = {}
        for name, metric in RECIPES.items():
            code, output, _ = run(name, Path(folder), ["--dtype", "float32", *options])
            if code:
                raise SystemExit(f"{name} ended with {code}")
            metrics[name] = score_file(str(output))[metric]
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=FORMATS, help="a format that is measured anew")
    path = result_path("format_accuracy")
    for name in parser.parse_args().only or FORMATS:
        found = {name: measured(FORMATS[name])}
        print(json.dumps(found), flush=True)
        write(path, {"model": "demo", "metrics": RECIPES, "formats": joined(path, "formats", found, list(FORMATS))})


if __name__ == "__main__":
    main()
