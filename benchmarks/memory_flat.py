"""Peak memory of a whole job against its number of rows: it must not grow with them.

The network is replaced by a stub that always answers the same token, so that a million rows take minutes; reading,
templating, tokenizing, scheduling, writing parts and joining are the real thing. Each size runs in a process of
its own.

    python benchmarks/memory_flat.py --rows 10000 --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from recording import result_path, write


def write_input(path: Path, rows: int) -> None:
    """Short rows of different texts, in row groups as real files have them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("name", pa.string()), ("number", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 50_000):
            numbers = range(first, min(first + 50_000, rows))
            names = [f"item {i * 2654435761 % 2**32:08x}" for i in numbers]
            writer.write_table(pa.table({"name": names, "number": list(numbers)}, schema))


def stub_engine(resolved, plan, tokenizer, progress, on_step):
    """In place of the job's own: everything but the network."""
    import torch

    from batchgen.core.plan import MemoryPlan, Policy
    from batchgen.engine.engine import Engine
    from batchgen.engine.parts import EngineParts
    from batchgen.runtime.sampler import sample
    from batchgen.schedule.packed_batch import pack

    config = resolved.config

    class Stub:
        bytes_moved = stalled_s = peak_bytes = {}
        busy_s = {"compute": 0.0}

        def run(self, batches, on_logits, *, vocabulary_chunks, deferred_batches):
            for batch in batches:
                logits = torch.zeros(len(batch.logits_rows), config.vocab_size)
                logits[:, 300] = 1.0
                on_logits(batch.logits_rows, logits, 0)

        def drop(self, deferred_batches):
            pass

        def close(self):
            pass

    parts = EngineParts(
        config=config,
        tokenizer=tokenizer(),
        executor=Stub(),
        split=lambda sweep, **cut: [sweep],
        pack=partial(pack, kv_block_size=16, key_bytes=64, windows=frozenset(config.windows)),
        sample=sample,
        policy=Policy(
            admission="continuous",
            gpu_batch_size=256,
            num_gpu_batches=1,
            max_num_batched_tokens=4096,
            max_model_len=config.max_position,
            kv_block_size=16,
            kv_blocks={"cpu": 4096},
            share_prefixes=True,
            weight_format="float32",
            kv_format="float32",
            kv_seqs={"cpu": 256},
        ),
        memory=MemoryPlan({}, {}, {"cpu": 4096}, 0, 4096),
        eos_token_ids=frozenset(),
        dtype="float32",
        loaded_bytes=0,
    )
    return Engine.from_parts(parts, sampling=resolved.options.sampling)


def run_one(model: str, rows: int, folder: Path) -> dict:
    """The job with a stubbed network, in this process; returns rows, peak bytes and seconds."""
    from batchgen.core.request import SamplingParams
    from batchgen.job import run as job

    source, output = folder / "in.parquet", folder / "out.parquet"
    write_input(source, rows)
    job.load_engine = stub_engine
    started = time.perf_counter()
    report = job.run_job(
        job.JobOptions(
            model, str(source), output, prompt_template="Say {{ name }}", chat=False,
            sampling=SamplingParams(max_tokens=2), flush_interval="1s", progress="none",
        )
    )  # fmt: skip
    assert report["rows_ok"] == rows
    return {"rows": rows, "peak_bytes": report["peak_bytes"]["cpu"], "wall_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="whose tokenizer is used")
    parser.add_argument("--rows", type=int, action="append", help="may be repeated")
    parser.add_argument("--output", type=Path, default=result_path("memory_flat"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_one(args.model, args.one, Path(folder))))
        return
    results = []
    for rows in args.rows or [10_000, 1_000_000]:
        command = [sys.executable, __file__, "--model", args.model, "--one", str(rows)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{rows:,} rows: peak {results[-1]['peak_bytes'] / 1e6:.0f} MB, {results[-1]['wall_s']:.0f} s")
    growth = results[-1]["peak_bytes"] - results[0]["peak_bytes"]
    write(args.output, {"runs": results, "growth_bytes": growth})
    print(f"growth: {growth / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
