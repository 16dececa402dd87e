"""The cost and the gain of attention budgets: perplexity, retrieval, and the speed of decoding long contexts.

- **Perplexity.** Windows of real text, Python's own reference documentation, are read as a prompt; the tokens after it
  are then decoded one by one, each attending to the budget's pages, and the token that the text has is scored.
- **Retrieval.** A sentence with a number of six digits lies somewhere in a text of the same kind, and the end of the
  prompt asks for it. The prompt is read whole, so the first digit is found by full attention; the others are not.
- **Speed.** Sweeps of decoding sequences with contexts of one length, whose KV is in memory or on disk. KV is random
  numbers, so that chosen pages lie apart. Budgets take turns, sweep by sweep.

Everything goes through the engine's executor, on the CPU, in fp32 or bf16. A prompt is read once for all budgets, which
begin with the same KV. The result file keeps what it has: a measurement that was stopped goes on.

    python benchmarks/attention_budget.py
    python benchmarks/attention_budget.py --part perplexity --lengths 2048 --budget all --budget 10%
    python benchmarks/attention_budget.py --part speed --dtype bfloat16 --model demo
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import replace
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
from batchgen.ops.chosen_attention import summarise
from batchgen.runtime.memory.transfers import untouched
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.staging import Run

BUDGETS = (ALL, "50%", "20%", "10%", "5%")
PLACEMENTS = (KVPlacement.CPU, KVPlacement.DISK)
LENGTHS = (2048, 4096, 8192)
DECODED = 512  # tokens of a window that are decoded
CHUNK = 512  # tokens of a prompt in a sweep
SWEEPS = 12  # that are timed, and one
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
    """Sequences that go through the executor together, one sweep after the other."""

    def __init__(self, parts: EngineParts, prompts: List[List[int]], longest: int) -> None:
        self.parts, block = parts, parts.policy.kv_block_size
        pages = -(-longest // block)
        (placement,) = parts.policy.kv_seqs
        if len(prompts) * pages > parts.memory.kv_blocks[KVPlacement(placement).tier]:
            raise SystemExit("the KV of so many rows does not fit: give a smaller --rows")
        self.sequences = [
            Sequence(i, i, 0, list(prompt), SamplingParams(max_tokens=longest), KVPlacement(placement))
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


def load(
    files: ModelFiles, budget: str, dtype: str, rows: int, longest: int, placement: KVPlacement = KVPlacement.CPU
) -> EngineParts:
    """The model on the CPU, everything in memory but perhaps KV."""
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
    policy = replace(policy, kv_seqs={str(placement): rows})
    budgets, folder = dict(resolve_budgets(device)), Path(tempfile.gettempdir())
    if placement is KVPlacement.DISK:
        budgets |= {"disk": shutil.disk_usage(folder).free // 2}
    request = LoadRequest(
        files, config, policy, dtype=dtype, device=device, budgets=budgets, min_output_len=1, offload_dir=folder
    )
    return load_parts(request, lambda: load_tokenizer(files))


def summarise_pages(parts: EngineParts, pages: torch.Tensor, layer: int, kv: torch.Tensor) -> None:
    """Write the summaries of pages that are complete, if the layer chooses any. kv: KV of the pages in their order."""
    if layer in parts.executor.kv_cache._summaries.get("cpu", {}):
        blocks, bits = torch.arange(len(pages)), parts.executor.kv_cache.format.bits
        summarise(kv, blocks, pages, parts.executor.kv_cache.summaries("cpu", layer), bits=bits)


class Prompts:
    """Prompts that were read once; engines with budgets of their own go on from them."""

    def __init__(self, files: ModelFiles, dtype: str, prompts: List[List[int]], longest: int) -> None:
        self._prompts, self._longest = prompts, longest
        parts = load(files, ALL, dtype, len(prompts), longest)
        rows = Rows(parts, prompts, longest)
        self._logits = rows.read_prompts()
        self._blocks = max(max(s.block_table) for s in rows.sequences) + 1
        pools = parts.executor.kv_cache.pools["cpu"]
        self._kv = {layer: pool[: self._blocks].clone() for layer, pool in pools.items()}
        parts.executor.close()

    def rows(self, parts: EngineParts) -> tuple[Rows, torch.Tensor]:
        """The rows in another engine as they were when their prompts had been read, and their logits."""
        rows, size = Rows(parts, self._prompts, self._longest), parts.policy.kv_block_size
        complete = [page for s in rows.sequences for page in s.block_table[: len(s.tokens) // size]]
        pages = torch.tensor(complete)
        for layer, kv in self._kv.items():
            parts.executor.kv_cache.pools["cpu"][layer][: self._blocks].copy_(kv)
            summarise_pages(parts, pages, layer, kv.index_select(0, pages))
        for sequence in rows.sequences:
            sequence.num_computed = len(sequence.tokens)
        return rows, self._logits


def perplexity(parts: EngineParts, prompts: Prompts, windows: List[List[int]]) -> dict:
    """The perplexity of the last tokens of each window, decoded after the tokens before them."""
    first, nats = len(windows[0]) - DECODED, torch.zeros(len(windows), dtype=torch.float64)
    rows, logits = prompts.rows(parts)
    for place in range(first, len(windows[0])):
        targets = torch.tensor([window[place] for window in windows])
        nats -= logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        if place + 1 < len(windows[0]):
            logits = rows.decode(targets.tolist())
    by_window = (nats / DECODED).tolist()
    mean = sum(by_window) / len(windows)
    return {
        "perplexity": math.exp(mean),
        "nats_per_token": mean,
        "nats_by_window": by_window,
        "tokens_scored": len(windows) * DECODED,
    }


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


def retrieval(parts: EngineParts, prompts: Prompts, cases: List[tuple[List[int], List[int]]]) -> dict:
    """The share of numbers found: all digits right, and digits beyond the first right where those before them are."""
    (rows, logits), right = prompts.rows(parts), []
    for place in range(len(cases[0][1])):
        chosen = logits.argmax(-1).tolist()
        right.append([token == answer[place] for token, (_, answer) in zip(chosen, cases, strict=True)])
        if place + 1 < len(cases[0][1]):
            logits = rows.decode([answer[place] for _, answer in cases])  # each digit is asked for by itself
    table = np.array(right)
    return {"numbers_found": float(table.all(0).mean()), "tokens_found": float(table.mean()), "cases": len(cases)}


def fill_with_random_kv(parts: EngineParts, rows: Rows, length: int) -> None:
    """Give each row a context of so many tokens, with random numbers as KV."""
    cache, size = parts.executor.kv_cache, parts.policy.kv_block_size
    count = -(-length // size)
    for layer in parts.config.kv_layers:
        shape = cache.shape_of(layer)
        raw = untouched((count, shape.disk_block_bytes), torch.uint8)
        kv = torch.randn((count, *shape.block), generator=torch.Generator().manual_seed(layer)).to(shape.dtype)
        raw[:, : shape.block_bytes] = kv.view(torch.uint8).view(count, -1)
        for sequence in rows.sequences:
            first = sequence.block_table[0]
            if sequence.kv_placement is KVPlacement.DISK:
                cache._on_disk.write(layer, raw, [Run(first, 0, count)])
            else:
                cache.pools["cpu"][layer][first : first + count].copy_(kv)
            summarise_pages(parts, torch.arange(first, first + length // size), layer, kv[: length // size])
    for sequence in rows.sequences:
        sequence.num_computed = length


def speed(files: ModelFiles, budgets: List[str], placement: KVPlacement, dtype: str, rows: int, length: int) -> dict:
    """Seconds of a decode sweep over rows with contexts of one length: the median, by budget."""
    rng, batches = random.Random(1), {}
    for budget in budgets:
        parts = load(files, budget, dtype, rows, length, placement)
        start = length - SWEEPS - 8
        batches[budget] = Rows(parts, [[rng.randrange(1000, 9000) for _ in range(start)]] * rows, length)
        fill_with_random_kv(parts, batches[budget], start)
    seconds: dict[str, list[float]] = {budget: [] for budget in budgets}
    read: dict[str, float] = {}
    for sweep in range(SWEEPS):
        for budget, batch in batches.items():
            before, started = batch.parts.executor.bytes_moved["disk_read"], time.perf_counter()
            batch.decode([rng.randrange(1000, 9000)] * rows)
            batch.parts.executor.lanes.drain()
            if sweep:  # the first one has pages of memory to ask for
                seconds[budget].append(time.perf_counter() - started)
                read[budget] = batch.parts.executor.bytes_moved["disk_read"] - before
    for batch in batches.values():
        batch.parts.executor.close()
    medians = {budget: float(np.median(times)) for budget, times in seconds.items()}
    return {
        "rows": rows,
        "sweep_s": medians,
        "disk_bytes_read": read,
        "times_as_fast": {budget: medians[ALL] / s for budget, s in medians.items()} if ALL in medians else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", action="append", choices=("perplexity", "retrieval", "speed"), help="[default: all]")
    parser.add_argument("--budget", action="append", help=f"[default: {', '.join(BUDGETS)}]")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rows", type=int, default=8, help="rows that go through the model together")
    parser.add_argument("-o", "--output", type=Path, default=result_path("attention_budget"))
    args = parser.parse_args()
    files = resolve_model(args.model)
    held = json.loads(args.output.read_text()) if args.output.exists() else {}
    results, budgets = held.get("results", {}), args.budget or BUDGETS

    def keep(name: str, result: dict) -> None:
        results[name] = result
        write(args.output, {"text": TEXT, "results": results})
        print(name, result, flush=True)

    text = load_tokenizer(files).encode_batch([real_text()])[0]
    for length in args.lengths:
        name = f"{args.model}, {args.dtype}, {length}"
        for placement in PLACEMENTS if "speed" in (args.part or ("speed",)) else ():
            if (title := f"{name}, speed, {placement}") not in results:
                keep(title, speed(files, budgets, placement, args.dtype, args.rows, length))
        for part in args.part or ("perplexity", "retrieval"):
            missing = [budget for budget in budgets if f"{name}, {part}, {budget}" not in results]
            if part == "speed" or not missing:
                continue
            windows = [text[i * length : (i + 1) * length] for i in range(args.rows)]
            cases = list(needles(files, length, args.rows))
            read = [w[: length - DECODED] for w in windows] if part == "perplexity" else [p for p, _ in cases]
            prompts = Prompts(files, args.dtype, read, length + 16)
            for budget in missing:
                parts = load(files, budget, args.dtype, args.rows, length + 16)
                found = (
                    perplexity(parts, prompts, windows) if part == "perplexity" else retrieval(parts, prompts, cases)
                )
                parts.executor.close()
                keep(f"{name}, {part}, {budget}", {**found, "rows": args.rows})


if __name__ == "__main__":
    main()
