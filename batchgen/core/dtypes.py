"""Dtypes of stored numbers and their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Codes of some bits, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5): KV, and
# weights of int4.
# Weights of int8 are codes of 8 bits, and a scale in fp32 for each row.
INT4, INT5, INT8 = "int4", "int5", "int8"
CODE_GROUP = 64
WEIGHT_CODE_BITS = 4
# Packed KV, the most exact first (docs/tiers.md has what each costs).
KV_CODE_BITS = {INT8: 8, INT5: 5, INT4: 4}
# Packed rows of a GGUF: values and bytes of a block. Weights in them are kept as they are in the file.
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
# Weights of 4 bits with a scale and a zero point for so many values of a row, as of GPTQ, AWQ and compressed-tensors
# (models/formats/groups.py): values and bytes of a block.
GROUP_FORMATS = {"w4_g32": (32, 20), "w4_g64": (64, 36), "w4_g128": (128, 68)}
# Weights in FP8 with a scale for so many values of a row (models/formats/fp8.py).
FP8_FORMATS = {"fp8_g32": (32, 36), "fp8_g128": (128, 132)}
# Rows of blocks: weights that are multiplied as they were found, and hold the numbers that they are expanded to.
BLOCK_FORMATS = {**GGUF_FORMATS, **GROUP_FORMATS, **FP8_FORMATS}
# Those of experts' matrices in blocks, and the others in the compute dtype, as gpt-oss has them: the experts' format.
MXFP4_EXPERTS = "mxfp4_experts"
EXPERT_FORMATS = {MXFP4_EXPERTS: "mxfp4"}
_OF_EXPERTS = (
    "up",
    "down",
    "gate_up",
)  # groups of a layer's tensors, and names of tensors, that have experts' matrices
# Each matrix in a format of its own, as most GGUFs have them (`ModelConfig.layer_formats`).
MIXED = "mixed"
# What a model is kept in as it was found, but for int8.
KEPT_FORMATS = (*BLOCK_FORMATS, *EXPERT_FORMATS, MIXED)
# Formats in which matrices of layers are packed. All else is in the compute dtype, but for `ModelConfig.end_formats`.
PACKED_FORMATS = (INT4, INT8, *KEPT_FORMATS)
# Values of `--weights`. AUTO: NATIVE or DEQUANTIZED, whichever is faster. NATIVE: in the model's own format.
# DEQUANTIZED: in the
# compute dtype.
AUTO, NATIVE, DEQUANTIZED = "auto", "native", "dequantized"
WEIGHTS = (AUTO, NATIVE, DEQUANTIZED, INT8, INT4)
# Of a weight, but for the scales of rows.
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
    """The format of the layers' matrices, for a value that `models.files.resolve_weights` has returned."""
    return dtype if weights in (AUTO, NATIVE, DEQUANTIZED) else weights


def block_format(weight_format: str) -> str:
    """The one of `BLOCK_FORMATS` that rows of bytes are in, where layers are in `weight_format`; that itself where there are none."""
    return EXPERT_FORMATS.get(weight_format, weight_format)


def matrix_format(weight_format: str, stem: str, dtype: str) -> str:
    """What a matrix of a layer is stored in.

    Args:
        weight_format: The layers'.
        stem: The matrix's name without ".weight", or its group of tensors.
        dtype: To compute in.
    """
    if weight_format in EXPERT_FORMATS:
        return EXPERT_FORMATS[weight_format] if stem in _OF_EXPERTS else dtype
    return weight_format


def matmul_key(weight_format: str, dtype: str, *, as_stored: bool = False) -> str:
    """The name that a profile has for the rates of a matmul.

    Args:
        weight_format: The format of the weights.
        dtype: The dtype of the activations.
        as_stored: True for weights as they are stored, as they are streamed; False for prepacked ones.
    """
    name = INT8 if weight_format == INT8 else dtype
    if weight_format in KEPT_FORMATS:
        name = f"{block_format(weight_format)} {dtype}"
    return f"{name} in rows" if as_stored else name


def changes_results(weights: str) -> bool:
    """Whether products are other ones than those of the weights in the compute dtype: rows of blocks hold the same numbers."""
    return weights in (INT4, INT8)


def weight_row_bytes(n: int, weight_format: str) -> int:
    """Stored bytes of a row of `n` weights.

    weight_format: a dtype to compute in, "int4", "int8": codes up to a multiple of four, and the row's scale; or one of
    `BLOCK_FORMATS`: whole blocks.
    """
    if weight_format == INT4:
        return packed_bytes(n, WEIGHT_CODE_BITS)
    if weight_format in BLOCK_FORMATS:
        values, num_bytes = BLOCK_FORMATS[weight_format]
        return -(-n // values) * num_bytes
    return -(-n // 4) * 4 + 4 if weight_format == INT8 else n * int(FORMAT_BYTES[weight_format])


@dataclass(frozen=True)
class KVFormat:
    """A format that the K and V of a token and head are stored in.

    Attributes:
        name: "int8", "int5" or "int4" of packed KV; else the dtype of its numbers.
        bits: Bits of a quantized value; 0: numbers are stored as they are.
    """

    name: str
    bits: int = 0

    @classmethod
    def of(cls, name: str) -> KVFormat:
        """The format of this name."""
        return cls(name, KV_CODE_BITS.get(name, 0))

    @property
    def rotates_keys(self) -> bool:
        """Whether keys are rotated before they are stored: 8 bits tell large channels from small ones as they are."""
        return 0 < self.bits < 8

    def row_bytes(self, n: int) -> int:
        """Stored bytes of `n` numbers."""
        return packed_bytes(n, self.bits) if self.bits else n * int(FORMAT_BYTES[self.name])


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of a packed row of `n` numbers: every group, the last one too, has its scale and zero point."""
    return code_bytes(n, bits) + 4 * -(-n // CODE_GROUP)


def code_bytes(n: int, bits: int) -> int:
    """Bytes of the codes of a packed row of `n` numbers: every group begins with a byte of its own."""
    whole, rest = divmod(n, CODE_GROUP)
    return whole * _group_bytes(CODE_GROUP, bits) + _group_bytes(rest, bits)


def _group_bytes(size: int, bits: int) -> int:
    """Of 4 and 5 bits the nibbles of two codes in each byte; of 5 bits then the fifth bits of either half."""
    half = (size + 1) // 2
    return {4: half, 5: half + 2 * ((half + 7) // 8), 8: size}[bits]
