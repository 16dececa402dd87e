"""transformers' generate() with Accelerate's disk offload: some layers stay in memory, the others are read from the
checkpoint in every step. Runs in an environment that has transformers and accelerate; nothing of batchgen is needed.

Rows are generated in batches of one size, in input order. Writes JSON, see `main`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

_LEAST_DECODES = 2


class StepTimer(StoppingCriteria):
    """Notes when each token was there, and stops at time `until`, or after the first few tokens if they take longer."""

    def __init__(self, until: float) -> None:
        self.times: list[float] = []
        self._until = until

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.full((len(input_ids),), self.times[-1] >= self._until and len(self.times) > _LEAST_DECODES)


def load(path: str, resident_layers: int, offload_dir: str):
    """The model with its first layers and all that is no layer in memory, the rest on disk."""
    count = AutoConfig.from_pretrained(path).num_hidden_layers
    device_map = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    device_map |= {f"model.layers.{i}": "cpu" if i < resident_layers else "disk" for i in range(count)}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, device_map=device_map, offload_folder=offload_dir
    ).eval()


def run(model, prompts: list[list[int]], max_new_tokens: int, batch_size: int, until: float):
    """(generated ids per row, [{"prompt_tokens", "generated_tokens", "seconds"} per step]), stopping when all is done,
    or at time `until`."""
    generated: list[list[int]] = []
    passes = []
    for first in range(0, len(prompts), batch_size):
        ids = torch.tensor(prompts[first : first + batch_size])  # [rows, prompt tokens]: all prompts are of one length
        timer = StepTimer(until)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([timer]),
            )
        for step, (begin, end) in enumerate(zip([started, *timer.times], timer.times, strict=False)):
            prompt_tokens = ids.numel() if step == 0 else 0
            passes.append({"prompt_tokens": prompt_tokens, "generated_tokens": len(ids), "seconds": end - begin})
        generated += out[:, ids.shape[1] :].tolist()
        if time.perf_counter() >= until:
            break
    return generated, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", required=True, help="JSON: a list of lists of token ids, all of one length")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--resident-layers", type=int, required=True, help="layers that stay in memory")
    parser.add_argument("--offload-dir", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-s", type=float, required=True, help="stop after this time, loading not counted")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    with open(args.prompts) as file:
        prompts = json.load(file)
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    model = load(args.model, args.resident_layers, args.offload_dir)
    ready = time.perf_counter()
    generated, passes = run(model, prompts, args.max_new_tokens, args.batch_size, ready + args.limit_s)
    with open(args.output, "w") as file:
        json.dump(
            {
                "load_s": ready - started,
                "generation_s": time.perf_counter() - ready,
                "complete": len(generated) == len(prompts)
                and all(len(ids) == args.max_new_tokens for ids in generated),
                "passes": passes,
                "generated": generated,
                "versions": {
                    name: importlib.metadata.version(name) for name in ("accelerate", "transformers", "torch")
                },
            },
            file,
        )


if __name__ == "__main__":
    main()
