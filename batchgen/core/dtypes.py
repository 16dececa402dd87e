"""Dtypes of stored numbers and their size."""

from __future__ import annotations

# 4 bits a number, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5).
INT4 = "int4"
INT4_GROUP = 64
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5 + 4.0 / INT4_GROUP}


def row_bytes(n: int, dtype: str) -> int:
    """Stored bytes of a row of `n` numbers; of int4, every group, the last one too, has its scale and zero point."""
    if dtype != INT4:
        return n * int(FORMAT_BYTES[dtype])
    whole, rest = divmod(n, INT4_GROUP)
    return whole * (INT4_GROUP // 2) + (rest + 1) // 2 + 4 * (whole + (rest > 0))
