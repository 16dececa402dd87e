"""Rows of blocks in any format, of a GGUF or not, with codes that take every value and scales that are numbers."""

from __future__ import annotations

import numpy as np

from batchgen.core.dtypes import BLOCK_FORMATS

# Where the fp16 numbers of a block are. MXFP4 has an exponent instead.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_rows(kind: str, rows: int, values: int, seed: int, size: float = 0.2) -> np.ndarray:
    """uint8 [rows, bytes of `values`]; values of about this size."""
    per_block, num_bytes = BLOCK_FORMATS[kind.lower()]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, values // per_block, num_bytes), dtype=np.uint8)
    for i, at in enumerate(_HALVES.get(kind, ())):
        scale = size * rng.uniform(0.5, 1.0, blocks.shape[:2]) / _largest(kind)
        # A minimum, so that values are on both sides of zero.
        half = scale if i == 0 else scale * (_largest(kind) / 2 if kind.endswith("_K") else -_largest(kind) / 2)
        blocks[..., at : at + 2] = half.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 127 + round(np.log2(size / 6))
    if kind.startswith("FP8_"):  # a scale, and no bytes that are no numbers
        blocks[..., :4] = (size / 448 * rng.uniform(0.5, 1.0, (*blocks.shape[:2], 1))).astype("<f4").view(np.uint8)
        blocks[..., 4:][blocks[..., 4:] & 127 == 127] = 0
    if kind.startswith("W4_"):  # a zero point, and the upper bytes of a scale
        scales = (size / 8 * rng.uniform(0.5, 1.0, blocks.shape[:2])).astype("<f4").view("<u4") & 0xFFFFFF00
        blocks[..., :4] = (scales | rng.integers(4, 12, scales.shape, dtype="<u4"))[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _largest(kind: str) -> float:
    """Of a code, times the largest integer that its scale is multiplied with."""
    codes = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 128, "IQ4_NL": 127}
    of_k = {"Q2_K": 3 * 15, "Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128, "IQ4_XS": 127 * 32}
    return (codes | of_k).get(kind, 1)
