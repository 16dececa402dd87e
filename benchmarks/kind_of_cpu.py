"""Rates of one core for the table of an instruction set, `batchgen/profiler/kinds/SET.json`, which ships.

One thread is timed by its own clock, and the fastest of many short samples counts, so that a busy machine gives the
same table. Run it once for each instruction set, on a CPU whose best set that is, or with BATCHGEN_ISA:

    BATCHGEN_NUM_THREADS=1 OMP_NUM_THREADS=1 python benchmarks/kind_of_cpu.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from recording import machine

from batchgen.core.dtypes import BLOCK_FORMATS, INT8, KV_CODE_BITS, STATE_DTYPES, matmul_key
from batchgen.core.hardware import ComputeRates, HardwareProfile, Rates
from batchgen.ops import cpp
from batchgen.ops.instruction_set import instruction_set
from batchgen.profiler import compute, state_rates
from batchgen.profiler.timing import Device, Effort, Trial

KINDS = Path(__file__).parent.parent / "batchgen" / "profiler" / "kinds"
DTYPES = ("bfloat16", "float16", "float32")
TOKENS = (1, 4, 16, 64, 256, 1024)
_SAMPLE_S, _FEWEST, _LONGEST_S = 0.001, 5, 0.6
_READ_BYTES = 256 << 20
# What is not a core's: a drive, and memory that a virtual machine gets from its host.
_ASSUMED = {
    "cpu_memory_bytes": 16 << 30,
    "disk_bytes": 100 << 30,
    "disk_read_bytes_per_s": 1e9,
    "disk_write_bytes_per_s": 8e8,
    "first_touch_bytes_per_s": 1e9,
}
# `batchgen profile` on two idle cores of a Zen 4.
_OVERHEADS = {
    "sweep_overhead_s": 4e-4,
    "sequence_overhead_s": 1.2e-5,
    "row_overhead_s": 8.6e-5,
    "load_bytes_per_s": 2.2e9,
    "gguf_load_bytes_per_s": 5.5e9,
    "sampling_logits_per_s": 2.7e9,
}
_STEP_OVERHEAD_S = 5e-5


@dataclass(frozen=True)
class ThreadClock(Device):
    """The CPU, timed by the calling thread's clock: the fastest sample, whatever runs beside."""

    def seconds(self, run: Callable[[int], object], first: int, count: int) -> float:
        started = time.thread_time()
        for i in range(first, first + count):
            run(i)
        return time.thread_time() - started

    def rate(self, trial: Trial, effort: Effort) -> float:
        self.seconds(trial.run, 0, 1)
        best = self.seconds(trial.run, 1, 1)
        count = max(1, math.ceil(_SAMPLE_S / max(best, 1e-7)))
        done, samples, until = 2, 0, time.thread_time() + effort.point_s
        while (samples < _FEWEST or time.thread_time() < until) and best * samples < _LONGEST_S:
            best = min(best, self.seconds(trial.run, done, count) / count)
            done, samples = done + count, samples + 1
        return trial.work / best


def rates_of(dtype: str) -> ComputeRates:
    """All rates of one core in one dtype; quantized weights and KV in the dtypes that tables need."""
    core, kind = ThreadClock("cpu"), getattr(torch, dtype)
    whole = Effort(widths=(512, 1024, 2048, 4096), tokens=TOKENS, point_s=0.08, call_s=0.7)
    brief = replace(whole, widths=(1024,), point_s=0.06)
    pool = core.pool(kind, whole)
    subjects, one_width = (compute.subjects_of("cpu", effort, None) for effort in (whole, brief))
    gemm = {dtype: compute.gemm_rates(core, pool, subjects.products, whole)}
    packed = [(dtype, True)]
    if dtype != "float16":  # rows of it are as fast as those in bfloat16
        packed += [(name, as_stored) for name in (INT8, *BLOCK_FORMATS) for as_stored in (False, True)]
    for name, as_stored in packed:
        key = matmul_key(name, dtype, as_stored=as_stored)
        by_width = compute.gemm_rates(core, pool, one_width.products, brief, name, as_stored=as_stored)
        gemm[key] = Rates(("tokens",), by_width.points[0][1])
        print(key, flush=True)
    formats: list[str | None] = [None, *KV_CODE_BITS] if dtype == "bfloat16" else [None]
    return ComputeRates(
        gemm_flops_per_s=gemm,
        prefill_attention_flops_per_s={
            name or dtype: compute.prefill_rates(core, pool, subjects.main, brief, name) for name in formats
        },
        decode_attention_bytes_per_s={
            name or dtype: compute.decode_rates(core, pool, subjects.attention, brief, name) for name in formats
        },
        elementwise_bytes_per_s={
            name or dtype: compute.elementwise_rates(core, pool, subjects.main, brief, name) for name in formats
        },
        expand_bytes_per_s=compute.dequantize_rate(core, pool, subjects.main, brief),
        state_update_bytes_per_s={
            name: state_rates.update_rates(core, state_rates.USUAL, name, kind, brief) for name in STATE_DTYPES
        },
        state_prefill_flops_per_s={dtype: state_rates.prefill_rates(core, state_rates.USUAL, kind, brief)},
    )


def read_rate() -> float:
    """Bytes per second that one core reads from memory."""
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return ThreadClock("cpu").rate(Trial(numbers.nbytes, lambda i: numbers.sum()), Effort())


def merged(a: ComputeRates, b: ComputeRates) -> ComputeRates:
    """Both tables; where both have a rate, that of `a`."""
    names = ("gemm_flops_per_s", "prefill_attention_flops_per_s", "decode_attention_bytes_per_s")
    names += ("elementwise_bytes_per_s", "state_update_bytes_per_s", "state_prefill_flops_per_s")
    return replace(a, **{name: getattr(b, name) | getattr(a, name) for name in names})


def rounded(value: Any) -> Any:
    """Numbers to three digits, throughout a JSON value."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=KINDS / f"{instruction_set()}.json")
    args = parser.parse_args()
    if cpp.num_threads() != 1:
        parser.error("a table is of one core: set BATCHGEN_NUM_THREADS=1 and OMP_NUM_THREADS=1")
    torch.set_num_threads(1)
    rates = ComputeRates()
    for dtype in DTYPES:
        of_dtype = rates_of(dtype)
        rates = of_dtype if dtype == DTYPES[0] else merged(rates, of_dtype)
    here = machine()
    source = f"one core of {here['cpu']}, family {here['family']} model {here['model']}: benchmarks/kind_of_cpu.py"
    profile = HardwareProfile(
        name=instruction_set(),
        cpu=replace(rates, step_overhead_s=_STEP_OVERHEAD_S),
        gpu=None,
        dram_bytes_per_s=read_rate(),
        sources={
            "cpu": source,
            **dict.fromkeys(_ASSUMED, "assumed: a job measures or corrects it"),
            **dict.fromkeys(_OVERHEADS, "`batchgen profile` on two idle cores of a Zen 4, for one core where it grows"),
        },
        **_ASSUMED,
        **_OVERHEADS,
    )
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(rounded(profile.to_json())) + "\n")


if __name__ == "__main__":
    main()
