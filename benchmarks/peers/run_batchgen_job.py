"""The job by the command `batchgen run`, with its output and run directory on disk.

Settings: memory_bytes, dtype and resume.

A job that was killed goes on with the same command where `resume` is set. Beside the tokens the result has what the
plan had predicted, and the output's SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from runner import Job, read_job, write_synced

from batchgen.cli import main as command
from batchgen.core.imports import leave_pandas_out

_BESIDE_FRAC = 0.08  # of the limit, for what the kernel counts beside the process


def run(job: Job, folder: Path) -> dict:
    """Run the job; returns its result. folder: the directory for input and output."""
    leave_pandas_out()  # as the command does, which would find it imported
    counts = {count for _, count in job.rows}
    if len(counts) != 1:
        raise SystemExit("all rows have the same number of output tokens here")
    rows, output = folder / "batchgen-input.parquet", folder / "batchgen-output.parquet"
    pq.write_table(pa.table({"prompt": [ids for ids, _ in job.rows]}), rows)
    output_tokens, report_file = counts.pop(), folder / "batchgen-report.json"
    settings = job.settings
    options: dict[str, Any] = {
        "--model": job.model,
        "--input": rows,
        "--output": output,
        "--report": report_file,
        "--prompt-column": "prompt",
        "--max-tokens": output_tokens,
        "--cpu-memory": int(settings["memory_bytes"] * (1 - _BESIDE_FRAC)),
        "--dtype": settings["dtype"],
        "--max-num-seqs": settings.get("max_num_seqs"),
        "--flush-interval": settings.get("flush_interval", 5.0),
        "--progress": "none",
    }
    switches = {
        "--ignore-eos": True,
        "--token-ids": True,
        "--no-enable-prefix-caching": not job.share_prefixes,
        "--overwrite": not settings["resume"],
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    sys.argv = ["batchgen", "run", *given, *(name for name, on in switches.items() if on)]
    try:
        command()
    except SystemExit as ended:
        if ended.code:
            raise
    report = json.loads(report_file.read_text())
    policy = report["policy"] or {}
    return {
        "load_s": report["load_s"],
        "wall_s": report["wall_s"],
        "generated": pq.read_table(output, columns=["token_ids"])["token_ids"].to_pylist(),
        "settings": {name: policy.get(name) for name in ("weight_format", "max_num_seqs", "max_num_batched_tokens")},
        "predicted_wall_s": report["predicted_wall_s"],
        "bytes_moved": report["bytes_moved"],
        "sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
        "versions": {name: importlib.metadata.version(name) for name in ("batchgen", "torch")},
    }


def main() -> None:
    started = time.perf_counter()
    asked, told = map(Path, sys.argv[1:])
    result = run(read_job(asked), told.parent)
    write_synced(told, json.dumps(result | {"process_s": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
