"""The Steps of sweeps that warm up a device: through one layer of each kind, leaving no KV and no states behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.core.attention_budget import CHOSEN_PAGES
from batchgen.core.kv_placement import KVPlacement
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.packed_batch import PackedBatch, Segment
from batchgen.schedule.step_graph import Step
from batchgen.schedule.sweeps import Sweeps

_BEFORE = 1 << 40  # Steps that warm up are numbered so far below the others


def layers_that_differ(context: StepContext) -> list[int]:
    """One layer of each kind, by where its weights are and what it attends to; the last one; those of reused KV."""
    kinds: dict[tuple[Any, ...], int] = {}
    config, on_device = context.config, context.kv_cache.on_device or (False,) * context.config.num_layers
    for layer, tiers in enumerate(context.weights.residency.layers):
        kind = context.windows[layer], config.kind_of(layer), on_device[layer]
        kinds.setdefault((*kind, *sorted(tiers.items())), layer)
    layers = {*kinds.values(), config.num_layers - 1}
    return sorted(layers | set(map(config.kv_source, layers)))


def sweeps_of_layers(context: StepContext, layers: Sequence[int]) -> Sweeps:
    """Sweeps of a model that has only these layers."""
    on_device = [context.kv_cache.on_device[j] for j in layers if context.kv_cache.on_device]
    states = [i for i, layer in enumerate(layers) if context.config.has_state(layer)]
    sources = [layers.index(context.config.kv_source(layer)) for layer in layers]
    residency, config = context.weights.residency.of_layers(layers), context.config
    choosing = [context.windows[layer] == CHOSEN_PAGES for layer in layers]
    return Sweeps(residency.streams(context.compute_tier, on_device, states, sources, choosing=choosing, **config.ends))


def numbered_before(steps: Iterable[Step], layers: Sequence[int]) -> Iterator[Step]:
    """The Steps of `sweeps_of_layers`, as those of the model's own layers, with numbers that no later Step has."""
    for step in steps:
        of_head = step.kind in ("head", "read_head", "load_head")
        yield step._replace(
            id=step.id - _BEFORE,
            sweep=step.sweep - _BEFORE,
            layer=step.layer if of_head else layers[step.layer],
            after=tuple(earlier - _BEFORE for earlier in step.after),
        )


def clear_kv(context: StepContext, batches: Iterable[PackedBatch], layers: Sequence[int]) -> None:
    """Set to zero the KV and the states in memory that micro-batches wrote."""
    for packed in batches:
        for segment in packed.segments:
            tier = context.compute_tier if segment.placement is KVPlacement.DEVICE else "cpu"
            for layer in layers:
                if context.config.has_state(layer):
                    _clear(context.states.pools.get(tier, {}), layer, _state_slots(packed, segment))
                elif layer in context.config.kv_layers:
                    slots = _kv_slots(packed, segment, context.config.windows[layer])
                    _clear(context.kv_cache.pools.get(tier, {}), layer, slots // context.kv_cache.kv_block_size)


def _kv_slots(packed: PackedBatch, segment: Segment, window: int | None) -> np.ndarray:
    """Slots of a segment's new KV in a pool."""
    streamed = segment.placement is KVPlacement.STREAMED
    return (packed.staging or {})[window].host_slots if streamed else segment.slots[window]


def _state_slots(packed: PackedBatch, segment: Segment) -> np.ndarray:
    """Slots of a segment's states in a pool."""
    staging, states = packed.state_staging, segment.states
    if segment.placement is KVPlacement.STREAMED:
        return np.empty(0, np.int64) if staging is None else staging.host_targets
    return np.empty(0, np.int64) if states is None else states.target


def _clear(pools: Mapping[int, Tensor], layer: int, rows: np.ndarray) -> None:
    """Set rows of a layer's pool to zero; a tier that only passed sequences of the disk has no pool, and no rows."""
    unique = torch.from_numpy(np.unique(rows).astype(np.int64))
    if len(unique):
        pools[layer].index_fill_(0, unique.to(pools[layer].device), 0)
