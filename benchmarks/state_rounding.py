"""The cost of recurrent states in 16 bits (`--state-dtype bfloat16`) in quality, on random weights.

No published model with such states is at hand, so two things are measured that do not need one:

- The error of one Gated DeltaNet layer's results, token by token, by the half-life of its states: the longer a state
  lives, the more roundings it has gone through. Keys and values are random.
- The divergence of whole models whose heads have half-lives from 1 to 10,000 tokens. Texts are drawn from the model
  with exact states, and scored with both, one token a sweep, as in decoding. Where log-probabilities of tokens differ
  by d, the mean of d is the Kullback-Leibler divergence in nats a token, and so is half of the mean of d * d as long as
  both are small, with less noise. Perplexity of such texts is higher by its exponential.

    python benchmarks/state_rounding.py
    python benchmarks/state_rounding.py --tokens 64 --rows 2 --output trial.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_word_tokenizer
from recording import result_path, write
from safetensors.torch import save_file

from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.ops import state_dispatch as ops
from batchgen.ops.state_slots import StateSlots

HALF_LIVES = (10, 100, 1_000, 10_000)  # tokens
HEADS, DIM, SEQUENCES = 8, 128, 4
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "linear_num_value_heads": 4},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024, "linear_num_value_heads": 16},
}
VOCAB_SIZE, WEIGHT_STD = 4096, 0.08


def layer_error(half_life: int, tokens: int) -> float:
    """The relative error (root mean square) of a layer's results over the last quarter of so many tokens."""
    draw = torch.Generator().manual_seed(half_life)
    slots, starts = torch.arange(SEQUENCES), torch.arange(SEQUENCES + 1)
    shape = SEQUENCES, HEADS, DIM, DIM
    states = [torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)]
    g = torch.full((SEQUENCES, HEADS), -math.log(2) / half_life)
    errors, sizes = [], []
    for token in range(tokens):
        qkv = torch.randn(SEQUENCES, 3 * HEADS * DIM, generator=draw)
        beta = torch.randn(SEQUENCES, HEADS, generator=draw).sigmoid()
        exact, rounded = (
            ops.delta_rule(qkv, g, beta, held, StateSlots(slots, slots, starts), key_heads=HEADS) for held in states
        )
        if token >= tokens * 3 // 4:
            errors.append(float((rounded - exact).square().mean()))
            sizes.append(float(exact.square().mean()))
    return math.sqrt(np.mean(errors) / np.mean(sizes))


def make_model(path: Path, shape: dict[str, int]) -> Path:
    """Write a Qwen3.5 model of a shape with random weights, whose heads' half-lives are spread from 1 to 10,000."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=VOCAB_SIZE,
        linear_key_head_dim=DIM, linear_value_head_dim=DIM, linear_num_key_heads=4, linear_conv_kernel_dim=4,
        max_position_embeddings=8192, tie_word_embeddings=False, initializer_range=WEIGHT_STD, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = {name: tensor.clone() for name, tensor in Qwen3_5ForCausalLM(config).state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):  # softplus of it is the log decay, as a_log is 0
            decay = math.log(2) / torch.logspace(0, 4, len(tensor))
            tensor.copy_(decay.expm1().log())
        if name.endswith("A_log"):
            tensor.zero_()
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}))
    write_word_tokenizer(path, VOCAB_SIZE)
    return path


def divergence(path: Path, rows: int, tokens: int) -> dict[str, float]:
    """The divergence of a model with rounded states from itself, by texts that are drawn from it."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": tokens + 1, "max_num_batched_tokens": 1}
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=0)
    draw = np.random.default_rng(0)
    first = draw.integers(0, VOCAB_SIZE, rows).tolist()
    with Engine(str(path), max_num_seqs=rows, dtype="float32", max_model_len=tokens + 1) as engine:
        drawn = {c.index: c.samples[0].token_ids for c in engine.generate(Request([t], sampling) for t in first)}
    scores = []
    for state_dtype in ("float32", "bfloat16"):
        with Engine(str(path), max_num_seqs=1, state_dtype=state_dtype, **options) as engine:
            requests = [ScoreRequest([token], (list(drawn[i]),)) for i, token in enumerate(first)]
            done = {s.index: s.scores[0].tokens for s in engine.score(requests)}
        scores.append(np.array([[t.chosen.logprob for t in done[i]] for i in range(rows)]))
    less_likely = scores[0] - scores[1]
    return {
        "nats_per_token": float(-scores[0].mean()),
        "mean_difference_nats": float(less_likely.mean()),
        "standard_error_nats": float(less_likely.mean(1).std() / math.sqrt(rows)),
        "difference_rms_nats": float(np.sqrt(np.square(less_likely).mean())),
        "divergence_nats": float(np.square(less_likely).mean() / 2),
        "perplexity_ratio": float(np.exp(np.square(less_likely).mean() / 2)),
        "tokens_scored": less_likely.size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--rows", type=int, default=8, help="texts that are drawn from each model")
    parser.add_argument("--output", type=Path, default=result_path("state_rounding"))
    args = parser.parse_args()
    results: dict[str, Any] = {"layer_error": {}, "models": {}}
    for half_life in HALF_LIVES:
        results["layer_error"][half_life] = layer_error(half_life, args.tokens)
        print(f"half-life of {half_life:,} tokens: results differ by {results['layer_error'][half_life]:.2%}")
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            found = results["models"][name] = divergence(make_model(Path(folder) / name, shape), args.rows, args.tokens)
            print(
                f"{name}: log-probabilities differ by {found['difference_rms_nats']:.2e}, on average by"
                f" {found['mean_difference_nats']:+.1e} (± {found['standard_error_nats']:.1e}); perplexity"
                f" {100 * (found['perplexity_ratio'] - 1):+.4f} %"
            )
    write(args.output, {"tokens": args.tokens, "rows": args.rows, "results": results})


if __name__ == "__main__":
    main()
