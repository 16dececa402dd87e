"""`batchgen bench`: it runs random rows of equal lengths, and compares the measured time with the prediction."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.plan import Plan
from batchgen.core.request import Request
from batchgen.core.units import format_seconds
from batchgen.core.workload import uniform_workload
from batchgen.distributed.group import early_group
from batchgen.distributed.launch import own_share
from batchgen.engine.engine import Engine
from batchgen.engine.parts import EngineStats
from batchgen.job.checks import check_options
from batchgen.job.command_options import BenchOptions
from batchgen.job.files import check_files
from batchgen.job.format_pinning import in_formats
from batchgen.job.job import resolve_job
from batchgen.job.loading import load_engine, tracing
from batchgen.job.options import JobOptions
from batchgen.job.planning import make_plan, make_plan_of_strategy
from batchgen.job.progress import Counts, Progress
from batchgen.job.report import engine_report, write_report
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.files import ModelFiles, resolve_model, without_weights
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.models.tokenizers.tokenizer import NoText
from batchgen.planner.explain import headline
from batchgen.planner.format_choice import formats_of


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Measure a model on random rows of equal lengths.

    Args:
        options: The model, and the number and lengths of the rows.

    Returns:
        The report, which is also written to `options.job.report`.

    Raises:
        BatchgenError: The model cannot be run, or a row failed.
    """
    started_s = time.monotonic()
    size = options.job.tensor_parallel
    with own_share(size) as shares, early_group(size, shares) as group, Progress(options.job.progress) as progress:
        check_options(options.job)
        check_files(options.job)
        job = resolve_job(_measured(options), _model(options))
        job = replace(job, shares=tuple(map(frozenset, shares)))
        workload = uniform_workload(
            options.num_prompts, options.input_len, options.output_len, job.options.sampling.n, job.context
        )
        tokenizer: Any = NoText() if job.files.kind == "dummy" else load_tokenizer(job.files)
        estimated = EstimatedWorkload(workload, True)
        if options.strategy is None:
            plan = make_plan(job, lambda: estimated, started_s=started_s)
        else:
            plan = make_plan_of_strategy(options.strategy, job, estimated, started_s=started_s)
        job = in_formats(job, *formats_of(plan.policy))
        for line in headline(plan):
            progress.say(line)
        with tracing(job) as on_step:
            engine = load_engine(job, plan, lambda: tokenizer, progress, on_step, group, serial=options.serial)
            with engine:
                loaded_s = time.monotonic()
                _generate(engine, _requests(options, job.config.vocab_size), options.num_prompts, progress)
                ended_s = time.monotonic()
            report = _report(options, job.files, engine, plan, ended_s - started_s, ended_s - loaded_s)
    if job.options.report:
        write_report(report, job.options.report)
    return report


def _measured(options: BenchOptions) -> JobOptions:
    """The job's options, changed so that every sample has the output length that is to be measured."""
    sampling = replace(options.job.sampling, max_tokens=options.output_len, ignore_eos=True)
    return replace(options.job, sampling=sampling)


def _model(options: BenchOptions) -> ModelFiles:
    if options.load_format not in ("auto", "dummy"):
        raise InputError(f"--load-format must be auto or dummy, not {options.load_format!r}")
    if options.load_format == "dummy":
        if options.job.lora is not None:
            raise InputError("--load-format dummy has no weights to merge an adapter into: leave out --lora")
        return without_weights(options.job.model)
    return resolve_model(options.job.model, options.job.lora)


def _requests(options: BenchOptions, vocab_size: int) -> Iterator[Request]:
    """Prompts of random tokens without shared prefixes, drawn as they are needed."""
    draw = random.Random(options.job.sampling.seed)
    for _ in range(options.num_prompts):
        yield Request(draw.choices(range(vocab_size), k=options.input_len))


def _generate(engine: Engine, requests: Iterable[Request], num_prompts: int, progress: Progress) -> None:
    done = 0

    def show(stats: EngineStats) -> None:
        progress.update(Counts(num_prompts, 0, done, 0, stats.prompt_tokens, stats.generated_tokens))

    progress.start()
    for completion in engine.generate(requests, on_sweep=show):
        if completion.error is not None:
            raise BatchgenError(completion.error)
        done += 1


def _report(
    options: BenchOptions, files: ModelFiles, engine: Engine, plan: Plan, wall_s: float, generation_s: float
) -> dict[str, Any]:
    predicted = plan.prediction
    tokens = engine.stats.prompt_tokens + engine.stats.generated_tokens
    return {
        "model": files.name,
        "weights": "dummy" if files.kind == "dummy" else "real",
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "strategy": options.strategy,
        "serial": options.serial,
        "generation_s": generation_s,
        "predicted_generation_s": predicted.total_s - predicted.startup_s,
        "generation_tokens_per_s": engine.stats.generated_tokens / generation_s,
        "generation_total_tokens_per_s": tokens / generation_s,
        **engine_report(engine, plan, wall_s),
    }


def summary(report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen bench` prints at its end. report: the report of the benchmark."""
    measured, predicted = report["generation_s"], report["predicted_generation_s"]
    loading_s = report["wall_s"] - measured
    return [
        f"{report['num_prompts']:,} prompts of {report['input_len']:,} tokens, {report['output_len']:,} out each, in"
        f" {format_seconds(measured)} (predicted {format_seconds(predicted)}), after {format_seconds(loading_s)}"
        " of starting and loading",
        f"{report['generation_tokens_per_s']:,.1f} generated tokens/s,"
        f" {report['generation_total_tokens_per_s']:,.0f} with prompts; busiest: {report['bottleneck']}",
    ]
