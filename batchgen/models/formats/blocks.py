"""The choice of a block format that can store quantized matrices without loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from batchgen.models.formats.base import Tensors

# Format -> columns and bytes of a block: `core.dtypes.GROUP_FORMATS` or `FP8_FORMATS`.
Formats = Mapping[str, tuple[int, int]]
# Matrices that are never quantized with the others of a layer: routers, and gates of few rows.
ROUTERS = (
    *(".gate", ".router", ".router.layer", ".router.proj", ".shared_expert_gate"),
    *(".in_proj_a", ".in_proj_b", ".in_proj_ba"),
)
# Suffixes of tensors that have the matrices of all experts of a layer.
_STACKED = (".gate_up_proj", ".down_proj", ".input_linear.weight", ".output_linear.weight")


def fitting_blocks(formats: Formats, columns: int, shared: int | None) -> list[str]:
    """Block formats whose blocks fill a row without a rest and have one scale each, the smallest blocks first.

    Args:
        formats: Formats to choose from.
        columns: Number of columns of a row.
        shared: Number of consecutive columns of a row that have one scale; None: the whole row.
    """
    return [name for name, (size, _) in formats.items() if columns % size == 0 and (shared or columns) % size == 0]


def largest_blocks(formats: Formats, columns: Iterable[int], shared: int | None) -> str | None:
    """The format with the largest blocks that can store all matrices; None: no format can.

    Args:
        formats: Formats to choose from.
        columns: Numbers of columns of the matrices.
        shared: Number of consecutive columns of a row that have one scale; None: the whole row.
    """
    rows = set(columns)
    fitting = [name for name in formats if all(name in fitting_blocks(formats, n, shared) for n in rows)]
    return fitting[-1] if fitting else None


def has_plain_matrices(tensors: Tensors) -> bool:
    """True if a matrix of a layer, other than a router, is stored as numbers of 16 bits or more."""
    return any(_is_plain(name, len(info.shape)) for name, info in tensors.items() if not info.dtype.startswith("F8_"))


def _is_plain(name: str, ndim: int) -> bool:
    """True for a matrix of a layer under a name of numbers, unless it is a router, and for the matrices of experts."""
    if not is_of_layer_matrix(name, 2 if ndim == 3 and name.endswith(_STACKED) else ndim):
        return False
    return name.endswith(_STACKED) or (name.endswith(".weight") and not name.removesuffix(".weight").endswith(ROUTERS))


def is_of_layer_matrix(name: str, ndim: int) -> bool:
    """True for a tensor that belongs to a matrix of a layer, and has two dimensions itself.

    Layers that predict further tokens ("mtp.layers.0"), which are not read, do not count.

    Args:
        name: Name of the tensor in the checkpoint.
        ndim: Number of its dimensions.
    """
    return ndim == 2 and re.search(r"^(?!mtp\.)(.*\.)?layers\.\d+\.", name) is not None


def block_columns(formats: Formats, columns: int, row_bytes: int) -> int:
    """The number of columns of a block in the format in which a row of `columns` columns has `row_bytes` bytes."""
    (size,) = (size for size, num_bytes in formats.values() if columns // size * num_bytes == row_bytes)
    return size
