"""Steps of a layer's matmuls: before attention, after it, and the router of experts that are read on demand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.models import layers
from batchgen.runtime.batch_state import RELEASED, BatchState
from batchgen.runtime.deferred import DeferredBatchState, slices, with_deferred
from batchgen.runtime.steps.attention import qkv_for_host
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.steps.weights import dequantizes_after_router
from batchgen.schedule.step_graph import Step


def pre(context: StepContext, step: Step, batch: BatchState) -> None:
    """Compute norm and QKV; deferred batches leave for their next attention."""
    tensors = context.layer(step)
    hidden = with_deferred(batch.hidden, [d.hidden for d in batch.joined])
    batch.qkv = hidden.new_empty(hidden.shape[0], context.config.projected_width(step.layer))
    if len(hidden):
        for part, qkv in context.chunks(hidden, batch.qkv):
            layers.pre_attention(context.config, tensors, part, qkv, reduce=context.options.reduce)
    leaving, batch.joined = batch.joined, []
    if step.layer == 0 and batch.begins is not None:
        leaving = [batch.begins]
    if leaving:
        _leave(context, step, batch, hidden, leaving)


def _leave(
    context: StepContext, step: Step, batch: BatchState, hidden: Tensor, leaving: Sequence[DeferredBatchState]
) -> None:
    """Deferred batches, the last rows of what has been computed, take with them what they need from here on."""
    qkv, start = batch.qkv, len(hidden) - sum(len(d.rows) for d in leaving)
    batch.hidden, batch.qkv = batch.hidden[:start], qkv[:start]
    if step.layer == 0 and batch.begins is not None and batch.per_layer is not None:
        batch.begins.per_layer = _on_device(context, batch, batch.per_layer)[:, start:].clone()
        batch.per_layer = batch.per_layer[:, :start]
    for deferred_batch, rows in zip(leaving, slices(start, leaving), strict=True):
        if context.config.has_state(step.layer):
            deferred_batch.leave(hidden[rows], [_as_wide_as(context, qkv[rows])])
            continue
        q, k, v = qkv_for_host(context, step, qkv[rows], deferred_batch.positions)
        gate = qkv[rows] if context.config.output_gate else None
        kv = [k, v] if context.config.owns_kv(step.layer) else []
        deferred_batch.leave(hidden[rows], [_as_wide_as(context, q.flatten(1)), *kv], gate)


def _as_wide_as(context: StepContext, sent: Tensor) -> Tensor:
    """Rows for the table of queries, which is as wide as any layer needs."""
    queries, _ = context.activations.deferred
    if sent.shape[1] == queries.shape[1]:
        return sent
    rows = sent.new_empty(len(sent), queries.shape[1])  # nobody reads beyond what is copied
    rows[:, : sent.shape[1]] = sent
    return rows


def route(context: StepContext, step: Step, batch: BatchState) -> None:
    """Compute what comes before the experts, so that it is known which ones to read."""
    batch.routes, rows = [], _rows_after_attention(context, step, batch)
    if rows is None:
        return
    batch.hidden, attention = rows
    tensors = context.layer(step)
    for part, attended in context.chunks(batch.hidden, attention):
        routes = layers.route_tokens(context.config, tensors, part, attended, context.options.reduce)
        batch.routes.append(routes)


def post(context: StepContext, step: Step, batch: BatchState) -> None:
    """Compute the output projection and the MLP."""
    if batch.routes is None and dequantizes_after_router(context, step):
        route(context, step, batch)
    if batch.routes is not None:
        _through_experts(context, step, batch)
        return
    rows = _rows_after_attention(context, step, batch)
    if rows is None:
        return
    hidden, attention = rows
    is_last = step.layer == context.config.num_layers - 1
    num_of_batch = len(hidden) - sum(len(d.rows) for d in batch.joined)
    tensors = context.layer(step)
    reduce, on_counts = context.options.reduce, context.routing.add
    for part, attended, *rest in context.chunks(hidden, attention, *_per_layer(context, step, batch)):
        per_layer = rest[0] if rest else None
        layers.post_attention(
            context.config, tensors, part, attended, part, per_layer=per_layer, reduce=reduce, on_counts=on_counts
        )
    if batch.joined and not is_last:
        for deferred_batch, part in zip(batch.joined, slices(num_of_batch, batch.joined), strict=True):
            deferred_batch.hidden, deferred_batch.attended = hidden[part], None
        hidden = batch.hidden.copy_(hidden[:num_of_batch]) if batch.on_host else hidden[:num_of_batch]
    batch.hidden = hidden


def _through_experts(context: StepContext, step: Step, batch: BatchState) -> None:
    """Compute the rest of a layer, once the experts are read."""
    context.weights.dequantize_experts(step.layer, step.weight_slot, batch.experts)
    tensors = context.layer(step)
    parts = context.chunks(batch.hidden, *_per_layer(context, step, batch)) if batch.routes else ()
    reduce, on_counts = context.options.reduce, context.routing.add
    for (part, *rest), routes in zip(parts, batch.routes or (), strict=True):
        per_layer = rest[0] if rest else None
        layers.add_experts(context.config, tensors, part, routes, per_layer, reduce, on_counts)
    batch.routes = None


def _per_layer(context: StepContext, step: Step, batch: BatchState) -> list[Tensor]:
    """The layer's input from per-layer embeddings, [tokens, per_layer_size], for the tokens of `_rows_after_attention`.

    Returns:
        One tensor; none if the model has no per-layer embeddings.
    """
    if batch.per_layer is None:
        return []
    rows = _on_device(context, batch, batch.per_layer[step.layer])
    if step.layer == context.config.num_layers - 1 and batch.logits_indices is not None:
        rows = rows[batch.logits_indices]
    joined = [d.per_layer[step.layer] for d in batch.joined if d.per_layer is not None]
    return [with_deferred(rows, joined)]


def _on_device(context: StepContext, batch: BatchState, rows: Tensor) -> Tensor:
    """Inputs of layers from per-layer embeddings, on the compute device."""
    return context.tiers.h2d.bring(rows) if batch.on_host and context.tiers.links else rows


def _rows_after_attention(context: StepContext, step: Step, batch: BatchState) -> tuple[Tensor, Tensor] | None:
    """(hidden, attention's result) of the tokens that the rest of a layer is for, deferred batches last.

    Returns:
        Two tensors of [tokens, ...]; None: there are no tokens.
    """
    batch.qkv = RELEASED  # memory for the other batches
    attended, hidden = [batch.attended.pop(placement) for placement in batch.parts], batch.hidden
    if not attended and not batch.joined:
        return None
    if len(attended) > 1:
        attended = [torch.cat(attended)]
    is_last = step.layer == context.config.num_layers - 1
    sends = is_last and not context.config.has_head
    # In the last layer only tokens whose logits are asked for go on.
    if is_last and not sends and batch.logits_indices is not None:
        attended = [a.index_select(0, batch.logits_indices) for a in attended]
        hidden = hidden.index_select(0, batch.logits_indices)
    attended += [d.attended for d in batch.joined]
    hidden = with_deferred(hidden, [d.hidden for d in batch.joined])
    return hidden, attended[0] if len(attended) == 1 else torch.cat(attended)
