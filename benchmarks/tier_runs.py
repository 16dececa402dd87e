"""Runs of a random model of moderate size under any policy, to compare predicted with measured times."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from random_model import make_model

from batchgen.core.device import Device
from batchgen.core.digest import json_sha256
from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.hardware import HardwareProfile
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.machine import CpuTime
from batchgen.core.plan import Plan, Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts, needs_store, resolve_budgets
from batchgen.job.machine_profile import for_device, measured_hardware, on_this_machine, wanted_of, with_disk
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.profiler.contention import contention_reason
from batchgen.profiler.emulated import emulated_profile
from batchgen.profiler.timing import FULL
from batchgen.profiler.transfer import disk_rates

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
    """A model of this shape, made in the work directory where it is not there yet."""
    path = work_dir / "model"
    make_model(path, **shape)
    return path


def prompts(rows: int, length: int, seed: int = 0, vocab_size: int = SHAPE["vocab_size"]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


def run(*args: Any, **options: Any) -> dict[str, Any]:
    """`run_here` in a process of its own: what earlier runs left in this one would count against the budgets."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_here, *args, **options).result()


def run_undisturbed(*args: Any, tries: int = 3, **options: Any) -> dict[str, Any]:
    """`run`, repeated where other processes took the cores meanwhile; the last try stands, whatever it was."""
    for _ in range(tries):
        result = run(*args, **options)
        if result["busy"] is None:
            break
        print(f"  again: {result['busy']}", flush=True)
    return result


def run_here(
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
    plan: Plan | None = None,
    **budgets: int | None,
) -> dict[str, Any]:
    """Runs all rows under a policy.

    Args:
        output_lens: tokens to generate, of each row.
        serial: nothing overlaps.
        kv_tokens: tokens that all KV pools together have blocks for.
        planned_process_bytes: memory of the process that the plan counted with.
        plan: The plan whose policy it is, where the run adapts to what it measures, as `batchgen run` does.
        budgets: of `resolve_budgets`.

    Returns:
        The seconds of the sweeps, without loading; "tokens", a digest of what each row generated; "busy", why the times
        cannot be trusted, None where the machine was left alone; and the engine's statistics.
    """
    files = resolve_model(str(model))
    store = None
    if needs_store(policy):
        store = find_or_convert(files, work_dir, "bfloat16", "int4" if policy.weight_format == "int4" else "native")
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
    adapts = {} if plan is None else {"planned_output_len": plan.workload.output_len.mean}
    costs = plan.prediction.lane_costs if plan else None
    with Engine.from_parts(parts, lane_costs=costs, **adapts) as engine:
        before, started = CpuTime.now(), time.perf_counter()
        done = list(engine.generate(requests))
        seconds = time.perf_counter() - started
        busy = contention_reason(before, CpuTime.now(), 1.0)
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
            "left_out": stats.left_out,
            "moved": stats.moved,
            "swapped_out": stats.swapped_out,
            "changes": [change.to_json() for change in engine.changes],
            "busy_s": parts.executor.busy_s,
            "stalled_s": parts.executor.stalled_s,
            "bytes_moved": parts.executor.bytes_moved,
            "peak_kv_blocks": stats.peak_kv_blocks,
        }


def different_rows(runs: Sequence[dict[str, Any]]) -> int:
    """The number of rows whose tokens are not the same in all of these runs."""
    return sum(len(set(row)) > 1 for row in zip(*[run["tokens"] for run in runs], strict=True))


def hardware_for(
    device: Device, config: ModelConfig, work_dir: Path, *, probe_disk: bool = False, stored: str = "bfloat16"
) -> HardwareProfile:
    """The machine as measured, with the emulated accelerator where the device is one.

    Args:
        probe_disk: Whether the disk is measured again.
        stored: The format of the layers' weights.
    """
    wanted = wanted_of(config, "bfloat16", (stored,) if stored in BLOCK_FORMATS else (), as_stored=(stored,))
    cpu, core = for_device(device, partial(measured_hardware, wanted, work_dir))
    hardware = on_this_machine(cpu)
    if probe_disk:
        hardware = with_disk(hardware, disk_rates(work_dir, FULL))
    return emulated_profile(hardware, device, core) if device.accelerated else hardware


def prediction_errors(entries: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """The median and the worst error of `planned_s` or `simulated_s` against `measured_s`."""
    errors = [abs(entry[f"{kind}_s"] / entry["measured_s"] - 1) for entry in entries]
    return {"median": statistics.median(errors), "worst": max(errors)}


def lanes_of(entry: dict[str, Any]) -> str:
    """The busy and waiting seconds of each lane that matters, measured and simulated, for the screen."""
    run = entry["runs"][-1]
    return "".join(
        f"\n    {lane}: busy {busy:.2f} s, simulated {entry['simulated_busy_s'][lane]:.2f} s;"
        f" waited for {run['stalled_s'][lane]:.2f} s, simulated {entry['simulated_stalled_s'][lane]:.2f} s"
        for lane, busy in run["busy_s"].items()
        if max(busy, entry["simulated_busy_s"][lane]) > 0.02 * entry["measured_s"]
    )
