"""Drafts that are checked together, against the same jobs without: a shape larger than its memory, and many rows.

    python benchmarks/drafts.py --work-dir DIR

A model of Llama-3.2-3B's shape runs within 3 GiB of memory, so that its weights are read from disk in each sweep.
Random weights copy nothing, so some of them are built, and the model says that token i + 1 follows token i
(counting_models.py). A prompt has a run of tokens among random ones, and the last token is the first of that run: the
answer is a span of the prompt, as in extraction. Nothing tells the drafts how the model was built. With `--copied`
below 1 a part of the rows asks for a run that the prompt has not, and nothing can be looked up there.

"experts 16" and "experts 64" are so many rows of the same kind for gpt-oss-20b's shape in MXFP4 (12.8 GB) within 8 GiB,
under the policy that the planner chooses. "json" is the demo model with restaurant entries under a JSON schema
(benchmarks/structured_output.py), weights on disk. "many rows" is the first model with 256 rows, and fewer layers,
where computation binds and drafts must cost nothing.

Each case runs in turns with and without drafts, in an engine of its own; seconds are those of generation. Beside them
are those that the simulator predicts for the same policy on this machine, with the rates of drafts and of experts that
the run had.
Cases that are not run again stay in the result file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from counting_models import counting_model
from random_model import LLAMA_3B
from random_shapes import write_store
from recording import machine, result_path, write
from structured_output import SCHEMA, conversations
from tier_runs import hardware_for

from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device
from batchgen.core.draft_rates import NO_RATES, DraftRates
from batchgen.core.dtypes import NATIVE
from batchgen.core.plan import Policy
from batchgen.core.request import Completion, Request, SamplingParams
from batchgen.core.routing import INDEPENDENT, Routing
from batchgen.core.units import parse_bytes
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts, process_bytes
from batchgen.engine.parts import EngineParts
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model, resolve_weights
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import Problem, problem_of
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
    cases: dict[str, Any] = {
        "extraction": extraction,
        "experts 16": partial(experts, 16),
        "experts 64": partial(experts, 64),
        "json": json_records,
        "many rows": many_rows,
    }
    parser.add_argument("--cases", nargs="+", choices=cases, default=None)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
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


def experts(rows: int, args: argparse.Namespace, drafts: bool) -> tuple[dict[str, Any], Any]:
    """Rows of `extraction` for a mixture of experts of which memory holds about a half."""
    path = write_store(args.work_dir / "counting-experts", "gpt-oss-20b", counts=True)
    requests = [Request(prompt(row, args, copied=True), sampling(args.output_tokens)) for row in range(rows)]
    return generate(path, requests, rows, parse_bytes("8GiB"), args, drafts, planned=True)


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
    *,
    planned: bool = False,
) -> tuple[dict[str, Any], Any]:
    """The figures of a job in an engine of its own, and the tokens of its rows.

    Args:
        planned: Whether the policy is the planner's; otherwise the layers' weights are on disk.
    """
    process = process_bytes()
    parts = load(model, rows, memory, process, args, planned=planned)
    with Engine.from_parts(parts, drafts=None if drafts else 0) as engine:
        policy, config = engine.policy, engine.parts.config
        started, started_cpu = time.perf_counter(), time.process_time()
        done = {completion.index: completion for completion in engine.generate(requests)}
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        stats, rates, counts = engine.stats, engine.draft_rates, engine.parts.executor.routing
        forced = engine.forced_per_step
    if forced:  # in sweeps without drafts too
        rates = replace(rates or replace(NO_RATES, most=0), forced=forced)
    errors = [completion.error for completion in done.values() if completion.error]
    if errors:
        raise SystemExit(f"{len(errors)} rows failed: {errors[0]}")
    routing = None if counts is None else counts.fitted()
    figures = {
        "seconds": seconds,
        "predicted_s": predicted_s(policy, config, list(done.values()), memory, process, rates, routing, args.work_dir),
        "policy": policy.to_json(),
        "routing": None if routing is None else asdict(routing),
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
    policy: Policy,
    config: ModelConfig,
    done: list[Completion],
    memory: int,
    process: int,
    rates: DraftRates | None,
    routing: Routing | None,
    work_dir: Path,
) -> float:
    """The simulator's seconds of a job's sweeps under its policy, on this machine as measured.

    Each sequence has as many drafts as make the job fastest.
    """
    outputs = [len(completion.samples[0].token_ids) for completion in done]
    workload = Workload(
        len(done), Lengths.of(completion.prompt_tokens for completion in done), Lengths.of(outputs), max(outputs),
        drafts=rates, routing=routing or INDEPENDENT,
    )  # fmt: skip
    problem = problem_in(
        memory, policy.weight_format, config, workload, work_dir, process_bytes=process,
        max_model_len=policy.max_model_len, max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
    )  # fmt: skip
    plan = replace(plan_problem(problem), policy=policy)

    def seconds(drafts: int) -> float:
        # The plan has drafts for its own placement, which may stream nothing.
        prediction = replace(plan.prediction, drafts=((policy.max_num_seqs, drafts),) if drafts else ())
        return simulate_job(replace(plan, prediction=prediction), config, problem.hardware).total_s

    return min(map(seconds, (0, 1, 2, 4, 8, 16) if rates is not None and rates.most else (0,)))


def problem_in(
    memory: int, weight_format: str, config: ModelConfig, workload: Workload, work_dir: Path, **given: int
) -> Problem:
    """The planning problem of a job within so much memory of this machine, as measured."""
    hardware = hardware_for(_CPU, config, work_dir, stored=weight_format)
    return problem_of(
        hardware, config, workload, dtype="bfloat16", weights=weight_format, cpu_memory=memory, **given
    )  # fmt: skip


def load(
    model: Path | str, rows: int, memory: int, process: int, args: argparse.Namespace, *, planned: bool = False
) -> EngineParts:
    """The model in bfloat16, ready for so many rows.

    Args:
        process: Bytes of the memory that the process takes without the model.
        planned: Whether the policy is the planner's; otherwise all layers' weights are on disk.
    """
    files = resolve_model(str(model))
    config = read_config(files)
    store = find_or_convert(files, args.work_dir / "stores", "bfloat16", resolve_weights(files, NATIVE))
    longest = 1024 if str(model) == "demo" else args.prompt_tokens + args.output_tokens
    if planned:
        workload = Workload.uniform(rows, args.prompt_tokens, args.output_tokens)
        sizes = {"max_model_len": longest, "max_num_seqs": rows, "process_bytes": process}
        problem = problem_in(memory, store.weight_format, config, workload, args.work_dir, **sizes)
        policy = plan_problem(problem).policy
    else:
        policy = on_disk(config, store.weight_format, rows, longest)
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
        planned_process_bytes=process,
    )
    return load_parts(request, lambda: load_tokenizer(files))


def on_disk(config: ModelConfig, weight_format: str, rows: int, longest: int) -> Policy:
    """The policy that reads the weights of all layers from disk in each sweep, for so many rows."""
    return Policy(
        admission="continuous",
        gpu_batch_size=rows,
        num_gpu_batches=1,
        max_num_batched_tokens=2048,
        max_model_len=longest,
        kv_block_size=16,
        kv_blocks={},
        share_prefixes=True,
        weight_format=weight_format,
        kv_format="bfloat16",
        weight_layers=dict.fromkeys(config.layer_tensors, (0, 0, config.num_layers)),
        head_tier="cpu",
        kv_seqs={"cpu": rows},
        activation_batches=(0, 1),
    )


if __name__ == "__main__":
    main()
