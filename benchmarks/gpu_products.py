"""The time of one layer's matrix products on a CUDA GPU by the format of the weights, of Llama-3.1-8B's shape.

Weights are in 16 bits, in int8, in blocks of FP8 and of 4 bits, and in int4: multiplied as they are stored, or
dequantized first. Writes JSON. Takes most of a minute, to compile kernels.

    python benchmarks/gpu_products.py --output products.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from batchgen.core.dtypes import INT4, INT8, dtype_name
from batchgen.models.hf.config import config_of_hf
from batchgen.ops import dispatch as ops
from batchgen.profiler.compute import dequantize_rate, gemm_rates
from batchgen.profiler.timing import FULL, Device

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8,
}  # fmt: skip
BLOCKS = ("fp8_g128", "w4_g128")
TOKENS = (1, 16, 64, 128, 256, 1024)


def measure(dtype: torch.dtype) -> list[dict[str, float]]:
    """Seconds of a layer's products in each format, for several numbers of tokens."""
    config, device = config_of_hf(SHAPE), Device("cuda")
    effort = replace(FULL, tokens=TOKENS)
    pool = device.pool(dtype, effort)
    params = config.matmul_params_per_layer
    formats = dtype_name(dtype), INT8, INT4, *BLOCKS
    rates = {name: gemm_rates(device, pool, (config,), effort, name) for name in formats}
    dequantizing_s = params * dtype.itemsize / dequantize_rate(device, pool, config, effort)

    def seconds(name: str, tokens: int) -> float:
        return 2 * params * tokens / rates[name].at(width=config.hidden_size, tokens=tokens)

    return [
        {
            "tokens": tokens,
            "numbers_s": seconds(dtype_name(dtype), tokens),
            "int8_s": seconds(INT8, tokens),
            "int4_s": seconds(INT4, tokens),
            **{f"{name}_s": seconds(name, tokens) for name in BLOCKS},
            "int4_dequantized_s": dequantizing_s + seconds(dtype_name(dtype), tokens),
        }
        for tokens in TOKENS
    ]


def blocks_of(case: dict[str, float]) -> dict[str, float]:
    """Seconds by the format of blocks."""
    return {name: case[f"{name}_s"] for name in BLOCKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_products: torch finds no CUDA device here")
    if not ops.multiplies_packed(torch.device("cuda")):
        sys.exit("gpu_products: there are no kernels for this GPU: Triton, and compute capability 8.0 or more")
    with torch.inference_mode():
        found = measure(getattr(torch, args.dtype))
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    cases = [
        f"{case['tokens']:,.0f} tokens {case['numbers_s'] * 1e6:,.0f} us (int8 {case['int8_s'] * 1e6:,.0f}, int4"
        f" {case['int4_s'] * 1e6:,.0f}, dequantized {case['int4_dequantized_s'] * 1e6:,.0f},"
        f" {', '.join(f'{name} {seconds * 1e6:,.0f}' for name, seconds in blocks_of(case).items())})"
        for case in found
    ]
    print(f"summary: a layer's products of {'; '.join(cases)}")


if __name__ == "__main__":
    main()
