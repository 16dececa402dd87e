"""`batchgen run`: a dataset through a model into a file, resumable at any moment.

The composition of everything else: dataset -> requests -> engine -> part writer -> join.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.device import parse_device
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.interrupts import keep
from batchgen.core.plan import Plan
from batchgen.core.request import Completion, Request, SamplingParams, Scored, ScoreRequest
from batchgen.core.workload import Workload
from batchgen.engine.encode import encode_all, encode_pairs, encode_prompt
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts, needs_store, resolve_budgets, resolve_context, resolve_dtype
from batchgen.engine.parts import EngineStats
from batchgen.job.files import check_files
from batchgen.job.options import JobOptions, check_options, seconds
from batchgen.job.planning import (
    loading_s,
    longest_tokens,
    machine_of,
    most_kv_tokens,
    offload_dir,
    plan_job,
    problem_of,
    process_share,
    read_plan,
    request_of,
    runnable,
)
from batchgen.job.progress import Counts, Progress
from batchgen.job.report import make_report, write_report
from batchgen.job.source import RequestSource, open_source
from batchgen.job.workload import UNKNOWN_ROWS, NoUsableRow, measure_workload
from batchgen.models.config import ModelConfig
from batchgen.models.convert import find_or_convert
from batchgen.models.files import ModelFiles, cache_dir, model_identity, read_config, resolve_model
from batchgen.output.row_result import RowResult
from batchgen.output.run_directory import Run, open_run
from batchgen.output.score_result import ScoreResult
from batchgen.planner.explain import headline
from batchgen.runtime.steps.trace import TraceWriter

if TYPE_CHECKING:
    from batchgen.models.tokenizer import Tokenizer


def run(model: str, input: Any, output: str | Path | None = None, **options: Any) -> dict:
    """Runs a job and returns its report, as `--report` writes it.

    output: None puts it into the cache directory, where the same job finds it again; the report says where.
    options: the command line's, with underscores, among them those of SamplingParams. Raises BatchgenError.
    """
    sampling = {name: options.pop(name) for name in SamplingParams.names() if name in options}
    unknown = set(options) - {f.name for f in fields(JobOptions)}
    if unknown:
        raise TypeError(f"run() has no option {sorted(unknown)[0]!r}")
    options.setdefault("progress", "none")
    return run_job(JobOptions(model, input, output, sampling=SamplingParams(**sampling), **options))


def run_job(options: JobOptions) -> dict:
    """Runs, resumes or finishes the job; returns the report, which is also written to `options.report`.

    A KeyboardInterrupt leaves finished rows on disk and is raised again. Raises BatchgenError.
    """
    started_s = time.monotonic()
    check_options(options)
    check_files(options)
    deadline_s = None if options.max_time is None else started_s + seconds(options.max_time)
    progress = Progress(options.progress)
    with ThreadPoolExecutor(1, thread_name_prefix="batchgen-load") as background, progress:
        source = open_source(options)
        if source.is_openai:
            check_files(options, errors_file=True)
        files = resolve_model(options.model, notify=progress.say)
        config = read_config(files)
        dtype = resolve_dtype(config, options.dtype, parse_device(options.device))
        tokenizer = background.submit(_load_tokenizer, files)  # most of it is importing transformers
        if source.needs_chat_template:
            tokenizer.result().require_chat_template()
        if options.dry_run:
            plan = _plan(options, source, files, config, dtype, tokenizer.result(), None, started_s, progress)
            return _dry_run(options, source, files, plan, tokenizer.result(), progress)
        fingerprint = {
            "input": source.dataset.identity(),
            "rows": {"limit": options.limit, "shard": options.shard, "id_column": options.id_column},
            "model": model_identity(files),
            "tokenizer": tokenizer.result().identity(),
            "prompt": source.identity,
            "sampling": options.sampling.to_json(),
            "dtype": dtype,
            "max_model_len": options.max_model_len,
            "on_overlong": options.on_overlong,
            "output_prefix": options.output_prefix,
        }
        if options.task != "generate":
            fingerprint["task"] = options.task
        if (options.quantization, options.kv_cache_dtype) != ("none", "auto"):
            fingerprint["formats"] = [options.quantization, options.kv_cache_dtype]
        if options.output is None:
            options = replace(options, output=_cached_output(fingerprint))
            check_files(options)
        with open_run(
            options.output,
            fingerprint,
            resume=options.resume,
            overwrite=options.overwrite,
            retry_failed=options.retry_failed,
            errors_file=source.is_openai,
        ) as state:
            keep(lambda: _kept(state))
            for notice in state.notices:
                progress.say(notice)
            total_rows = source.dataset.num_rows
            if state.complete:
                return _close(options, make_report(options, source, state, None, None, started_s, "already complete"))
            engine = plan = None
            if total_rows is None or len(state.done_rows) < total_rows:
                if state.rows_resumed:
                    progress.say(f"resuming: {state.rows_resumed:,} rows are done already")
                plan = _plan(options, source, files, config, dtype, tokenizer.result(), state, started_s, progress)
                for line in headline(plan):
                    progress.say(line)
                with tracing(options, files) as on_step:
                    engine = load_engine(options, plan, files, tokenizer.result, progress, on_step)
                    with engine:
                        reached_end = _run_rows(options, source, state, engine, progress, total_rows, deadline_s)
                if not reached_end:
                    return _close(options, make_report(options, source, state, engine, plan, started_s, "stopped"))
            progress.close()
            state.finish(
                source.dataset,
                columns=source.columns,
                prefix=options.output_prefix,
                format_row=source.format_row,
            )
            return _close(options, make_report(options, source, state, engine, plan, started_s, "complete"))


def _kept(state: Run) -> str:
    """Saves the rows that are finished; says how many these are."""
    rows, name = state.save(), state.output_path.name
    if not rows:
        return f"no rows of {name} are finished yet"
    finished = "1 row" if rows == 1 else f"{rows:,} rows"
    return f"{finished} of {name} finished and saved, the same command goes on from there"


def _cached_output(fingerprint: dict[str, Any]) -> Path:
    """The file of a job that was not told any: named after all that decides its rows."""
    if "head_sha256" in fingerprint["input"]:
        raise InputError("the input is a stream, of which only the first rows tell it from others: give an output")
    folder = cache_dir() / "outputs"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    return folder / f"{key[:32]}.arrow"


@contextlib.contextmanager
def tracing(options: JobOptions, files: ModelFiles) -> Iterator[Callable | None]:
    """What to tell of every Step, if a timeline is asked for."""
    if options.trace is None:
        yield None
        return
    trace = TraceWriter(options.trace, f"{files.name}: run")
    try:
        yield trace.add
    finally:
        trace.close()


def _load_tokenizer(files: ModelFiles):
    from batchgen.models.tokenizer import load_tokenizer

    return load_tokenizer(files)


def _plan(
    options: JobOptions,
    source: RequestSource,
    files: ModelFiles,
    config: ModelConfig,
    dtype: str,
    tokenizer: Tokenizer,
    state: Run | None,
    started_s: float,
    progress: Progress,
) -> Plan:
    """How to run the rows that are left: the plan given, or the fastest that keeps everything in memory."""
    context = resolve_context(config, options.max_model_len)
    if options.plan is not None:
        return runnable(
            read_plan(options.plan), files.name, dtype, context, device=parse_device(options.device),
            quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype,
        )  # fmt: skip
    total_rows = source.dataset.num_rows
    rows_done = len(state.done_rows) if state else 0
    rows_left = None if total_rows is None else max(1, total_rows - rows_done)
    try:
        workload, output_len_known = measure_workload(
            source,
            tokenizer,
            sampling=options.sampling,
            max_model_len=context,
            rows_left=rows_left,
            expected_output_len=options.expected_output_len,
            finished_output_lens=state.output_lens() if state and options.task == "generate" else (),
            share_prefixes=options.share_prefixes,
            on_overlong=options.on_overlong,
        )
    except NoUsableRow as error:  # each of them will say so in the output, and later ones may be fine
        progress.say(str(error))
        longest = min(options.sampling.max_tokens, context - 1) if options.task == "generate" else 1
        workload, output_len_known = Workload.uniform(rows_left or UNKNOWN_ROWS, 1, longest), False
    request = request_of(options, files, config, dtype, context)
    hardware, request = machine_of(options, files, config, request, progress.say)
    return plan_job(
        problem_of(hardware, config, workload, request),
        request,
        startup_s=time.monotonic() - started_s,
        loading_s=loading_s(hardware, config, dtype, files.kind),
        output_len_known=output_len_known,
    )


def load_engine(
    options: JobOptions,
    plan: Plan,
    files: ModelFiles,
    tokenizer: Callable,
    progress: Progress,
    on_step: Callable | None,
) -> Engine:
    """An engine that runs as the plan says. tokenizer: gives the tokenizer."""
    device, directory, policy = parse_device(options.device), offload_dir(options), plan.policy
    cpu_memory = options.cpu_memory
    if cpu_memory is None and options.plan is None:
        cpu_memory = plan.budgets["cpu"]  # as it was found for this job a moment ago
    store = None
    if needs_store(policy):
        with progress.layers() as on_layer:
            store = find_or_convert(
                files, directory, plan.dtype, options.quantization, notify=progress.say, on_layer=on_layer
            )
    progress.say(f"loading {files.name}")
    request = LoadRequest(
        files,
        read_config(files),
        policy,
        dtype=plan.dtype,
        device=device,
        budgets=resolve_budgets(
            device,
            cpu_memory=cpu_memory,
            gpu_memory=options.gpu_memory,
            disk_memory=options.disk_memory,
            offload_dir=directory,
        ),
        min_output_len=options.sampling.max_tokens if options.task == "generate" else 1,
        sampling=options.sampling if options.task == "generate" else None,
        task=options.task,
        longest_tokens=longest_tokens(plan),
        most_kv_tokens=most_kv_tokens(plan),
        planned_process_bytes=process_share(plan),
        offload_dir=directory,
        store=store,
        on_step=on_step,
    )
    parts = load_parts(request, tokenizer)
    return Engine.from_parts(
        parts,
        expected_output_len=options.expected_output_len,
        planned_output_len=plan.workload.output_len.mean,
        on_overlong=options.on_overlong,
        sampling=options.sampling,
    )


def _run_rows(
    options: JobOptions,
    source: RequestSource,
    state: Run,
    engine: Engine,
    progress: Progress,
    total_rows: int | None,
    deadline_s: float | None,
) -> bool:
    """Runs the rows that are left into parts. True if all are done, False if the deadline came first."""
    done = failed = 0
    stopped = False

    def expired() -> bool:
        nonlocal stopped
        stopped = deadline_s is not None and time.monotonic() >= deadline_s
        return stopped

    def show(stats: EngineStats) -> None:
        progress.update(
            Counts(total_rows, state.rows_resumed, done, failed, stats.prompt_tokens, stats.generated_tokens)
        )

    progress.start()
    run = engine.score if options.task == "score" else engine.generate
    results = run(source.requests(state.done_rows), should_stop=expired, on_sweep=show)
    with state.writer(flush_interval_s=seconds(options.flush_interval)) as writer:
        try:
            for result in results:
                writer.add(result.row, _row_result(options, source, result))
                done += 1
                if result.error is not None:
                    failed += 1
                    _on_failed_row(options, result.row, result.error)
        finally:
            results.close()
    return not stopped or len(state.done_rows) == total_rows


def _row_result(options: JobOptions, source: RequestSource, result: Completion | Scored) -> RowResult | ScoreResult:
    if isinstance(result, Completion):
        return RowResult.from_completion(result)
    asked = options.sampling.logprobs is not None
    return ScoreResult.from_scored(result, whole=source.scores_prompts, token_logprobs=asked)


def _on_failed_row(options: JobOptions, row: int, error: str) -> None:
    if options.on_error == "fail":
        raise BatchgenError(f"row {row}: {error} (--on-error record notes it in the row and goes on)")


def _dry_run(
    options: JobOptions, source: RequestSource, files: ModelFiles, plan: Plan, tokenizer: Tokenizer, progress: Progress
) -> dict:
    """Shows what a run would do with the first row, without reading weights or writing anything."""
    first, batch = next(source.dataset.batches(0, 1))
    request = next(source.requests_of(batch, first))
    if request.error is not None:
        prompt, token_ids, what = f"(row {first} would fail: {request.error})", [], ""
    elif isinstance(request, ScoreRequest):
        context, continuations = encode_pairs(tokenizer, request, encode_all(tokenizer, [request]))
        lengths = ", ".join(f"{len(tokens):,}" for tokens in continuations)
        prompt, token_ids, what = (
            tokenizer.decode(context, skip_special_tokens=False),
            list(context),
            f"{lengths} scored",
        )
        prompt += "".join(f"\n-> {tokenizer.decode(tokens, skip_special_tokens=False)}" for tokens in continuations)
    else:
        prompt, token_ids = _shown(request, tokenizer)
        what = f"up to {options.sampling.max_tokens:,} generated"
    rows = source.dataset.num_rows
    for line in headline(plan):
        progress.say(line)
    progress.say(f"model {files.name} in {plan.dtype}; {'an unknown number of' if rows is None else f'{rows:,}'} rows")
    progress.say(f"row {first}: {len(token_ids):,} prompt tokens, {what}")
    progress.say(prompt)
    return {
        "state": "dry run",
        "rows": rows,
        "model": files.name,
        "dtype": plan.dtype,
        "plan": plan.to_json(),
        "sampling": options.sampling.to_json(),
        "first_prompt": prompt,
        "first_prompt_tokens": len(token_ids),
    }


def _shown(request: Request, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A prompt as text and as tokens."""
    token_ids = encode_prompt(tokenizer, request)
    if isinstance(request.prompt, str):
        return request.prompt, token_ids
    messages = bool(request.prompt) and isinstance(request.prompt[0], dict)
    return tokenizer.decode(token_ids, skip_special_tokens=not messages), token_ids


def _close(options: JobOptions, report: dict) -> dict:
    if options.report:
        write_report(report, options.report)
    return report
