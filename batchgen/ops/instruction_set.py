"""The instruction set and the threads with which the CPU computes. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.ops.kernel_library import library as _kernels


def instruction_set() -> str:
    """The process's instruction set: the one that BATCHGEN_ISA names, or else the fastest that the machine has.

    Raises:
        InputError: The machine does not have the instruction set that BATCHGEN_ISA names.
    """
    return _kernels.active()


def forced_instruction_set() -> str | None:
    """The instruction set that BATCHGEN_ISA names; None: the variable is not set.

    It runs all kernels. The profiler measures no other instruction set.

    Raises:
        InputError: The machine does not have the instruction set.
    """
    return instruction_set() if os.environ.get("BATCHGEN_ISA") else None


def num_threads() -> int:
    """Number of threads that execute a kernel: BATCHGEN_NUM_THREADS, OMP_NUM_THREADS or the number of CPUs.

    Raises:
        InputError: BATCHGEN_NUM_THREADS is not a number of threads.
    """
    return _kernels.num_threads()


def follow_affinity() -> None:
    """Move the kernels' threads to the cores on which this thread may run now.

    It is called when these cores have changed. Kernels that are running are not affected.
    """
    _kernels.follow_affinity()


def usable_instruction_sets() -> list[str]:
    """Instruction sets on which kernels can run here: the machine's, the most capable first, then emulated ones."""
    return [*_kernels.instruction_sets(), *_kernels.plain_twins()]


def unavailable() -> dict[str, str]:
    """Instruction sets that the CPU has but the kernels cannot use: the reason, in a few words, by name."""
    return _kernels.unavailable()


def has_fast_bfloat16() -> bool:
    """Tell whether the CPU multiplies bfloat16 in hardware. On other CPUs float32 is faster."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
