"""Instruction sets and threads of the CPU that computes. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.ops import _kernels


def instruction_set() -> str:
    """The process's instruction set: the one that BATCHGEN_ISA names, or the machine's best. Raises InputError."""
    return _kernels.active()


def forced_instruction_set() -> str | None:
    """The instruction set that BATCHGEN_ISA names, which runs everything: no other is measured. Raises InputError."""
    return instruction_set() if os.environ.get("BATCHGEN_ISA") else None


def num_threads() -> int:
    """Threads that share a loop of the kernels: BATCHGEN_NUM_THREADS, else OMP_NUM_THREADS, else one for each CPU.

    Raises InputError for a BATCHGEN_NUM_THREADS that is no number of threads.
    """
    return _kernels.num_threads()


def follow_affinity() -> None:
    """Move the kernels' threads to the cores that the calling thread may run on now, from their next loop on.

    It is called where these cores have changed. Loops under way stay where they are.
    """
    _kernels.follow_affinity()


def usable_instruction_sets() -> list[str]:
    """Instruction sets that kernels can run on here: the machine's, the most capable first, then the plain twins."""
    return [*_kernels.instruction_sets(), *_kernels.plain_twins()]


def unavailable() -> dict[str, str]:
    """Instruction sets that the CPU has but the kernels cannot use, by name, and the reason in a few words."""
    return _kernels.unavailable()


def has_fast_bfloat16() -> bool:
    """Tell whether the CPU multiplies bfloat16 in hardware. Elsewhere float32 is faster."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
