"""Dtypes of stored numbers and their size."""

from __future__ import annotations

# 4 bits a number, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5).
INT4 = "int4"
INT4_GROUP = 64
# Of weights: 8 bits each, and a scale in fp32 for each row.
INT8 = "int8"
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5 + 4.0 / INT4_GROUP, "int8": 1.0}


def row_bytes(n: int, dtype: str) -> int:
    """Stored bytes of a row of `n` numbers; of int4, every group, the last one too, has its scale and zero point."""
    if dtype != INT4:
        return n * int(FORMAT_BYTES[dtype])
    whole, rest = divmod(n, INT4_GROUP)
    return whole * (INT4_GROUP // 2) + (rest + 1) // 2 + 4 * (whole + (rest > 0))


def weight_row_bytes(n: int, weight_format: str) -> int:
    """Stored bytes of a row of `n` weights; of int8, codes up to a multiple of four, and the row's scale."""
    return -(-n // 4) * 4 + 4 if weight_format == INT8 else row_bytes(n, weight_format)
