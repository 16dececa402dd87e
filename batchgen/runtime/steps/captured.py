"""The Step of all layers of a sweep that moves nothing: one kernel launched after the other, or one CUDA graph."""

from __future__ import annotations

from functools import partial

from batchgen.core.kv_placement import KVPlacement
from batchgen.models.experts import MATRICES, is_of_experts
from batchgen.ops import dispatch as ops
from batchgen.ops.state_slots import StateSlots
from batchgen.runtime.batch_state import BatchPart, BatchState
from batchgen.runtime.graphs import StaticBuffers, SweepGraphs
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.streams import Driver
from batchgen.schedule.packed_batch import empty_batch
from batchgen.schedule.step_graph import Step


def all_layers(context: StepContext, step: Step, batch: BatchState) -> None:
    """Launch all layers, or replay them over the micro-batch's static buffers if it has some."""
    if batch.buffers is None:
        for handler, layer_step in context.layer_steps(batch.packed.num_tokens):
            handler(context, layer_step, batch)
        return
    assert context.graphs is not None, "sweeps are no CUDA graphs"
    hidden = context.graphs.run(batch.buffers, batch.hidden)
    batch.hidden = hidden if batch.logits_indices is None else hidden.index_select(0, batch.logits_indices)


def sweep_graphs(context: StepContext, driver: Driver, most_tokens: int) -> SweepGraphs | None:
    """Graphs of sweeps of at most `most_tokens` tokens; None: a sweep cannot be one."""
    config, layers = context.config, context.weights.source.layers
    if config.per_layer_size:  # rows of a table that only the host has
        return None
    # With a gate and an up projection in two formats, the host multiplies expert by expert, as the router chose them.
    if any(is_of_experts(name) and name not in MATRICES for layer in layers for name in layer):
        return None
    windows = {config.windows[layer] for layer in config.attention_layers}
    if not all(ops.can_capture(context.attention_operands(window), context.device) for window in windows):
        return None
    return SweepGraphs(
        partial(_launch_layers, context),
        driver.capture,
        lambda plan, window: ops.cut_attention(plan, context.attention_operands(window), device=context.device),
        most_tokens,
        config.hidden_size,
        context.weights.dtype,
        context.device,
    )


def _launch_layers(context: StepContext, buffers: StaticBuffers) -> None:
    """Launch all layers over static buffers."""
    launched = context.layer_steps(len(buffers.hidden))
    context.expands = any(step.kind == "expand_weight" for _, step in launched)
    slots = buffers.state_slots
    states = None if slots is None else StateSlots(*slots)
    part = BatchPart(slice(0, len(buffers.hidden)), buffers.slots, {}, buffers.plans, states)
    parts = {KVPlacement.DEVICE: part}
    positions = buffers.positions
    batch = BatchState(empty_batch(), positions, positions, None, parts, {}, False, hidden=buffers.hidden)
    for handler, step in launched:
        handler(context, step, batch)
