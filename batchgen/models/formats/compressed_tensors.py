"""compressed-tensors: weights of 4 bits (pack-quantized), of 8 bits (int-quantized) and in FP8, by `config_groups`.

| format | tensor | shape | |
|---|---|---|---|
| pack-quantized | `weight_packed` | [rows, columns / 8] | nibble i of word w is column 8 w + i |
| | `weight_zero_point` | [rows / 8, groups] | nibble i of word w is row 8 w + i; none where all are 8 |
| | `weight_scale` | [rows, groups] | |
| int-quantized | `weight` | [rows, columns] | signed bytes |
| | `weight_scale` | [rows, 1] | |
| float-quantized | | | `fp8.py` |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.core.dtypes import INT8
from batchgen.core.errors import InputError
from batchgen.models.families import MIXTURES
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart, Tensors
from batchgen.models.formats.blocks import ROUTERS
from batchgen.models.formats.fp8 import Fp8
from batchgen.models.formats.groups import GroupScheme, ReadQuants
from batchgen.models.formats.stated import Stated, block_shape, flag, group_size

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.layouts import Shape

_INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_TABLES = ("embed_tokens", "embed_tokens_per_layer")  # looked up by row, which are no linear layers
_STRATEGIES = {
    "pack-quantized": ("group", "channel"),
    "float-quantized": ("tensor", "channel", "block"),
    "naive-quantized": ("tensor", "channel"),
}


@dataclass(frozen=True)
class PackQuantized(GroupScheme):
    """compressed-tensors with weights of 4 bits in groups, and activations of 16 bits (pack-quantized)."""

    label = "compressed-tensors W4A16"
    names = ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx")
    scales_by_row = True

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[Shape, Shape]:
        return (rows, -(-columns // 8)), (-(-rows // 8), groups)

    def read_quants(self, quants: NamedTensor) -> ReadQuants:
        from batchgen.models.formats.group_matrix import nibbles
        from batchgen.models.tensor_files.reading import read_rows

        return lambda start, stop: nibbles(read_rows(*quants, start, stop))

    def zero_points(self, words: Tensor) -> Tensor:
        from batchgen.models.formats.group_matrix import nibbles

        return nibbles(words.t())


@dataclass(frozen=True)
class Int8(Scheme):
    """compressed-tensors with 8 bits: weights with a scale for each row, activations with a scale for each token."""

    def describe(self) -> str:
        return "compressed-tensors W8A8"

    def supports(self, family: str) -> bool:
        return family not in MIXTURES

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        return INT8

    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        from batchgen.models.tensor_files.reading import check_stored

        name, scale_name = f"{stem}.weight", f"{stem}.weight_scale"
        if not in_layer and (name not in tensors or tensors[name].dtype != "I8" or stem.endswith(_TABLES)):
            return None
        if stem.endswith(ROUTERS) and tensors[name].dtype != "I8":
            return None
        info, scale = tensors[name], tensors[scale_name]
        where = f"tensor {name} in {info.path}"
        if info.dtype != "I8":
            raise InputError(
                f"{where} is {info.dtype}, but its config.json says that all layers have weights of 8 bits (I8)"
            )
        if info.shape != shape:
            raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
        if info.num_bytes != math.prod(shape):
            raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")
        if scale.shape not in ((shape[0], 1), (shape[0],)):
            raise InputError(
                f"tensor {scale_name} in {scale.path} is {list(scale.shape)}: only a scale for each output channel is "
                "supported"
            )
        check_stored(scale_name, scale, scale.shape)
        return Int8Matrix((name, info), (scale_name, scale))


@dataclass(frozen=True)
class Int8Matrix(StoredPart):
    """A stored matrix of weights of 8 bits.

    Attributes:
        quants: Name and place of the quantized values, int8 [rows, columns].
        scales: Name and place of the scales, one for each row.
    """

    quants: NamedTensor
    scales: NamedTensor

    def fill(self, out: Tensor) -> None:
        """Fill a tensor with the matrix: with int8 rows (`ops/int8.py`) if `out` is int8, otherwise with numbers.

        Raises:
            InputError: A scale is negative (which would mean a rotated row), NaN or infinite.
        """
        import torch

        from batchgen.models.tensor_files import reading
        from batchgen.ops import int8

        (name, info), (scale_name, scale) = self.quants, self.scales
        rows, n = info.shape
        scales = torch.empty(rows, dtype=torch.float32)
        reading.read_numbers(scale_name, scale, scales)
        if not bool((scales.isfinite() & ~scales.signbit()).all()):
            raise InputError(
                f"tensor {scale_name} in {scale.path} has scales that are negative or no numbers: fetch the model again"
            )
        step = max(1, reading.CHUNK_VALUES // n)
        for start in range(0, rows, step):
            some = slice(start, min(rows, start + step))
            values = torch.empty(some.stop - start, n, dtype=torch.int8)
            reading.read_into(name, info, start * n, memoryview(values.view(-1).view(torch.uint8).numpy()))
            packed = int8.join(values, scales[some, None])
            if out.dtype == torch.int8:
                out[some] = packed
            else:
                int8.dequantize(packed, n, out[some])


def read_compressed_tensors(config: Stated) -> Scheme:
    """The scheme that a `quantization_config` describes.

    The scheme must apply to all linear layers except those in `ignore`.

    Raises:
        InputError: A value is not supported; the message names it.
    """
    stated = config.get("config_groups") or {}
    if not isinstance(stated, Mapping):
        raise InputError(f"quantization_config: config_groups must be an object, not {stated!r}: fetch the model again")
    schemes = []
    for name, group in (stated or {"": {}}).items():
        if not isinstance(group, Mapping):
            raise InputError(
                f"quantization_config: config_groups.{name} must be a scheme, not {group!r}: fetch the model again"
            )
        schemes.append(_scheme_of_group(config, group))
    if len(set(schemes)) > 1:
        raise InputError(
            "compressed-tensors checkpoints in several schemes at once are not supported: use the model's unquantized "
            "safetensors"
        )
    if config.get("kv_cache_scheme"):
        raise InputError(
            "compressed-tensors checkpoints with a kv_cache_scheme are not supported: remove it from config.json"
        )
    _refuse_transforms(config)
    return schemes[0]


def _scheme_of_group(config: Stated, group: Stated) -> Scheme:
    form = group.get("format") or config.get("format")
    weights, activations = group.get("weights"), group.get("input_activations")
    if form == "int-quantized":
        wrong = _difference(weights, _INT8_WEIGHTS) or _difference(activations, _INT8_ACTIVATIONS)
    elif form == "pack-quantized":
        wrong = _difference(weights, {"num_bits": 4, "type": "int"}) or ("activations" if activations else "")
    elif form in ("float-quantized", "naive-quantized"):
        wrong = _difference(weights, {"num_bits": 8, "type": "float"})
    else:
        raise _refused(form, group, "")
    strategy = weights.get("strategy") if isinstance(weights, Mapping) else None
    if form != "int-quantized" and not wrong and strategy not in _STRATEGIES[form]:
        wrong = f"strategy {strategy!r}"
    if wrong or not isinstance(weights, Mapping) or group.get("output_activations"):
        raise _refused(form, group, wrong)
    if form == "int-quantized":
        return Int8()
    if form == "pack-quantized":
        size = group_size(weights, "group_size") if strategy == "group" else None
        symmetric, act_order = flag(weights, "symmetric", True), _act_order(weights.get("actorder"))
        return PackQuantized(size, symmetric=symmetric, act_order=act_order)
    return Fp8(block_shape(weights.get("block_structure")) if strategy == "block" else None)


def _act_order(stated: Any) -> bool:
    """True if columns may be in any group (act-order). The value has two spellings each for true and false."""
    if stated in (None, "weight", "static") or stated is False:
        return False
    if stated in ("group", "dynamic") or stated is True:
        return True
    raise InputError(
        f"quantization_config: actorder must be one of group, dynamic, weight, static, not {stated!r}: fetch the"
        " model again"
    )


def _refuse_transforms(config: Stated) -> None:
    """Raise InputError for values that change the meaning of the tensors, such as transforms and sparsity.

    Sparsity "dense" means none.
    """
    sparsity = config.get("sparsity_config")
    dense = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"
    for name, stated in {
        "transform_config": config.get("transform_config"),
        "sparsity_config": not dense and sparsity,
    }.items():
        if stated:
            raise InputError(
                f"compressed-tensors checkpoints with a {name} are not supported: use the model's unquantized "
                "safetensors"
            )


def _difference(stated: Any, wanted: Mapping[str, Any]) -> str:
    """The first field whose value differs from the required one, as "field value"; "" if there is none."""
    if not isinstance(stated, Mapping):
        return "nothing stated"
    values = {name: stated.get(name) for name in wanted}
    differing = (n for n, value in wanted.items() if (type(values[n]), values[n]) != (type(value), value))
    return next((f"{n} {values[n]!r}" for n in differing), "")


def _refused(form: Any, group: Stated, wrong: str) -> InputError:
    bits = "".join(
        f"{letter}{part.get('num_bits', 16) if isinstance(part := group.get(name), Mapping) else 16}"
        for letter, name in (("W", "weights"), ("A", "input_activations"))
    )
    detail = f", {wrong}" if wrong else ""
    return InputError(
        f"compressed-tensors checkpoints in the scheme {bits} ({form or 'no format'}{detail}) are not supported, only "
        "int-quantized"
        " W8A8 (weights by channel, activations by token), pack-quantized W4A16 and float-quantized FP8: use the "
        "model's unquantized"
        " safetensors"
    )
