"""The time of one layer's mixture of experts on a CUDA GPU, of Qwen3-30B-A3B's shape.

It is taken by the kernels that group tokens by expert, and by torch, as on a GPU without such kernels, where the host
waits for the router. Writes JSON. Takes some seconds.

    python benchmarks/gpu_experts.py --output experts.json
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from batchgen.models import experts
from batchgen.models.hf.config import config_of_hf
from batchgen.ops import dispatch as ops
from batchgen.profiler.timing import FULL, Device, Trial

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32,
    "head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 8, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip
TOKENS = (16, 256, 4096)


def measure(dtype: torch.dtype, divisor: int, all_tokens: tuple[int, ...]) -> list[dict[str, float]]:
    """Seconds of each way, for several numbers of tokens. The layer's sizes are divided by a divisor."""
    divided = {name: SHAPE[name] // divisor for name in ("hidden_size", "moe_intermediate_size", "num_experts")}
    config, device = config_of_hf(SHAPE | divided), Device("cuda")
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "router.weight": (config.num_experts, hidden),
        "gate_up.weight": (config.num_experts * 2 * inner, hidden),
        "down.weight": (config.num_experts * hidden, inner),
    }
    weights = {name: torch.empty(s, dtype=dtype, device="cuda").normal_(std=0.02) for name, s in shapes.items()}
    found = []
    for tokens in all_tokens:
        x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        routes = experts.route(config, weights, x)
        if not ops.groups_experts(x, weights["gate_up.weight"], weights["down.weight"]):
            sys.exit("gpu_experts: there are no kernels for this GPU: Triton, and compute capability 8.0 or more")
        timed = {}
        for name, way in (("grouped_s", experts.together), ("torch_s", experts.chosen_experts)):
            call = partial(way, config, weights, x, *routes)
            timed[name] = 1 / device.rate(Trial(1, lambda i, call=call: call()), FULL)
        found.append({"tokens": tokens, **timed})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--divisor", type=int, default=1, help="the layer's sizes are divided by it")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_experts: torch finds no CUDA device here")
    with torch.inference_mode():
        found = measure(getattr(torch, args.dtype), args.divisor, tuple(args.tokens))
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    cases = [
        f"{case['tokens']:,.0f} tokens {case['grouped_s'] * 1e3:.2f} ms ({case['torch_s'] * 1e3:.2f} by torch)"
        for case in found
    ]
    print(f"summary: {'; '.join(cases)}")


if __name__ == "__main__":
    main()
