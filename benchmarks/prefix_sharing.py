"""The quickstart job with prefix sharing on and off, in turn: wall time of generation and of the whole job.

python benchmarks/prefix_sharing.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

import batchgen
from batchgen.cli.options import read_job_file
from batchgen.job.report import versions

HERE = Path(__file__).parent
CONFIG = HERE.parent / "recipes" / "data_wrangling" / "fodors_zagats" / "job.toml"


def run(share_prefixes: bool, limit: int | None, folder: str) -> tuple[dict, list[str]]:
    """The job's report, and its answers."""
    output = Path(folder) / f"{share_prefixes}.parquet"
    options = {"share_prefixes": share_prefixes, "limit": limit, "overwrite": True}
    report = batchgen.run(output=output, **options, **read_job_file(CONFIG))
    return report, pq.read_table(output).column("text").to_pylist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="only the first rows")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", default=str(HERE / "results" / "prefix_sharing.json"))
    args = parser.parse_args()
    reports: dict[str, list[dict]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for name in reports:
                report, answers = run(name == "on", args.limit, folder)
                reports[name].append(report)
                print(f"prefix sharing {name}: {report['wall_s']:.1f} s, of which loading {report['load_s']:.1f} s")
                if name == "on":
                    expected = answers
            differing = sum(a != b for a, b in zip(expected, answers, strict=True))
    wall = {name: min(r["wall_s"] for r in runs) for name, runs in reports.items()}
    generation = {name: min(r["wall_s"] - r["load_s"] for r in runs) for name, runs in reports.items()}
    first = reports["on"][0]
    result = {
        "benchmark": "prefix_sharing",
        "arguments": {k: v for k, v in vars(args).items() if k != "output"},
        "rows": first["rows"],
        "prompt_tokens": first["prompt_tokens"],
        "cached_prompt_tokens": first["cached_prompt_tokens"],
        "dtype": first["dtype"],
        "rows_with_another_answer": differing,
        "wall_s": {name: [r["wall_s"] for r in runs] for name, runs in reports.items()},
        "load_s": {name: [r["load_s"] for r in runs] for name, runs in reports.items()},
        "ratio_wall": wall["off"] / wall["on"],
        "ratio_without_loading": generation["off"] / generation["on"],
        "versions": versions(),
    }
    Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"with prefix sharing {result['ratio_wall']:.1f} times faster ({result['ratio_without_loading']:.1f} times"
        f" without loading); {differing} of {first['rows']} answers differ"
    )


if __name__ == "__main__":
    main()
