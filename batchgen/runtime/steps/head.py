"""The Step of the head: logits, whole or chunk by chunk of the vocabulary; or hidden states for embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.models import layers
from batchgen.ops import dispatch as ops
from batchgen.ops.long_steps import note
from batchgen.runtime.batch_state import RELEASED, BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.sequence import NOT_FINITE, LogitsRow
from batchgen.schedule.step_graph import Step

# Operations of a Step for the logits of one of several parts of its rows on a GPU, at most, and for what is done with
# them.
_PART_OPERATIONS = 48


def head(context: StepContext, step: Step, batch: BatchState) -> None:
    """Compute the logits of the rows that ask for them, or those of one vocabulary chunk.

    A model without an output matrix hands its hidden states over instead, fp32 [rows, hidden].
    """
    if not context.options.makes_logits:
        batch.hidden = RELEASED
        return
    config, weights = context.config, context.weights
    if step.layer == 0:
        batch.hidden = layers.before_logits(config, weights.head, batch.hidden)
        if context.take_hidden is not None:
            context.take_hidden(batch.packed.logits_rows, batch.hidden)
    if config.hidden_output:
        context.take_logits(_wanted(batch), batch.hidden.float(), 0)
        batch.hidden = RELEASED
        return
    start, rows = weights.vocabulary_chunk(step.layer, step.weight_slot)
    if not rows.shape[0]:  # the last chunks of a small vocabulary are empty: all of its logits are there
        return
    stop = start + rows.shape[0]
    bias = weights.head_bias(start, stop)
    wanted = _wanted(batch)
    count = context.options.logit_rows or len(wanted) or 1
    if rows.shape[0] == config.vocab_size or context.vocabulary_chunks:
        for i in _parts(len(wanted), count):
            part = batch.hidden[i : i + count]
            logits = layers.logits(config, part, rows, context.logits_buffer(part, rows), bias)
            context.take_logits(wanted[i : i + count], logits, start)
    else:
        if start == 0:
            batch.logits = torch.empty(len(wanted), config.vocab_size, device=context.device)
        for i in _parts(len(wanted), count):
            part = slice(i, i + count)
            batch.logits[part, start:stop] = layers.logits(config, batch.hidden[part], rows, bias=bias)
            if stop == config.vocab_size:
                context.take_logits(wanted[part], batch.logits[part], 0)
    if stop == config.vocab_size:
        batch.hidden = batch.logits = RELEASED


def largest_logits(context: StepContext, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the tokens with the largest logits, where all of the output matrix is on the device.

    Args:
        context: The model and its memory.
        hidden: Activations after the last layer, [rows, hidden].

    Returns:
        Tokens, int64 [rows], and the same with NOT_FINITE where the logits are not finite.
    """
    config, weights = context.config, context.weights
    _, rows = weights.vocabulary_chunk(0, None)
    bias = weights.head_bias(0, config.vocab_size)
    chosen = []
    for part in layers.before_logits(config, weights.head, hidden).split(context.options.logit_rows or len(hidden)):
        logits = layers.logits(config, part, rows, context.logits_buffer(part, rows), bias)
        chosen.append(ops.argmax_if_finite(logits, NOT_FINITE))
    tokens, if_finite = map(torch.cat, zip(*chosen, strict=True))
    return tokens, if_finite


def _parts(num_rows: int, count: int) -> Iterator[int]:
    """Yield the first row of each part of so many rows, and note what is launched for it."""
    for first in range(0, num_rows, count):
        yield first
        if first:  # as many as for the first part every Step may have
            note(_PART_OPERATIONS)


def _wanted(batch: BatchState) -> list[LogitsRow]:
    """The rows of the micro-batch's hidden states in the head, those of deferred batches last."""
    return [*batch.packed.logits_rows, *(row for deferred_batch in batch.joined for row in deferred_batch.rows)]
