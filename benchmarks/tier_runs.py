"""What the benchmarks of the tiers share: a random model of moderate size, and runs of it under any policy."""

from __future__ import annotations

import json
import multiprocessing
import platform
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cpu_kind import machine
from random_model import make_model

from batchgen.core.device import Device
from batchgen.core.digest import json_sha256
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.machine import CpuTime
from batchgen.core.plan import Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts, needs_store, resolve_budgets
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.tokenizer import load_tokenizer
from batchgen.profiler.busy import why_busy

RESULTS = Path(__file__).parent / "results"
# About 0.4 GB of bf16 weights, 31 MB a layer: products that fill the cores, buses that can be the bottleneck.
SHAPE = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 16384,
}


def model_in(work_dir: Path, shape: dict[str, int] = SHAPE) -> Path:
    """A model of this shape, made where it is not there yet."""
    path = work_dir / "model"
    make_model(path, **shape)
    return path


def prompts(rows: int, length: int, seed: int = 0, vocab_size: int = SHAPE["vocab_size"]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


def run(*args: Any, **options: Any) -> dict[str, Any]:
    """As `run_here`, in a process of its own: what earlier runs left in this one would count against the budgets."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_here, *args, **options).result()


def run_undisturbed(*args: Any, tries: int = 3, **options: Any) -> dict[str, Any]:
    """As `run`, again where other processes took the cores meanwhile; the last of the tries stands, whatever it was."""
    for _ in range(tries):
        found = run(*args, **options)
        if found["busy"] is None:
            break
        print(f"  again: {found['busy']}", flush=True)
    return found


def run_here(  # one run, told by its command line
    model: Path,
    device: Device,
    policy: Policy,
    rows: Sequence[list[int]],
    output_lens: Sequence[int],
    *,
    work_dir: Path,
    serial: bool = False,
    kv_tokens: int | None = None,
    planned_process_bytes: int | None = None,
    kernels: KernelChoice = PROCESS_SET,
    **budgets: int | None,
) -> dict[str, Any]:
    """Runs all rows; seconds are those of the sweeps, loading left out. kv_tokens: of the KV pools together.

    tokens: a digest of what each row generated. busy: why the times cannot be
    trusted, None where the machine was left alone.
    """
    files = resolve_model(str(model))
    store = None
    if needs_store(policy):
        store = find_or_convert(files, work_dir, "bfloat16", "int4" if policy.weight_format == "int4" else "none")
    longest = max(len(r) for r in rows) + max(output_lens)
    request = LoadRequest(
        files,
        read_config(files),
        policy,
        dtype="bfloat16",
        device=device,
        budgets=resolve_budgets(device, offload_dir=work_dir, **budgets),
        min_output_len=max(output_lens),
        longest_tokens=longest,
        most_kv_tokens=kv_tokens or longest * policy.max_num_seqs,
        offload_dir=work_dir,
        store=store,
        serial=serial,
        planned_process_bytes=planned_process_bytes,
        kernels=kernels,
    )
    parts = load_parts(request, lambda: load_tokenizer(files))
    requests = [
        Request(list(row), SamplingParams(max_tokens=n, ignore_eos=True))
        for row, n in zip(rows, output_lens, strict=True)
    ]
    with Engine.from_parts(parts) as engine:
        before, started = CpuTime.now(), time.perf_counter()
        done = list(engine.generate(requests))
        seconds = time.perf_counter() - started
        busy = why_busy(before, CpuTime.now(), 1.0)
        stats = engine.stats
        failed = [c.error for c in done if c.error]
        if failed:
            raise SystemExit(f"{len(failed)} rows failed: {failed[0]}")
        return {
            "seconds": seconds,
            "busy": busy,
            "tokens": [json_sha256(c.samples[0].token_ids)[:8] for c in sorted(done, key=lambda c: c.index)],
            "generated_tokens_per_s": stats.generated_tokens / seconds,
            "sweeps": stats.sweeps,
            "tokens_per_sweep": stats.generated_tokens / stats.sweeps,
            "preempted": stats.preempted,
            "busy_s": parts.executor.busy_s,
            "stalled_s": parts.executor.stalled_s,
            "bytes_moved": parts.executor.bytes_moved,
            "peak_kv_blocks": stats.peak_kv_blocks,
        }


def different_rows(runs: Sequence[dict[str, Any]]) -> int:
    """Of runs over the same rows, the rows that have not the same tokens in all of them."""
    return sum(len(set(row)) > 1 for row in zip(*[run["tokens"] for run in runs], strict=True))


def results_of(name: str) -> Path:
    """The file of a benchmark's results."""
    return RESULTS / f"{name}.json"


def joined(path: Path, found: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Settings as they were found, and those of the file beside them, by their names in this order: a command may measure only some."""
    before = json.loads(path.read_text())["settings"] if path.exists() else []
    by_name = {entry["setting"]: entry for entry in (*before, *found)}
    return [by_name[name] for name in names if name in by_name]


def write(name: str, result: dict[str, Any], path: Path | None = None) -> None:
    """The result with what it was made with, to a path or to benchmarks/results/."""
    import torch

    from batchgen._version import __version__

    about = {
        "command": f"python benchmarks/{Path(sys.argv[0]).name}",
        "machine": machine(),
        "versions": {"batchgen": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    told = path is None
    path = path or results_of(name)
    path.write_text(json.dumps(about | result, indent=2) + "\n")
    if told:
        print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
