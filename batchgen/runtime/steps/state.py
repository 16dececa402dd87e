"""The work of Steps of attention in state layers: states are updated where they lie, or in a staging buffer."""

from __future__ import annotations

from batchgen.core.kv_placement import KVPlacement
from batchgen.models.state import mix_state
from batchgen.ops.state_slots import StateSlots
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def update_states(context: StepContext, step: Step, batch: BatchState) -> None:
    """Update states on the compute device."""
    tensors = context.layer(step)
    for placement, part in batch.parts.items():
        if placement is KVPlacement.CPU:
            continue
        if placement is KVPlacement.DEVICE:
            states = context.states.in_pool(context.compute_tier, step.layer)
        elif step.kv_slot is not None:
            states = context.states.in_staging(step.kv_slot)
        else:  # in this layer the host's pool lies on the device
            part, states = batch.part_in_place, context.states.in_pool("cpu", step.layer)
        projected = batch.qkv if len(batch.parts) == 1 else batch.qkv[part.tokens]
        batch.attended[placement] = mix_state(context.config, tensors, projected, states, slots_of(part.states))


def send_projected(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send what the CPU updates states by to host memory."""
    part, config = batch.parts[KVPlacement.CPU], context.config
    projected = batch.qkv[part.tokens]
    widths = config.sent_width(step.layer), config.mixed_size(step.layer)
    sent, mixed = context.activations.exchange(len(projected), *widths)
    context.tiers.d2h.copy(sent, projected.contiguous())
    batch.for_cpu[step.layer], batch.from_cpu[step.layer] = (sent, mixed), mixed


def update_on_cpu(context: StepContext, step: Step, batch: BatchState) -> None:
    """Update states in host memory."""
    sent, mixed = batch.for_cpu.pop(step.layer)
    states = context.states.in_pool("cpu", step.layer)
    slots = slots_of(batch.parts[KVPlacement.CPU].states)
    result = mix_state(context.config, context.weights.of_states(step.layer), sent, states, slots, out=mixed)
    assert result.data_ptr() == mixed.data_ptr(), "the result is where the accelerator takes it from"


def update_deferred(context: StepContext, step: Step, deferred_batch: DeferredBatchState) -> None:
    """Update the states of a deferred batch in host memory."""
    config, tensors = context.config, context.weights.of_states(step.layer)
    states, slots = context.states.in_pool("cpu", step.layer), slots_of(deferred_batch.states)
    widths = config.sent_width(step.layer), config.mixed_size(step.layer)
    deferred_batch.update(
        context.activations.deferred, widths, lambda sent: mix_state(config, tensors, sent, states, slots)
    )


def slots_of(states: StateSlots | None) -> StateSlots:
    """The slots of the states of a part of a batch, of a model with state layers."""
    assert states is not None, "the sequences have no states"
    return states
