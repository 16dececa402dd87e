"""Weights of 4 bits in groups of columns, as compressed-tensors (pack-quantized), GPTQ and AWQ have them.

All three are the same numbers, (code - zero point) * scale, with codes and zero points from 0 to 15 and a scale for each row and
group. They differ in where these lie. Words are little-endian, nibble i of a word are its bits 4 i to 4 i + 3:

| layout | codes | zero points | scales |
|---|---|---|---|
| pack-quantized | `weight_packed` [rows, columns / 8]: nibble i is column 8 w + i | `weight_zero_point` [rows / 8, groups]: nibble i is row 8 w + i; 8 where it is symmetric | `weight_scale` [rows, groups] |
| GPTQ | `qweight` [columns / 8, rows], nibbles as above | `qzeros` [groups, rows / 8], one less than they count (checkpoint_format "gptq") | `scales` [groups, rows] |
| AWQ | `qweight` [columns, rows / 8]: nibbles are rows 0, 2, 4, 6, 1, 3, 5, 7 of eight | `qzeros` [groups, rows / 8], nibbles as of codes | `scales` [groups, rows] |

`g_idx` [columns] says which group each column is of, where that is not the order of columns (act-order).

In memory and in weight stores they are rows of blocks (`GROUP_FORMATS`, csrc/quant/int4_groups.h), without loss: of each group four bytes, the
first of which is the zero point and the others are the upper ones of the scale in fp32, which holds those of 16 bits; then its codes, for
each 32 of them 16 bytes, the first half in the low nibbles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.core.dtypes import GROUP_FORMATS, weight_row_bytes
from batchgen.core.errors import InputError
from batchgen.models.formats.quantization import AWQ, GPTQ, PACK_QUANTIZED, Scheme, fitting_blocks
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import check_stored, read_numbers, read_rows
from batchgen.ops import cpp as kernels

# layout -> names of codes, zero points, scales and groups of columns
_NAMES = {
    PACK_QUANTIZED: ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales", "g_idx"),
}
_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # where rows 0 to 7 of eight are in a word
_SYMMETRIC_ZERO = 8
_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class GroupCodes:
    """A matrix [rows, columns] of such a checkpoint. tensors: name and place of each."""

    scheme: Scheme
    shape: tuple[int, int]
    codes: tuple[str, TensorInfo]
    scales: tuple[str, TensorInfo]
    zeros: tuple[str, TensorInfo] | None
    group_of: tuple[str, TensorInfo] | None

    @property
    def groups(self) -> int:
        return -(-self.shape[1] // (self.scheme.group_size or self.shape[1]))

    def _block_format(self, group_of: Tensor) -> str | None:
        """The blocks that hold this matrix without loss; None: none do."""
        n = self.shape[1]
        size = self.scheme.group_size or n
        if self.scales[1].dtype == "F32" or n % size or not torch.equal(group_of, torch.arange(n) // size):
            return None
        return next(iter(fitting_blocks(GROUP_FORMATS, n, size)), None)

    def fill(self, out: Tensor) -> None:
        """Fill `out` with numbers, [rows, columns] of any float dtype, or with rows of blocks, uint8 [rows, bytes of a row].

        Raises InputError where scales are no numbers, or columns are in no group or in another one than blocks have them in.
        """
        scales, zeros, group_of = _scales(self), _zeros(self), _group_of(self)
        packing, n = out.dtype == torch.uint8, self.shape[1]
        if packing and not torch.equal(group_of, torch.arange(n) // (self.scheme.group_size or n)):
            name, info = self.group_of or self.codes
            raise InputError(f"tensor {name} in {info.path} has columns out of order: give --weights dequantized")
        kind = self._block_format(group_of)
        for some, codes in _codes(self):
            if packing:
                _to_blocks(codes, scales[some], zeros[some], out[some])
            elif kind:  # the kernels' threads are faster
                blocks = torch.empty(len(codes), weight_row_bytes(n, kind), dtype=torch.uint8)
                _to_blocks(codes, scales[some], zeros[some], blocks)
                kernels.unpack_blocks(kind.upper(), blocks, out[some])
            else:
                values = codes.float().sub_(zeros[some].float()[:, group_of])
                out[some] = values.mul_(scales[some][:, group_of])


def find(tensors: Mapping[str, TensorInfo], stem: str, shape: tuple[int, int], scheme: Scheme) -> GroupCodes | None:
    """The matrix that a file calls `stem`, checked; None: it is not in codes.

    Raises InputError where a tensor of it is missing, or is not what scheme and shape ask for.
    """
    codes, zeros, scales, group_of = (f"{stem}.{name}" for name in _NAMES[scheme.layout])
    if codes not in tensors:
        return None
    order = (group_of,) if scheme.act_order and scheme.group_size else ()
    for name in (scales, *order) if scheme.symmetric else (scales, zeros, *order):
        if name not in tensors:
            raise InputError(f"{tensors[codes].path} has no tensor {name} beside {codes}: fetch the model again")
    found = GroupCodes(
        scheme,
        shape,
        (codes, tensors[codes]),
        (scales, tensors[scales]),
        None if scheme.symmetric else (zeros, tensors[zeros]),
        (group_of, tensors[group_of]) if group_of in tensors else None,
    )
    _check(found)
    return found


def _check(source: GroupCodes) -> None:
    (rows, n), groups, layout = source.shape, source.groups, source.scheme.layout
    if layout == AWQ and rows % 8:
        raise InputError(
            f"tensor {source.codes[0]} in {source.codes[1].path} cannot have {rows} rows: words hold eight"
        )
    words, row_words = -(-n // 8), -(-rows // 8)
    shapes = {PACK_QUANTIZED: (rows, words), GPTQ: (words, rows), AWQ: (n, row_words)}
    check_stored(*source.codes, shapes[layout], ("I32",))
    per_row = layout == PACK_QUANTIZED
    scales = (rows, groups) if per_row else (groups, rows)
    if source.scales[1].shape != scales:
        (name, info), size = source.scales, source.scheme.group_size or "all"
        raise InputError(
            f"tensor {name} in {info.path} is {list(info.shape)}; groups of {size} columns, as config.json has them, ask for {list(scales)}"
        )
    check_stored(*source.scales, scales, _SCALES)
    if source.zeros:
        check_stored(*source.zeros, (row_words, groups) if per_row else (groups, row_words), ("I32",))
    if source.group_of:
        check_stored(*source.group_of, (n,), ("I32", "I64"))


def _to_blocks(codes: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> None:
    """Rows of codes uint8 [rows, n], with a scale and a zero point [rows, groups] for so many of them, as blocks in `out`."""
    rows, n = codes.shape
    # Bytes of a row tell one format from another.
    (size,) = (size for size, num_bytes in GROUP_FORMATS.values() if n // size * num_bytes == out.shape[1])
    blocks = out.view(rows, n // size, 4 + size // 2)
    heads = (scales.contiguous().view(torch.int32) & ~255) | zeros.int()
    each = n // size // scales.shape[1]  # blocks that share a scale
    heads = heads.repeat_interleave(each, dim=1).contiguous()
    blocks[..., :4] = heads.view(torch.uint8).view(rows, n // size, 4)
    halves = codes.reshape(rows, n // 32, 2, 16)
    blocks[..., 4:] = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, n // size, size // 2)


def _codes(source: GroupCodes) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, and their codes, uint8 [rows, columns]."""
    (rows, n), (name, info) = source.shape, source.codes
    step = max(8, reading.CHUNK_VALUES // n // 8 * 8)
    whole = None if source.scheme.layout == PACK_QUANTIZED else read_rows(name, info, 0, info.shape[0])
    for start in range(0, rows, step):
        some = slice(start, min(rows, start + step))
        if whole is None:
            codes = _nibbles(read_rows(name, info, some.start, some.stop))
        elif source.scheme.layout == GPTQ:
            codes = _nibbles(whole[:, some].t())
        else:
            words = whole[:, some.start // 8 : some.stop // 8]
            codes = _nibbles(words).view(*words.shape, 8)[..., _AWQ_NIBBLES].reshape(n, -1).t()
        yield some, codes[:, :n].contiguous()


def _nibbles(words: Tensor) -> Tensor:
    """int32 [a, b] -> uint8 [a, 8 b]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(words), -1)


def _scales(source: GroupCodes) -> Tensor:
    """fp32 [rows, groups]."""
    name, info = source.scales
    found = torch.empty(info.shape)
    read_numbers(name, info, found)
    if not bool(found.isfinite().all()):
        raise InputError(f"tensor {name} in {info.path} has scales that are no numbers: fetch the model again")
    return found if source.scheme.layout == PACK_QUANTIZED else found.t().contiguous()


def _zeros(source: GroupCodes) -> Tensor:
    """uint8 [rows, groups]."""
    (rows, _), layout = source.shape, source.scheme.layout
    if source.zeros is None:
        return torch.full((rows, source.groups), _SYMMETRIC_ZERO, dtype=torch.uint8)
    name, info = source.zeros
    words = read_rows(name, info, 0, info.shape[0])
    if layout == PACK_QUANTIZED:
        words = words.t()
    found = _nibbles(words)
    if layout == AWQ:
        found = found.view(len(found), -1, 8)[..., _AWQ_NIBBLES].reshape(len(found), -1)
    # What lacks 1 is kept in four bits, so 15 stands for 0.
    return (found[:, :rows].t() + source.scheme.zero_offset & 15).contiguous()


def _group_of(source: GroupCodes) -> Tensor:
    """The group of each column, int64 [columns]."""
    n = source.shape[1]
    if source.group_of is None:
        return torch.arange(n) // (source.scheme.group_size or n)
    name, info = source.group_of
    found = read_rows(name, info, 0, n).long()
    if bool(((found < 0) | (found >= source.groups)).any()):
        raise InputError(
            f"tensor {name} in {info.path} has columns in groups that are not there: fetch the model again"
        )
    return found
