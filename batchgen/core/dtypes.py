"""Dtypes of stored numbers and their size."""

from __future__ import annotations

# KV: codes of 4 or 8 bits, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5). Weights: of int4 the
# same; of int8 codes of 8 bits, and a scale in fp32 for each row.
INT4, INT8 = "int4", "int8"
CODE_BITS = {INT4: 4, INT8: 8}
CODE_GROUP = 64
# Of a weight, but for the scales of rows.
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, INT4: 0.5 + 4.0 / CODE_GROUP, INT8: 1.0}


def row_bytes(n: int, dtype: str) -> int:
    """Stored bytes of a row of `n` numbers; of codes, every group, the last one too, has its scale and zero point."""
    if dtype not in CODE_BITS:
        return n * int(FORMAT_BYTES[dtype])
    return code_bytes(n, CODE_BITS[dtype]) + 4 * -(-n // CODE_GROUP)


def code_bytes(n: int, bits: int) -> int:
    """Bytes of the codes of a packed row of `n` numbers: every group begins with a byte of its own."""
    whole, rest = divmod(n, CODE_GROUP)
    return whole * (CODE_GROUP * bits // 8) + (rest * bits + 7) // 8


def weight_row_bytes(n: int, weight_format: str) -> int:
    """Stored bytes of a row of `n` weights; of int8, codes up to a multiple of four, and the row's scale."""
    return -(-n // 4) * 4 + 4 if weight_format == INT8 else row_bytes(n, weight_format)
