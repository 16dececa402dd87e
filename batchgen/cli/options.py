"""The options of the commands. Flags keep vLLM's names where vLLM has one."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from batchgen.core.errors import InputError


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The options in a TOML file, under their names with underscores. Files named there that lie beside it are meant,
    wherever the command is run. Raises InputError."""
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
    names = {key: key.replace("-", "_") for key in values}
    return {name: _beside(path, name, values[key]) for key, name in names.items()}


def _config_file(context: click.Context, _: click.Parameter, path: str | None) -> None:
    """--config: the file's values become defaults, which flags override."""
    if path is None:
        return
    values = read_job_file(path)
    # `plan` takes the file of a `run` as well; what only `run` knows does not matter to it.
    known = {p.name for p in context.command.params} | _names_of(RUN_OPTIONS)
    for key in values:
        if key not in known:
            raise InputError(f"--config {path}: {key!r} is no option of batchgen {context.info_name}")
    context.default_map = {**(context.default_map or {}), **values}


def _beside(config: str | Path, key: str, value: Any) -> Any:
    if key not in ("input", "prompt_template", "json_schema", "plan") or not isinstance(value, str):
        return value
    mark = "@" if key == "prompt_template" else ""
    name = value.removeprefix(mark)
    folder = os.path.dirname(os.path.abspath(config))
    there, pattern = os.path.join(folder, name), os.path.join(glob.escape(folder), name)
    if not name or not value.startswith(mark):
        return value
    if os.path.exists(there):
        return mark + there
    return mark + pattern if glob.glob(pattern) else value


# What the job is: shared by `run` and `plan`.
JOB_OPTIONS = [
    click.option("-m", "--model", required=True, metavar="MODEL",
                 help="Hugging Face directory or hub id, .gguf file, weight store, or 'demo' (SmolLM2-135M-Instruct)."),
    click.option("--config", metavar="FILE", is_eager=True, expose_value=False, callback=_config_file,
                 help="TOML file of these options, which flags override. Files it names are looked for beside it first."),
    click.option("--prompt-column", metavar="NAME", help="Column that holds the prompts [default: prompt]."),
    click.option("--prompt-template", metavar="TEXT", help="Jinja template over the columns; @FILE reads it from a file."),
    click.option("--messages-column", metavar="NAME", help="Column of chat messages (lists of role and content)."),
    click.option("--system-prompt", metavar="TEXT", help="System message before each row's messages; implies --chat."),
    click.option("--chat", is_flag=True, help="Send text prompts as a user's message, through the chat template."),
    click.option("--task", type=click.Choice(["generate", "score"]), default="generate", show_default=True,
                 help="score: log-probabilities of continuations of the prompt, or of the prompt itself."),
    click.option("--continuations-column", metavar="NAME",
                 help="With --task score: column of what may follow the prompt, one or a list, texts or token ids."),
    click.option("--choices", multiple=True, metavar="TEXT",
                 help="With --task score: a text that may follow every prompt, repeated for each; the likeliest is the choice."),
    click.option("--choices-column", metavar="NAME", help="With --task score: column with a list of choices for each row."),
    click.option("--sampling-column", metavar="NAME",
                 help="Column of structs or JSON objects with sampling parameters of the row's own."),
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
    click.option("--json-schema", metavar="FILE", help="Every text is JSON that is valid against this schema."),
    click.option("--regex", metavar="TEXT", help="Every text matches this regular expression, as a whole."),
    click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto",
                 show_default=True),
    click.option("--quantization", type=click.Choice(["none", "int4"]), default="none", show_default=True,
                 help="int4: the layers' matrices in 4 bits."),
    click.option("--kv-cache-dtype", type=click.Choice(["auto", "int4"]), default="auto", show_default=True,
                 help="int4: KV in 4 bits."),
    click.option("--device", default="auto", show_default=True, metavar="DEVICE",
                 help="cpu, or an accelerator that is emulated on it, with memory and links of its own:"
                      " emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s."),
    click.option("--gpu-memory", metavar="SIZE", help="GPU memory budget [default: all of it]."),
    click.option("--cpu-memory", metavar="SIZE", help="Memory budget such as 14GiB [default: what is free, less 10%]."),
    click.option("--disk-memory", metavar="SIZE", help="Disk budget [default: what is free, less 10%]; 0 is none."),
    click.option("--hardware", metavar="FILE|NAME",
                 help="Plan with this profile's rates: a file of `batchgen profile`, or t4, a10g, rtx3090, a100, h100, h200,"
                      " zen4 [default: this machine's, measured once]."),
    click.option("--offload-dir", metavar="DIR", help="Directory of the disk tier [default: the cache directory]."),
    click.option("--admission", type=click.Choice(["auto", "continuous", "static"]), default="auto", show_default=True),
    click.option("--max-num-seqs", type=int, metavar="N", help="Most samples in flight [default: as planned]."),
    click.option("--num-gpu-batches", type=int, metavar="N", help="GPU batches in a block [default: as planned]."),
    click.option("--max-num-batched-tokens", type=int, metavar="N",
                 help="Most tokens in one sweep; longer prompts are chunked [default: as planned]."),
    click.option("--max-model-len", type=int, metavar="N", help="Longest prompt plus output [default: the model's]."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", "share_prefixes", default=True,
                 help="Compute a prompt prefix that rows share once [default: on]."),
    click.option("--expected-output-len", type=int, metavar="N",
                 help="Tokens a sample usually generates, for planning and admission."),
    click.option("--on-overlong", type=click.Choice(["error", "truncate-left", "truncate-right"]), default="error",
                 show_default=True, help="A prompt that does not fit the context."),
    click.option("--shard", metavar="I/N", help="Only the I-th of N equal parts of the input, I from 0."),
    click.option("--limit", type=int, metavar="N", help="Only the first N rows."),
    click.option("--split", metavar="NAME", help="Split of a dataset that has several."),
    click.option("--id-column", metavar="NAME", help="Column whose value, rather than the row number, seeds a row's draws."),
    click.option("--input-format", type=click.Choice(["parquet", "jsonl", "csv", "datasets", "openai"])),
    click.option("--trace", metavar="FILE",
                 help="Write a timeline of every lane, for chrome://tracing: of the run, or what the plan expects."),
    click.option("--progress", type=click.Choice(["auto", "plain", "none"]), default="auto", show_default=True),
]  # fmt: skip

_INPUT_HELP = "Parquet, JSONL or CSV file, glob or directory; saved or hub dataset; OpenAI batch JSONL."

RUN_OPTIONS = [
    click.option("-i", "--input", required=True, metavar="PATH", help=_INPUT_HELP),
    click.option("-o", "--output", required=True, metavar="FILE", help="A .parquet, .jsonl, .csv or .arrow file."),
    click.option("--plan", metavar="FILE", help="Run as this plan of `batchgen plan -o` says."),
    click.option("--resume/--no-resume", default=True, help="Go on from rows that are done already [default: resume]."),
    click.option("--overwrite", is_flag=True, help="Drop old progress; the old output stays until the new one is whole."),
    click.option("--retry-failed", is_flag=True, help="Run the rows that failed again."),
    click.option("--max-time", metavar="TIME", help="Stop cleanly after 6h, 90m, ...; the next run goes on (exit code 3)."),
    click.option("--flush-interval", default="5s", show_default=True, metavar="TIME",
                 help="How often finished rows are saved: what a crash can cost."),
    click.option("--on-error", type=click.Choice(["record", "fail"]), default="record", show_default=True,
                 help="A bad row: note it in the row, or stop the job."),
    click.option("--output-prefix", default="", metavar="TEXT", help="Put before the names of the output columns."),
    click.option("--report", metavar="FILE", help="Write the report as JSON; - is stdout."),
    click.option("--dry-run", is_flag=True, help="Check everything, show the plan and the first prompt; run nothing."),
]  # fmt: skip

PLAN_OPTIONS = [
    click.option("-i", "--input", metavar="PATH", help=_INPUT_HELP + " Or give lengths:"),
    click.option("--num-prompts", type=int, metavar="N", help="Plan for N prompts instead of an input ..."),
    click.option("--input-len", type=int, metavar="N", help="... of this many tokens each,"),
    click.option("--output-len", type=int, metavar="N", help="and outputs of this many tokens."),
    click.option("--max-block-latency", metavar="TIME", help="Longest time from a block's first prompt to its last token."),
    click.option("--what-if", multiple=True, metavar="NAME=SIZE",
                 help="Plan again with gpu-memory, cpu-memory, disk-memory, h2d, d2h, disk-read, disk-write or dram changed"
                      " (gpu-memory=48GiB), beside the current plan; may be repeated."),
    click.option("--explain", is_flag=True, help="Placement, lanes, memory, and what more of each would buy."),
    click.option("--frontier", is_flag=True, help="Throughput against block latency."),
    click.option("--json", "as_json", is_flag=True, help="The plan as JSON on stdout."),
    click.option("-o", "--output", "plan_file", metavar="FILE", help="Write the plan, for `batchgen run --plan`."),
]  # fmt: skip

BENCH_OPTIONS = [
    click.option("--num-prompts", type=int, default=64, show_default=True, metavar="N", help="Rows,"),
    click.option("--input-len", type=int, default=512, show_default=True, metavar="N", help="of this many tokens each,"),
    click.option("--output-len", type=int, default=32, show_default=True, metavar="N", help="and this many generated ones."),
    click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", show_default=True,
                 help="dummy: made-up weights for a config.json, or its directory, given as --model."),
    click.option("--plan", metavar="FILE", help="Run as this plan of `batchgen plan -o` says."),
    click.option("--report", metavar="FILE", help="Write the report as JSON; - is stdout."),
]  # fmt: skip
# Of JOB_OPTIONS, what means nothing for rows that are made up.
OF_ROWS = (
    "prompt_column", "prompt_template", "messages_column", "system_prompt", "chat", "max_tokens", "stop", "stop_token_ids",
    "ignore_eos", "share_prefixes", "expected_output_len", "on_overlong", "shard", "limit", "split", "id_column", "input_format",
    "json_schema", "regex", "task", "choices", "choices_column", "continuations_column", "sampling_column",
)  # fmt: skip

PROFILE_OPTIONS = [
    click.option("--device", default="auto", show_default=True, metavar="DEVICE",
                 help="cpu, cuda or emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s."),
    click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), multiple=True,
                 help="Formats to measure, may be repeated [default: the one models run in here]."),
    click.option("--offload-dir", metavar="DIR", help="Directory of the disk tier [default: the cache directory]."),
    click.option("--refresh", is_flag=True, help="Measure again, although this machine was measured before."),
    click.option("-o", "--output", metavar="FILE", help="Write the profile as JSON; - is stdout."),
]  # fmt: skip

CONVERT_OPTIONS = [
    click.option("-m", "--model", required=True, metavar="MODEL",
                 help="Hugging Face directory or hub id, .gguf file, weight store, or 'demo' (SmolLM2-135M-Instruct)."),
    click.option("-o", "--output", required=True, metavar="DIR", help="Directory of the weight store."),
    click.option("--quantization", type=click.Choice(["none", "int4"]), default="none", show_default=True,
                 help="int4: the layers' matrices in 4 bits."),
    click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto",
                 show_default=True, help="Of everything else, and of what is computed."),
    click.option("--overwrite", is_flag=True, help="Replace a store of another model or format."),
    click.option("--progress", type=click.Choice(["auto", "plain", "none"]), default="auto", show_default=True),
]  # fmt: skip


def without(options: Sequence[Callable], names: Sequence[str]) -> list[Callable]:
    """The options that do not have these names."""
    return [option for option in options if _names_of([option]).isdisjoint(names)]


def _names_of(options: Sequence[Callable]) -> set[str]:
    def nothing() -> None: ...

    for option in options:
        option(nothing)
    return {parameter.name for parameter in nothing.__click_params__}


def with_options(*groups: Sequence[Callable]) -> Callable:
    """A decorator that adds these options, in the order in which help shows them."""

    def decorate(command: Callable) -> Callable:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate
