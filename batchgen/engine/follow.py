"""The work of every rank but rank 0: it loads its part of the model, and runs the sweeps that rank 0 sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.messages import StageLoads, decode
from batchgen.engine.pipeline import serve_stage
from batchgen.engine.tensor_parallel import follow_sweeps

if TYPE_CHECKING:
    from batchgen.distributed.group import Group


def follow_rank_zero(group: Group) -> dict[str, int]:
    """Load this rank's part of the model and run the sweeps that rank 0 sends, until rank 0 ends the group.

    Args:
        group: The group of ranks: the stages of a pipeline, or the ranks of tensor parallelism.

    Returns:
        Peak bytes of each tier in this process.

    Raises:
        EOFError: Rank 0 ended the group before it sent a model to load.
        BatchgenError: This rank has failed, or the connection to the others is lost.
    """
    message = decode(group.receive_broadcast())
    if isinstance(message, StageLoads):
        return serve_stage(group, message.loads)
    return follow_sweeps(group, message.request, message.memory)
