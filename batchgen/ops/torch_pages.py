"""Summaries and choice of KV pages in torch, on any device: what kernels are compared with, and used without them.

`page_choice` has the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.core.attention_budget import FIRST_PAGES, RECENT_PAGES
from batchgen.ops import dispatch as ops
from batchgen.ops import quant
from batchgen.ops.attention_plan import PageChoice
from batchgen.ops.host_copy import upload


def summarise(kv: Tensor, blocks: Tensor, summaries: Tensor, targets: Tensor, bits: int) -> None:
    """Write the summaries of some KV blocks (`ops.chosen_attention.summarise`)."""
    keys = kv[:, 0].index_select(0, blocks)
    if bits:
        keys = quant.dequantize(keys, summaries.shape[-1], dtype=torch.float32, bits=bits)
    pages = torch.stack((keys.amin(2), keys.amax(2)), dim=2)
    # Prompts that a GPU attends to may be of sequences whose decoding tokens are the CPU's: their summaries are there.
    ops.scatter_rows(summaries, targets, pages.to(summaries.dtype))


@dataclass(frozen=True)
class TorchPages:
    """The sequences that choose pages, as tensors on a device; padding repeats a sequence's last page.

    Attributes:
        tokens: Row of the queries of each sequence, int64 [n].
        blocks: KV blocks of each sequence, int64 [n, pages].
        summaries: Numbers of the blocks' summaries, int64 [n, pages].
        counts: Pages of each sequence, int64 [n, 1].
        wanted: Pages that each sequence attends to, int64 [n, 1].
        most_pages: Columns of the chosen table.
    """

    tokens: Tensor
    blocks: Tensor
    summaries: Tensor
    counts: Tensor
    wanted: Tensor
    most_pages: int

    @classmethod
    def of(cls, choice: PageChoice, device: torch.device) -> TorchPages:
        """Copy a choice to a device. The host does not wait."""
        counts = np.diff(choice.starts)
        columns = np.minimum(np.arange(counts.max(initial=1)), counts[:, None] - 1) + choice.starts[:-1, None]

        def on_device(array: np.ndarray) -> Tensor:
            return upload(np.ascontiguousarray(array, np.int64), device)

        blocks, summaries = (on_device(numbers[columns]) for numbers in (choice.blocks, choice.summaries))
        rest = on_device(counts)[:, None], on_device(choice.num_pages)[:, None]
        return cls(on_device(choice.tokens), blocks, summaries, *rest, choice.most_pages)

    def choose(self, q: Tensor, summaries: Tensor) -> Tensor:
        """The KV blocks of the chosen pages in the order of their tokens, int64 [n, most_pages]; the rest is padding.

        Args:
            q: Queries of the sweep, [tokens, heads, head_dim].
            summaries: Summaries of the layer, [blocks, kv_heads, 2, head_dim].
        """
        scores, page = self.scores(q, summaries), torch.arange(self.blocks.shape[1], device=q.device)
        always = (page < FIRST_PAGES) | (page >= self.counts - RECENT_PAGES)
        scores = scores.masked_fill(always, torch.inf).masked_fill(page >= self.counts, -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        is_chosen = page < self.wanted  # by rank
        ordinals = torch.where(is_chosen, order, self.counts).sort(dim=1).values[:, : self.most_pages]
        return self.blocks.gather(1, ordinals.clamp(max=self.blocks.shape[1] - 1))

    def scores(self, q: Tensor, summaries: Tensor) -> Tensor:
        """Scores of all pages of each sequence, fp32 [n, pages]."""
        n, count = self.blocks.shape
        kv_heads, head_dim = summaries.shape[1], summaries.shape[3]
        queries = q.index_select(0, self.tokens).float().view(n, kv_heads, -1, head_dim)
        low, high = self._summaries(summaries).float().unbind(3)  # each [n, pages, kv_heads, head_dim]
        bounds = torch.einsum("nhgd,nphd->nhgp", queries.clamp(min=0), high)
        bounds += torch.einsum("nhgd,nphd->nhgp", queries.clamp(max=0), low)
        page = torch.arange(count, device=q.device)
        outside = (page < FIRST_PAGES) | (page >= self.counts - RECENT_PAGES)
        bounds = bounds.masked_fill(outside[:, None, None], -torch.inf)
        return bounds.softmax(-1).flatten(1, 2).sum(1)

    def _summaries(self, summaries: Tensor) -> Tensor:
        """The summaries of all pages of each sequence, [n, pages, kv_heads, 2, head_dim]."""
        if summaries.device == self.summaries.device:
            return summaries[self.summaries]
        shape = *self.summaries.shape, *summaries.shape[1:]
        found = torch.empty(shape, dtype=summaries.dtype, device=self.summaries.device)
        ops.gather_rows(found.flatten(0, 1), summaries, self.summaries.view(-1))
        return found
