"""The kernels of a job: those of its plan, those of its finished rows, or those that BATCHGEN_ISA names."""

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
    """The planned kernels, without those that this machine lacks; BATCHGEN_ISA overrides the plan.

    A missing instruction set is logged, and replaced by the machine's first one.

    Args:
        planned: The kernel of each shape in the plan.

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
    """The kernels for the remaining rows of a job: those that computed its finished rows.

    So results do not depend on where the job was interrupted. Kernels that this machine lacks are logged.

    Args:
        recorded: The kernels that computed the finished rows.
    """
    usable = kernels_here(recorded)
    if usable.default != recorded.default or usable.names() != recorded.names():
        logger.warning("finished rows were made with other kernels: the rows that are left may round differently")
    return usable


def kernels_report(kernels: KernelChoice) -> dict[str, Any]:
    """The kernels as JSON values, and the instruction sets of the CPU that cannot be used with the reasons."""
    return kernels.to_json() | {"unavailable": unavailable()}
