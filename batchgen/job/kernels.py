"""The kernels of a job: the planned ones, those that made its finished rows, or those that BATCHGEN_ISA names."""

from __future__ import annotations

import logging
from typing import Any

from batchgen.core.kernel_choice import TORCH, KernelChoice
from batchgen.ops.instruction_set import (
    forced_instruction_set,
    instruction_set,
    num_threads,
    unavailable,
    usable_instruction_sets,
)

logger = logging.getLogger(__name__)


def kernels_here(planned: KernelChoice) -> KernelChoice:
    """The planned choice as far as this machine has the instruction sets in it; BATCHGEN_ISA overrides it.

    A set that is missing here is logged, and replaced by the machine's first one.

    Raises:
        InputError: BATCHGEN_ISA names a set that is missing here, or BATCHGEN_NUM_THREADS is not a number of threads.
    """
    num_threads()
    if forced := forced_instruction_set():
        return KernelChoice(default=forced)
    usable = (*usable_instruction_sets(), TORCH)
    missing = sorted({isa for isa in (planned.default, *planned.names().values()) if isa and isa not in usable})
    if missing:
        logger.warning(
            "kernels were chosen for %s, which is not here: %s instead", ", ".join(missing), instruction_set()
        )
    return planned.among(usable, instruction_set())


def kernels_of_rows(recorded: KernelChoice) -> KernelChoice:
    """The kernels for the remaining rows of a job, which come out as if the job had never stopped.

    Where this machine lacks one of the recorded kernels, that is logged.

    Args:
        recorded: The kernels that made the finished rows.
    """
    usable = kernels_here(recorded)
    if usable.default != recorded.default or usable.names() != recorded.names():
        logger.warning("finished rows were made with other kernels: the rows that are left may round differently")
    return usable


def kernels_report(kernels: KernelChoice) -> dict[str, Any]:
    """The choice as JSON values, with the instruction sets of the CPU that cannot be used and the reasons."""
    return kernels.to_json() | {"unavailable": unavailable()}
