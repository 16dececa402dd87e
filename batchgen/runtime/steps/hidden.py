"""Steps that make activations or move them: embedding, host memory, the stages of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.models import layers
from batchgen.runtime.batch_state import RELEASED, BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def embed(context: StepContext, step: Step, batch: BatchState) -> None:
    """Look up the embeddings of the micro-batch's tokens."""
    on_device, links = context.weights.embeds_on_device, context.tiers.links
    token_ids, positions = batch.token_ids, batch.positions if on_device else batch.host_positions
    if batch.pending is not None:
        assert context.tokens is not None, "sampled tokens are on the host"
        context.tokens.fill(token_ids, *batch.pending)
    weights, rows = context.weights, context.weights.embedding_rows_of(batch.packed.token_ids)
    hidden = layers.embed(context.config, weights.embeddings, token_ids, positions, weights.dtype, rows)
    batch.per_layer = _per_layer_inputs(context, step, batch, hidden)
    if links and batch.on_host:
        waiting = context.activations.waiting(step.batch, len(hidden))
        hidden = links[1].copy(waiting, hidden) if on_device else waiting.copy_(hidden)
    elif links and not on_device:
        hidden = links[0].bring(hidden)
    batch.hidden = hidden


def _per_layer_inputs(context: StepContext, step: Step, batch: BatchState, hidden: Tensor) -> Tensor | None:
    """The inputs of all layers from per-layer embeddings, where the micro-batch's activations are between layers.

    Args:
        context: The model and its memory.
        step: The Step that embeds the micro-batch.
        batch: The micro-batch, whose tokens are all known to the host.
        hidden: Embeddings of its tokens, [tokens, hidden], in the memory that the token embedding is in.

    Returns:
        Inputs [layers, tokens, per_layer_size]; None: the model has no per-layer embeddings.
    """
    table, links, on_device = context.weights.per_layer, context.tiers.links, context.weights.embeds_on_device
    if table is None:
        return None
    rows = table.rows(batch.packed.token_ids, context.weights.dtype)
    rows = links[0].bring(rows) if links and on_device else rows
    inputs = layers.per_layer_inputs(context.config, context.weights.embeddings, hidden, rows)
    if links and batch.on_host:
        waiting = context.activations.waiting_inputs(step.batch, len(hidden))
        return links[1].copy(waiting, inputs) if on_device else waiting.copy_(inputs)
    return links[0].bring(inputs) if links and not on_device else inputs


def receive(context: StepContext, step: Step, batch: BatchState) -> None:
    """Receive activations from the previous stage."""
    hidden = _received(context, batch)
    if context.warms_up:
        hidden.zero_()
    else:
        context.options.ranks.receive_from_previous(hidden)
    if not context.tiers.links:
        batch.hidden = hidden


def _received(context: StepContext, batch: BatchState) -> Tensor:
    """Memory of the host for activations of the previous stage, [tokens, hidden].

    For an accelerator it is known before anything is received, so that what copies it can be launched.
    """
    num_tokens = batch.packed.num_tokens
    if not context.tiers.links:
        return torch.empty(num_tokens, context.config.hidden_size, dtype=context.weights.dtype)
    return context.activations.arriving(batch.first_token, num_tokens)


def send(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send activations, which are in host memory, to the next stage."""
    hidden, batch.hidden = batch.hidden, RELEASED
    if not context.warms_up:
        context.options.ranks.send_to_next(hidden)


def load_hidden(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy activations that wait in host memory to the accelerator."""
    comes_first = step.layer == 0 and not context.config.embeds
    source = _received(context, batch) if comes_first else batch.hidden
    target = context.activations.fetched(len(source)) if batch.on_host else batch.hidden
    batch.hidden = context.tiers.h2d.copy(target, source)


def store_hidden(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy activations to host memory, where they wait for the next layer, or for the next stage."""
    hidden = batch.hidden
    if step.layer < context.config.num_layers - 1:
        target = context.activations.waiting(step.batch, len(hidden))
    else:
        context.tiers.d2h.borrow(hidden)  # of compute's stream, which may use its memory again
        target = context.activations.leaving(batch.first_token, len(hidden))
    batch.hidden = context.tiers.d2h.copy(target, hidden)
