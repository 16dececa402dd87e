"""The matrix products of a mixture of experts, each token with its own experts only, by Triton kernels.

Tokens are sorted by expert on the GPU (MegaBlocks: Gale et al., 2022). A program computes one tile: some rows of one
expert, and some columns. The host does not know the number of rows of an expert. It launches as many programs as the
worst routing needs, and programs without a tile return at once. So the host does not wait for the router, and launches
are equal for any routing, as CUDA graphs need it. All tiles have one shape, and sums run over the depth in one order.
So the result of a row does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.triton.launch import Card, Launch, card, power_of_two
from batchgen.ops.triton.norm import activated

_SORTED_AT_ONCE = 2048
_ADDED_COLUMNS = 1024


@dataclass(frozen=True)
class ProductTile:
    """The tile that one program computes.

    Attributes:
        rows: Number of rows, all of one expert.
        columns: Number of columns of the result.
        depth: Number of columns of the operands that are multiplied in one step.
        warps: Number of warps of a program.
        stages: Number of stages of Triton's pipeline.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def grouped_experts(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Compute for each token the weighted sum of its experts' results, fp32 [tokens, hidden].

    `dispatch.grouped_experts` describes the arguments.
    """
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for launch in launches(x, shares, chosen, gate_up, gate_up_bias, down, down_bias, activation, total):
        launch()
    return total


def supports_grouped(device: torch.device) -> bool:
    """Tell whether a GPU multiplies tiles fast enough for these kernels. On other GPUs torch multiplies."""
    return card(device).has_products


def product_tile(dtype: torch.dtype, shared_memory: int, *, gated: bool) -> ProductTile:
    """Choose the tile that one program computes in a product of tokens and experts, for any number of rows.

    With few rows, the time is that of reading the experts' weights once, so padded rows cost nothing. With many rows,
    every weight that is read from the cache is multiplied with all rows of the tile.

    Args:
        dtype: Dtype of both operands.
        shared_memory: Shared memory that one block may use, in bytes.
        gated: Whether two matrices, gate and up, are multiplied at once; then each has half of the columns.
    """
    matrices = 2 if gated else 1
    if dtype == torch.float32:  # products without tensor cores, whose operands take many registers
        return ProductTile(32, 64 // matrices, 32, 4, 2)
    rows, columns, depth = 64, 128 // matrices, 64
    step_bytes = (rows + matrices * columns) * depth * dtype.itemsize
    return ProductTile(rows, columns, depth, 4, max(2, min(4, shared_memory // step_bytes - 1)))


def launches(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    total: Tensor,
    on: Card | None = None,
) -> list[Launch]:
    """The kernel launches of a mixture of experts: sorting, both products, and the weighted sums.

    `on` is the GPU whose properties determine the tiles; None: the GPU of x.
    """
    (tokens, hidden), k, depth = x.shape, chosen.shape[1], down.shape[1]
    num_experts = down.shape[0] // hidden
    assert x.stride(1) == 1 and all(t.is_contiguous() for t in (shares, chosen, gate_up, down, total))
    assert gate_up.shape == (num_experts * 2 * depth, hidden) and shares.dtype == torch.float32
    where = {"device": x.device}
    order = torch.empty(tokens * k, dtype=torch.int32, **where)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, **where)
    inner = torch.empty(tokens * k, depth, dtype=x.dtype, **where)
    made = torch.empty(tokens * k, hidden, dtype=x.dtype, **where)
    shared_memory = (on or card(x.device)).shared_memory
    first, second = (product_tile(x.dtype, shared_memory, gated=gated) for gated in (True, False))
    sort_args = {"chosen": chosen, "order": order, "starts": starts, "count": tokens * k}
    add_args = {"made": made, "shares": shares, "total": total}
    columns = min(_ADDED_COLUMNS, power_of_two(hidden, 32))
    return [
        # One program more than experts: its start is where the last expert ends.
        Launch(
            _sort, (num_experts + 1 if tokens else 0,), sort_args, {"EXPERTS": num_experts, "BLOCK": _SORTED_AT_ONCE}
        ),
        _product_launch(x, gate_up, gate_up_bias, inner, order, starts, first, k, activation),
        _product_launch(inner, down, down_bias, made, order, starts, second, k, None),
        Launch(_add, (tokens, triton.cdiv(hidden, columns)), add_args, {"CHOICES": k, "N": hidden, "BLOCK": columns}),
    ]  # fmt: skip


def _product_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    order: Tensor,
    starts: Tensor,
    tile: ProductTile,
    k: int,
    activation: str | None,
) -> Launch:
    num_experts, (count, columns) = len(starts) - 1, out.shape
    args = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        "order": order,
        "starts": starts,
        "x_stride": x.stride(0),
    }
    constants = {
        "EXPERTS": num_experts,
        "EXPERTS_BLOCK": power_of_two(num_experts),
        "CHOICES": k,
        "COLUMNS": columns,
        "DEPTH": x.shape[1],
        "ACTIVATION": activation,
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "STEP": tile.depth,
    }
    # Of each expert the last tile may have few rows.
    tiles = count // tile.rows + num_experts if count else 0
    return Launch(_multiply, (tiles, triton.cdiv(columns, tile.columns)), args, constants, tile.warps, tile.stages)


@triton.jit(do_not_specialize=["count"])
def _sort(chosen, order, starts, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel: the pairs (token, choice) of one expert, in order, and the place of the first one in the sorted list."""
    expert = tl.program_id(0)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + at, mask=at < count, other=EXPERTS + 1)
        lower += (found < expert).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(starts + expert, start)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + at, mask=at < count, other=EXPERTS + 1)
        own = (found == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(own, 0) - 1, at, mask=own > 0)
        start += tl.sum(own, 0)


@triton.jit
def _multiply(  # a kernel takes pointers and scalars only
    x,
    weight,
    bias,
    out,
    order,
    starts,
    x_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Kernel: a tile of the product of one expert.

    With an activation (the first product) rows of x are tokens, and rows of the result are sorted by expert. Without
    one (the second product) rows of x are sorted by expert, and rows of the result are pairs (token, choice).
    """
    # Numbered so that an expert's tiles follow from its own start alone: it has no more of them than there are numbers
    # up to the next expert's.
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS_BLOCK)
    first_tile = tl.load(starts + number, mask=number < EXPERTS, other=0) // ROWS + number
    expert = tl.sum(((number < EXPERTS) & (first_tile <= tile)).to(tl.int32), 0) - 1
    start, stop = tl.load(starts + expert), tl.load(starts + expert + 1)
    first_row = start + (tile - start // ROWS - expert) * ROWS
    if first_row >= stop:
        return
    row = first_row + tl.arange(0, ROWS)
    there = row < stop
    assigned = tl.load(order + row, mask=there, other=0)
    x_row, out_row = row, assigned
    matrices: tl.constexpr = 1 if ACTIVATION is None else 2
    if ACTIVATION is not None:
        x_row, out_row = assigned // CHOICES, row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x_rows = x + x_row.to(tl.int64)[:, None] * x_stride
    first_weight = expert.to(tl.int64) * (matrices * COLUMNS)
    w_rows = weight + (first_weight + column)[:, None] * DEPTH
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    up = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, DEPTH, STEP):
        depth = step + tl.arange(0, STEP)[None, :]
        x_mask, w_mask = there[:, None], inside[:, None]
        if DEPTH % STEP:
            x_mask, w_mask = x_mask & (depth < DEPTH), w_mask & (depth < DEPTH)
        some = tl.load(x_rows + depth, mask=x_mask, other=0.0)
        total = tl.dot(some, tl.trans(tl.load(w_rows + depth, mask=w_mask, other=0.0)), total, input_precision="ieee")
        if ACTIVATION is not None:
            more = tl.load(w_rows + COLUMNS * DEPTH + depth, mask=w_mask, other=0.0)
            up = tl.dot(some, tl.trans(more), up, input_precision="ieee")
    if bias is not None:
        bias += first_weight
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION is not None:
            up += tl.load(bias + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        total = activated(total, up, ACTIVATION)
    made = out + out_row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(made, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _add(made, shares, total, CHOICES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel: the weighted sum of one token's results, in the order in which its experts were chosen."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOICES):
        row = token * CHOICES + choice
        sums += tl.load(made + row * N + column, mask=inside, other=0.0).to(tl.float32) * tl.load(shares + row)
    tl.store(total + token * N + column, sums, mask=inside)
