"""The commands of `batchgen`, declared with click."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from batchgen._version import __version__
from batchgen.cli.options import CONFIG, STEPS, takes_options
from batchgen.core.card_errors import naming_card_errors
from batchgen.core.errors import BatchgenError, InputError, JobStopped, TooManyFailed, naming_files
from batchgen.core.imports import import_torch, importing, leave_pandas_out
from batchgen.core.interrupts import keep
from batchgen.core.request import SamplingParams
from batchgen.core.screen import ProductLost, Screen, put, say
from batchgen.core.text import visible, without_credentials
from batchgen.core.text_file import read_text
from batchgen.job.command_options import BenchOptions, ConvertOptions, PlanOptions, ProfileOptions, ServeOptions
from batchgen.job.option import RUN, TEXT_OF_FILE, Option
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions
from batchgen.job.step_tables import steps_of


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="batchgen")
def cli() -> None:
    """A whole dataset through a language model, on one machine."""
    keep(lambda: "")


# What `run` prints on standard output without running: for programs.
_AS_JSON = Option(
    "as_json", ("--json",), RUN, frozenset(), default=False, type=bool, common=True,
    help="With --dry-run: as JSON on stdout, with the whole plan.",
)  # fmt: skip


@takes_options("run", CONFIG, _AS_JSON, short_help=True)
def run(**options: Any) -> None:
    """Run every row of a dataset through a model.

    \b
    batchgen run --model demo --input data.parquet
    batchgen run --model demo --input data.csv --prompt-template 'Classify: {{ text }}' --max-tokens 8
    batchgen run --model demo --input data.csv --prompt-template 'Is it late? {{ text }}' --task score \\
        --choices yes --choices no

    The first writes data.out.parquet: all columns of the input, in its order, and text, finish_reason, prompt_tokens,
    generated_tokens and error (gen_text and so on where the input has one of these names). Stop it however you like:
    the same command goes on where it was. --dry-run shows the first prompt and how long the job will take.

    Exit codes: 0 complete, 1 failed, 2 bad usage or input, 3 stopped by --max-time, 4 too many rows failed, 130
    interrupted.
    """
    ranks = max(options["tensor_parallel"], options["pipeline"])
    _follow(ranks)
    as_json = options.pop("as_json")
    if as_json and not options["dry_run"]:
        raise InputError("--json is for --dry-run: leave it out, or give --report - for the report of a whole job")
    keep(lambda: "no rows are finished yet")
    from batchgen.distributed.group import dismissing

    with dismissing(ranks):
        job = _job(options)
        _say_begun(job)
        with importing():
            from batchgen.job.checks import check_job
            from batchgen.job.default_output import default_output
        leave_pandas_out()
        given = job.output is not None
        if not given:
            job = replace(job, output=default_output(job))
        keep(lambda: _before_rows(str(job.output)))
        check_job(job)  # before imports that take a second
        if not given and job.progress != "none":
            say(without_credentials(f"output: {job.output}"))
    with importing():
        import_torch()
        from batchgen.job.report import dry_run_lines
        from batchgen.job.start import runner_of, summary_of

        run_it = runner_of(job)

    failure = None
    try:
        report = run_it(job)
    except TooManyFailed as error:
        failure, report = error, error.report
    except BatchgenError as error:
        _log_and_exit(error, job)
        raise
    if options["report"] == "-" or options["log_format"] == "json":
        pass  # stdout is the report's
    elif report["state"] == "dry run":
        put([json.dumps(report, indent=2)] if as_json else dry_run_lines(report))
    else:
        for line in summary_of(job, report):
            say(line, sys.stderr if job.output == "-" else sys.stdout)  # stdout may be the output's
    if failure is not None:
        _log_and_exit(failure, job)
        raise failure
    if report["state"] == "stopped":
        sys.exit(JobStopped.exit_code)


@takes_options("plan", CONFIG)
def plan(**options: Any) -> None:
    """Say how a job will run and how long it will take, on this machine or another.

    Nothing but the model's configuration and a sample of the rows is read.
    """
    of_plan = _taken(options, PlanOptions)
    job = _job(options)
    with importing():
        import_torch()
        from batchgen.job.start import planner_of

        lines_of = planner_of(job)
    leave_pandas_out()
    put(lines_of(PlanOptions(job, **of_plan)))


@takes_options("bench", CONFIG)
def bench(**options: Any) -> None:
    """Measure a model on random rows of equal lengths, beside what the plan said it would take.

    With --load-format dummy a model's config.json is enough: it is run with random weights of that shape.
    """
    _follow(options["tensor_parallel"])
    with importing():
        import_torch()
        from batchgen.distributed.group import dismissing
        from batchgen.job.bench import run_bench, summary
    leave_pandas_out()

    with dismissing(options["tensor_parallel"]):
        of_bench = _taken(options, BenchOptions)
        job = _job(options)
    report = run_bench(BenchOptions(job, **of_bench))
    if options["report"] != "-":
        put(summary(report))


@takes_options("profile")
def profile(**options: Any) -> None:
    """Measure what this machine can do: matrix products, attention, memory, disk. Kept for later plans."""
    from batchgen.job.plan import run_profile

    put(run_profile(ProfileOptions(**options)))


@takes_options("convert")
def convert(**options: Any) -> None:
    """Put a model's weights into a store: one file a layer, as they are streamed from disk.

    Can be interrupted at any time: the same command goes on, checks what is there and repairs it.
    """
    keep(lambda: "the same command goes on from there")
    from batchgen.job.convert import run_convert

    say(run_convert(ConvertOptions(**options)), sys.stdout)


@takes_options("serve-batches", CONFIG)
def serve_batches(**options: Any) -> None:
    """Serve OpenAI's batches on this machine: /v1/files, /v1/batches, and chats that are gathered into batches.

    The model is loaded once. Programs that use OpenAI's client work unchanged: OPENAI_BASE_URL is the address that is
    shown, and OPENAI_API_KEY the key. A server that was stopped goes on with its batches when it is started again.
    """
    of_server = _taken(options, ServeOptions)
    job = _job(options)
    with importing():
        import_torch()
        from batchgen.serve.server import serve
    leave_pandas_out()
    serve(ServeOptions(job, **of_server))


@click.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout.")
def status(output: str, as_json: bool) -> None:
    """Say how far the job of an output is, whether its process is alive, and when it will be done.

    `output` is the file or the URL that `batchgen run` was given. With --share also what each worker does; that takes
    as long as an eighth of the lease time, in which every worker gives a sign.
    """
    from batchgen.job.destination import local_output
    from batchgen.job.status import describe_status, output_status

    state = output_status(local_output(output), name=output)
    put([json.dumps(state, indent=2)] if as_json else [*map(visible, describe_status(state))])


def _log_and_exit(error: BatchgenError, job: JobOptions) -> None:
    """End the process with an error as a line of the log, if the log is in JSON."""
    if job.log_format == "json":
        from batchgen.job.log_format import LogFormat

        line = LogFormat("json", job.log_name).line(str(error), "error", "error", exit_code=error.exit_code)
        say(line, sys.stderr)
        sys.exit(error.exit_code)


def _say_begun(job: JobOptions) -> None:
    """On a terminal, say which job it is: somebody looks at a screen on which nothing would be for a second."""
    if job.progress != "none" and Screen.over(sys.stderr).isatty():
        say(without_credentials(f"batchgen {__version__}: {job.model} over {job.input}"))


def _follow(ranks: int) -> None:
    """In a process that a launcher has started as a rank other than 0: do that rank's work, then exit.

    Args:
        ranks: Number of ranks of the job.
    """
    from batchgen.distributed.launch import rank_of_environment

    place = rank_of_environment() if ranks > 1 else None
    if place is not None and place.size == ranks:
        # batchgen itself reports a connection that has ended; torch's C++ would too.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if place is not None and place.size == ranks and place.rank > 0:
        from batchgen.distributed.serve import serve
        from batchgen.engine.messages import WORK

        sys.exit(serve(place, WORK))


def _before_rows(output: str) -> str:
    """The message for an interruption before a job's run directory exists. output: the output's name."""
    begun = os.path.exists(os.path.realpath(output) + ".batchgen/manifest.json")
    return "no row was run yet, those of earlier runs are kept" if begun else "no rows are finished yet"


def _taken(options: dict[str, Any], owner: type) -> dict[str, Any]:
    """Remove the options that are fields of a dataclass from a dictionary of options, and return them.

    Args:
        options: Options by name, from which the fields are removed.
        owner: The dataclass.
    """
    return {f.name: options.pop(f.name) for f in fields(owner) if f.name in options}


def _job(options: dict[str, Any]) -> JobOptions:
    """The job's options from those of the command line; files that options such as --json-schema name are read."""
    options, read = dict(options), []
    if (config := options.pop("config")) is not None:
        read.append(("--config", config))
    given = _taken(options, SamplingParams)
    files = {option.name: option.flag for option in options_of("run") if option.reads == TEXT_OF_FILE}
    for holder in (given, options):
        read += [(files[name], os.path.expanduser(holder[name])) for name in files if holder.get(name) is not None]
    options = {"input": None, "output": None, **_with_texts(options)}
    steps = [_with_texts(step) for step in click.get_current_context().meta.get(STEPS, ())]
    if steps:
        options["steps"] = steps_of(steps, f"--config {config}")
    return JobOptions(sampling=SamplingParams(**_with_texts(given)), read_before=tuple(read), **options)


def _with_texts(given: dict[str, Any]) -> dict[str, Any]:
    """Values of options, with the texts of files in place of their names."""
    given = dict(given)
    for option in options_of("run"):
        if option.reads == TEXT_OF_FILE and given.get(option.name) is not None:
            given[option.name] = _read_text(option.flag, given[option.name])
    return given


def _read_text(flag: str, path: str) -> str:
    """The text of a file that an option names. Raises InputError."""
    try:
        return read_text(Path(path).expanduser(), "utf-8-sig")
    except (OSError, UnicodeError) as error:
        hint = "; write it to a file and give the file's name" if path.lstrip().startswith(("{", "start:")) else ""
        raise InputError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}{hint}") from error


for _command in (run, status, plan, bench, profile, convert, serve_batches):
    cli.add_command(_command)


def run_cli() -> int:
    """Run the command of `sys.argv`; returns its exit code. Any error prints one line."""
    try:
        # Not by click's main(), which ends without a word where any pipe or socket has broken.
        with (
            naming_files(errors=PermissionError),
            naming_card_errors(),
            cli.make_context("batchgen", sys.argv[1:]) as context,
        ):
            code = cli.invoke(context)
    except click.exceptions.Exit as error:  # of --help and --version
        return error.exit_code
    except BatchgenError as error:
        from batchgen.job.progress import LOG_VARIABLE

        if os.environ.get(LOG_VARIABLE, "").upper() == "DEBUG":
            for line in "".join(traceback.format_exception(error)).splitlines():
                say(line)
        say(f"batchgen: {error}")
        return error.exit_code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        lines = shown.getvalue().splitlines()
        if isinstance(error, click.UsageError) and error.message.startswith("Got unexpected extra argument"):
            lines[-1] += ": a value that has spaces needs quotes around it, as 'Classify: {{ text }}' has"
        for line in lines:
            say(line)
        return error.exit_code
    except ProductLost as error:
        if error.errno == errno.EPIPE:  # whoever reads it has seen enough
            return 0
        say(f"batchgen: cannot write standard output: {error.strerror}")
        return BatchgenError.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        say(f"batchgen: {os.fspath(error.filename)}: {error.strerror}")
        return BatchgenError.exit_code
    return code if isinstance(code, int) else 0
