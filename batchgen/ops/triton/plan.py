"""An AttentionPlan as flat int32 arrays on a GPU, made once per sweep for all layers.

The plan is cut into items. An item has a few tokens with consecutive positions, and a range of keys that they attend
to. There are two launches: one for items with few rows, one for items with many. If there are too few items for all
multiprocessors, long ranges of keys are cut into several items (flash-decoding). A shared prefix is also an item of its
own. A token in several items gets an unnormalised partial result from each. Merges add them up.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from operator import ge

import numpy as np
import torch
from torch import Tensor

from batchgen.ops.attention_items import (
    COLUMNS,
    FIRST_KEY,
    FIRST_TOKEN,
    LAST_KEY,
    NUM_TOKENS,
    PARTIAL,
    item_spans,
    keys_cut,
    numbers_within,
    tokens_cut,
)
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.ops.triton.launch import Tile, power_of_two

# Keys of a part: no fewer than these, so that reading them is worth a merge. (few rows, many rows)
_LEAST_PART = (256, 1024)
# Programs that a card's multiprocessor is given: memory is kept busy by several at a time. (few rows, many rows)
_PROGRAMS_PER_SM = (2, 1)
_LEAST_ROOM = 8
_ALIGNED = 4  # arrays start at multiples of 16 bytes


@dataclass(frozen=True)
class Geometry:
    """The sizes for which a plan is cut.

    Attributes:
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Number of values in one head.
        kv_block_size: Number of tokens in a KV block.
        few, many: Tiles of the launches for items with few and with many rows.
        num_sms: Number of multiprocessors of the GPU.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_block_size: int
    few: Tile
    many: Tile
    num_sms: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Capacity:
    """The lengths of a plan's arrays.

    Attributes:
        few, many: Numbers of items with few and with many rows.
        table: Number of entries of the block table.
        merges: Number of tokens whose partial results are merged.
        partial_rows: Number of partial results.
    """

    few: int
    many: int
    table: int
    merges: int
    partial_rows: int

    @property
    def lengths(self) -> tuple[int, int, int, int, int]:
        return self.few, self.many, self.table, self.merges, self.partial_rows

    def holds(self, other: Capacity) -> bool:
        return all(map(ge, self.lengths, other.lengths))

    def enlarged(self, other: Capacity) -> Capacity:
        """The lengths that hold two plans, one at a time."""
        return Capacity(*map(max, self.lengths, other.lengths))

    @property
    def programs(self) -> int:
        """Number of programs of all launches, for each KV head."""
        return self.few + self.many + self.merges

    @property
    def words(self) -> int:
        """Length of a `DevicePlan.buffer`, a multiple of 16 bytes."""
        return _starts(self)[-1]

    def of_every_kernel(self) -> Capacity:
        """The lengths with a place at least in each array, so that each kernel of attention is launched."""
        return Capacity(*(max(1, n) for n in self.lengths))

    def rounded(self) -> Capacity:
        """The lengths rounded up to powers of two, so that one capacity serves many plans. A length of 0 stays 0."""
        return Capacity(*(power_of_two(n, _LEAST_ROOM) if n else 0 for n in self.lengths))


@dataclass
class DevicePlan:
    """A plan's arrays on a device, as views of one buffer.

    The views `few` and `many` are items, int32 [items, COLUMNS]; items with NUM_TOKENS 0 are empty. `table` has the
    block tables, one after the other, int32. `merge_tokens`, int32 [merges], has the tokens to merge, or -1.
    `merge_starts`, int32 [merges + 1], has the first place of each token in `merge_rows`, int32 [partial_rows], the
    numbers of its partial results.

    Attributes:
        geometry: Sizes for which the plan is cut.
        capacity: Lengths of the arrays.
        buffer: Buffer on the device.
    """

    geometry: Geometry
    capacity: Capacity
    buffer: Tensor

    def __post_init__(self) -> None:
        views = _views(self.buffer, self.capacity)
        self.few, self.many, self.table, self.merge_tokens, self.merge_starts, self.merge_rows = views

    def with_table(self, table: Tensor) -> DevicePlan:
        """The plan with other block tables of the same lengths."""
        plan = copy(self)
        plan.table = table
        return plan


@dataclass(frozen=True)
class CutPlan:
    """A plan's arrays in the host's memory.

    Attributes:
        geometry: Sizes for which the plan is cut.
        arrays: The arrays `few`, `many`, `table`, `merge_tokens`, `merge_starts` and `merge_rows` of a `DevicePlan`.
    """

    geometry: Geometry
    arrays: _Arrays

    @property
    def capacity(self) -> Capacity:
        """The lengths of this plan's arrays."""
        return _lengths(self.arrays)

    def prepare(self, device: torch.device, capacity: Capacity | None = None) -> DevicePlan:
        """Copy the plan to a device. capacity: Lengths of the arrays there; None: those of this plan."""
        capacity = capacity or self.capacity
        buffer = np.zeros(capacity.words, np.int32)
        self.write(buffer, capacity)
        return self.within(capacity, upload(buffer, device))

    def within(self, capacity: Capacity, buffer: Tensor) -> DevicePlan:
        """The plan in a device's memory that what `write` makes is copied to, int32 [capacity.words]."""
        return DevicePlan(self.geometry, capacity, buffer)

    def write(self, buffer: np.ndarray, capacity: Capacity) -> None:
        """Write the plan as a `DevicePlan` of a capacity has it: beyond its own items and merges there are empty ones.

        Args:
            buffer: Zeros, int32 [capacity.words].
            capacity: Lengths of the arrays.

        Raises:
            ValueError: The plan does not fit the capacity.
        """
        if not capacity.holds(self.capacity):
            raise ValueError(f"a plan of {self.capacity} does not fit {capacity}")
        starts, tokens = _starts(capacity), self.arrays[3]
        for start, array in zip(starts, self.arrays, strict=False):
            buffer[start : start + array.size] = array.reshape(-1)
        buffer[starts[3] + len(tokens) : starts[3] + capacity.merges] = -1


def cut(plan: AttentionPlan, geometry: Geometry) -> CutPlan:
    return CutPlan(geometry, _cut(plan, geometry))


# Arrays in a buffer.

_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _sizes(capacity: Capacity) -> tuple[int, ...]:
    merges = capacity.merges
    return COLUMNS * capacity.few, COLUMNS * capacity.many, capacity.table, merges, merges + 1, capacity.partial_rows


def _starts(capacity: Capacity) -> list[int]:
    """Place of each array in a buffer, and then the buffer's length."""
    return [0, *accumulate(max(_ALIGNED, -(-size // _ALIGNED) * _ALIGNED) for size in _sizes(capacity))]


def _views(buffer: Tensor, capacity: Capacity) -> list[Tensor]:
    starts = _starts(capacity)[:-1]
    views = [buffer[start : start + size] for start, size in zip(starts, _sizes(capacity), strict=True)]
    return [views[0].view(-1, COLUMNS), views[1].view(-1, COLUMNS), *views[2:]]


def _lengths(arrays: _Arrays) -> Capacity:
    few, many, table, tokens, _, rows = (len(a) for a in arrays)
    return Capacity(few, many, table, tokens, rows)


# Cutting.


def _cut(plan: AttentionPlan, geometry: Geometry) -> _Arrays:
    """Cut a plan into the arrays of a `CutPlan`."""
    spans, table = item_spans(plan, geometry.kv_block_size)
    tiles = tokens_cut(spans, geometry.many.rows // geometry.group)
    is_few = tiles[:, NUM_TOKENS] * geometry.group <= geometry.few.rows
    few, many = (
        _longest_first(_parts(items, geometry.kv_heads, programs * geometry.num_sms, least))
        for items, programs, least in zip((tiles[is_few], tiles[~is_few]), _PROGRAMS_PER_SM, _LEAST_PART, strict=True)
    )
    items = np.concatenate((few, many))
    are_whole = len(items) == len(tiles) and not plan.shared
    merges = _NO_MERGES if are_whole else _mark_partial(items)
    return items[: len(few)], items[len(few) :], table, *merges


_NO_MERGES = np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64)


def _parts(items: np.ndarray, kv_heads: int, programs: int, least: int) -> np.ndarray:
    """Cut items by keys, so that all programs get about equal numbers of keys.

    Args:
        items: The items.
        kv_heads: Number of key and value heads.
        programs: Number of programs that run at the same time.
        least: Least number of keys of a part.

    Returns:
        Items with at most n keys, where n is a power of two.
    """
    keys = items[:, LAST_KEY] - items[:, FIRST_KEY]
    size = power_of_two(-(-int(keys.sum()) * kv_heads // programs), least)
    parts, _ = keys_cut(items, size)
    return parts


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Items in decreasing order of keys, so that no multiprocessor has a long item at the end."""
    return items[(items[:, FIRST_KEY] - items[:, LAST_KEY]).argsort(kind="stable")]


def _mark_partial(items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign rows for partial results to items with tokens that are also in other items, in place.

    Returns:
        Tokens to merge; the first place of each token among the rows, and their number; the rows, by token.
    """
    first, count = items[:, FIRST_TOKEN], items[:, NUM_TOKENS]
    size = int((first + count).max(initial=0)) + 1
    changes = np.bincount(first, minlength=size) - np.bincount(first + count, minlength=size)
    several = np.concatenate([[0], np.cumsum(np.cumsum(changes) > 1)])
    partial = several[first + count] > several[first]
    counts = np.where(partial, count, 0)
    items[:, PARTIAL] = np.where(partial, np.cumsum(counts) - counts, -1)
    token_of_row = np.repeat(first, counts) + numbers_within(counts)
    rows = np.argsort(token_of_row, kind="stable")
    tokens, starts = np.unique(token_of_row[rows], return_index=True)
    return tokens, np.append(starts, len(rows)), rows
