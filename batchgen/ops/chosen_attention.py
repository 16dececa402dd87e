"""Attention of decoding tokens to chosen pages of their KV, beside that of other tokens to all keys.

`page_choice` has the rule. A plan is made once for a sweep; in each layer that chooses pages the summaries of complete
pages are written, pages are chosen by the layer's queries, and the attention kernels go over the chosen blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchgen.ops import cpp, torch_attention, torch_pages
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import AttentionPlan, PageChoice
from batchgen.ops.host_copy import upload
from batchgen.ops.long_steps import note
from batchgen.ops.page_choice import chosen_groups

# Operations on a GPU that put the chosen blocks into one table of a plan, at most.
_TABLE_OPERATIONS = 8


@dataclass(frozen=True)
class ChosenAttention:
    """A sweep's attention in layers that choose pages, in the form that `paged_attention` takes.

    Attributes:
        plan: Plan of the attention kernels. Of sequences that choose it has places in the table of chosen blocks.
        pages: The sequences that choose: for C++ kernels, or as tensors.
        table: Table of chosen blocks that C++ kernels attend to, int32 [n, pages]; None: places are below zero.
        complete: KV blocks that are complete after the sweep, int64 on the device of the KV, and the numbers of their
            summaries.
        isa: Instruction set that attends on the CPU. "": the process's.
    """

    plan: ops.PreparedAttention
    pages: PageChoice | torch_pages.TorchPages
    table: np.ndarray | None
    complete: tuple[Tensor, Tensor]
    isa: str


PreparedPlan: TypeAlias = "ops.PreparedAttention | ChosenAttention"


def prepare_attention(
    plan: AttentionPlan,
    operands: AttentionOperands,
    device: torch.device = ops.CPU,
    isa: str = "",
    every_kernel: bool = False,
) -> PreparedPlan:
    """Turn the attention plan of a sweep into the form that `paged_attention` takes.

    Args:
        plan: Attention plan of the sweep.
        operands: Shapes and dtypes of queries and KV.
        device: Device that has queries and KV.
        isa: Instruction set that computes attention on the CPU. "": the process's.
        every_kernel: Whether each kernel of a GPU is launched (`ops.prepare_attention`).
    """
    choice = plan.pages
    if choice is None:
        return ops.prepare_attention(plan, operands, device=device, isa=isa, every_kernel=every_kernel)
    complete = tuple(upload(n, device) for n in (choice.complete_blocks, choice.complete_summaries))
    if ops.has_cpu_attention(operands, device):
        table = np.zeros((len(choice.tokens), choice.most_pages), np.int32)
        prepared = ops.prepare_attention(
            plan, operands, device=device, isa=isa, chosen=(choice.tokens, table, choice.num_keys)
        )
        return ChosenAttention(prepared, choice, table, complete, isa)
    # Blocks that are not known yet are counted down from -1.
    places = -1 - np.arange(len(choice.tokens) * choice.most_pages, dtype=np.int32)
    decode = chosen_groups(choice, places.reshape(len(choice.tokens), choice.most_pages))
    whole = replace(plan, decode=(*plan.decode, *decode), pages=None)
    prepared = ops.prepare_attention(whole, operands, device=device, isa=isa, every_kernel=every_kernel)
    return ChosenAttention(prepared, torch_pages.TorchPages.of(choice, device), None, complete, isa)


@dataclass(frozen=True)
class StagedChoice:
    """The sequences of a batch that choose pages before these are brought to where attention is computed.

    Attributes:
        tokens: The batch's token of each sequence, int64 [n], on the device.
        pages: The sequences, with their queries in the same order: for C++ kernels, or as tensors.
        isa: Instruction set on the CPU. "": the process's.
    """

    tokens: Tensor
    pages: PageChoice | torch_pages.TorchPages
    isa: str

    def choose(self, q: Tensor, summaries: Tensor) -> Tensor:
        """The KV blocks of the chosen pages in the order of their tokens, int64 [n, pages]; the rest is padding.

        Args:
            q: Query of each sequence, [n, heads, head_dim].
            summaries: Summaries of the layer's pages, [blocks, kv_heads, 2, head_dim].
        """
        if not isinstance(self.pages, PageChoice):
            return self.pages.choose(q, summaries)
        table = np.zeros((len(q), self.pages.most_pages), np.int32)
        cpp.choose_pages(q, summaries, self.pages, table, self.isa)
        return torch.from_numpy(table).long()


def prepare_choice(
    choice: PageChoice, operands: AttentionOperands, device: torch.device = ops.CPU, isa: str = ""
) -> StagedChoice:
    """Turn a batch's choice of pages into the form that chooses in each layer.

    Args:
        choice: Sequences that choose, with tokens counted in the batch.
        operands: Shapes and dtypes of queries and KV.
        device: Device that has the queries.
        isa: Instruction set on the CPU. "": the process's.
    """
    pages = replace(choice, tokens=np.arange(len(choice.tokens)))
    by_kernels = ops.has_cpu_attention(operands, device)
    return StagedChoice(
        upload(choice.tokens, device), pages if by_kernels else torch_pages.TorchPages.of(pages, device), isa
    )


def paged_attention(
    q: Tensor, kv: Tensor, plan: PreparedPlan, summaries: Tensor | None, out: Tensor | None = None, **softmax: Any
) -> Tensor:
    """Compute attention, to chosen pages where the plan is for a layer that chooses.

    Args:
        q: Queries [tokens, heads, head_dim].
        kv: KV of the layer, which already contains K and V of the query tokens.
        plan: Result of `prepare_attention`.
        summaries: Summaries of the layer's pages, [blocks, kv_heads, 2, head_dim], in which those of pages that are
            complete now are written; None: the layer does not choose.
        out: Tensor for the result, of q's shape. None: a new tensor.
        softmax: Further arguments of `ops.paged_attention`.

    Returns:
        Attention output [tokens, heads * head_dim].
    """
    if not isinstance(plan, ChosenAttention):
        return ops.paged_attention(q, kv, plan, out, **softmax)
    assert summaries is not None, "a layer that chooses pages has summaries"
    summarise(kv, *plan.complete, summaries, bits=softmax.get("bits", 0))
    prepared = plan.plan
    if isinstance(plan.pages, PageChoice):
        assert plan.table is not None
        cpp.choose_pages(q, summaries, plan.pages, plan.table, plan.isa)
    elif len(plan.pages.tokens):
        prepared = _with_blocks(prepared, plan.pages.choose(q, summaries).view(-1))
    return ops.paged_attention(q, kv, prepared, out, **softmax)


def summarise(kv: Tensor, blocks: Tensor, targets: Tensor, summaries: Tensor, *, bits: int = 0) -> None:
    """Write the summaries of complete KV blocks: of each key channel the smallest and then the largest number.

    Args:
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width].
        blocks: Blocks, int64.
        targets: Numbers of their summaries, int64.
        summaries: Summaries, [blocks, kv_heads, 2, head_dim].
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.
    """
    if not len(blocks):
        return
    if kv.is_cpu and cpp.supports_head_dim(summaries.shape[-1]):
        cpp.summarise_pages(kv, blocks, targets, summaries, bits)
    else:
        torch_pages.summarise(kv, blocks, summaries, targets, bits)


def _with_blocks(plan: Any, chosen: Tensor) -> Any:
    """A plan of torch or Triton with blocks in place of numbers below zero: -1 - i stands for chosen block i."""

    def known(blocks: Tensor) -> Tensor:
        place = (-1 - blocks).clamp(min=0).long()
        table = torch.where(blocks < 0, chosen[place].to(blocks.dtype), blocks)
        note(_TABLE_OPERATIONS)
        return table

    if isinstance(plan, torch_attention.TorchAttentionPlan):
        return replace(plan, batches=tuple(replace(batch, blocks=known(batch.blocks)) for batch in plan.batches))
    return plan.with_table(known(plan.table))
