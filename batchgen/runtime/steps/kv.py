"""Steps that move the KV of sequences of placement `streamed` and `disk`, or of those that change their placement."""

from __future__ import annotations

from batchgen.models import layers
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import download
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.memory.kv_cache import Moves
from batchgen.runtime.memory.state_cache import StateMoves
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def choose_pages(context: StepContext, step: Step, batch: BatchState) -> None:
    """Choose the pages that pass through a staging buffer, by the queries of the layer."""
    choice, config, kv_cache = batch.staged_choice, context.config, context.kv_cache
    assert choice is not None, "no sequence of the batch chooses pages"
    rows = layers.ungated(config, batch.qkv.index_select(0, choice.tokens))
    rows = rows[:, : config.attention_of(step.layer).q_size].contiguous()
    options = context.rotary(step, batch.positions.index_select(0, choice.tokens))
    q, _, _ = ops.rotary(rows, config.num_heads, 0, rotate_keys=kv_cache.format.rotates_keys, **options)
    table = choice.choose(q, kv_cache.summaries("cpu", step.layer))
    moves = _moves(context, step, batch)
    if context.tiers.links:
        batch.chosen_on_host[step.layer] = kv_cache.chosen_on_host(step.layer, moves, table)
    if kv_cache.reads_chosen(step.layer, moves):
        batch.chosen_on_disk[step.layer] = download(table)


def read_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read KV or states from disk."""
    if context.config.has_state(step.layer):
        context.states.read(step.layer, step.kv_buffer, _state_moves(batch))
    else:
        table = batch.chosen_on_disk.pop(step.layer, None)
        context.kv_cache.read(step.layer, step.kv_buffer, _moves(context, step, batch), table)


def load_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the KV or the states that a micro-batch reads in one layer from host memory to the accelerator.

    The Step names the layer and the staging buffer (`kv_slot`) that they go to. What is on disk is in host memory by
    then.
    """
    if context.config.has_state(step.layer):
        context.states.load(step.layer, step.kv_buffer, _state_moves(batch))
    else:
        blocks = batch.chosen_on_host.pop(step.layer, None)
        context.kv_cache.load(step.layer, step.kv_buffer, _moves(context, step, batch), blocks)


def store_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy new KV, or all states, from the staging buffer to host memory."""
    if context.config.has_state(step.layer):
        context.states.store(step.layer, step.kv_buffer, _state_moves(batch))
    else:
        context.kv_cache.store(step.layer, step.kv_buffer, _moves(context, step, batch))


def write_cache(context: StepContext, step: Step, batch: BatchState) -> None:
    """Write new KV, or all states, to disk."""
    if context.config.has_state(step.layer):
        context.states.write(step.layer, step.kv_buffer, _state_moves(batch))
    else:
        context.kv_cache.write(step.layer, step.kv_buffer, _moves(context, step, batch))


def swap_in(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the KV of sequences that move from the host's pool to the device's, in one layer."""
    context.kv_cache.swap_in(step.layer, batch.packed.swaps_in)


def swap_out(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the KV of sequences that move from the device's pool to the host's, in one layer."""
    context.kv_cache.swap_out(step.layer, batch.packed.swaps_out)


def _moves(context: StepContext, step: Step, batch: BatchState) -> Moves:
    return batch.moves[context.windows[step.layer]]


def _state_moves(batch: BatchState) -> StateMoves:
    assert batch.state_moves is not None, "no state passes"
    return batch.state_moves
