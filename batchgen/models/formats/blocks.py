"""Block formats that hold quantized matrices without loss, so that these stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from batchgen.models.formats.base import Tensors

# Format -> columns and bytes of a block: `core.dtypes.GROUP_FORMATS` or `FP8_FORMATS`.
Formats = Mapping[str, tuple[int, int]]
# Matrices that are never quantized with the others of a layer: routers, and the shared expert's gate.
_ROUTERS = (".gate", ".router", ".shared_expert_gate")


def fitting_blocks(formats: Formats, columns: int, shared: int | None) -> list[str]:
    """Formats of which whole blocks make up a row, each block with one scale; those with the smallest blocks first.

    Args:
        formats: Formats to choose from.
        columns: Columns of a row.
        shared: Columns of a row that have one scale; None: all.
    """
    return [name for name, (size, _) in formats.items() if columns % size == 0 and (shared or columns) % size == 0]


def largest_blocks(formats: Formats, columns: Iterable[int], shared: int | None) -> str | None:
    """The format with the largest blocks that fits all matrices; None: none does.

    Args:
        formats: Formats to choose from.
        columns: Columns of the matrices.
        shared: Columns of a row that have one scale; None: all.
    """
    rows = set(columns)
    fitting = [name for name in formats if all(name in fitting_blocks(formats, n, shared) for n in rows)]
    return fitting[-1] if fitting else None


def has_plain_matrices(tensors: Tensors) -> bool:
    """True where a matrix of a layer, routers aside, is in numbers of 16 bits or more."""
    return any(
        name.endswith(".weight")
        and not name.removesuffix(".weight").endswith(_ROUTERS)
        and not info.dtype.startswith("F8_")
        for name, info in tensors.items()
        if is_of_layer_matrix(name, len(info.shape))
    )


def is_of_layer_matrix(name: str, ndim: int) -> bool:
    """True for tensors of a layer's matrices, which have two dimensions."""
    return ndim == 2 and re.search(r"(^|\.)layers\.\d+\.", name) is not None


def block_columns(formats: Formats, columns: int, row_bytes: int) -> int:
    """Columns of a block of that format whose rows of so many columns have so many bytes."""
    (size,) = (size for size, num_bytes in formats.values() if columns // size * num_bytes == row_bytes)
    return size
