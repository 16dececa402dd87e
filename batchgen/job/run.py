"""`batchgen run`: it runs a dataset through a model into a file, and can be resumed at any moment.

The parts are composed here: dataset -> requests -> engine -> part writer -> join.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.card_errors import naming_card_errors
from batchgen.core.errors import BatchgenError, InputError, TooManyFailed, naming_files
from batchgen.core.interrupts import keep
from batchgen.core.plan import Plan
from batchgen.core.request import Completion, Embedded, Request, Scored, ScoreRequest
from batchgen.core.workload import Workload
from batchgen.distributed.group import early_group
from batchgen.distributed.launch import own_share
from batchgen.engine.embedding import prompted
from batchgen.engine.encode import encode_all, encode_pairs, encode_prompt
from batchgen.engine.engine import Engine
from batchgen.engine.parts import EngineStats
from batchgen.engine.prompt_order import MOST_REQUESTS
from batchgen.job.answer_cache import AnswerCache, answered
from batchgen.job.cached_outputs import cached_output
from batchgen.job.chat_notices import watch_chats
from batchgen.job.checks import check_job
from batchgen.job.deduplication import Deduplication
from batchgen.job.destination import Destination
from batchgen.job.draft_rates import keep_drafts
from batchgen.job.embedding import for_task, head_of, with_head_context
from batchgen.job.failures import FailedRows, FailureLimit
from batchgen.job.files import check_files, write_text
from batchgen.job.format_pinning import in_formats, job_of_output, leaves_formats_open, possible_jobs
from batchgen.job.job import USUAL_FORMATS, Job, dequantized_line, resolve_job
from batchgen.job.kernels import kernels_of_rows
from batchgen.job.learning import Learner
from batchgen.job.loading import load_engine, tracing
from batchgen.job.log_format import LogFormat
from batchgen.job.observer import Observer, RowCounts, expected_of
from batchgen.job.options import JobOptions, seconds
from batchgen.job.pages.run_page import RunPage
from batchgen.job.planned_stages import PlannedStages
from batchgen.job.planning import make_plan
from batchgen.job.progress import Progress
from batchgen.job.report import Origin, make_report, write_report
from batchgen.job.routing import keep_routing
from batchgen.job.row_flow import RowFlow
from batchgen.job.row_sizes import SCAN_ROWS, RowSizes
from batchgen.job.session import Session
from batchgen.job.shared import going_on, open_output, requests_left
from batchgen.job.snapshot import Publisher
from batchgen.job.sorted_requests import sorts_rows
from batchgen.job.source import RequestSource, open_input
from batchgen.job.step_source import SteppedSource, open_rows
from batchgen.job.weight_choice import in_format_of_rows
from batchgen.job.workload import UNKNOWN_ROWS, EstimatedWorkload, NoUsableRow, measure_workload
from batchgen.models.files import ModelFiles, read_config, resolve_model
from batchgen.models.identity import model_identity
from batchgen.models.model_versions import ModelVersions, changed_file, check_unchanged, model_versions
from batchgen.models.tokenizers.thinking import Thinking
from batchgen.ops.instruction_set import forced_instruction_set, unavailable
from batchgen.output.embed_result import EmbedResult
from batchgen.output.parts import Result
from batchgen.output.row_result import RowResult
from batchgen.output.run_directory import Run
from batchgen.output.score_result import ScoreResult
from batchgen.planner.explain import headline, kernel_headline, runs_lines
from batchgen.planner.format_choice import formats_of
from batchgen.runtime.pooler import VectorHead
from batchgen.share.run import SharedRun

if TYPE_CHECKING:
    from batchgen.distributed.group import Group
    from batchgen.models.tokenizers.tokenizer import Tokenizer


logger = logging.getLogger(__name__)

_DEADLINE = "the deadline came first"
_BEGINS_TWICE = (
    "a prompt begins with the model's beginning-of-text token, and its tokenizer puts another before it:"
    " leave it out of the prompts"
)


@dataclass(frozen=True)
class _Job:
    """The state of a run after it has begun.

    Attributes:
        resolved: The job's resolved options.
        source: The job's input.
        tokenizer: Function that waits until the tokenizer is loaded, and returns it.
        progress: Display of the job.
        publisher: State of the job for other programs.
        origin: Circumstances of the run, for its report.
        deadline_s: Time of time.monotonic at which the job stops; None: it has no limit.
        deduplication: Deduplication of the job's requests.
        destination: Destination of the output; None: a local file.
        page: Page of the run, `--report-html`; None: not asked for.
        group: Group of ranks that a launcher has started; None: there is none.
        versions: Versions of the model's files when the job began.
        cache: Answers of earlier jobs, `--cache`; None: not asked for.
        row_sizes: Sizes of the input's rows.
        planned: Plan that has chosen the formats; None: they were not open.
        session: Session whose loaded model the run uses; None: it loads its own, and closes it.
    """

    resolved: Job
    source: RequestSource
    tokenizer: Callable[[], Tokenizer]
    progress: Progress
    publisher: Publisher
    origin: Origin
    deadline_s: float | None
    deduplication: Deduplication
    destination: Destination | None = None
    page: RunPage | None = None
    group: Group | None = None
    versions: ModelVersions = field(default_factory=dict)
    cache: AnswerCache | None = None
    row_sizes: RowSizes = field(default_factory=RowSizes)
    planned: Plan | None = None
    session: Session | None = None

    @property
    def options(self) -> JobOptions:
        return self.resolved.options

    def must_stop(self) -> bool:
        """Tell whether the job's time is over, or its session wants it to stop."""
        late = self.deadline_s is not None and time.monotonic() >= self.deadline_s
        return late or (self.session is not None and self.session.should_stop())

    def report(self, state: Run | SharedRun, engine: Engine | None, plan: Plan | None, outcome: str) -> dict[str, Any]:
        """Make the report of the end of the job, and write it where the options say."""
        report = make_report(self.options, self.source, state, engine, plan, self.origin, outcome)
        report |= {"estimated_wall_s": self.progress.estimated_s, "rows_repeated": self.deduplication.count}
        report["rows_cached"] = self.cache.rows if self.cache is not None else 0
        put = self.destination if outcome != "stopped" else None
        errors_file = self.source.is_openai
        if put is not None:
            report |= put.names(state.output_path, errors_file=errors_file)
        if self.page is not None and self.options.report_html:
            write_text(self.page.render(report, plan), self.options.report_html, "--report-html")
        if put is not None and put.put(state.output_path, errors_file=errors_file) and outcome == "already complete":
            self.progress.say(f"all rows were done: they are written to {put.name} again")
        if self.options.report:
            write_report(report, self.options.report)
        return report

    def ended(self, state: Run | SharedRun, engine: Engine | None, plan: Plan | None, outcome: str) -> dict[str, Any]:
        """Make the report of a job that has all its rows. Raises TooManyFailed."""
        report = self.report(state, engine, plan, outcome)
        limit = FailureLimit.parse(self.options.max_failed)
        if reason := limit.exceeded(report["rows_failed"], report["rows"]):
            raise TooManyFailed(_too_many(reason, report), report)
        return report


def run_job(options: JobOptions, session: Session | None = None) -> dict[str, Any]:
    """Run a job, or resume it where an earlier run has stopped.

    Args:
        options: The job's options.
        session: Session of several jobs that use one loaded model; None: the job loads the model, and closes it.

    Returns:
        The report, which is also written to `options.report`.

    Raises:
        BatchgenError: The job cannot be run or completed.
        TooManyFailed: More rows failed than `options.max_failed` allows; its `report` is the report.
        KeyboardInterrupt: The job was interrupted; finished rows are on disk.
    """
    started_s = time.monotonic()
    ranks = max(options.tensor_parallel, options.pipeline)
    with naming_files(errors=PermissionError), own_share(ranks) as shares, early_group(ranks, shares) as group:
        return _run_job(options, started_s, shares, group, session)


def _run_job(
    options: JobOptions, started_s: float, shares: list[set[int]], group: Group | None, session: Session | None
) -> dict[str, Any]:
    """Run a job; returns its report.

    Args:
        options: The job's options.
        started_s: Start of the command, of time.monotonic.
        shares: Set of CPU cores of each rank.
        group: Group of ranks that a launcher has started; None: there is none.
        session: Session of several jobs that use one loaded model; None: there is none.
    """
    check_job(options)
    origin = Origin.of(options, started_s)
    destination = Destination.of(options)
    if destination is not None:
        options = destination.local(options)
    deadline_s = None if options.max_time is None else started_s + seconds(options.max_time)
    progress = Progress(options.progress, log_format=LogFormat(options.log_format, options.log_name))
    publisher = Publisher(options.log_name, None if options.dry_run else options.metrics_file)
    with (
        ThreadPoolExecutor(1, thread_name_prefix="batchgen-tokenizer") as background,
        progress,
        publisher.ending(),
        naming_card_errors(),
    ):
        # Without an output of its own, a job is told from others by all of its input.
        dataset = open_input(options, copy_streams=options.output is None and not options.dry_run)
        source = open_rows(options, dataset)
        if source.is_openai:
            if options.output is None and destination is None and not options.dry_run:
                raise InputError("an OpenAI batch is answered in JSON lines: give an output that ends in .jsonl")
            check_files(options, errors_file=True)
        elif options.output is None:  # a file's column names are checked in `open_source`
            source.output_names(options)
        files = for_task(resolve_model(options.model, options.lora), options)
        versions = model_versions(files)
        if session is not None:
            session.expect(versions)
        tokenizer = background.submit(_load_tokenizer, files, options)
        config = read_config(files)
        head = head_of(files, config, options, tokenizer.result)
        options = with_head_context(options, config, head)
        resolved = resolve_job(options, files, config)
        resolved = replace(resolved, shares=tuple(map(frozenset, shares)))
        identities = {"input": source.dataset.identity(), "model": model_identity(resolved.files)}
        source = source.for_model(resolved.config, tokenizer.result(), options)
        if head is not None:
            source = source.with_head(head, options)
        if (renamed := _renamed_line(source, options)) is not None:
            progress.say(renamed)
        for notice in (*source.notices, *([head.notice] if head is not None and head.notice else [])):
            progress.say(notice)
        page = RunPage() if options.report_html else None
        job = _Job(
            resolved,
            source,
            tokenizer.result,
            progress,
            publisher,
            replace(origin, model=resolved.files.name, identity=identities["model"]),
            deadline_s,
            Deduplication(options.sampling),
            destination,
            page,
            group,
            versions,
            session=session,
        )
        if options.dry_run:
            return _dry_run(job, _plan(job, None))
        job = _in_kept_formats(job, identities)
        resolved = job.resolved
        fingerprint = _fingerprint(job, identities)
        output, named = options.output, options.output is not None
        if output is None:
            output = _unnamed_output(job, fingerprint)
            options = replace(options, output=output)
            check_files(options)
            job = replace(job, resolved=replace(resolved, options=replace(resolved.options, output=output)))
        with contextlib.ExitStack() as stack:
            if (cache := AnswerCache.of(job.resolved, fingerprint)) is not None:
                stack.callback(cache.close)
            state = open_output(options, output, fingerprint, source, named=named)
            stack.callback(state.close)
            if isinstance(state, Run):
                publisher.write_into(state.directory)
            report = _carry_on(replace(job, cache=cache), state)
        publisher.end(report)
        if options.log_format == "json":
            values = {key: report[key] for key in ("rows_ok", "rows_failed", "rows_left", "wall_s")}
            progress.say(report["state"], event="end", **values)
        return report


def _carry_on(job: _Job, state: Run | SharedRun) -> dict[str, Any]:
    """Run the rows that are left and join the output; returns the report."""
    keep(lambda: _kept(job, state))
    for notice in state.notices:
        job.progress.say(notice)
    if state.complete:
        if job.page is not None and isinstance(state, Run):
            job.page.read_rows(state.parts_dir, job.source, job.options.task)
        return job.ended(state, None, None, "already complete")
    total_rows = job.source.dataset.num_rows
    engine = plan = stopped = None
    if not _all_known(job, state) and not state.is_done(total_rows):
        if state.has_begun:
            job.progress.say(_resuming(state))
        made_in = state.weight_format if state.has_begun else None
        job, plan = _plan_in(made_in, job, state)
        if state.has_begun and state.kernels is not None:
            plan = replace(plan, kernels=kernels_of_rows(state.kernels))
        state.record_weight_format(plan.policy.weight_format)
        state.record_kernels(plan.kernels)
        if state.complete:  # other workers have done the rest meanwhile
            return job.ended(state, None, None, "already complete")
        if state.weight_format not in (made_in, plan.policy.weight_format):  # the first worker's
            job, plan = _plan_in(state.weight_format, job, state)
        if state.kernels is not None and state.kernels != plan.kernels:  # the first worker's
            plan = replace(plan, kernels=kernels_of_rows(state.kernels))
        for line in (*_headline(job, plan), *_kernel_lines(plan)):
            job.progress.say(line)
        with tracing(job.resolved) as on_step:
            load = partial(load_engine, job.resolved, plan, job.tokenizer, job.progress, on_step, job.group)
            with load() if job.session is None else job.session.engine(plan, load) as engine:
                check_unchanged(job.versions)  # since before the fingerprint was made
                stopped = _run_rows(job, state, engine, plan)
                if (path := changed_file(job.versions)) is not None:
                    job.progress.say(
                        f"{path} has changed since the job began: its rows are of the weights as they were"
                    )
                keep_routing(job.resolved.files, job.resolved.config, engine.parts.executor.routing)
    if job.page is not None and isinstance(state, Run):
        job.page.read_rows(state.parts_dir, job.source, job.options.task)  # before parts are joined and removed
    if stopped is not None:
        report = job.report(state, engine, plan, "stopped")
        if stopped == _DEADLINE:
            return report
        raise TooManyFailed(_too_many(stopped, report), report)
    job.progress.close()
    state.finish(
        job.source.dataset,
        columns=job.source.columns,
        prefix=job.options.output_prefix,
        format_row=job.source.format_row,
        before_replacing=job.source.dataset.check,
    )
    return job.ended(state, engine, plan, "complete")


def _all_known(job: _Job, state: Run | SharedRun) -> bool:
    """Write the rows whose answers are in the cache, before the model is loaded; returns whether no other is left.

    Workers and rows that go through steps look up each row when its turn comes.
    """
    if job.cache is None or not isinstance(state, Run) or isinstance(job.source, SteppedSource):
        return False
    left = 0
    with state.writer(flush_interval_s=seconds(job.options.flush_interval)) as writer:
        for completion in answered(job.cache, job.resolved, job.source, job.tokenizer(), state):
            if completion is None or completion.row is None:
                left += 1
                continue
            writer.add(completion.row, _row_result(job.options, job.source, completion))
            job.cache.add(completion)
    state.rows_known = job.cache.rows
    job.progress.say(f"cache: {job.cache.rows:,} rows are known, {left:,} have to be computed")
    return not left


def _headline(job: _Job, plan: Plan) -> list[str]:
    """The plan in a few lines, with the number of runs where `--max-time` ends this one first."""
    lines = [*headline(plan), *dequantized_line(job.resolved)]
    most_s = None if job.options.max_time is None else seconds(job.options.max_time)
    return lines if most_s is None else [*lines, *runs_lines(plan.prediction, most_s)]


def _resuming(state: Run | SharedRun) -> str:
    """The line for a job of which some rows are finished or begun."""
    line = f"resuming: {state.rows_resumed:,} rows are done already"
    if partials := state.partials.values():
        line += f", {len(partials):,} are begun ({sum(p.num_tokens for p in partials):,} tokens)"
    return line


def _renamed_line(source: RequestSource, options: JobOptions) -> str | None:
    """The line for a job whose output columns cannot have their usual names; None: they can."""
    names, usual = source.output_names(options), list(source.columns.types())
    if options.output_prefix or source.is_openai or names == usual:
        return None
    taken = next(name for name in usual if name in source.dataset.schema.names)
    return (
        f"the input has a column named {taken}: the output keeps it, and what is new is in {', '.join(names)}"
        " (--output-prefix gives other names)"
    )


def _kernel_lines(plan: Plan) -> list[str]:
    """Lines on the job's kernels, and on the instruction sets of the CPU that cannot be used."""
    lines = [kernel_headline(plan.kernels)]
    if not forced_instruction_set():
        lines += [f"{name} is not used: {reason}" for name, reason in unavailable().items()]
    return lines


def _fingerprint(job: _Job, identities: dict[str, Any]) -> dict[str, Any]:
    """All that decides the output's rows, as JSON values. identities: of "input" and "model"."""
    options, resolved = job.options, job.resolved
    thinking = None
    if options.task == "generate" and options.reasoning_column and not resolved.config.has_channels:
        thinking = Thinking.of(job.tokenizer(), options.sampling.regex)
    fingerprint: dict[str, Any] = {
        "input": identities["input"],
        "rows": {"limit": options.limit, "shard": options.shard, "id_column": options.id_column},
        "model": identities["model"],
        "tokenizer": job.tokenizer().identity(),
        "prompt": job.source.identity,
        "sampling": options.sampling.to_json(),
        "dtype": resolved.dtype,
        "max_model_len": options.max_model_len,
        "on_overlong": options.on_overlong,
        "output_prefix": options.output_prefix,
    }
    if options.json_columns:
        fingerprint["json_columns"] = True
    if thinking is not None:
        fingerprint["reasoning"] = thinking.begin
    if options.token_ids:
        fingerprint["token_ids"] = True
    if options.task != "generate":
        fingerprint["task"] = options.task
    if (formats := resolved.deciding_formats) != USUAL_FORMATS:
        fingerprint["formats"] = formats
    return fingerprint


def _in_kept_formats(job: _Job, identities: dict[str, Any]) -> _Job:
    """The run in the formats of its output's rows, or those that its plan chooses where `--quality` leaves them open.

    Args:
        job: The run.
        identities: The identities of "input" and "model".
    """
    resolved = job.resolved
    if not leaves_formats_open(resolved):
        return job
    if not job.options.overwrite and job.options.plan is None:
        for possible in possible_jobs(resolved):
            at = replace(job, resolved=possible)
            output = job.options.output or _unnamed_output(at, _fingerprint(at, identities))
            if job_of_output(resolved, Path(output)) == possible:
                return at
    plan = _plan(job, None)
    return replace(job, resolved=in_formats(resolved, *formats_of(plan.policy)), planned=plan)


def _unnamed_output(job: _Job, fingerprint: dict[str, Any]) -> Path:
    """The output of a run whose options name none."""
    return cached_output(fingerprint, ".arrow" if job.destination is None else ".jsonl")


def _kept(job: _Job, state: Run | SharedRun) -> str:
    """Save finished rows; returns a text with their number, or the session's."""
    job.publisher.publish(state="interrupted", seconds_left=None, rows_per_s=0.0)
    rows, name = state.save(), state.output_path.name
    if job.session is not None:
        return job.session.kept
    if not rows and state.partials:
        return f"no rows of {name} are finished, {len(state.partials):,} are begun, the same command goes on from there"
    if not rows:
        return f"no rows of {name} are finished yet"
    finished = "1 row" if rows == 1 else f"{rows:,} rows"
    return f"{finished} of {name} finished and saved, the same command goes on from there"


def _load_tokenizer(files: ModelFiles, options: JobOptions) -> Tokenizer:
    from batchgen.models.tokenizers.loading import load_tokenizer

    return load_tokenizer(files, options.special_tokens, options.chat_template)


def _plan(job: _Job, state: Run | SharedRun | None) -> Plan:
    """The plan for the rows that are left."""
    if job.planned is not None and not (state and state.has_begun):
        return job.planned
    make = partial(make_plan, job.resolved, started_s=job.origin.started_s)
    estimate = partial(_workload, job, state)
    return make(estimate) if job.session is None else job.session.plan(estimate, make)


def _plan_in(weight_format: str | None, job: _Job, state: Run | SharedRun) -> tuple[_Job, Plan]:
    """The plan for the rows that are left, with weights in the format of the finished rows if that is possible.

    Args:
        weight_format: Format of the weights that computed the finished rows; None: no row is finished.
        job: The run.
        state: The run directory.

    Returns:
        The run and its plan; the run's job allows that format only, if that is possible.
    """
    if weight_format is None:
        return job, _plan(job, state)
    resolved = None if job.options.plan else in_format_of_rows(job.resolved, weight_format)
    if resolved is not None:
        kept = replace(job, resolved=resolved)
        with contextlib.suppress(InputError):  # no plan fits, but one with the other format may
            return kept, _plan(kept, state)
    plan = _plan(job, state)
    if (other := plan.policy.weight_format) != weight_format:
        job.progress.say(
            f"other rows of this output are made with weights in {weight_format}, this plan has them in {other}:"
            " rows may round differently"
        )
    return job, plan


def _workload(job: _Job, state: Run | SharedRun | None) -> EstimatedWorkload:
    """The workload of the rows that are left."""
    options, context = job.options, job.resolved.context
    total_rows = job.source.dataset.num_rows
    rows_done = len(state.done_rows) if state else 0
    rows_left = None if total_rows is None else max(1, total_rows - rows_done)
    finished = state.output_lens() if state and options.task == "generate" else ()
    try:
        estimated = measure_workload(
            job.source, job.tokenizer(), options, context, rows_left=rows_left, finished_output_lens=finished
        )
        job.row_sizes.sampled(estimated.sampled)
        return estimated
    except NoUsableRow as error:  # each bad row has its error in the output, and later rows may be fine
        job.progress.say(str(error))
        longest = min(options.sampling.max_tokens, context - 1) if options.task == "generate" else 1
        return EstimatedWorkload(Workload.uniform(rows_left or UNKNOWN_ROWS, 1, longest), False)


def _run_rows(job: _Job, state: Run | SharedRun, engine: Engine, plan: Plan) -> str | None:
    """Run the rows that are left, and write their results into parts.

    Returns:
        The reason why some rows are still left, which is the deadline or too many failed rows; None: all are done.
    """
    options, total_rows = job.options, job.source.dataset.num_rows
    per_row = job.source.columns.results_per_row
    limit = FailureLimit.parse(options.max_failed)
    rows = FailedRows(limit, state.done_rows.failed, total_rows, results_per_row=per_row)
    finished_tokens = 0
    stopped: str | None = None
    ending = False
    warned_of_beginning = False

    def should_stop() -> bool:
        nonlocal stopped
        if stopped is None and job.must_stop():
            stopped = _DEADLINE
        return ending or stopped is not None

    def show(stats: EngineStats) -> None:
        nonlocal warned_of_beginning
        if stats.begins_twice and not warned_of_beginning:
            warned_of_beginning = True
            logger.warning(_BEGINS_TWICE)
        if job.page is not None:
            job.page.after_sweep(stats)
        left = observer.after_sweep(stats)
        tokens = stats.computed_tokens, stats.generated_tokens, finished_tokens
        learner.after_sweep(rows.done, *tokens, job.deduplication.count, left)

    def row_counts() -> RowCounts:
        return RowCounts(rows.done, rows.failed, job.deduplication.count)

    observer = Observer(state, total_rows, row_counts, job.progress, job.publisher)
    stepped = isinstance(job.source, SteppedSource)  # its later steps are not in the plan
    expected = None if stepped else expected_of(plan, options, state, total_rows, job.row_sizes)
    in_order = sorts_rows(plan) and not stepped and not job.source.dataset.is_stream
    if expected is not None:
        mixed = MOST_REQUESTS if plan.policy.share_prefixes else 1
        job.row_sizes.mixed(total_rows if in_order and total_rows is not None else mixed)
        job.row_sizes.scan_in_thread(job.source.batches(0, SCAN_ROWS), plan.prediction.total_s)
    observer.start(expected, engine)
    planned = (
        None if expected is None or options.share else PlannedStages.of(plan, expected.rows, expected.seqs_per_row)
    )
    learner = Learner(job.resolved, plan, planned, job.progress.say, job.origin.started_s)
    run = _engine_call(job, engine)
    flow = None
    ahead = engine.policy.max_num_seqs * 5 // 4
    left: Generator[Any, None, None]
    left = requests_left(job.source, state, ahead, should_stop, rows.watch, in_order=in_order)
    watched: Iterator[Any] = left
    if isinstance(job.source, SteppedSource) and isinstance(state, Run):
        flow = RowFlow(job.source, state.done_rows, state.parts_dir, should_stop)
        left = flow.requests()
        watched = rows.watch(left)
    requests = going_on(watch_chats(watched, job.tokenizer), state)
    if not options.share:  # a worker claims more rows as its rows come out: none may be held back
        requests = job.deduplication.unique(requests)
    results = job.deduplication.with_duplicates(run(requests, should_stop=should_stop, on_sweep=show))
    if flow is not None:
        results = flow.results(results)
    interval_s = seconds(options.flush_interval)
    with state.saver(engine.partials, interval_s), state.writer(flush_interval_s=interval_s) as writer:
        try:
            for result in results:
                writer.add(result.row, _row_result(options, job.source, result))
                observer.finished(result)
                _keep_answer(job, result)
                if isinstance(result, Completion):
                    finished_tokens += sum([len(sample.token_ids) for sample in result.samples])
                too_many = rows.add(result.row, result.error)
                if result.error is not None and (result.row + 1) % per_row == 0:
                    _on_failed_row(job, result.row // per_row, result.error, first=rows.failed == 1)
                if too_many is not None:
                    stopped = too_many
                    break
        finally:
            ending = True
            results.close()
            with contextlib.suppress(ValueError):  # its thread is still in it, and ends by itself
                left.close()
            job.row_sizes.stop()
            learner.keep()
            keep_drafts(job.resolved, engine.draft_rates, engine.forced_per_step)
    return None if state.is_done(total_rows) else stopped


def _engine_call(job: _Job, engine: Engine) -> Callable[..., Any]:
    """The engine's function for the job's task, which looks answers up if there is a cache."""
    if job.options.task == "score":
        return engine.score
    if job.source.head is not None:
        return partial(engine.embed, head=VectorHead(job.source.head))
    return engine.generate if job.cache is None else partial(engine.generate, known=job.cache.known)


def _keep_answer(job: _Job, result: Completion | Scored | Embedded) -> None:
    """Keep an answer for later jobs if there is a cache."""
    if job.cache is not None and isinstance(result, Completion):
        job.cache.add(result)


def _row_result(options: JobOptions, source: RequestSource, result: Completion | Scored | Embedded) -> Result:
    if isinstance(result, Completion):
        return RowResult.from_completion(result, token_ids=options.token_ids)
    if isinstance(result, Embedded):
        return EmbedResult.from_embedded(result)
    token_logprobs = options.sampling.logprobs is not None
    return ScoreResult.from_scored(result, whole=source.scores_prompts, token_logprobs=token_logprobs)


def _on_failed_row(job: _Job, row: int, error: str, first: bool) -> None:
    if job.options.on_error == "fail":
        raise BatchgenError(f"row {row}: {error} (--on-error record notes it in the row and goes on)")
    if first:
        job.progress.say(f"row {row:,} failed: {error} (further rows that fail are only counted)")


def _too_many(reason: str, report: dict[str, Any]) -> str:
    """The closing line of a job with too many failed rows."""
    errors = [f": {kind['error']} ({kind['rows']:,} of them)" for kind in report["errors"][:1]]
    if report["state"] == "stopped":
        end = "finished rows are kept, --max-failed accepts more, --retry-failed runs failed ones again"
    else:
        end = f"{report['output']} has them with their errors, --retry-failed runs failed ones again"
    return "".join([reason, *errors, f"; {end}"])


def _dry_run(job: _Job, plan: Plan) -> dict[str, Any]:
    """The report of what a run would do with the first row, without reading weights or writing anything."""
    first, batch = next(job.source.batches(0, 1), (0, None))
    request = Request("", error="there is none") if batch is None else next(job.source.requests_of(batch, first))
    (request,) = watch_chats([replace(request, row=first)], job.tokenizer)
    if request.error is not None:
        prompt, num_tokens, what = f"(row {first} would fail: {request.error})", 0, ""
    elif isinstance(request, ScoreRequest):
        prompt, num_tokens, what = _shown_to_score(request, job.tokenizer())
    elif job.source.head is not None:
        prompt, num_tokens = _shown(prompted(request, job.source.head), job.tokenizer())
        what = f"a vector of {job.source.head.size:,} values"
    else:
        prompt, num_tokens = _shown(request, job.tokenizer())
        sampling = request.sampling or job.options.sampling
        most = f"up to {sampling.max_tokens:,} generated"
        what = f"one of {len(sampling.choice):,} choices" if sampling.choice else most
    return {
        "state": "dry run",
        "rows": job.source.dataset.num_rows,
        "output": None if job.options.output is None else str(job.options.output),
        "output_columns": job.source.output_names(job.options),
        "model": job.resolved.files.name,
        "dtype": plan.dtype,
        "plan": plan.to_json(),
        "headline": _headline(job, plan),
        "sampling": job.options.sampling.to_json(),
        "first_row": first,
        "first_prompt": prompt,
        "first_prompt_tokens": num_tokens,
        "first_row_asks": what,
    }


def _shown_to_score(request: ScoreRequest, tokenizer: Tokenizer) -> tuple[str, int, str]:
    """A context and its continuations as text, the context's length in tokens, and a text with the scored lengths."""
    context, continuations = encode_pairs(tokenizer, request, encode_all(tokenizer, [request]))
    lengths = ", ".join(f"{len(tokens):,}" for tokens in continuations)
    prompt = tokenizer.decode(context, skip_special_tokens=False)
    prompt += "".join(f"\n-> {tokenizer.decode(tokens, skip_special_tokens=False)}" for tokens in continuations)
    return prompt, len(context), f"{lengths} scored"


def _shown(request: Request, tokenizer: Tokenizer) -> tuple[str, int]:
    """A prompt as text, and its length in tokens."""
    token_ids = encode_prompt(tokenizer, request)
    if isinstance(request.prompt, str):
        return request.prompt, len(token_ids)
    messages = bool(request.prompt) and isinstance(request.prompt[0], dict)
    return tokenizer.decode(token_ids, skip_special_tokens=not messages), len(token_ids)
