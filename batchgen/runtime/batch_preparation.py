"""Packed micro-batches made ready for their Steps: indices and attention plans on the devices that use them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.core.attention_budget import CHOSEN_PAGES
from batchgen.core.kv_placement import KVPlacement
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.chosen_attention import PreparedPlan, StagedChoice, prepare_attention, prepare_choice
from batchgen.ops.dispatch import CPU
from batchgen.ops.host_copy import upload
from batchgen.runtime.batch_state import A, BatchPart, BatchState, Plans, for_each
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.graphs import GraphSweep
from batchgen.runtime.state_slots import upload_slots
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.token_table import places_of
from batchgen.schedule.packed_batch import PackedBatch, Segment


def prepare_batches(context: StepContext, batches: Sequence[PackedBatch]) -> list[BatchState]:
    """The micro-batches of a sweep, ready for their Steps. The activations of the last ones wait in host memory."""
    first_on_host = len(batches) - context.options.batches_on_host
    stops = itertools.accumulate(batch.num_tokens for batch in batches)
    return [
        _prepare(context, batch, k >= first_on_host, stop - batch.num_tokens)
        for k, (batch, stop) in enumerate(zip(batches, stops, strict=True))
    ]


def prepare_for_graph(sweep: GraphSweep) -> BatchState:
    """A micro-batch whose layers are a CUDA graph."""
    packed = sweep.packed
    token_ids, positions = torch.from_numpy(packed.token_ids), torch.from_numpy(packed.positions)
    return BatchState(
        packed, positions, positions, None, parts={}, moves={}, on_host=False, token_ids=token_ids, graph_sweep=sweep
    )


def _tokens(context: StepContext, packed: PackedBatch, on_host: bool) -> dict[str, Any]:
    """The attributes `token_ids`, `pending` and `logits_indices` of a micro-batch's state, brought by one copy.

    Args:
        context: The model and its memory.
        packed: The micro-batch.
        on_host: Whether its activations wait in host memory, which is the next batch's before the head.
    """
    arrays = {"logits": packed.logits_indices}
    if len(packed.logits_rows) == packed.num_tokens and not on_host:
        arrays = {}
    on_device = context.config.embeds and context.weights.embeds_on_device
    if on_device:
        arrays["tokens"] = packed.token_ids
    if len(packed.pending_rows):
        arrays |= {"rows": packed.pending_rows, "places": places_of(packed.pending_slots)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if arrays and context.device != CPU:
        together = upload(np.concatenate(list(arrays.values())), context.device)
        tensors = dict(zip(arrays, together.split([len(array) for array in arrays.values()]), strict=True))
    return {
        "token_ids": tensors["tokens"] if on_device else torch.from_numpy(packed.token_ids),
        "pending": (tensors["rows"], tensors["places"]) if "rows" in tensors else None,
        "logits_indices": tensors.get("logits"),
    }


def _prepare(context: StepContext, packed: PackedBatch, on_host: bool, first_token: int) -> BatchState:
    parts: dict[KVPlacement, BatchPart] = {}
    begins = None
    for segment in packed.segments:
        attended_on_cpu = segment.placement in (KVPlacement.CPU, KVPlacement.DEFERRED)
        plans = _prepared_plans(context, segment, CPU if attended_on_cpu else context.device)
        if segment.placement is KVPlacement.DEFERRED:
            begins = _prepare_deferred(context, packed, segment, plans)
            continue
        rows = _rows_on_host(context, segment) if segment.placement is KVPlacement.CPU else {}
        tokens, slots = slice(segment.start, segment.stop), _uploaded(context, segment.slots)
        states = upload_slots(segment.states, CPU if attended_on_cpu else context.device)
        parts[segment.placement] = BatchPart(tokens, slots, rows, plans, states)
    in_place = None
    if packed.in_place:
        plans, slots = _prepared_plans(context, packed.in_place, context.device), packed.in_place.slots
        states = upload_slots(packed.in_place.states, context.device)
        in_place = replace(parts[KVPlacement.STREAMED], slots=_uploaded(context, slots), plans=plans, states=states)
    cache, state_moves = context.kv_cache, None
    moves = for_each(
        _of_layers(context, packed.staging or {}),
        lambda staging, window: cache.prepare(staging, window, context.device),
        cache.shape_in,
    )
    if packed.state_staging is not None and context.config.state is not None:
        state_moves = context.states.prepare(packed.state_staging, context.device)
    positions = torch.from_numpy(packed.positions), upload(packed.positions, context.device)
    batch = BatchState(
        packed, *positions, parts=parts, moves=moves, on_host=on_host, begins=begins, in_place=in_place,
        state_moves=state_moves, first_token=first_token, staged_choice=_prepared_choice(context, packed),
        **_tokens(context, packed, on_host),
    )  # fmt: skip
    if context.tiers.links and not (context.config.embeds or on_host):  # for what the previous stage will send
        shape = packed.num_tokens, context.config.hidden_size
        batch.hidden = torch.empty(shape, dtype=context.weights.dtype, device=context.device)
    return batch


def _prepare_deferred(context: StepContext, packed: PackedBatch, segment: Segment, plans: Plans) -> DeferredBatchState:
    """The sequences of a micro-batch that begin a token whose attention is deferred."""
    positions = upload(packed.positions[segment.start : segment.stop], context.device)
    slots = torch.from_numpy(packed.exchange_slots), upload(packed.exchange_slots, context.device)
    rows, states = _rows_on_host(context, segment), upload_slots(segment.states, CPU)
    return DeferredBatchState(packed.deferred_rows, positions, *slots, rows, plans, states)


def _prepared_plans(context: StepContext, segment: Segment, device: torch.device) -> Plans:
    """Attention plans of a segment by sliding window, on the device that attends."""

    def prepared(plan: AttentionPlan, window: int | None) -> PreparedPlan:
        operands, isa = context.attention_operands(window), _isa(context, window)
        return prepare_attention(plan, operands, device=device, isa=isa, every_kernel=context.warms_up)

    return {window: prepared(plan, window) for window, plan in _of_layers(context, segment.plans).items()}


def _prepared_choice(context: StepContext, packed: PackedBatch) -> StagedChoice | None:
    """The sequences that choose which pages pass through the staging buffer; None: none does."""
    if packed.staged_choice is None or CHOSEN_PAGES not in context.attended_windows:
        return None
    operands, isa = context.attention_operands(CHOSEN_PAGES), _isa(context, CHOSEN_PAGES)
    return prepare_choice(packed.staged_choice, operands, device=context.device, isa=isa)


def _isa(context: StepContext, window: int | None) -> str:
    """The instruction set that attends on the CPU in layers with a sliding window. "": the process's."""
    return context.options.attention_isa.get(context.config.attention_within(window or None), "")


def _uploaded(context: StepContext, slots: Mapping[int | None, np.ndarray]) -> dict[int | None, Tensor]:
    """Slots of new KV by sliding window, on the compute device."""
    return for_each(slots, lambda of_window, window: upload(of_window, context.device))


def _rows_on_host(context: StepContext, segment: Segment) -> dict[int | None, tuple[Tensor, Tensor]]:
    """Rows of the host's pool, flat, that K and V of the segment's tokens go to, by sliding window."""
    shape_in = context.kv_cache.shape_in

    def rows(slots: np.ndarray, window: int | None) -> tuple[Tensor, Tensor]:
        shape = shape_in(window)
        keys = upload(ops.kv_rows(slots, shape.kv_heads, shape.kv_block_size).numpy(), context.device)
        return keys, keys + shape.kv_heads * shape.kv_block_size

    return for_each(_of_layers(context, segment.slots), rows, shape_in)


def _of_layers(context: StepContext, by_window: Mapping[int | None, A]) -> dict[int | None, A]:
    """The values of windows that layers here have; another stage of a pipeline may have others."""
    return {window: value for window, value in by_window.items() if window in context.attended_windows}
