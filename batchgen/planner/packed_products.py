"""The number of tokens up to which a GPU multiplies 4-bit weights as they are stored, and does not dequantize them."""

from __future__ import annotations

from batchgen.core.dtypes import INT4, packed_matmul_key
from batchgen.planner.experts import first_tokens
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import dequantize_s, matmul_s


def packed_tokens(s: CostInputs) -> int:
    """The most tokens of a sweep for which products with weights as they are stored are faster than with numbers.

    Weights as they are stored take a quarter of the reads, but every tile of rows of activations unpacks them anew.
    Dequantized weights are written once a sweep, of experts all, and then are read by each micro-batch. 0 where the
    profile has no rate of such products, as where no kernel can make them.
    """
    key = packed_matmul_key(s.compute_format)
    if s.weight_format != INT4 or not s.on_gpu or not s.rates.has_rates("gemm_flops_per_s", key):
        return 0

    def is_slower(tokens: int) -> bool:
        packed, numbers = (matmul_s(s, tokens, s.num_gpu_batches, packed=packed).total for packed in (True, False))
        return packed >= numbers + dequantize_s(s)

    return first_tokens(is_slower) - 1
