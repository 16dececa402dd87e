"""CPU seconds of the host for a row of a whole job, from reading to joining, beside another checkout's.

    python benchmarks/host_time.py --other ../batchgen-before

The model has two layers of 64 columns, so nearly all of the time is the host's. Rows have 10 words and get 4 tokens.
Jobs of two sizes run in processes of their own, the checkouts in turn; the difference of their CPU seconds by that of
their rows is what a row takes, without the start of the process and planning.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_model import make_model, prompt_ids, prompt_text
from recording import result_path, write

ROOT = Path(__file__).resolve().parents[1]
_PROMPT_TOKENS, _OUTPUT_TOKENS, _VOCAB = 10, 4, 1024
_SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": _VOCAB,
}
# Runs in either checkout, so it uses nothing but the command line. The last line: CPU seconds of all its processes.
_RUN = """
import json, resource, sys
from batchgen.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(sum(time.ru_utime + time.ru_stime for time in times)), file=sys.stderr)
"""


def write_rows(path: Path, rows: int) -> None:
    """Rows of different texts, with a number each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [prompt_text(ids) for ids in prompt_ids(rows, _PROMPT_TOKENS, _VOCAB)]
    pq.write_table(pa.table({"prompt": texts, "number": list(range(rows))}), path)


def cpu_s(checkout: Path, model: Path, source: Path, folder: Path, *, learns: bool) -> float:
    """CPU seconds of a job in a checkout, whose packages and knowledge of the machine are this environment's.

    Args:
        checkout: The checkout.
        model: The model.
        source: The job's rows.
        folder: Folder with the knowledge of the machine.
        learns: Whether later jobs know what this one learns of the machine; otherwise all are planned alike.
    """
    cache = folder / "cache"
    with tempfile.TemporaryDirectory(dir=folder) as output:
        if not learns:
            cache = Path(shutil.copytree(cache, Path(output, "cache")))
        options = ["--max-tokens", str(_OUTPUT_TOKENS), "--ignore-eos", "--cpu-memory", "3GiB", "--progress", "none"]
        command = ["run", "--model", str(model), "--input", str(source), "--output", f"{output}/out.parquet", *options]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *command],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "BATCHGEN_CACHE": str(cache)},
            check=True,
            capture_output=True,
            text=True,
        )
    return float(json.loads(done.stderr.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--rows", type=int, nargs=2, default=(10_000, 60_000), help="rows of the two jobs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=result_path("host_time"))
    args = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    few, many = sorted(args.rows)
    row_s: dict[str, list[float]] = {side: [] for side in checkouts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", **_SHAPE)
        sources = {rows: folder / f"{rows}.parquet" for rows in (few, many)}
        for rows, source in sources.items():
            write_rows(source, rows)
        for turn in range(-1, args.rounds):
            for side, checkout in checkouts.items():
                times = {
                    rows: cpu_s(checkout, model, source, folder, learns=turn < 0) for rows, source in sources.items()
                }
                if turn >= 0:  # the first round learns the machine
                    row_s[side].append((times[many] - times[few]) / (many - few))
                    print(f"{side}: {row_s[side][-1] * 1e6:.0f} CPU seconds a million rows")
    medians = {side: statistics.median(values) for side, values in row_s.items()}
    result = {"rows": [few, many], "row_cpu_s": row_s, "million_rows_cpu_s": {s: m * 1e6 for s, m in medians.items()}}
    write(args.output, result)


if __name__ == "__main__":
    main()
