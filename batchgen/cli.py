"""The command line. Flags keep vLLM's names where vLLM has one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from batchgen._version import __version__
from batchgen.errors import BatchgenError, InputError

EXIT_STOPPED = 3  # the deadline came first: the same command goes on
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="batchgen")
def cli() -> None:
    """A whole dataset through a language model, on one machine."""


def _config_file(context: click.Context, _: click.Parameter, path: str | None) -> None:
    """--config: the file's values become defaults, which flags override."""
    if path is None:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config {path} is not valid TOML: {error}") from error
    known = {p.name for p in context.command.params}
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in known:
            raise InputError(f"--config {path}: {key!r} is no option of batchgen {context.info_name}")
    context.default_map = {**(context.default_map or {}), **values}


_OPTIONS = [
    click.option("-m", "--model", required=True, metavar="MODEL",
                 help="Hugging Face directory or hub id, .gguf file, or 'demo' (SmolLM2-135M-Instruct)."),
    click.option("-i", "--input", required=True, metavar="PATH",
                 help="Parquet, JSONL or CSV file, glob or directory; saved or hub dataset; OpenAI batch JSONL."),
    click.option("-o", "--output", required=True, metavar="FILE", help="A .parquet, .jsonl or .csv file."),
    click.option("--config", metavar="FILE", is_eager=True, expose_value=False, callback=_config_file,
                 help="TOML file of these options; flags override it."),
    click.option("--prompt-column", metavar="NAME", help="Column that holds the prompts [default: prompt]."),
    click.option("--prompt-template", metavar="TEXT", help="Jinja template over the columns; @FILE reads it from a file."),
    click.option("--messages-column", metavar="NAME", help="Column of chat messages (lists of role and content)."),
    click.option("--system-prompt", metavar="TEXT", help="System message before each row's messages; implies --chat."),
    click.option("--chat", is_flag=True, help="Send text prompts as a user's message, through the chat template."),
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens generated per sample."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 is off."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("-n", "n", type=int, default=1, show_default=True, help="Samples per row."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--stop", multiple=True, metavar="TEXT", help=r"Stop string, may be repeated; \n and \t are understood."),
    click.option("--stop-token-ids", multiple=True, type=int, metavar="ID", help="Stop token, may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on past end-of-text."),
    click.option("--logprobs", type=int, metavar="N", help="Log-probabilities of the chosen token and the top N."),
    click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto",
                 show_default=True),
    click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True),
    click.option("--cpu-memory", metavar="SIZE", help="Memory budget such as 14GiB [default: what is free, less 10%]."),
    click.option("--admission", type=click.Choice(["continuous", "static"]), default="continuous", show_default=True),
    click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Most samples in flight."),
    click.option("--max-num-batched-tokens", type=int, default=1024, show_default=True,
                 help="Most tokens in one sweep; longer prompts are chunked."),
    click.option("--max-model-len", type=int, metavar="N", help="Longest prompt plus output [default: the model's]."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", "share_prefixes", default=True,
                 help="Compute a prompt prefix that rows share once [default: on]."),
    click.option("--expected-output-len", type=int, metavar="N", help="Tokens a sample usually generates, for admission."),
    click.option("--resume/--no-resume", default=True, help="Go on from rows that are done already [default: resume]."),
    click.option("--overwrite", is_flag=True, help="Drop old progress; the old output stays until the new one is whole."),
    click.option("--retry-failed", is_flag=True, help="Run the rows that failed again."),
    click.option("--max-time", metavar="TIME", help="Stop cleanly after 6h, 90m, ...; the next run goes on (exit code 3)."),
    click.option("--flush-interval", default="5s", show_default=True, metavar="TIME",
                 help="How often finished rows are saved: what a crash can cost."),
    click.option("--on-error", type=click.Choice(["record", "fail"]), default="record", show_default=True,
                 help="A bad row: note it in the row, or stop the job."),
    click.option("--on-overlong", type=click.Choice(["error", "truncate-left", "truncate-right"]), default="error",
                 show_default=True, help="A prompt that does not fit the context."),
    click.option("--shard", metavar="I/N", help="Only the I-th of N equal parts of the input, I from 0."),
    click.option("--limit", type=int, metavar="N", help="Only the first N rows."),
    click.option("--split", metavar="NAME", help="Split of a dataset that has several."),
    click.option("--id-column", metavar="NAME", help="Column whose value, rather than the row number, seeds a row's draws."),
    click.option("--input-format", type=click.Choice(["parquet", "jsonl", "csv", "datasets", "openai"])),
    click.option("--output-prefix", default="", metavar="TEXT", help="Put before the names of the output columns."),
    click.option("--report", metavar="FILE", help="Write the report as JSON; - is stdout."),
    click.option("--progress", type=click.Choice(["auto", "plain", "none"]), default="auto", show_default=True),
    click.option("--dry-run", is_flag=True, help="Check everything and show the first prompt; run nothing."),
]  # fmt: skip


def _with_options(command):
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@cli.command()
@_with_options
def run(**options: Any) -> None:
    """Run every row of a dataset through a model.

    Rows are written in input order, input columns kept, with the columns text, finish_reason, prompt_tokens,
    generated_tokens and error. Finished rows are saved every few seconds: run the same command again after any
    interruption and it goes on.

    Exit codes: 0 complete, 1 failed, 2 bad usage or input, 3 stopped by --max-time, 130 interrupted.
    """
    from batchgen.job import JobOptions, run_job
    from batchgen.report import summary
    from batchgen.request import SamplingParams

    options["stop"] = tuple(s.replace("\\n", "\n").replace("\\t", "\t") for s in options["stop"])
    sampling = SamplingParams(**{name: options.pop(name) for name in SamplingParams.names()})
    report = run_job(JobOptions(sampling=sampling, **options))
    if options["report"] == "-":
        pass  # stdout is the report's
    elif report["state"] == "dry run":
        click.echo(json.dumps({k: v for k, v in report.items() if k != "first_prompt"}, indent=2))
    else:
        for line in summary(report):
            click.echo(line)
    if report["state"] == "stopped":
        sys.exit(EXIT_STOPPED)


def main() -> None:
    """The console script: one line and an exit code for whatever goes wrong."""
    # A scheduler's SIGTERM saves finished rows just as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = cli.main(standalone_mode=False)
    except BatchgenError as error:
        click.echo(f"batchgen: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        _interrupted()
    except KeyboardInterrupt:
        _interrupted()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> None:
    click.echo("batchgen: interrupted; finished rows are saved, the same command goes on from there", err=True)
    sys.exit(EXIT_INTERRUPTED)
