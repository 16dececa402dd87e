"""Steps of sequences whose attention is deferred, which are in no micro-batch meanwhile (APEX section 3.3)."""

from __future__ import annotations

from batchgen.ops.dispatch import CPU
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def send_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send queries and new KV of a deferred batch to host memory."""
    pool, window = context.kv_cache.pools["cpu"][step.layer], context.config.windows[step.layer]
    queries, _ = context.activations.deferred
    context.deferred_of.pop(step.id).send(context.tiers.d2h, pool, window, queries)


def attend_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Attend on the CPU for a deferred batch."""
    pool, window = context.kv_cache.pools["cpu"][step.layer], context.config.windows[step.layer]
    softmax = context.softmax(step, CPU)
    deferred_batch = context.deferred_of.pop(step.id)
    deferred_batch.attend(pool, window, context.activations.deferred, context.config.num_heads, **softmax)


def join_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy a deferred batch's attention to the compute device, and let it go on with the micro-batch."""
    deferred_batch = context.deferred_of.pop(step.id)
    _, attended = context.activations.deferred
    deferred_batch.join(context.tiers.h2d, attended)
    batch.joined.append(deferred_batch)
