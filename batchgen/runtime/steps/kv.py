"""Steps that move the KV of sequences of placement `streamed` and `disk`."""

from __future__ import annotations

from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.memory.kv_cache import Moves
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def read_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read KV from disk."""
    context.kv_cache.read(step.layer, step.kv_buffer, _moves(context, step, batch))


def load_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the KV of earlier sweeps that a micro-batch reads in one layer from host memory to the accelerator.

    The Step names the layer and the staging buffer (`kv_slot`) that the KV goes to. KV on disk is in host memory by
    then.
    """
    context.kv_cache.load(step.layer, step.kv_buffer, _moves(context, step, batch))


def store_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy new KV from the staging buffer to host memory."""
    context.kv_cache.store(step.layer, step.kv_buffer, _moves(context, step, batch))


def write_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Write new KV to disk."""
    context.kv_cache.write(step.layer, step.kv_buffer, _moves(context, step, batch))


def _moves(context: StepContext, step: Step, batch: BatchState) -> Moves:
    return batch.moves[context.config.windows[step.layer]]
