"""Number formats of weights, KV and activations, and their sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# KV, and weights of int4: quantized values with a scale and a zero point of 16 bits for each group of 64 (FlexGen 5).
# Weights of int8: values of 8 bits with a scale in fp32 for each row.
INT4, INT5, INT8 = "int4", "int5", "int8"
CODE_GROUP = 64
WEIGHT_CODE_BITS = 4
# Packed KV, the most exact first (docs/tiers.md has what each costs).
KV_CODE_BITS = {INT8: 8, INT5: 5, INT4: 4}
# Block-quantized rows of a GGUF: values and bytes of a block.
GGUF_FORMATS = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
}
# Weights of GPTQ, AWQ and compressed-tensors in 4 bits, with a scale and a zero point for each group of a row
# (models/formats/groups.py): values and bytes of a block.
GROUP_FORMATS = {"w4_g32": (32, 20), "w4_g64": (64, 36), "w4_g128": (128, 68)}
# Weights in FP8 with a scale for each group of a row (models/formats/fp8.py): values and bytes of a block.
FP8_FORMATS = {"fp8_g32": (32, 36), "fp8_g128": (128, 132)}
# Formats of block-quantized weights.
BLOCK_FORMATS = {**GGUF_FORMATS, **GROUP_FORMATS, **FP8_FORMATS}
# Formats in which experts' matrices alone are block-quantized, as in gpt-oss: the experts' format.
MXFP4_EXPERTS = "mxfp4_experts"
EXPERT_FORMATS = {MXFP4_EXPERTS: "mxfp4"}
# Groups of a layer's tensors, and names of tensors, that hold experts' matrices.
_OF_EXPERTS = ("up", "down", "gate_up")
# Each matrix in a format of its own, as most GGUFs have them (`ModelConfig.layer_formats`).
MIXED = "mixed"
# Packed formats that a model's own files may have, but for int8.
NATIVE_FORMATS = (*BLOCK_FORMATS, *EXPERT_FORMATS, MIXED)
# Formats in which matrices of layers are packed. All else is in the compute dtype, but for `ModelConfig.end_formats`.
PACKED_FORMATS = (INT4, INT8, *NATIVE_FORMATS)
# Values of `--weights`. AUTO: NATIVE or DEQUANTIZED, whichever is faster. NATIVE: in the model's own format.
# DEQUANTIZED: in the compute dtype.
AUTO, NATIVE, DEQUANTIZED = "auto", "native", "dequantized"
WEIGHTS = (AUTO, NATIVE, DEQUANTIZED, INT8, INT4)
# Values of `--state-dtype`: formats of the recurrent states of linear attention, the exact one first.
STATE_DTYPES = ("float32", "bfloat16")
# Bytes of a weight, but for the scales of rows.
FORMAT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    INT4: WEIGHT_CODE_BITS / 8 + 4.0 / CODE_GROUP,
    INT8: 1.0,
    **{name: num_bytes / values for name, (values, num_bytes) in BLOCK_FORMATS.items()},
}
FORMAT_BYTES |= {name: FORMAT_BYTES[of_experts] for name, of_experts in EXPERT_FORMATS.items()}  # which are nearly all


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def weight_format_of(dtype: str, weights: str) -> str:
    """The storage format of the layers' weight matrices.

    Args:
        dtype: The compute dtype.
        weights: A value that `models.files.resolve_weights` has returned.
    """
    return dtype if weights in (AUTO, NATIVE, DEQUANTIZED) else weights


def block_format(weight_format: str) -> str:
    """The format of block-quantized weight rows, a key of `BLOCK_FORMATS`, in a model with this weight format.

    The result is `weight_format` itself where the model has no block-quantized rows.
    """
    return EXPERT_FORMATS.get(weight_format, weight_format)


def matrix_format(weight_format: str, stem: str, dtype: str) -> str:
    """The storage format of one weight matrix of a layer.

    Args:
        weight_format: The weight format of the layers.
        stem: The name of the matrix without ".weight", or the name of its group of tensors.
        dtype: The compute dtype.
    """
    if weight_format in EXPERT_FORMATS:
        return EXPERT_FORMATS[weight_format] if stem in _OF_EXPERTS else dtype
    return weight_format


def matmul_key(weight_format: str, dtype: str, *, as_stored: bool = False) -> str:
    """The key under which a hardware profile has the FLOP/s of matrix products.

    Args:
        weight_format: The format of the weights.
        dtype: The dtype of the activations.
        as_stored: True for weights in the layout of the model's files, which streamed weights keep; False for weights
            that are prepacked for the kernel.
    """
    name = INT8 if weight_format == INT8 else dtype
    if weight_format in NATIVE_FORMATS:
        name = f"{block_format(weight_format)} {dtype}"
    return f"{name} in rows" if as_stored else name


def packed_matmul_key(dtype: str) -> str:
    """The key under which a hardware profile has the FLOP/s of matrix products with weights of "int4" as stored.

    Args:
        dtype: The dtype of the activations.
    """
    return f"{INT4} {dtype}"


def changes_results(weights: str) -> bool:
    """True where a value of `--weights` changes the model's numbers, as "int4" and "int8" do."""
    return weights in (INT4, INT8)


def weight_row_bytes(n: int, weight_format: str) -> int:
    """The stored bytes of a row of weights.

    Args:
        n: Number of weights in the row.
        weight_format: A compute dtype, "int4", "int8" or a key of `BLOCK_FORMATS`. A row in "int8" is padded to a
            multiple of four weights and has a scale. A row in a block format consists of whole blocks.
    """
    if weight_format == INT4:
        return packed_bytes(n, WEIGHT_CODE_BITS)
    if weight_format in BLOCK_FORMATS:
        values, num_bytes = BLOCK_FORMATS[weight_format]
        return -(-n // values) * num_bytes
    return -(-n // 4) * 4 + 4 if weight_format == INT8 else n * int(FORMAT_BYTES[weight_format])


@dataclass(frozen=True)
class KVFormat:
    """A storage format of keys and values (KV): each token has one row of numbers per KV head for K, and one for V.

    Attributes:
        name: "int8", "int5" or "int4" for quantized KV; else the dtype of the stored numbers.
        bits: Bits of a quantized number; 0 where the numbers are not quantized.
    """

    name: str
    bits: int = 0

    @classmethod
    def of(cls, name: str) -> KVFormat:
        """The KV format of this name."""
        return cls(name, KV_CODE_BITS.get(name, 0))

    @property
    def rotates_keys(self) -> bool:
        """True where keys are rotated before they are quantized, so that large and small channels need fewer bits.

        Formats with 8 bits need no rotation.
        """
        return 0 < self.bits < 8

    def row_bytes(self, n: int) -> int:
        """The stored bytes of a row of `n` numbers."""
        return packed_bytes(n, self.bits) if self.bits else n * int(FORMAT_BYTES[self.name])

    @property
    def summary_format(self) -> str:
        """The format of the smallest and largest numbers of a page's keys (`ops.page_choice`): that of the keys."""
        return "bfloat16" if self.bits else self.name

    def summary_bytes(self, n: int) -> int:
        """The bytes of these numbers, for a head of `n` numbers."""
        return 2 * n * int(FORMAT_BYTES[self.summary_format])


def packed_bytes(n: int, bits: int) -> int:
    """The bytes of a quantized row of `n` numbers, with the scale and zero point of each group of numbers.

    A last group with fewer numbers has them too.

    Args:
        n: Numbers of the row.
        bits: Bits of a quantized number.
    """
    return code_bytes(n, bits) + 4 * -(-n // CODE_GROUP)


def code_bytes(n: int, bits: int) -> int:
    """The bytes of the quantized numbers of a row, without scales and zero points; each group begins at a whole byte.

    Args:
        n: Numbers of the row.
        bits: Bits of a quantized number.
    """
    whole, rest = divmod(n, CODE_GROUP)
    return whole * _group_bytes(CODE_GROUP, bits) + _group_bytes(rest, bits)


def _group_bytes(size: int, bits: int) -> int:
    """The bytes of the quantized numbers of one group.

    A byte holds the lower four bits of two numbers. With 5 bits, the fifth bits of each half of the group follow.
    """
    half = (size + 1) // 2
    return {4: half, 5: half + 2 * ((half + 7) // 8), 8: size}[bits]
