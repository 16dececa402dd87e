"""Drafts that are checked together, against the same jobs without: a shape larger than its memory, and many rows.

    python benchmarks/drafts.py --work-dir DIR

A model of Llama-3.2-3B's shape runs within 3 GiB of memory, so that its weights are read from disk in each sweep.
Random weights copy nothing, so some of them are built: embeddings are points on circles, one layer turns each circle by
one step, and the model thereby says that token i + 1 follows token i. The matrices of all other layers stay random, but
for those whose results are added to the residual: they are zero, and are read and multiplied like any others. A prompt
has a run of tokens among random ones, and the last token is the first of that run: the answer is a span of the prompt,
as in extraction. Nothing tells the drafts how the model was built. With `--copied` below 1 a part of the rows asks for
a run that the prompt has not, and nothing can be looked up there.

The second case is the demo model with restaurant entries under a JSON schema (benchmarks/structured_output.py), weights
on disk; the third is the first model with 256 rows, and fewer layers, where computation binds and drafts must cost
nothing.
Each case runs in turns with and without drafts, in an engine of its own; seconds are those of generation. Beside them
are those that the simulator predicts for the same policy on this machine, with the rates of drafts that the run had.
Cases that are not run again stay in the result file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from random_model import LLAMA_3B, make_model
from recording import machine, result_path, write
from structured_output import SCHEMA, conversations
from tier_runs import hardware_for

from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device
from batchgen.core.draft_rates import NO_RATES, DraftRates
from batchgen.core.dtypes import NATIVE
from batchgen.core.plan import Policy
from batchgen.core.request import Completion, Request, SamplingParams
from batchgen.core.units import parse_bytes
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts
from batchgen.engine.parts import EngineParts
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import problem_of
from batchgen.planner.simulation import simulate_job

_CPU = Device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="the model, twice its size")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("3GiB"))
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--copied", type=float, default=1.0, help="part of the rows whose answer is in the prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=["extraction", "json", "many rows"], default=None)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    cases: dict[str, Any] = {"extraction": extraction, "json": json_records, "many rows": many_rows}
    path = args.output or result_path("drafts", by_cpu=True)
    results = json.loads(path.read_text())["cases"] if path.exists() else {}
    sizes = {name: getattr(args, name) for name in ("layers", "rows", "memory", "prompt_tokens", "output_tokens")}
    for name in args.cases or cases:
        results[name] = {"arguments": sizes} | in_turns(cases[name], args)
        print(name, json.dumps(results[name], indent=2), flush=True)
    write(path, {"machine": machine(), "cases": results})


def in_turns(case: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a case with and without drafts, in turns; returns the runs and the gain of the fastest of each."""
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    texts = set()
    for _ in range(args.rounds):
        for name, drafts in (("off", False), ("on", True)):
            figures, tokens = case(args, drafts)
            runs[name].append(figures)
            texts.add(tokens)
    fastest = {name: min(run["seconds"] for run in found) for name, found in runs.items()}
    predicted = {name: min(runs_of, key=lambda run: run["seconds"])["predicted_s"] for name, runs_of in runs.items()}
    return {
        "gain": fastest["off"] / fastest["on"],
        "predicted_gain": predicted["off"] / predicted["on"],
        "same_tokens": len(texts) == 1,
        **runs,
    }


def extraction(args: argparse.Namespace, drafts: bool) -> tuple[dict[str, Any], Any]:
    """Rows whose answers are spans of their prompts, with weights on disk as far as memory does not hold them."""
    path = counting_model(args.work_dir / f"counting-{args.layers}", args.layers)
    requests = [
        Request(prompt(row, args, copied=row < args.copied * args.rows), sampling(args.output_tokens))
        for row in range(args.rows)
    ]
    return generate(path, requests, args.rows, args.memory, args, drafts)


def many_rows(args: argparse.Namespace, drafts: bool) -> tuple[dict[str, Any], Any]:
    """256 rows with two layers, which are read from disk in less time than computation takes."""
    path = counting_model(args.work_dir / "counting-2", 2)
    requests = [Request(prompt(row, args, copied=True), sampling(args.output_tokens)) for row in range(256)]
    return generate(path, requests, 256, parse_bytes("8GiB"), args, drafts)


def json_records(args: argparse.Namespace, drafts: bool) -> tuple[dict[str, Any], Any]:
    """Restaurant entries turned into records under a schema by the demo model, with its weights on disk."""
    params = SamplingParams(max_tokens=512, json_schema=SCHEMA)
    requests = [Request(messages, params) for messages in conversations(2 * args.rows)]
    return generate("demo", requests, args.rows, args.memory, args, drafts)


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def prompt(row: int, args: argparse.Namespace, *, copied: bool) -> list[int]:
    """Random tokens with a run of consecutive ones among them, and the first token of that run, or of another."""
    draw, length = random.Random(row), args.output_tokens + 2
    first = draw.randrange(1, LLAMA_3B["vocab_size"] - 2 * length)
    run = list(range(first, first + length))
    rest = [draw.randrange(1, LLAMA_3B["vocab_size"]) for _ in range(args.prompt_tokens - length - 1)]
    place = draw.randrange(len(rest))
    last = first if copied else draw.randrange(1, LLAMA_3B["vocab_size"] - length)
    return [*rest[:place], *run, *rest[place:], last]


def generate(
    model: Path | str,
    requests: list[Request],
    rows: int,
    memory: int,
    args: argparse.Namespace,
    drafts: bool,
) -> tuple[dict[str, Any], Any]:
    """The figures of a job in an engine of its own, and the tokens of its rows."""
    with Engine.from_parts(load(model, rows, memory, args), drafts=None if drafts else 0) as engine:
        policy, config = engine.policy, engine.parts.config
        started, started_cpu = time.perf_counter(), time.process_time()
        done = {completion.index: completion for completion in engine.generate(requests)}
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        stats, rates, forced = engine.stats, engine.draft_rates, engine.forced_per_step
    if forced:  # in sweeps without drafts too
        rates = replace(rates or replace(NO_RATES, most=0), forced=forced)
    errors = [completion.error for completion in done.values() if completion.error]
    if errors:
        raise SystemExit(f"{len(errors)} rows failed: {errors[0]}")
    figures = {
        "seconds": seconds,
        "predicted_s": predicted_s(policy, config, list(done.values()), memory, rates, args.work_dir),
        "rates": None if rates is None else asdict(rates),
        "cpu_s": cpu_s,
        "sweeps": stats.sweeps,
        "generated_tokens": stats.generated_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "forced_tokens": stats.forced_tokens,
    }
    return figures, tuple(done[i].samples[0].token_ids for i in range(len(requests)))


def predicted_s(
    policy: Policy, config: ModelConfig, done: list[Completion], memory: int, rates: DraftRates | None, work_dir: Path
) -> float:
    """The simulator's seconds of a job's sweeps under its policy, on this machine as measured.

    Each sequence has as many drafts as make the job fastest.
    """
    outputs = [len(completion.samples[0].token_ids) for completion in done]
    workload = Workload(
        len(done), Lengths.of(completion.prompt_tokens for completion in done), Lengths.of(outputs), max(outputs),
        drafts=rates,
    )  # fmt: skip
    hardware = hardware_for(_CPU, config, work_dir)
    problem = problem_of(
        hardware, config, workload, dtype="bfloat16", max_model_len=policy.max_model_len, cpu_memory=memory,
        max_num_seqs=policy.max_num_seqs, max_num_batched_tokens=policy.max_num_batched_tokens,
    )  # fmt: skip
    plan = replace(plan_problem(problem), policy=policy)

    def seconds(drafts: int) -> float:
        # The plan has drafts for its own placement, which may stream nothing.
        prediction = replace(plan.prediction, drafts=((policy.max_num_seqs, drafts),) if drafts else ())
        return simulate_job(replace(plan, prediction=prediction), config, hardware).total_s

    return min(map(seconds, (0, 1, 2, 4, 8, 16) if rates is not None and rates.most else (0,)))


def load(model: Path | str, rows: int, memory: int, args: argparse.Namespace) -> EngineParts:
    """The model in bfloat16, ready for so many rows, with the layers' weights on disk."""
    files = resolve_model(str(model))
    config = read_config(files)
    layers = 0, 0, config.num_layers
    store = find_or_convert(files, args.work_dir / "stores", "bfloat16", NATIVE)
    longest = 1024 if str(model) == "demo" else args.prompt_tokens + args.output_tokens
    policy = Policy(
        admission="continuous",
        gpu_batch_size=rows,
        num_gpu_batches=1,
        max_num_batched_tokens=2048,
        max_model_len=longest,
        kv_block_size=16,
        kv_blocks={},
        share_prefixes=True,
        weight_format=store.weight_format,
        kv_format="bfloat16",
        weight_layers=dict.fromkeys(config.layer_tensors, layers),
        head_tier="cpu",
        kv_seqs={"cpu": rows},
        activation_batches=(0, 1),
    )
    request = LoadRequest(
        files,
        config,
        policy,
        dtype="bfloat16",
        device=_CPU,
        budgets={"cpu": memory, "disk": 1 << 40},
        min_output_len=1,
        longest_tokens=longest,
        offload_dir=cache_dir(),
        store=store,
    )
    return load_parts(request, lambda: load_tokenizer(files))


def counting_model(path: Path, layers: int) -> Path:
    """A model of the 3B shape with so many layers whose next token is the last one plus one; most weights are random.

    Dimension 0 of each embedding is constant, so the first head of each group attends to its own token alone; two for
    each of 512 circles follow, which its values and outputs turn by the circle's step.
    """
    make_model(path, num_hidden_layers=layers)
    done = path / "counts"
    if done.exists():
        return path
    tensors = _Tensors(path)
    hidden, head, circles = LLAMA_3B["hidden_size"], LLAMA_3B["head_dim"], 512
    steps = np.random.default_rng(0).uniform(0, 2 * np.pi, circles)
    embedding = tensors["model.embed_tokens.weight"]
    for begin in range(0, len(embedding), 4096):
        angles = np.arange(begin, min(begin + 4096, len(embedding)))[:, None] * steps
        part = np.zeros((len(angles), hidden), np.float32)
        part[:, 0], part[:, 1 : 1 + circles] = 16.0, np.cos(angles)
        part[:, 1 + circles : 1 + 2 * circles] = np.sin(angles)
        embedding[begin : begin + 4096] = _bfloat16(part / 16)
    for layer in range(layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][:] = 0
    own = np.zeros((LLAMA_3B["num_key_value_heads"] * head, hidden), np.float32)
    own[:, 0] = 2.0
    heads = LLAMA_3B["num_attention_heads"] * head
    tensors["model.layers.0.self_attn.k_proj.weight"][:] = _bfloat16(own)
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = _bfloat16(np.tile(own, (heads // len(own), 1)))
    values = np.zeros((2 * circles, hidden), np.float32)
    values[:, 1 : 1 + 2 * circles] = np.eye(2 * circles)
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = _bfloat16(values)
    turn, gain = np.zeros((hidden, heads), np.float32), 8.0
    value_of = np.arange(2 * circles)  # head of each value: the first of those that share its KV head
    column = value_of // head * (heads // len(own)) * head + value_of % head
    i = np.arange(circles)
    turn[1 + i, column[i]], turn[1 + i, column[circles + i]] = np.cos(steps), -np.sin(steps)
    turn[1 + circles + i, column[i]], turn[1 + circles + i, column[circles + i]] = np.sin(steps), np.cos(steps)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = _bfloat16(gain * turn)
    done.touch()
    return path


class _Tensors:
    """The tensors of safetensors files in a directory, bfloat16 as uint16, to be written in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]

    def __getitem__(self, name: str) -> np.ndarray:
        path = self._path / self._files[name]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
        offset = 8 + length + entry["data_offsets"][0]
        return np.memmap(path, np.uint16, "r+", offset, tuple(entry["shape"]))


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The upper halves of fp32 numbers, rounded to nearest."""
    return ((numbers.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


if __name__ == "__main__":
    main()
