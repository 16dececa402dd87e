"""`batchgen run`: a dataset through a model into a file, resumable at any moment.

The composition of everything else: dataset -> requests -> engine -> part writer -> join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from batchgen.dataset import Dataset, open_dataset
from batchgen.engine import ON_OVERLONG, Engine, EngineStats
from batchgen.errors import BatchgenError, InputError
from batchgen.hardware import peak_resident_bytes
from batchgen.loading import load_parts, resolve_dtype
from batchgen.model_files import ModelFiles, model_identity, read_config, resolve_model
from batchgen.output.formats import check_writable
from batchgen.output.join import output_schema
from batchgen.output.row_result import RowResult
from batchgen.output.run_directory import Run, errors_path, open_run
from batchgen.progress import Counts, Progress
from batchgen.report import check_report_path, versions, write_report
from batchgen.request import Completion, Request, SamplingParams
from batchgen.units import parse_seconds, parse_shard


@dataclass(frozen=True)
class JobOptions:
    """Everything `batchgen run` can be told, under the names of its flags (see `batchgen run --help`).

    input may also be a `datasets.Dataset` or `IterableDataset`.
    """

    model: str
    input: Any
    output: str | Path
    prompt_column: str | None = None
    prompt_template: str | None = None
    messages_column: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "auto"
    device: str = "auto"
    cpu_memory: str | int | None = None
    admission: str = "continuous"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    max_model_len: int | None = None
    share_prefixes: bool = True
    expected_output_len: int | None = None
    resume: bool = True
    overwrite: bool = False
    retry_failed: bool = False
    max_time: str | float | None = None
    flush_interval: str | float = "5s"
    on_error: str = "record"
    on_overlong: str = "error"
    shard: str | None = None
    limit: int | None = None
    split: str | None = None
    id_column: str | None = None
    input_format: str | None = None
    output_prefix: str = ""
    report: str | None = None
    progress: str = "auto"
    dry_run: bool = False


def run(model: str, input: Any, output: str | Path, **options: Any) -> dict:
    """Runs a job and returns its report, as `--report` writes it.

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
    _check_options(options)
    deadline_s = None if options.max_time is None else started_s + _seconds(options.max_time)
    progress = Progress(options.progress)
    with ThreadPoolExecutor(1, thread_name_prefix="batchgen-load") as background, progress:
        source = _open_source(options)
        files = resolve_model(options.model, notify=progress.say)
        config = read_config(files)
        dtype = resolve_dtype(config, options.dtype)
        tokenizer = background.submit(_load_tokenizer, files)  # most of it is importing transformers
        if source.needs_chat_template:
            tokenizer.result().require_chat_template()
        if options.dry_run:
            return _dry_run(options, source, files, dtype, tokenizer.result(), progress)
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
        with open_run(
            options.output,
            fingerprint,
            resume=options.resume,
            overwrite=options.overwrite,
            retry_failed=options.retry_failed,
            errors_file=source.is_openai,
        ) as state:
            for notice in state.notices:
                progress.say(notice)
            total_rows = source.dataset.num_rows
            if state.complete:
                return _report(options, source, state, None, started_s, "already complete")
            engine = None
            if total_rows is None or len(state.done_rows) < total_rows:
                if state.rows_resumed:
                    progress.say(f"resuming: {state.rows_resumed:,} rows are done already")
                engine = _load_engine(options, files, tokenizer.result, progress)
                reached_end = _generate(options, source, state, engine, progress, total_rows, deadline_s)
                if not reached_end:
                    return _report(options, source, state, engine, started_s, "stopped")
            progress.close()
            state.finish(
                source.dataset,
                n=options.sampling.n,
                logprobs=options.sampling.logprobs is not None,
                prefix=options.output_prefix,
                format_row=source.format_row,
            )
            return _report(options, source, state, engine, started_s, "complete")


@dataclass(frozen=True)
class _Source:
    """The input and how its rows become requests. format_row: OpenAI batches are answered in their own format."""

    dataset: Dataset
    requests_of: Callable[[Any, int], Iterator[Request]]  # (record batch, first row)
    identity: dict
    needs_chat_template: bool
    format_row: Callable | None = None

    @property
    def is_openai(self) -> bool:
        return self.format_row is not None

    def requests(self, state: Run, rows: dict[int, int]) -> Iterator[Request]:
        """Requests for every row not done yet; notes in `rows` which row the i-th request is for."""
        count = 0
        first_needed = state.done_rows.next_unfinished(0)
        for first, batch in self.dataset.batches(first_needed):
            needed = [row not in state.done_rows for row in range(first, first + batch.num_rows)]
            if not any(needed):
                continue
            for offset, request in enumerate(self.requests_of(batch, first)):
                if needed[offset]:
                    rows[count] = first + offset
                    count += 1
                    yield request


def _check_options(options: JobOptions) -> None:
    """Everything that can be refused without reading anything."""
    if options.on_error not in ("record", "fail"):
        raise InputError(f"--on-error must be record or fail, not {options.on_error!r}")
    if options.on_overlong not in ON_OVERLONG:
        raise InputError(f"--on-overlong must be one of {', '.join(ON_OVERLONG)}, not {options.on_overlong!r}")
    if options.limit is not None and options.limit < 1:
        raise InputError(f"--limit must be at least 1, not {options.limit}")
    if options.overwrite and options.retry_failed:
        raise InputError(
            "--overwrite and --retry-failed exclude each other: the first starts afresh, the second"
            " keeps the rows that are fine"
        )
    if options.retry_failed and not options.resume:
        raise InputError("--retry-failed needs what was done before: leave out --no-resume")
    check_report_path(options.report)
    if options.max_time is not None:
        _seconds(options.max_time)
    if _seconds(options.flush_interval) <= 0:
        raise InputError(f"--flush-interval must be above 0, not {options.flush_interval!r}")


def _seconds(value: str | float) -> float:
    return parse_seconds(value) if isinstance(value, str) else float(value)


def _open_source(options: JobOptions) -> _Source:
    dataset = open_dataset(
        options.input,
        input_format=options.input_format,
        split=options.split,
        limit=options.limit,
        shard=parse_shard(options.shard) if options.shard else None,
    )
    if dataset.num_rows == 0:
        raise InputError(f"shard {options.shard} has no rows: the input has fewer rows than shards")
    if dataset.format == "openai":
        return _openai_source(options, dataset)

    from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests

    spec = PromptSpec(
        options.prompt_column,
        options.prompt_template,
        options.messages_column,
        options.system_prompt,
        options.chat,
    )
    compiled = compile_prompts(spec, dataset.schema, options.id_column)
    wants_logprobs = options.sampling.logprobs is not None
    schema = output_schema(dataset.schema, options.sampling.n, wants_logprobs, options.output_prefix)
    check_writable(Path(options.output), schema)
    return _Source(
        dataset,
        lambda batch, first: rows_to_requests(batch, first, compiled, options.sampling, options.id_column),
        spec.identity(),
        compiled.uses_chat,
    )


def _load_tokenizer(files: ModelFiles):
    from batchgen.tokenizer import load_tokenizer

    return load_tokenizer(files)


def _load_engine(options: JobOptions, files: ModelFiles, tokenizer: Callable, progress: Progress) -> Engine:
    progress.say(f"loading {files.name}")
    parts = load_parts(
        files,
        tokenizer,
        dtype=options.dtype,
        device=options.device,
        cpu_memory=options.cpu_memory,
        admission=options.admission,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        share_prefixes=options.share_prefixes,
        min_output_len=options.sampling.max_tokens,
        on_load=None,
    )
    return Engine.from_parts(
        parts,
        expected_output_len=options.expected_output_len,
        on_overlong=options.on_overlong,
        sampling=options.sampling,
    )


def _generate(
    options: JobOptions,
    source: _Source,
    state: Run,
    engine: Engine,
    progress: Progress,
    total_rows: int | None,
    deadline_s: float | None,
) -> bool:
    """Runs the rows that are left into parts. True if all are done, False if the deadline came first."""
    rows: dict[int, int] = {}
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
    completions = engine.generate(source.requests(state, rows), should_stop=expired, on_sweep=show)
    with state.writer(flush_interval_s=_seconds(options.flush_interval)) as writer:
        try:
            for completion in completions:
                row = rows.pop(completion.index)
                writer.add(row, RowResult.from_completion(completion))
                done += 1
                if completion.error is not None:
                    failed += 1
                    _on_failed_row(options, row, completion)
        finally:
            completions.close()
    return not stopped or len(state.done_rows) == total_rows


def _on_failed_row(options: JobOptions, row: int, completion: Completion) -> None:
    if options.on_error == "fail":
        raise BatchgenError(f"row {row}: {completion.error} (--on-error record notes it in the row and goes on)")


def _openai_source(options: JobOptions, dataset: Dataset) -> _Source:
    """An OpenAI batch brings its own prompts and parameters."""
    from batchgen.dataset.openai_batch import rows_to_requests
    from batchgen.dataset.openai_response import format_error, format_response

    given = {
        "--prompt-column": options.prompt_column,
        "--prompt-template": options.prompt_template,
        "--messages-column": options.messages_column,
        "--system-prompt": options.system_prompt,
        "--chat": options.chat,
        "--id-column": options.id_column,
        "--output-prefix": options.output_prefix,
    }
    for flag, value in given.items():
        if value:
            raise InputError(f"{flag} has no meaning for an OpenAI batch, whose lines are whole requests: leave it out")

    def format_row(row: dict, result: dict) -> tuple[str, dict]:
        if result["error"] is not None:
            return "errors", format_error(row["custom_id"], result["error"], result["row"])
        logprobs = result["logprobs"] or [None] * len(result["text"])
        samples = [
            {"text": text, "finish_reason": reason, "logprobs": positions}
            for text, reason, positions in zip(result["text"], result["finish_reason"], logprobs, strict=True)
        ]
        answer = {
            "samples": samples,
            "prompt_tokens": result["prompt_tokens"],
            "generated_tokens": result["generated_tokens"],
        }
        return "output", format_response(row["custom_id"], row["body"], answer, str(options.model), result["row"])

    return _Source(
        dataset,
        lambda batch, first: rows_to_requests(batch, first, options.sampling, dataset.duplicate_rows),
        {"format": "openai"},
        False,
        format_row,
    )


def _dry_run(
    options: JobOptions, source: _Source, files: ModelFiles, dtype: str, tokenizer: Any, progress: Progress
) -> dict:
    """Shows what a run would do with the first row, without reading weights or writing anything."""
    first, batch = next(source.dataset.batches(0, 1))
    request = next(source.requests_of(batch, first))
    if request.error is not None:
        prompt, token_ids = f"(row {first} would fail: {request.error})", []
    elif isinstance(request.prompt, str):
        prompt, token_ids = request.prompt, tokenizer.encode_batch([request.prompt])[0]
    elif request.prompt and isinstance(request.prompt[0], dict):
        token_ids = tokenizer.encode_chat(request.prompt)
        prompt = tokenizer.decode(token_ids, skip_special_tokens=False)
    else:
        prompt, token_ids = tokenizer.decode(list(request.prompt)), list(request.prompt)
    rows = source.dataset.num_rows
    progress.say(f"model {files.name} in {dtype}; {'an unknown number of' if rows is None else f'{rows:,}'} rows")
    progress.say(f"row {first}: {len(token_ids):,} prompt tokens, up to {options.sampling.max_tokens:,} generated")
    progress.say(prompt)
    return {
        "state": "dry run",
        "rows": rows,
        "model": files.name,
        "dtype": dtype,
        "sampling": options.sampling.to_json(),
        "first_prompt": prompt,
        "first_prompt_tokens": len(token_ids),
    }


def _report(
    options: JobOptions, source: _Source, state: Run, engine: Engine | None, started_s: float, outcome: str
) -> dict:
    """Makes the report, and writes it where it was asked for.

    Rows are those of the whole output; tokens, times and bytes are this run's.
    """
    stats = engine.stats if engine else EngineStats()
    wall_s = time.monotonic() - started_s
    totals = state.totals or {"rows_ok": state.done_rows.ok, "rows_failed": state.done_rows.failed}
    tokens = stats.prompt_tokens + stats.generated_tokens
    lanes = {"compute": stats.busy_s["compute"] + stats.busy_s["sampling"], "input": stats.busy_s["input_wait"]}
    rows = totals["rows_ok"] + totals["rows_failed"]
    total_rows = rows if outcome != "stopped" else source.dataset.num_rows
    report = {
        "state": outcome,
        "output": str(options.output),
        "errors_output": str(errors_path(Path(options.output))) if source.is_openai else None,
        "rows": total_rows,
        "rows_ok": totals["rows_ok"],
        "rows_failed": totals["rows_failed"],
        "rows_resumed": rows if outcome == "already complete" else state.rows_resumed,
        "rows_left": None if total_rows is None else total_rows - rows,
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "wall_s": wall_s,
        "load_s": engine.parts.load_s if engine else 0.0,
        "generated_tokens_per_s": stats.generated_tokens / wall_s,
        "total_tokens_per_s": tokens / wall_s,
        "predicted_wall_s": None,
        "bottleneck": max(lanes, key=lanes.get) if engine else None,
        "peak_bytes": {"gpu": 0, "cpu": peak_resident_bytes(), "disk": 0},
        "bytes_moved": {"disk_read": engine.parts.weights_file_bytes if engine else 0},
        "busy_s": dict(stats.busy_s),
        "sweeps": stats.sweeps,
        "preempted": stats.preempted,
        "dtype": engine.parts.dtype if engine else None,
        "policy": engine.policy.to_json() if engine else None,
        "memory": engine.parts.memory.to_json() if engine else None,
        "versions": versions(),
    }
    if options.report:
        write_report(report, options.report)
    return report
