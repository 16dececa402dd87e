"""The Steps of sweeps that warm up a device: through one layer of each kind, leaving no KV behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from batchgen.core.kv_placement import KVPlacement
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.packed_batch import PackedBatch
from batchgen.schedule.step_graph import Step
from batchgen.schedule.sweeps import Sweeps

_BEFORE = 1 << 40  # Steps that warm up are numbered so far below the others


def layers_that_differ(context: StepContext) -> list[int]:
    """One layer of each kind, by where its weights are and what it attends to; and the last one."""
    kinds: dict[tuple[Any, ...], int] = {}
    config, on_device = context.config, context.kv_cache.on_device or (False,) * context.config.num_layers
    for layer, tiers in enumerate(context.weights.residency.layers):
        kind = config.windows[layer], config.has_experts(layer), on_device[layer]
        kinds.setdefault((*kind, *sorted(tiers.items())), layer)
    return sorted({*kinds.values(), config.num_layers - 1})


def sweeps_of_layers(context: StepContext, layers: Sequence[int]) -> Sweeps:
    """Sweeps of a model that has only these layers."""
    on_device = [context.kv_cache.on_device[j] for j in layers if context.kv_cache.on_device]
    return Sweeps(context.weights.residency.of_layers(layers).streams(context.compute_tier, on_device))


def numbered_before(steps: Iterable[Step], layers: Sequence[int]) -> Iterator[Step]:
    """The Steps of `sweeps_of_layers`, as those of the model's own layers, with numbers that no later Step has."""
    for step in steps:
        of_head = step.kind in ("head", "load_head")
        yield step._replace(
            id=step.id - _BEFORE,
            sweep=step.sweep - _BEFORE,
            layer=step.layer if of_head else layers[step.layer],
            after=tuple(earlier - _BEFORE for earlier in step.after),
        )


def clear_kv(context: StepContext, batches: Iterable[PackedBatch], layers: Sequence[int]) -> None:
    """Set to zero the blocks of memory that the new KV of micro-batches went to."""
    for packed in batches:
        _clear_kv(context, packed, layers)


def _clear_kv(context: StepContext, packed: PackedBatch, layers: Sequence[int]) -> None:
    kv_cache = context.kv_cache
    for segment in packed.segments:
        tier = context.compute_tier if segment.placement is KVPlacement.DEVICE else "cpu"
        for layer in layers:
            window = context.config.windows[layer]
            streamed = segment.placement is KVPlacement.STREAMED
            slots = (packed.staging or {})[window].host_slots if streamed else segment.slots[window]
            blocks = torch.from_numpy(np.unique(slots // kv_cache.shapes.kv_block_size))
            if len(blocks):
                pool = kv_cache.pools[tier][layer]
                pool.index_fill_(0, blocks.to(pool.device), 0)
