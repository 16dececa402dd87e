"""The jobs that engines are compared on: prompt token ids, and how many tokens each row generates whatever they are."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from batchgen.cli.options import read_job_file
from batchgen.core.request import SamplingParams
from batchgen.job.options import JobOptions
from batchgen.job.step_source import open_rows
from batchgen.models.config import ModelConfig
from batchgen.models.files import resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer

ROOT = Path(__file__).parents[2]
AZURE_SAMPLE = ROOT / "benchmarks" / "data" / "azure_conv_sample.csv"
RECIPE = ROOT / "recipes" / "data_wrangling" / "fodors_zagats" / "job.toml"
_FIRST_RANDOM_ID = 100  # below are special tokens

Row = tuple[list[int], int]


@dataclass(frozen=True)
class Workload:
    """share_prefixes: prompts begin alike, and engines may make use of that."""

    rows: list[Row]
    share_prefixes: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.rows)


def fixed(model: str, vocab_size: int, rows: int | None) -> Workload:
    """Random prompts of 512 tokens, 32 tokens out."""
    return Workload(random_rows([(512, 32)] * (rows or 64), vocab_size))


def azure(model: str, vocab_size: int, rows: int | None) -> Workload:
    """Random prompts with lengths of the Azure LLM inference trace (conversation), clipped to 1024 in and 256 out.

    They are the first rows of a seeded sample.
    """
    with AZURE_SAMPLE.open() as file:
        sample = list(islice(csv.DictReader(file), rows or 64))
    lengths = [(_clip(row["ContextTokens"], 1024), _clip(row["GeneratedTokens"], 256)) for row in sample]
    return Workload(random_rows(lengths, vocab_size))


def match(model: str, vocab_size: int, rows: int | None) -> Workload:
    """The recipe's entity matching job: its prompts, which begin alike, and as many tokens as its answers may have."""
    options = read_job_file(RECIPE)
    sampling = {name: options.pop(name) for name in SamplingParams.names() if name in options}
    job = JobOptions(**options | {"model": model, "limit": rows}, output=None, sampling=SamplingParams(**sampling))
    source = open_rows(job)
    requests = [r for first, batch in source.dataset.batches(0) for r in source.requests_of(batch, first)]
    tokenizer = load_tokenizer(resolve_model(model))
    texts = [request.prompt for request in requests]
    chat = source.needs_chat_template
    prompts = [tokenizer.encode_chat(text) for text in texts] if chat else tokenizer.encode_batch(texts)
    return Workload([(list(ids), job.sampling.max_tokens) for ids in prompts], share_prefixes=True)


WORKLOADS = {"fixed": fixed, "azure": azure, "match": match}


def random_rows(lengths: list[tuple[int, int]], vocab_size: int, seed: int = 0) -> list[Row]:
    """A row of random token ids for each (prompt tokens, output tokens)."""
    draw = random.Random(seed)
    return [([draw.randrange(_FIRST_RANDOM_ID, vocab_size) for _ in range(size)], count) for size, count in lengths]


def work(workload: Workload, config: ModelConfig) -> dict[str, int]:
    """The least that an engine must do: FLOPs of linear layers, of logits where a token is drawn, and of attention, for
    prompts and single tokens apart; and bytes of bfloat16 KV that single tokens read, and of fp32 states that they read
    and write.

    Where prefixes are shared, every prefix that two prompts have in common counts once. A prompt's last token always
    counts, and the last token drawn goes through no layer.
    """
    computed = 0
    prefill_pairs = decode_pairs = 0  # (token, token it attends to)
    previous: list[int] = []
    for ids, count in sorted(workload.rows):
        same = _common(previous, ids) if workload.share_prefixes else 0
        first = min(same, len(ids) - 1)
        computed += len(ids) - first + count - 1
        prefill_pairs += _sum_to(len(ids)) - _sum_to(first)
        decode_pairs += _sum_to(len(ids) + count - 1) - _sum_to(len(ids))
        previous = ids
    state_bytes = len(config.state_layers) * 4 * math.prod(config.state.matrix_shape) if config.state else 0
    attention = config.flops_per_token(1) - config.flops_per_token(0)  # no window is as short as these rows
    return {
        "linear_flops": 2 * computed * config.num_layers * config.matmul_params_per_layer,
        "logits_flops": 2 * workload.output_tokens * config.vocab_size * config.embed_size,
        "prefill_attention_flops": attention * prefill_pairs,
        "decode_attention_flops": attention * decode_pairs,
        "decode_kv_bytes": config.kv_bytes_per_token(2) * decode_pairs,
        "decode_state_bytes": 2 * state_bytes * (workload.output_tokens - len(workload.rows)),
    }


def _clip(text: str, most: int) -> int:
    return max(1, min(int(text), most))


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _sum_to(n: int) -> int:
    return n * (n + 1) // 2
