"""Rows of a block-quantized table by an index, such as embeddings of tokens, dequantized by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton.blocks import byte_numbers, nibble_columns, nibble_numbers
from batchgen.ops.triton.launch import Launch
from batchgen.ops.triton.product import storage_of

# Rows and columns of a program. Its columns have whole runs of nibbles in every format.
_ROWS, _COLUMNS = 8, 256


def block_rows(table: BlockWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of a table.

    Args:
        table: The table [rows, columns].
        index: Numbers of rows, int64 [n].
        dtype: Dtype of the result, to which numbers are rounded.

    Returns:
        Rows [n, columns].
    """
    out = torch.empty(len(index), table.shape[1], dtype=dtype, device=index.device)
    block_rows_launch(table, index, out)()
    return out


def block_rows_launch(table: BlockWeight, index: Tensor, out: Tensor) -> Launch:
    assert table.data.is_contiguous() and out.is_contiguous() and out.shape == (len(index), table.shape[1])
    count, columns = out.shape
    args = {"table": table.data, "index": index, "out": out, "num_rows": count}
    constants = {
        "COLUMNS": columns,
        "WIDTH": table.data.shape[1],
        **storage_of(table).constants,
        "ROWS": _ROWS,
        "STEP": _COLUMNS,
    }
    return Launch(_block_rows, (triton.cdiv(count, _ROWS), triton.cdiv(columns, _COLUMNS)), args, constants)


@triton.jit(do_not_specialize=["num_rows"])
def _block_rows(
    table,
    index,
    out,
    num_rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    HEAD: tl.constexpr,
    GAP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Kernel: STEP columns of ROWS rows."""
    row, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * STEP
    there = row < num_rows
    rows = table + tl.load(index + row, mask=there, other=0) * WIDTH
    target = out + row.to(tl.int64)[:, None] * COLUMNS
    type: tl.constexpr = out.dtype.element_ty
    if GAP:
        low, high = nibble_numbers(rows, there, first, COLUMNS, STEP, KIND, VALUES, BYTES, HEAD, GAP)
        column = nibble_columns(first, STEP, GAP)[None, :]
        mask = there[:, None] & (column < COLUMNS)
        tl.store(target + column, low.to(type), mask=mask)
        tl.store(target + column + GAP, high.to(type), mask=mask)
    else:
        numbers = byte_numbers(rows, there, first, COLUMNS, STEP, KIND, VALUES, BYTES, HEAD)
        column = first + tl.arange(0, STEP)[None, :]
        tl.store(target + column, numbers.to(type), mask=there[:, None] & (column < COLUMNS))
