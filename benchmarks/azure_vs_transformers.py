"""Total tokens/s of batchgen against transformers.generate, side by side in one run.

Prompt and output lengths are those of the first rows of a seeded sample of the Azure LLM inference trace
(conversation), clipped to --max-prompt and --max-output; prompts are random token ids, end-of-text is ignored, so
both engines do exactly the same work. transformers runs left-padded batches in input order, as its users do. It
generates each batch up to the batch's longest output; only the tokens asked for count.

    python benchmarks/azure_vs_transformers.py
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from pathlib import Path

import torch

import batchgen
from batchgen.job.report import versions
from batchgen.models.files import resolve_model

HERE = Path(__file__).parent


def workload(rows: int, max_prompt: int, max_output: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt token ids, output tokens) per row."""
    with open(HERE / "data" / "azure_conv_sample.csv") as file:
        sample = list(csv.DictReader(file))[:rows]
    rng = random.Random(0)
    return [
        (
            [rng.randrange(100, vocab_size) for _ in range(max(1, min(int(row["ContextTokens"]), max_prompt)))],
            max(1, min(int(row["GeneratedTokens"]), max_output)),
        )
        for row in sample
    ]


def run_batchgen(engine: batchgen.Engine, work) -> float:
    requests = [
        batchgen.Request(ids, batchgen.SamplingParams(max_tokens=count, ignore_eos=True)) for ids, count in work
    ]
    started = time.perf_counter()
    completions = list(engine.generate(requests))
    wall_s = time.perf_counter() - started
    for completion in completions:
        assert len(completion.samples[0].token_ids) == work[completion.index][1]
    return wall_s


def run_transformers(model, work, batch_size: int, pad: int) -> float:
    started = time.perf_counter()
    for first in range(0, len(work), batch_size):
        batch = work[first : first + batch_size]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
        count = max(count for _, count in batch)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=pad
            )
        assert out.shape[1] == longest + count
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32, help="of transformers.generate")
    parser.add_argument("--repeats", type=int, default=2, help="the engines take turns this many times")
    parser.add_argument("--output", default=str(HERE / "results" / "azure_vs_transformers.json"))
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    files = resolve_model(args.model)
    source = {"gguf_file": files.path.name} if files.kind == "gguf" else {}
    directory = files.path.parent if files.kind == "gguf" else files.path
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16, **source).eval()
    engine = batchgen.Engine(args.model, dtype="bfloat16", share_prefixes=False)
    pad = engine.parts.config.eos_token_ids[0]

    work = workload(args.rows, args.max_prompt, args.max_output, engine.parts.config.vocab_size)
    tokens = sum(len(ids) + count for ids, count in work)
    warm = [(ids[:64], 4) for ids, _ in work[:4]]
    run_batchgen(engine, warm)
    run_transformers(model, warm, args.batch_size, pad)

    walls: dict[str, list[float]] = {"batchgen": [], "transformers": []}
    for turn in range(args.repeats):
        walls["batchgen"].append(run_batchgen(engine, work))
        walls["transformers"].append(run_transformers(model, work, args.batch_size, pad))
        print(
            f"turn {turn + 1}: batchgen {walls['batchgen'][-1]:.1f} s, transformers {walls['transformers'][-1]:.1f} s"
        )
    engine.close()
    best = {name: min(times) for name, times in walls.items()}
    result = {
        "benchmark": "azure_vs_transformers",
        "arguments": {k: v for k, v in vars(args).items() if k != "output"},
        "prompt_tokens": sum(len(ids) for ids, _ in work),
        "output_tokens": sum(count for _, count in work),
        "threads": torch.get_num_threads(),
        "wall_s": walls,
        "total_tokens_per_s": {name: tokens / wall for name, wall in best.items()},
        "ratio": best["transformers"] / best["batchgen"],
        "ratio_per_turn": [t / b for b, t in zip(walls["batchgen"], walls["transformers"], strict=True)],
        "versions": versions(),
    }
    Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"batchgen {result['total_tokens_per_s']['batchgen']:,.0f} tokens/s,"
        f" transformers {result['total_tokens_per_s']['transformers']:,.0f} tokens/s: {result['ratio']:.2f} times"
    )


if __name__ == "__main__":
    main()
