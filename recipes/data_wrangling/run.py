"""Run data wrangling recipes and print their metrics, in the form of FlexGen's table 10.

    python recipes/data_wrangling/run.py NAME [NAME ...] [--output-dir out] [options of `batchgen run`]

NAME: fodors_zagats, beer, itunes_amazon, imputation, error_detection, or all. Each runs `batchgen run --config
NAME/job.toml` in a process of its own, into <output-dir>/NAME.parquet, with its report beside it. Run again after an
interruption it goes on; --overwrite starts afresh. Other options go to `batchgen run` (--model, --limit, --max-time).
The exit code is that of the job that did not end well, else 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from score import score_file

HERE = Path(__file__).resolve().parent
TASKS = {
    "fodors_zagats": "EM: Fodors-Zagats",
    "beer": "EM: Beer",
    "itunes_amazon": "EM: iTunes-Amazon",
    "imputation": "DI: Restaurant",
    "error_detection": "ED: Restaurant",
}
METRICS = ("precision", "recall", "f1", "accuracy")
HEADER = (
    "Task", "Number of seq.", "Input seq. length", "Output seq. length", "Running time (s)",
    "Total throughput (token/s)", "Precision", "Recall", "F1", "Accuracy",
)  # fmt: skip


def run(name: str, output_dir: Path, options: list[str]) -> tuple[int, Path, Path]:
    """Runs or goes on with one recipe's job: (exit code, output, report)."""
    output, report = output_dir / f"{name}.parquet", output_dir / f"{name}.report.json"
    job = ["run", "--config", HERE / name / "job.toml", "--output", output, "--report", report, *options]
    print(f"{TASKS[name]}:", flush=True)
    return subprocess.run([sys.executable, "-m", "batchgen", *map(str, job)]).returncode, output, report


def table_row(name: str, output: Path, report: dict) -> tuple[str, ...]:
    """A recipe's line under HEADER.

    Lengths are means in tokens; throughput counts prompts and outputs together. A job that was done already has neither
    time nor throughput.
    """
    lengths = pq.read_table(output, columns=["prompt_tokens", "generated_tokens"])
    prompt, generated = (round(pc.mean(column).as_py() or 0) for column in lengths.columns)
    timed = report["state"] == "complete" and report["prompt_tokens"] > 0
    time = (f"{report['wall_s']:.3f}", f"{report['total_tokens_per_s']:.3f}") if timed else ("-", "-")
    scores = score_file(str(output))
    metrics = (f"{scores[m]:.3f}" if m in scores else "-" for m in METRICS)
    return (TASKS[name], str(lengths.num_rows), str(prompt), str(generated), *time, *metrics)


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = [HEADER, tuple("-" * width for width in widths), *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="Other options go to batchgen run.", allow_abbrev=False
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=[*TASKS, "all"], help=", ".join([*TASKS, "all"]))
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    args, options = parser.parse_known_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in TASKS if "all" in args.names else args.names:
        code, output, report = run(name, args.output_dir, options)
        if code:
            return code
        scores = score_file(str(output))
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in scores.items()), flush=True)
        rows.append(table_row(name, output, json.loads(report.read_text())))
    print("\n" + markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
