"""Experts that a checkpoint stacks in one tensor for each layer, as single matrices under names of their own.

Checkpoints of Qwen3.5 and Gemma 4 have "experts.gate_up_proj" [experts, gate and up rows, columns] and
"experts.down_proj" in place of a gate, an up and a down projection for each expert. Scales of FP8 are stacked in the
same way. Those of Granite have "input_linear.weight" and "output_linear.weight". Published ones of Qwen3-VL's
mixtures have "experts.gate_up_proj" [experts, columns, gate and up rows], and "experts.down_proj" likewise; those in
FP8 have scales of blocks in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart
from batchgen.models.formats.fp8 import Fp8, Fp8Matrix
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import NUMBERS, check_stored, read_numbers

# Suffix of a stacked tensor, and of the tensors of its experts.
_SUFFIXES = {"": ".weight", ".weight": ".weight", "_scale_inv": ".weight_scale_inv", "_weight_scale": ".weight_scale"}


def single_experts(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], stem: str, stacked: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorInfo]:
    """The places of all matrices of experts that are stacked, by the names that matrices of single experts have.

    Args:
        config: Configuration of the model.
        tensors: All tensors of the checkpoint.
        stem: Name of a layer's experts, with {} for the number of the layer: "model.layers.{}.mlp.experts".
        stacked: Names of the stacked tensors within a layer, and the parts of each expert in them.

    Raises:
        InputError: A stacked tensor has no matrix for each expert.
    """
    of_layers = stem[: stem.index("{}") + 2]
    return dict(
        single
        for layer in range(config.num_layers)
        for fused, parts in stacked.items()
        for suffix in _SUFFIXES
        if (info := tensors.get(name := f"{of_layers.format(layer)}.{fused}{suffix}")) is not None
        for single in _cut(name, info, config.num_experts, stem.format(layer), parts, _SUFFIXES[suffix])
    )


def _cut(
    name: str, info: TensorInfo, experts: int, stem: str, parts: tuple[str, ...], suffix: str
) -> Iterator[tuple[str, TensorInfo]]:
    """The names and places of the matrices in a stacked tensor: of each expert, its parts one after the other."""
    count = experts * len(parts)
    if len(info.shape) != 3 or info.shape[0] != experts or info.shape[1] % len(parts):
        raise InputError(
            f"tensor {name} in {info.path} is {list(info.shape)}, its config asks for {experts} experts first"
        )
    shape, size = (info.shape[1] // len(parts), info.shape[2]), info.num_bytes // count
    for i in range(count):
        expert, part = divmod(i, len(parts))
        place = replace(info, shape=shape, offset=info.offset + i * size, num_bytes=size)
        yield f"{stem}.{expert}.{parts[part]}{suffix}", place


@dataclass(frozen=True)
class StackedExpert(StoredPart):
    """A matrix of one expert in a tensor [experts, rows of all parts, columns], or with columns before rows.

    Where both have the same shape it is the first one, as transformers takes it.

    Attributes:
        name: Name of the tensor.
        info: Place of the tensor.
        expert: Number of the expert.
        part: Number of the matrix among the expert's parts in the tensor.
        parts: Number of these parts.
    """

    name: str
    info: TensorInfo
    expert: int
    part: int
    parts: int

    def check(self, experts: int, shape: tuple[int, ...], dtypes: tuple[str, ...] = tuple(NUMBERS)) -> None:
        """Raise InputError unless the tensor has so many experts' matrices of a shape (rows, columns)."""
        sizes = (self.parts * shape[0], shape[1])
        stacked = (experts, *(sizes[::-1] if self.is_turned(shape) else sizes))
        check_stored(self.name, self.info, stacked, dtypes)

    def is_turned(self, shape: tuple[int, ...]) -> bool:
        """Tell whether the tensor has columns before rows, of matrices of a shape (rows, columns)."""
        return self.info.shape[1:] != (self.parts * shape[0], shape[1])

    def fill(self, out: Tensor) -> None:
        rows, columns = out.shape
        width = self.parts * rows
        if not self.is_turned((rows, columns)):
            return read_numbers(self.name, self.info, out, (self.expert * width + self.part * rows) * columns)
        step = max(1, reading.CHUNK_VALUES // width)
        for start in range(0, columns, step):
            count = min(step, columns - start)
            values = torch.empty(count, width, dtype=NUMBERS[self.info.dtype])
            read_numbers(self.name, self.info, values, (self.expert * columns + start) * width)
            out[:, start : start + count] = values[:, self.part * rows : (self.part + 1) * rows].t()


@dataclass(frozen=True)
class StackedFp8Expert(Fp8Matrix):
    """A matrix of one expert in a tensor of FP8 weights, which are stacked as in a `StackedExpert`, like their scales.

    Attributes:
        place: Place of the expert in the tensor.
    """

    place: StackedExpert

    def stored_rows(self, start: int, stop: int) -> Tensor:
        """The 8-bit numbers of rows [start, stop), uint8 [stop - start, columns]."""
        first = self.place.part * self.shape[0]
        return self._of_all_parts(self.numbers)[first + start : first + stop].contiguous()

    def stored_scales(self) -> Tensor:
        """The scales, fp32 [blocks of rows, blocks of columns]."""
        rows = -(-self.shape[0] // self.block[0])
        return self._of_all_parts(self.scales)[self.place.part * rows :][:rows].float()

    def _of_all_parts(self, stacked: NamedTensor) -> Tensor:
        """The expert's rows of all parts in a stacked tensor."""
        (values,) = reading.read_rows(*stacked, self.place.expert, self.place.expert + 1)
        return values.t() if self.place.is_turned(self.shape) else values


def found_expert(
    expert: StackedExpert,
    tensors: Mapping[str, TensorInfo],
    scheme: Scheme | None,
    experts: int,
    shape: tuple[int, int],
) -> StoredPart:
    """The matrix of an expert, after the shapes and dtypes of the tensor and of its scales have been checked.

    Args:
        expert: Place of the expert in a stacked tensor.
        tensors: All tensors of the checkpoint.
        scheme: Quantization that config.json states; None: weights are plain numbers.
        experts: Number of experts of a layer.
        shape: Rows and columns of the matrix.

    Raises:
        InputError: A tensor has another shape or dtype, or there are no scales for blocks of an FP8 one.
    """
    if not expert.info.dtype.startswith("F8_"):
        expert.check(experts, shape)
        return expert
    expert.check(experts, shape, ("F8_E4M3",))
    block = scheme.block if isinstance(scheme, Fp8) else None
    if block is None or (expert.parts > 1 and shape[0] % block[0]):
        raise InputError(
            f"tensor {expert.name} in {expert.info.path}: stacked experts in FP8 need scales for blocks that part them "
            "(weight_block_size): take the model in bfloat16, or a GGUF of it"
        )
    name = f"{expert.name}_scale_inv"
    sizes = (expert.parts * -(-shape[0] // block[0]), -(-shape[1] // block[1]))
    check_stored(name, tensors[name], (experts, *(sizes[::-1] if expert.is_turned(shape) else sizes)))
    return StackedFp8Expert(shape, block, (expert.name, expert.info), (name, tensors[name]), expert)


def either_way_stacked(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], stem: str, stacked: Mapping[str, tuple[str, ...]]
) -> dict[str, StackedExpert]:
    """The matrices of experts that are stacked with rows or columns first, by the names that single matrices have.

    Args:
        config: Configuration of the model.
        tensors: All tensors of the checkpoint.
        stem: Name of a layer's experts, with {} for the number of the layer.
        stacked: Names of the stacked tensors within a layer, and the parts of each expert in them.
    """
    of_layers = stem[: stem.index("{}") + 2]
    return {
        f"{stem.format(layer)}.{expert}.{part}.weight": StackedExpert(name, info, expert, number, len(parts))
        for layer in range(config.num_layers)
        for stack, parts in stacked.items()
        if (info := tensors.get(name := f"{of_layers.format(layer)}.{stack}")) is not None
        for expert in range(config.num_experts)
        for number, part in enumerate(parts)
    }
