"""Dtypes of stored numbers and their size."""

from __future__ import annotations

# Codes of some bits, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5).
INT4, INT8 = "int4", "int8"
CODE_GROUP = 64
WEIGHT_CODE_BITS = 4
# KV of 4 bits costs 7 % of perplexity; the fifth bit takes that to 1 % (docs/tiers.md).
KV_CODE_BITS = {INT4: 5, INT8: 8}
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": WEIGHT_CODE_BITS / 8 + 4.0 / CODE_GROUP}


def row_bytes(n: int, dtype: str) -> int:
    """Stored bytes of a row of `n` numbers of a weight, "int4" or any dtype to compute in."""
    return packed_bytes(n, WEIGHT_CODE_BITS) if dtype == INT4 else n * int(FORMAT_BYTES[dtype])


def kv_row_bytes(n: int, kv_format: str) -> int:
    """Stored bytes of `n` numbers of one token's K or V. kv_format: a dtype to compute in, "int8" or "int4"."""
    bits = KV_CODE_BITS.get(kv_format)
    return packed_bytes(n, bits) if bits else row_bytes(n, kv_format)


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
