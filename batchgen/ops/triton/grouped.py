"""The matrix products of a mixture of experts, each token with its own experts only, by Triton kernels.

Tokens are sorted by expert on the GPU (MegaBlocks: Gale et al., 2022). A program computes one tile: some rows of one
expert, and some columns. The host does not know the number of rows of an expert. It launches as many programs as the
worst routing needs, and programs without a tile return at once. So the host does not wait for the router, and launches
are equal for any routing, as CUDA graphs need it. All tiles have one shape, and sums run over the depth in one order.
So the result of a row does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton.groups import aligned
from batchgen.ops.triton.int8_rows import coded_launch
from batchgen.ops.triton.launch import Card, Launch, card, power_of_two
from batchgen.ops.triton.norm import activated
from batchgen.ops.triton.product import product_tile, scaled, storage_of, sums_of_products, tensor_of

_SORTED_AT_ONCE = 2048
_ADDED_COLUMNS = 1024


def grouped_experts(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor | BlockWeight,
    gate_up_bias: Tensor | None,
    down: Tensor | BlockWeight,
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


def launches(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor | BlockWeight,
    gate_up_bias: Tensor | None,
    down: Tensor | BlockWeight,
    down_bias: Tensor | None,
    activation: str,
    total: Tensor,
    on: Card | None = None,
) -> list[Launch]:
    """The kernel launches of a mixture of experts: sorting, both products, and the weighted sums.

    `on` is the GPU whose properties determine the tiles; None: the GPU of x.
    """
    (tokens, hidden), k = x.shape, chosen.shape[1]
    num_experts = down.shape[0] // hidden
    inner_size = gate_up.shape[0] // (2 * num_experts)
    contiguous = shares, chosen, tensor_of(gate_up), tensor_of(down), total
    assert x.stride(1) == 1 and all(t.is_contiguous() for t in contiguous)
    assert shares.dtype == torch.float32
    where = {"device": x.device}
    order = torch.empty(tokens * k, dtype=torch.int32, **where)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, **where)
    inner = torch.empty(tokens * k, inner_size, dtype=x.dtype, **where)
    made = torch.empty(tokens * k, hidden, dtype=x.dtype, **where)
    routes, on = (order, starts, k), on or card(x.device)
    return [
        sort_launch(chosen, order, starts),
        *_product_launches(x, gate_up, gate_up_bias, inner, routes, activation, on),
        *_product_launches(inner, down, down_bias, made, routes, None, on),
        add_launch(made, shares, total),
    ]


def sort_launch(chosen: Tensor, order: Tensor, starts: Tensor, places: Tensor | None = None) -> Launch:
    """The launch that sorts the pairs of a token and a choice by expert.

    Args:
        chosen: Number of each expert, int64 [tokens, experts of a token].
        order: Is filled with the number of each sorted pair, int32 [pairs].
        starts: Is filled with the first sorted pair of each expert, and the number of all, int32 [experts + 1].
        places: Is filled with the place of each pair among the sorted ones, int32 [pairs]; or None.
    """
    num_experts, count = len(starts) - 1, chosen.numel()
    args = {"chosen": chosen, "order": order, "starts": starts, "places": places, "count": count}
    # One program more than experts: its start is where the last expert ends.
    grid = (num_experts + 1 if count else 0,)
    return Launch(_sort, grid, args, {"EXPERTS": num_experts, "BLOCK": _SORTED_AT_ONCE})


def add_launch(made: Tensor, shares: Tensor, total: Tensor, places: Tensor | None = None) -> Launch:
    """The launch that adds each token's results.

    Args:
        made: Results, [pairs, hidden].
        shares: Weight of each result, fp32 [tokens, experts of a token].
        total: Is filled with the sums, fp32 [tokens, hidden].
        places: Row of each pair's result, int32 [pairs]; None: results are in the order of pairs.
    """
    (tokens, k), hidden = shares.shape, made.shape[1]
    columns = min(_ADDED_COLUMNS, power_of_two(hidden, 32))
    args = {"made": made, "shares": shares, "total": total, "places": places}
    constants = {"CHOICES": k, "N": hidden, "BLOCK": columns}
    return Launch(_add, (tokens, triton.cdiv(hidden, columns)), args, constants)


def _product_launches(
    x: Tensor,
    weight: Tensor | BlockWeight,
    bias: Tensor | None,
    out: Tensor,
    routes: tuple[Tensor, Tensor, int],
    activation: str | None,
    on: Card,
) -> list[Launch]:
    """The launches of one product with the experts' matrices: of int8 rows, x is quantized first."""
    (order, starts, k), storage = routes, storage_of(weight)
    kind, weight = storage.kind, tensor_of(weight)
    num_experts, (count, columns), depth = len(starts) - 1, out.shape, x.shape[1]
    matrices = 1 if activation is None else 2
    assert weight.shape == (num_experts * matrices * columns, storage.row_width(depth))
    of_experts = columns * min(num_experts, count)
    tile = product_tile(kind, x.dtype, count / num_experts, of_experts, on, gated=matrices == 2)
    quantizing, scales = [], None
    if kind == "int8":
        launch, x, scales = coded_launch(x, weight)
        quantizing = [launch]
    args = {
        "x": x,
        "x_scales": scales,
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
        "DEPTH": depth,
        "WIDTH": weight.shape[1],
        **storage.constants,
        "ALIGNED": kind == "int4" and aligned(depth, 4, weight.data_ptr()),
        "ACTIVATION": activation,
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "STEP": tile.depth,
    }
    # Of each expert the last tile may have few rows.
    tiles = count // tile.rows + num_experts if count else 0
    grid = tiles, triton.cdiv(columns, tile.columns)
    return [*quantizing, Launch(_multiply, grid, args, constants, tile.warps, tile.stages)]


@triton.jit(do_not_specialize=["count"])
def _sort(chosen, order, starts, places, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
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
        place = start + tl.cumsum(own, 0) - 1
        tl.store(order + place, at, mask=own > 0)
        if places is not None:
            tl.store(places + at, place, mask=own > 0)
        start += tl.sum(own, 0)


@triton.jit
def _multiply(  # a kernel takes pointers and scalars only
    x,
    x_scales,
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
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    HEAD: tl.constexpr,
    GAP: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    first_weight = expert.to(tl.int64) * (matrices * COLUMNS)
    w_rows = weight + (first_weight + column) * WIDTH
    up_offset: tl.constexpr = COLUMNS * WIDTH
    total, up = sums_of_products(
        x + x_row.to(tl.int64) * x_stride, there, w_rows, inside, up_offset,
        DEPTH, KIND, VALUES, BYTES, HEAD, GAP, ALIGNED, matrices == 2, ROWS, BLOCK, STEP,
    )  # fmt: skip
    if KIND == "int8":
        total = scaled(total, x_scales + x_row, there, w_rows, inside, WIDTH)
        if ACTIVATION is not None:
            up = scaled(up, x_scales + x_row, there, w_rows + up_offset, inside, WIDTH)
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
def _add(made, shares, total, places, CHOICES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel: the weighted sum of one token's results, in the order in which its experts were chosen."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        row = pair if places is None else tl.load(places + pair).to(tl.int64)
        sums += tl.load(made + row * N + column, mask=inside, other=0.0).to(tl.float32) * tl.load(shares + pair)
    tl.store(total + token * N + column, sums, mask=inside)
