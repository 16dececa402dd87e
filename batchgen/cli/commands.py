"""The commands, as click has them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from batchgen._version import __version__
from batchgen.cli.options import (
    BENCH_OPTIONS,
    CONVERT_OPTIONS,
    JOB_OPTIONS,
    OF_ROWS,
    PLAN_OPTIONS,
    PROFILE_OPTIONS,
    RUN_OPTIONS,
    with_options,
    without,
)
from batchgen.core.errors import BatchgenError, InputError, JobStopped
from batchgen.core.interrupts import keep


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="batchgen")
def cli() -> None:
    """A whole dataset through a language model, on one machine."""
    keep(lambda: "")


@cli.command()
@with_options(RUN_OPTIONS, JOB_OPTIONS)
def run(**options: Any) -> None:
    """Run every row of a dataset through a model.

    Rows are written in input order, input columns kept, with the columns text, finish_reason, prompt_tokens,
    generated_tokens and error; with --task score logprobs, is_greedy and num_tokens of every continuation, or logprob,
    num_tokens and perplexity of the prompt, and the choice of --choices. Finished rows are saved every few seconds: run the same command again after any
    interruption and it goes on.

    Exit codes: 0 complete, 1 failed, 2 bad usage or input, 3 stopped by --max-time, 130 interrupted.
    """
    keep(lambda: _before_rows(options["output"]))
    from batchgen.job.report import summary
    from batchgen.job.run import JobOptions, run_job

    report = run_job(JobOptions(**_sampling_apart(options)))
    if options["report"] == "-":
        pass  # stdout is the report's
    elif report["state"] == "dry run":
        click.echo(json.dumps({k: v for k, v in report.items() if k != "first_prompt"}, indent=2))
    else:
        for line in summary(report):
            click.echo(line)
    if report["state"] == "stopped":
        sys.exit(JobStopped.exit_code)


@cli.command()
@with_options(PLAN_OPTIONS, JOB_OPTIONS)
def plan(**options: Any) -> None:
    """Say how a job will run and how long it will take, on this machine or another.

    Nothing but the model's configuration and a sample of the rows is read.
    """
    from batchgen.job.options import JobOptions
    from batchgen.job.plan import PlanOptions, run_plan

    options = _sampling_apart(options)
    own = {f.name: options.pop(f.name) for f in fields(PlanOptions) if f.name in options}
    for line in run_plan(PlanOptions(JobOptions(output=None, **options), **own)):
        click.echo(line)


@cli.command()
@with_options(BENCH_OPTIONS, without(JOB_OPTIONS, OF_ROWS))
def bench(**options: Any) -> None:
    """Measure a model on made-up rows of equal lengths, beside what the plan said it would take.

    With --load-format dummy a model's config.json is enough: weights of that shape are made up.
    """
    from batchgen.job.bench import BenchOptions, run_bench, summary
    from batchgen.job.options import JobOptions

    options = _sampling_apart(options)
    own = {f.name: options.pop(f.name) for f in fields(BenchOptions) if f.name in options}
    report = run_bench(BenchOptions(JobOptions(input=None, output=None, **options), **own))
    if options["report"] != "-":
        for line in summary(report):
            click.echo(line)


@cli.command()
@with_options(PROFILE_OPTIONS)
def profile(**options: Any) -> None:
    """Measure what this machine can do: matrix products, attention, memory, disk. Kept for later plans."""
    from batchgen.job.plan import run_profile

    for line in run_profile(**options):
        click.echo(line)


@cli.command()
@with_options(CONVERT_OPTIONS)
def convert(**options: Any) -> None:
    """Put a model's weights into a store: one file a layer, as they are streamed from disk.

    Can be interrupted at any time: the same command goes on, checks what is there and repairs it.
    """
    keep(lambda: "the same command goes on from there")
    from batchgen.job.convert import run_convert

    click.echo(run_convert(**options))


def _before_rows(output: str) -> str:
    """What is true of a job that has not looked into its run directory yet."""
    begun = os.path.exists(os.path.realpath(output) + ".batchgen/manifest.json")
    return "no row was run yet, those of earlier runs are kept" if begun else "no rows are finished yet"


def _sampling_apart(options: dict[str, Any]) -> dict[str, Any]:
    """The options, those of SamplingParams as one."""
    from batchgen.core.request import SamplingParams

    given = {name: options.pop(name) for name in SamplingParams.names() if name in options}
    if "stop" in given:
        given["stop"] = tuple(s.replace("\\n", "\n").replace("\\t", "\t") for s in given["stop"])
    if given.get("json_schema") is not None:
        given["json_schema"] = _read_schema(given["json_schema"])
    sampling = SamplingParams(**given)
    return options | {"sampling": sampling}


def _read_schema(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(f"--json-schema {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def run_cli() -> int:
    """Runs the command of `sys.argv`; its exit code, after one line for whatever went wrong."""
    try:
        code = cli.main(standalone_mode=False)
    except BatchgenError as error:
        click.echo(f"batchgen: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code if isinstance(code, int) else 0
