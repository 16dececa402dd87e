"""What the CPU that computes can do. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.ops import _kernels


def instruction_set() -> str:
    """That of the kernels on the CPU: the machine's best, or what the environment's BATCHGEN_ISA names. Raises InputError."""
    return _kernels.active()


def forced_instruction_set() -> str | None:
    """What BATCHGEN_ISA names: it runs everything, and nothing else is measured or chosen. Raises InputError."""
    return instruction_set() if os.environ.get("BATCHGEN_ISA") else None


def num_threads() -> int:
    """Threads that a loop of the kernels is shared by: what BATCHGEN_NUM_THREADS says, else OMP_NUM_THREADS, else one for each CPU.

    Raises InputError for a BATCHGEN_NUM_THREADS that is no number of threads.
    """
    return _kernels.num_threads()


def follow_affinity() -> None:
    """From the next loop of the kernels on, have threads on the cores that the calling thread may run on now.

    To be called where these were changed. What is under way goes on where it is.
    """
    _kernels.follow_affinity()


def usable_instruction_sets() -> list[str]:
    """All that kernels may be asked to run on here: the machine's, the most capable first, then the plain twins."""
    return [*_kernels.instruction_sets(), *_kernels.plain_twins()]


def unavailable() -> dict[str, str]:
    """Instruction sets that the CPU has but the kernels cannot use, by name, and the reason in a few words."""
    return _kernels.unavailable()


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; elsewhere float32 is the faster choice."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
