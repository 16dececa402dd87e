"""The work of a rank other than 0: it loads the part of a model that rank 0 names, and runs the sweeps of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.messages import StageLoads, decode
from batchgen.engine.pipeline import serve_stage
from batchgen.engine.tensor_parallel import follow_sweeps

if TYPE_CHECKING:
    from batchgen.distributed.group import Group


def follow_rank_zero(group: Group) -> dict[str, int]:
    """Be a stage of a pipeline, or a rank of tensor parallelism, until rank 0 ends the group.

    Returns:
        Peak bytes of each tier in this process.

    Raises:
        EOFError: Rank 0 has nothing to do.
        BatchgenError: This rank has failed, or the others are lost.
    """
    message = decode(group.receive_broadcast())
    if isinstance(message, StageLoads):
        return serve_stage(group, message.loads)
    return follow_sweeps(group, message.request, message.memory)
