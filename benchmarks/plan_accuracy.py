"""Predicted against measured wall time of `batchgen run`, for jobs of different shape on this machine.

Every job is a command of its own, as a user would start it; the prediction is the one it prints before it starts.
Prompts are made of random words; end-of-text is ignored, so that outputs have the length that was planned for.

    python benchmarks/plan_accuracy.py
    python benchmarks/plan_accuracy.py --only azure --only match
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from recording import result_path, write

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "data_wrangling" / "fodors_zagats" / "job.toml"
BATCHGEN = Path(sys.executable).with_name("batchgen")
_TEXT = "the of and to in is was for on that with as at by from his her they which are one all were when we there can"
WORDS = _TEXT.split()


def prompt(draw: random.Random, tokens: int) -> str:
    """A text of about so many tokens: these words are a token each."""
    return " ".join(draw.choice(WORDS) for _ in range(tokens))


def parquet(path: Path, lengths: list[int]) -> list[str]:
    """Arguments for a file of prompts of these lengths."""
    draw = random.Random(1)
    pq.write_table(pa.table({"prompt": [prompt(draw, n) for n in lengths]}), path)
    return ["--input", str(path), "--ignore-eos", "--no-chat"]


def openai_batch(path: Path, lengths: list[tuple[int, int]]) -> list[str]:
    """Arguments for a file of rows with a prompt and an output length each."""
    draw = random.Random(2)
    with path.open("w") as file:
        for i, (prompt_len, output_len) in enumerate(lengths):
            body = {"model": "m", "prompt": prompt(draw, prompt_len), "max_tokens": output_len, "ignore_eos": True}
            file.write(
                json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            )
    return ["--input", str(path)]


def azure_lengths(rows: int) -> list[tuple[int, int]]:
    with (HERE / "data" / "azure_conv_sample.csv").open() as file:
        trace = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)][:rows]
    return [(min(a, 1024), max(1, min(b, 256))) for a, b in trace]


def jobs(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of `batchgen run`."""
    draw = random.Random(3)
    return {
        "fixed": [*parquet(folder / "fixed.parquet", [512] * 96), "--max-tokens", "32"],
        "decode": [*parquet(folder / "decode.parquet", [32] * 96), "--max-tokens", "256"],
        "prefill": [*parquet(folder / "prefill.parquet", [900] * 64), "--max-tokens", "1"],
        "azure": openai_batch(folder / "azure.jsonl", azure_lengths(96)),
        "match": ["--config", str(RECIPE), "--ignore-eos"],
        "short": [*parquet(folder / "short.parquet", [draw.randint(10, 60) for _ in range(3000)]), "--max-tokens", "4"],
        "float32": [
            *parquet(folder / "float32.parquet", [300] * 48), "--max-tokens", "64", "--dtype", "float32",
        ],
        "few at a time": [
            *parquet(folder / "few.parquet", [200] * 64), "--max-tokens", "48", "--max-num-seqs", "8",
        ],
    }  # fmt: skip


def run(arguments: list[str], folder: Path) -> dict:
    output = folder / ("out.jsonl" if "jsonl" in arguments[1] else "out.parquet")
    report = folder / "report.json"
    command = [str(BATCHGEN), "run", "--model", "demo", *arguments, "--output", str(output), "--overwrite"]
    subprocess.run(
        [*command, "--report", str(report), "--progress", "none"], check=True, cwd=HERE.parent, capture_output=True
    )
    return json.loads(report.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="just these jobs; may be repeated")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--output", type=Path, default=result_path("plan_accuracy"))
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(args.repeat):
            for job, arguments in jobs(folder).items():
                if args.only and job not in args.only:
                    continue
                report = run(arguments, folder)
                predicted, measured = report["predicted_wall_s"], report["wall_s"]
                results.append(
                    {"job": job, "predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1}
                    | {key: report[key] for key in ("rows", "prompt_tokens", "generated_tokens", "load_s", "hardware")}
                    | {
                        "policy": {
                            k: report["policy"][k] for k in ("max_num_seqs", "max_num_batched_tokens", "admission")
                        }
                    }
                    | {"startup_s": report["predicted"]["startup_s"], "sweeps": report["sweeps"]}
                    | {"predicted_sweeps": report["predicted"]["sweeps"], "busy_s": report["busy_s"]}
                )
                print(
                    f"{job}: predicted {predicted:.1f} s, measured {measured:.1f} s, {predicted / measured - 1:+.0%}",
                    flush=True,
                )
    write(args.output, {"jobs": results})


if __name__ == "__main__":
    main()
