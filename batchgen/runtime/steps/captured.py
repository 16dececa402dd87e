"""The Step of all layers of a sweep that moves nothing: one kernel launched after the other, or one CUDA graph.

The graph may have what comes before and after the layers too.
"""

from __future__ import annotations

from functools import partial

from batchgen.core.kv_placement import KVPlacement
from batchgen.models import layers
from batchgen.models.experts import MATRICES, is_of_experts
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import upload
from batchgen.ops.state_slots import StateSlots
from batchgen.runtime.batch_state import BatchPart, BatchState
from batchgen.runtime.graphs import KEPT, LOGITS, POSITIONS, TAKEN, TOKEN_IDS, GraphResult, StaticBuffers, SweepGraphs
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.steps.head import largest_logits
from batchgen.runtime.streams import Driver
from batchgen.schedule.packed_batch import empty_batch
from batchgen.schedule.step_graph import Step


def all_layers(context: StepContext, step: Step, batch: BatchState) -> None:
    """Launch all layers, or run the micro-batch's CUDA graph."""
    sweep = batch.graph_sweep
    if sweep is None:
        for handler, layer_step in context.layer_steps(batch.packed.num_tokens):
            handler(context, layer_step, batch)
        return
    assert context.graphs is not None, "sweeps are no CUDA graphs"
    context.reserve_places(sweep.places)
    result = context.graphs.run(sweep, batch.hidden)
    rows = batch.packed.logits_rows
    if isinstance(result, tuple):
        assert context.largest is not None, "nobody takes the tokens"
        context.largest.take_largest(rows, *result)
    elif len(rows) == len(result):
        batch.hidden = result
    else:
        batch.hidden = result.index_select(0, upload(batch.packed.logits_indices, context.device))


def sweep_graphs(context: StepContext, driver: Driver, most_tokens: int) -> SweepGraphs | None:
    """Graphs of sweeps of at most `most_tokens` tokens; None: a sweep cannot be one."""
    config, matrices = context.config, context.weights.source.layers
    if config.per_layer_size:  # rows of a table that only the host has
        return None
    # With a gate and an up projection in two formats, the host multiplies expert by expert, as the router chose them.
    if any(is_of_experts(name) and name not in MATRICES for layer in matrices for name in layer):
        return None
    windows = {config.windows[layer] for layer in config.attention_layers}
    if not all(ops.can_capture(context.attention_operands(window), context.device) for window in windows):
        return None
    return SweepGraphs(
        partial(_launch_sweep, context),
        driver.capture,
        lambda plan, window: ops.cut_attention(plan, context.attention_operands(window), device=context.device),
        most_tokens,
        context.device,
        embeds=context.weights.embeds_on_device,
        chooses=_has_head(context),
    )


def _has_head(context: StepContext) -> bool:
    """Tell whether all logits of a row are made on the device at once, for nothing but the choice of tokens."""
    makes_logits = context.options.makes_logits and not context.config.hidden_output
    return makes_logits and not context.weights.output_matrix.buffers


def _launch_sweep(context: StepContext, buffers: StaticBuffers) -> GraphResult:
    """Launch a sweep over static buffers: the embedding, if it is on the device, all layers, and perhaps the head."""
    tokens, size = context.tokens, buffers.size
    launched = context.layer_steps(size.tokens)
    context.expands = any(step.kind == "expand_weight" for _, step in launched)
    slots = buffers.state_slots
    states = None if slots is None else StateSlots(*slots)
    parts = {KVPlacement.DEVICE: BatchPart(slice(0, size.tokens), buffers.slots, {}, buffers.plans, states)}
    hidden, positions = buffers.hidden, buffers.row(POSITIONS)
    if hidden is None:
        token_ids, embeddings = buffers.row(TOKEN_IDS), context.weights.embeddings
        if tokens is not None:
            token_ids = tokens.taken(token_ids, buffers.row(TAKEN))
        hidden = layers.embed(context.config, embeddings, token_ids, positions, context.weights.dtype)
    wanted = None if size.rows is None else buffers.row(LOGITS)  # the others end before the last MLP
    batch = BatchState(empty_batch(), positions, positions, wanted, parts, {}, False, hidden=hidden)
    for handler, step in launched:
        handler(context, step, batch)
    if size.rows is None:
        return batch.hidden
    chosen, if_finite = largest_logits(context, batch.hidden)
    if tokens is not None:
        tokens.keep(buffers.row(KEPT), chosen)
    return chosen, if_finite
