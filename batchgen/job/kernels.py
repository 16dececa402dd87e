"""What a job's shapes run on: as planned, as its finished rows were made, or as BATCHGEN_ISA says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchgen.core.kernel_choice import TORCH, KernelChoice
from batchgen.ops.instruction_set import (
    forced_instruction_set,
    instruction_set,
    num_threads,
    unavailable,
    usable_instruction_sets,
)


def kernels_here(planned: KernelChoice, notify: Callable[[str], None]) -> KernelChoice:
    """A choice as far as this machine has what it names, with nothing left open; BATCHGEN_ISA stands above it.

    notify: told of what is missing, once, in a line. Raises InputError for a BATCHGEN_ISA that is not there, and for a
    BATCHGEN_NUM_THREADS that is no number of threads.
    """
    num_threads()
    if forced := forced_instruction_set():
        return KernelChoice(default=forced)
    usable = (*usable_instruction_sets(), TORCH)
    missing = sorted({isa for isa in (planned.default, *planned.names().values()) if isa and isa not in usable})
    if missing:
        notify(f"kernels were chosen for {', '.join(missing)}, which is not here: {instruction_set()} instead")
    return planned.among(usable, instruction_set())


def kernels_of_rows(recorded: KernelChoice | None, notify: Callable[[str], None]) -> KernelChoice:
    """What the rows that are left run on, so that they come out as if the job had never stopped.

    Args:
        recorded: What the finished rows were made with; None: by a version that recorded nothing, and did not choose.
        notify: Told where that cannot be had.
    """
    wanted = recorded or KernelChoice(default=instruction_set())
    made = kernels_here(wanted, notify)
    if made.default != wanted.default or made.names() != wanted.names():
        notify("finished rows were made with other kernels: the rows that are left may round differently")
    return made


def kernels_report(kernels: KernelChoice) -> dict[str, Any]:
    """The choice for a report, with the instruction sets that the CPU has and that cannot be used, and why."""
    return kernels.to_json() | {"unavailable": unavailable()}
