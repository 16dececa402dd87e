"""Bytes of KV, of attention's inputs and of its results in each layer, where layers differ, and their means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from batchgen.core.attention_budget import ALL, CHOSEN_PAGES, AttentionBudget
from batchgen.core.direct_io import ALIGNMENT, aligned
from batchgen.core.dtypes import FORMAT_BYTES, KVFormat
from batchgen.models.config import AttentionShape, ModelConfig
from batchgen.planner.kv_memory import kv_block_bytes, summary_bytes, window_bytes


class PageReads(NamedTuple):
    """The KV that a decoding token reads in a layer that chooses pages.

    Attributes:
        budget: Pages that it attends to.
        kv_block_size: Tokens of a page.
        summary_frac: Bytes of a page's summary for each byte of its KV.
    """

    budget: AttentionBudget
    kv_block_size: int
    summary_frac: float

    def keys(self, context: float) -> float:
        """Tokens whose KV takes as many bytes as all that is read in a context."""
        pages = math.ceil(context / self.kv_block_size)
        chosen = self.budget.pages(pages, self.kv_block_size)
        return context if chosen >= pages else chosen * self.kv_block_size + context * self.summary_frac


class AttentionKind(NamedTuple):
    """The layers of a model whose attention has one shape.

    Attributes:
        shape: Heads of their attention.
        windows: Sliding windows, each with the number of these layers that have it; None: layers without one;
            CHOSEN_PAGES: layers that choose pages.
        kv_token_bytes: Stored bytes of the keys and values of one token in one of them.
        pages: KV that a decoding token reads in layers that choose pages; None: there are none.
    """

    shape: AttentionShape
    windows: tuple[tuple[int | None, int], ...]
    kv_token_bytes: float
    pages: PageReads | None = None

    @property
    def layers(self) -> int:
        """Number of these layers."""
        return sum(count for _, count in self.windows)

    def seen(self, context: float) -> float:
        """Tokens attended to in a context, averaged over the layers."""
        seen: float = sum(count * (min(w, context) if w else context) for w, count in self.windows)
        return seen / self.layers

    def read(self, context: float) -> float:
        """Tokens whose KV a decoding token reads in a context, averaged over the layers; summaries count as tokens."""
        if self.pages is None:
            return self.seen(context)
        chosen = sum(count for w, count in self.windows if w == CHOSEN_PAGES) / self.layers
        return self.seen(context) - chosen * (context - self.pages.keys(context))


@lru_cache(maxsize=64)
def sizes_of_layers(
    model: ModelConfig, compute_format: str, kv_format: str, kv_block_size: int, attention_budget: str = ALL
) -> LayerSizes:
    """The sizes of a model's layers, which many inputs of the cost model have in common."""
    return LayerSizes(model, compute_format, kv_format, kv_block_size, attention_budget)


@dataclass(frozen=True)
class LayerSizes:
    """Sizes in bytes by layer. Means are over all layers, those counted too that have nothing of it.

    Attributes:
        model: Configuration of the model.
        compute_format, kv_format: Dtypes of computation and of stored KV.
        kv_block_size: Tokens of a KV block.
        attention_budget: Tokens that a decoding token attends to, as `--attention-budget` states them.
    """

    model: ModelConfig
    compute_format: str
    kv_format: str
    kv_block_size: int
    attention_budget: str = ALL

    @cached_property
    def budget(self) -> AttentionBudget | None:
        """The attention budget; None: all tokens are attended to."""
        return AttentionBudget.of(self.attention_budget)

    @cached_property
    def summary_block(self) -> int:
        """Bytes of the summaries of a KV block in all layers; 0 where all tokens are attended to."""
        return sum(self.summaries)

    @cached_property
    def summaries(self) -> tuple[int, ...]:
        """Bytes of the summary of a KV block in each layer with KV of its own that chooses pages; 0 in others."""
        return summary_bytes(self.model, self.kv_format, self.attention_budget)

    @cached_property
    def _windows(self) -> tuple[int | None, ...]:
        return self.model.layer_windows(chooses=self.budget is not None)

    def _pages(self, shape: AttentionShape) -> PageReads | None:
        if self.budget is None:
            return None
        stored = KVFormat.of(self.kv_format)
        page = 2 * self.kv_block_size * stored.row_bytes(shape.head_dim)
        return PageReads(self.budget, self.kv_block_size, stored.summary_bytes(shape.head_dim) / page)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Bytes of a KV block in memory, in each layer: 0 where a layer has no keys and values of its own."""
        return kv_block_bytes(self.model, self.kv_block_size, self.kv_format)

    @cached_property
    def read_blocks(self) -> tuple[int, ...]:
        """Bytes of a KV block that each layer attends to, its own or that of another layer; 0 in state layers."""
        model = self.model
        return tuple(0 if model.has_state(j) else self.blocks[model.kv_source(j)] for j in range(model.num_layers))

    @cached_property
    def mean_block(self) -> float:
        """Bytes of a KV block in memory, the mean."""
        return self._mean(self.blocks)

    @cached_property
    def mean_disk_block(self) -> float:
        """Bytes of a KV block on disk, in whole pages, the mean."""
        return self._mean(map(aligned, self.blocks))

    @cached_property
    def mean_reused_block(self) -> float:
        """Bytes of a KV block that layers bring in beside their own, the mean."""
        return self._mean(self.read_blocks) - self.mean_block

    @cached_property
    def mean_disk_reused_block(self) -> float:
        """Bytes of a KV block that layers read from disk beside their own, the mean."""
        return self._mean(map(aligned, self.read_blocks)) - self.mean_disk_block

    @cached_property
    def all_read(self) -> tuple[int, int]:
        """Bytes of a KV block of all layers that attend, (without, with) a sliding window."""
        windowed = window_bytes(self.model, self.read_blocks)
        return sum(self.read_blocks) - windowed, windowed

    @cached_property
    def mean_choosing_block(self) -> float:
        """Bytes of a KV block in layers that choose pages, the mean over all layers."""
        return self._mean(self._choosing_blocks)

    @cached_property
    def mean_disk_choosing_block(self) -> float:
        """Bytes of a KV block on disk in layers that choose pages, the mean over all layers."""
        return self._mean(map(aligned, self._choosing_blocks))

    @cached_property
    def _choosing_blocks(self) -> tuple[int, ...]:
        choosing = self.model.choosing_layers(self.attention_budget) or (False,) * self.model.num_layers
        return tuple(size if chooses else 0 for size, chooses in zip(self.read_blocks, choosing, strict=True))

    @cached_property
    def largest_block(self) -> int:
        """Bytes of a buffer that a KV block of any layer fits into."""
        return max(self.blocks)

    @cached_property
    def pads_blocks(self) -> bool:
        """True if KV blocks on disk are larger than in memory."""
        return any(size % ALIGNMENT for size in self.blocks)

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The layers that attend, by the shape of their attention."""
        windows: dict[AttentionShape, Counter[int | None]] = {}
        for layer in self.model.attention_layers:
            windows.setdefault(self.model.attention_of(layer), Counter())[self._windows[layer]] += 1
        return tuple(
            AttentionKind(shape, tuple(n.items()), self._token_bytes(shape), self._pages(shape))
            for shape, n in windows.items()
        )

    def attention_kind(self, layer: int) -> AttentionKind:
        """Layer number `layer`, which attends, as a kind of its own."""
        shape = self.model.attention_of(layer)
        return AttentionKind(shape, ((self._windows[layer], 1),), self._token_bytes(shape), self._pages(shape))

    def _token_bytes(self, shape: AttentionShape) -> int:
        return 2 * shape.num_kv_heads * KVFormat.of(self.kv_format).row_bytes(shape.head_dim)

    @cached_property
    def queries(self) -> tuple[float, ...]:
        """Bytes of one token's queries, or of what its state is updated by, in each layer."""
        return self._numbers(self.model.sent_width)

    @cached_property
    def results(self) -> tuple[float, ...]:
        """Bytes of what attention, or the update of a state, gives for one token, in each layer."""
        return self._numbers(self.model.mixed_size)

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """Bytes of one token that are sent to the CPU, which attends or updates the state, in each layer.

        They are queries, with keys and values as they are stored, or the inputs of the update.
        """
        blocks = zip(self.queries, self.blocks, strict=True)
        return tuple(queries + block / self.kv_block_size for queries, block in blocks)

    @cached_property
    def mean_result(self) -> float:
        """Bytes of what attention, or the update of a state, gives for one token, the mean."""
        return self._mean(self.results)

    @cached_property
    def mean_sent(self) -> float:
        """Bytes of one token that are sent to the CPU, the mean."""
        return self._mean(self.sent)

    def _numbers(self, width_of: Callable[[int], int]) -> tuple[float, ...]:
        return tuple(width_of(j) * FORMAT_BYTES[self.compute_format] for j in range(self.model.num_layers))

    def _mean(self, sizes: Iterable[float]) -> float:
        return sum(sizes) / self.model.num_layers
