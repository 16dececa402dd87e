"""The cost and the gain of attention budgets: perplexity, retrieval, and the speed of decoding long contexts.

- **Perplexity.** Windows of real text, Python's own reference documentation, are read as a prompt; the tokens after it
  are then decoded one by one, each attending to the budget's pages, and the token that the text has is scored.
- **Retrieval.** A sentence with a number of six digits lies somewhere in a text of the same kind, and the end of the
  prompt asks for it. The prompt is read whole, so the first digit is found by full attention; the others are not.
- **Speed.** Sweeps of decoding sequences with contexts of one length.

Everything goes through the engine's executor, on the CPU, in fp32 or bf16. The result file keeps what it has: a
measurement that was stopped goes on.

    python benchmarks/attention_budget.py
    python benchmarks/attention_budget.py --part perplexity --lengths 2048 --budget all --budget 10%
    python benchmarks/attention_budget.py --part speed --dtype bfloat16 --model demo
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from pathlib import Path

import numpy as np
import torch
from perplexity import TEXT, real_text
from recording import result_path, write

from batchgen.core.attention_budget import ALL
from batchgen.core.device import Device
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.engine.loader import LoadRequest, in_memory_policy, load_parts, resolve_budgets
from batchgen.engine.parts import EngineParts
from batchgen.models.files import ModelFiles, read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence

BUDGETS = (ALL, "50%", "20%", "10%", "5%")
LENGTHS = (2048, 4096, 8192)
DECODED = 512  # tokens of a window that are decoded
CHUNK = 512  # tokens of a prompt in a sweep
CITIES = (
    "Lisbon",
    "Oslo",
    "Dublin",
    "Prague",
    "Vienna",
    "Athens",
    "Warsaw",
    "Madrid",
    "Berlin",
    "Rome",
    "Paris",
    "Cairo",
)


class Rows:
    """Sequences in memory that go through the executor together, one sweep after the other."""

    def __init__(self, parts: EngineParts, prompts: List[List[int]], longest: int) -> None:
        self.parts, block = parts, parts.policy.kv_block_size
        pages = -(-longest // block)
        if len(prompts) * pages > parts.memory.kv_blocks["cpu"]:
            raise SystemExit("the KV of so many rows does not fit: give a smaller --rows")
        self.sequences = [
            Sequence(i, i, 0, list(prompt), SamplingParams(max_tokens=longest), KVPlacement.CPU)
            for i, prompt in enumerate(prompts)
        ]
        for i, sequence in enumerate(self.sequences):
            sequence.block_table = array("i", range(i * pages, (i + 1) * pages))

    def sweep(self, tokens: int) -> torch.Tensor:
        """Run up to so many tokens of each row; the logits after the last one, [rows, vocabulary]."""
        scheduled = [ScheduledSequence(s, min(tokens, s.num_remaining)) for s in self.sequences]
        last = torch.empty(len(self.sequences), self.parts.config.vocab_size)

        def keep(rows, logits, start) -> None:
            for (sequence, _), row in zip(rows, logits, strict=True):
                last[sequence.request_index] = row

        self.parts.executor.run([self.parts.pack(scheduled)], keep, vocabulary_chunks=False)
        for sequence, count in scheduled:
            sequence.num_computed += count
        return last

    def read_prompts(self) -> torch.Tensor:
        """Run all prompts, in chunks; the logits after them."""
        while True:
            logits = self.sweep(CHUNK)
            if not any(s.num_remaining for s in self.sequences):
                return logits

    def decode(self, tokens: List[int]) -> torch.Tensor:
        """Run one more token of each row; the logits after it."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.tokens.append(token)
        return self.sweep(1)


def load(files: ModelFiles, budget: str, dtype: str, rows: int, longest: int) -> EngineParts:
    """The model on the CPU, everything in memory."""
    device, config = Device("cpu"), read_config(files)
    policy = in_memory_policy(
        config,
        device,
        dtype=dtype,
        admission="continuous",
        max_num_seqs=rows,
        max_num_batched_tokens=rows * CHUNK,
        max_model_len=longest,
        share_prefixes=False,
        attention_budget=budget,
    )
    request = LoadRequest(
        files, config, policy, dtype=dtype, device=device, budgets=resolve_budgets(device), min_output_len=1
    )
    return load_parts(request, lambda: load_tokenizer(files))


def perplexity(parts: EngineParts, windows: List[List[int]]) -> dict:
    """The perplexity of the last tokens of each window, decoded after the tokens before them."""
    first = len(windows[0]) - DECODED
    rows = Rows(parts, [window[:first] for window in windows], len(windows[0]))
    logits, nats = rows.read_prompts(), 0.0
    for place in range(first, len(windows[0])):
        targets = torch.tensor([window[place] for window in windows])
        nats -= float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())
        if place + 1 < len(windows[0]):
            logits = rows.decode(targets.tolist())
    count = len(windows) * DECODED
    return {"perplexity": math.exp(nats / count), "nats_per_token": nats / count, "tokens_scored": count}


def needles(files: ModelFiles, length: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts of so many tokens, each with a number to find in it, and the tokens of the number."""
    tokenizer, rng = load_tokenizer(files), random.Random(length)
    text = tokenizer.encode_batch([real_text()])[0]
    for i in range(count):
        city, number = CITIES[i % len(CITIES)], str(rng.randrange(100000, 1000000))
        fact = tokenizer.encode_batch([f"\n\nThe secret number of {city} is {number}.\n\n"])[0]
        question = tokenizer.encode_batch([f"\n\nAs was said above, the secret number of {city} is"])[0]
        answer = tokenizer.encode_batch([f" {number}"])[0]
        filler = length - len(fact) - len(question) - len(answer)
        start = rng.randrange(len(text) - filler)
        body, depth = text[start : start + filler], round(filler * (i + 0.5) / count)
        yield [*body[:depth], *fact, *body[depth:], *question], answer


def retrieval(parts: EngineParts, cases: List[tuple[List[int], List[int]]]) -> dict:
    """The share of numbers found: all digits right, and digits beyond the first right where those before them are."""
    rows = Rows(parts, [prompt for prompt, _ in cases], max(len(p) + len(a) for p, a in cases))
    logits, right = rows.read_prompts(), []
    for place in range(len(cases[0][1])):
        chosen = logits.argmax(-1).tolist()
        right.append([token == answer[place] for token, (_, answer) in zip(chosen, cases, strict=True)])
        if place + 1 < len(cases[0][1]):
            logits = rows.decode([answer[place] for _, answer in cases])  # each digit is asked for by itself
    table = np.array(right)
    return {"numbers_found": float(table.all(0).mean()), "tokens_found": float(table.mean()), "cases": len(cases)}


def speed(parts: EngineParts, rows: int, length: int, sweeps: int = 24) -> dict:
    """Seconds of a decode sweep over rows with contexts of one length: the median."""
    rng = random.Random(1)
    batch = Rows(parts, [[rng.randrange(1000, 9000) for _ in range(length - sweeps - 8)]] * rows, length)
    batch.read_prompts()
    seconds = []
    for _ in range(sweeps):
        started = time.perf_counter()
        batch.decode([rng.randrange(1000, 9000)] * rows)
        seconds.append(time.perf_counter() - started)
    return {"sweep_s": float(np.median(seconds)), "tokens_per_s": rows / float(np.median(seconds)), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", action="append", choices=("perplexity", "retrieval", "speed"), help="[default: all]")
    parser.add_argument("--budget", action="append", help=f"[default: {', '.join(BUDGETS)}]")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rows", type=int, default=8, help="rows that go through the model together")
    parser.add_argument("--output", type=Path, default=result_path("attention_budget"))
    args = parser.parse_args()
    files = resolve_model(args.model)
    held = json.loads(args.output.read_text()) if args.output.exists() else {}
    results = held.get("results", {})
    text = load_tokenizer(files).encode_batch([real_text()])[0]
    for length in args.lengths:
        windows = [text[i * length : (i + 1) * length] for i in range(args.rows)]
        cases = list(needles(files, length, args.rows))
        for budget in args.budget or BUDGETS:
            for part in args.part or ("perplexity", "retrieval", "speed"):
                name = f"{args.model}, {args.dtype}, {part}, {length}, {budget}"
                if name in results:
                    continue
                parts = load(files, budget, args.dtype, args.rows, length + 16)
                if part == "perplexity":
                    results[name] = perplexity(parts, windows)
                elif part == "retrieval":
                    results[name] = retrieval(parts, cases)
                else:
                    results[name] = speed(parts, args.rows, length)
                parts.executor.close()
                write(args.output, {"text": TEXT, "results": results})
                print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
