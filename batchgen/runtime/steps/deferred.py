"""Steps of sequences whose attention is deferred, which are in no micro-batch meanwhile (APEX section 3.3)."""

from __future__ import annotations

from torch import Tensor

from batchgen.models import layers
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.steps.state import update_deferred
from batchgen.schedule.step_graph import Step


def send_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send queries and new KV of a deferred batch to host memory, or what its states are updated by."""
    pool = context.kv_cache.pool("cpu", step.layer) if context.config.owns_kv(step.layer) else None
    queries, _ = context.activations.deferred
    context.deferred_of.pop(step.id).send(context.tiers.d2h, pool, context.windows[step.layer], queries)


def attend_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Attend on the CPU for a deferred batch, or update its states."""
    deferred_batch = context.deferred_of.pop(step.id)
    if context.config.has_state(step.layer):
        update_deferred(context, step, deferred_batch)
        return
    pool, plan = context.kv_cache.pool("cpu", step.layer), deferred_batch.plans[context.windows[step.layer]]

    def attend(q: Tensor) -> Tensor:
        return context.attend(step, q, pool, plan, "cpu")

    deferred_batch.attend(context.activations.deferred, context.config.attention_of(step.layer), attend)


def join_deferred(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy a deferred batch's attention to the compute device, and let it go on with the micro-batch."""
    deferred_batch = context.deferred_of.pop(step.id)
    _, table = context.activations.deferred
    attended = deferred_batch.join(context.tiers.h2d, table, context.config.mixed_size(step.layer))
    if deferred_batch.projected is not None:
        layers.gate_attention(context.config, deferred_batch.projected, attended)
        deferred_batch.projected = None
    batch.joined.append(deferred_batch)
