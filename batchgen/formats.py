"""Number formats and their size."""

from __future__ import annotations

# 4 bits a number, and a scale and a zero point of 16 bits for each group of 64 (FlexGen section 5).
INT4_GROUP = 64
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5 + 4.0 / INT4_GROUP}
