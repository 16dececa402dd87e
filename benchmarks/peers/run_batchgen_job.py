"""The job by `batchgen run`, with its output and run directory on disk. Settings: memory_bytes, dtype and resume.

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

import pyarrow as pa
import pyarrow.parquet as pq
from runner import Job, read_job, write_synced

import batchgen

_BESIDE_FRAC = 0.08  # of the limit, for what the kernel counts beside the process


def run(job: Job, folder: Path) -> dict:
    """Run the job; returns its result. folder: the directory for input and output."""
    counts = {count for _, count in job.rows}
    if len(counts) != 1:
        raise SystemExit("all rows have the same number of output tokens here")
    rows, output = folder / "batchgen-input.parquet", folder / "batchgen-output.parquet"
    pq.write_table(pa.table({"prompt": [ids for ids, _ in job.rows]}), rows)
    report = batchgen.run(
        job.model,
        rows,
        output,
        prompt_column="prompt",
        max_tokens=counts.pop(),
        ignore_eos=True,
        token_ids=True,
        share_prefixes=job.share_prefixes,
        cpu_memory=int(job.settings["memory_bytes"] * (1 - _BESIDE_FRAC)),
        dtype=job.settings["dtype"],
        overwrite=not job.settings["resume"],
        max_num_seqs=job.settings.get("max_num_seqs"),
        flush_interval=job.settings.get("flush_interval", 5.0),
    )
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
    result = run(read_job(Path(sys.argv[1])), Path(sys.argv[2]).parent)
    write_synced(Path(sys.argv[2]), json.dumps(result | {"process_s": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
