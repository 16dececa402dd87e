"""Writes docs/command_line.md: every command of batchgen and every option, as click knows them.

    python docs/describe_commands.py

`make docs` does this, and a test compares the page with the committed one. The options of `batchgen.run` in Python are
written too (`describe_options.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from batchgen.cli.commands import cli

OUTPUT = Path(__file__).with_name("command_line.md")
INTRODUCTION = """\
# Command line

This page is made from the program itself by `docs/describe_commands.py`. `batchgen COMMAND --help` prints the same.

Every option of `run`, `plan`, `bench` and `serve-batches` may also stand in a TOML file, under its name with
underscores. `--config FILE` reads it; options on the command line override the file. Sizes are written `14GiB`,
durations `6h` or `90m`.

## Exit codes

| code | meaning |
|---|---|
| 0 | The job is complete. |
| 1 | Something failed. Finished rows are kept. |
| 2 | An option or the input is wrong. |
| 3 | `--max-time` has passed. The same command goes on later. |
| 4 | More rows failed than `--max-failed` allows, or all of them. Finished rows are kept. |
| 130 | The job was interrupted by Ctrl-C, SIGTERM or SIGHUP (its terminal was closed). Finished rows are kept. |

## Environment variables

| name | meaning |
|---|---|
| `BATCHGEN_CACHE` | The cache directory: downloads, measured profiles, weight stores, outputs without a name. \
Default: `~/.cache/batchgen`. One that another user may write to is not used: a folder within it is. |
| `BATCHGEN_SECRET`, `BATCHGEN_SECRET_FILE` | What ranks on several hosts know, and nobody else: 32 characters or \
more (`openssl rand -hex 32`), or a file of mode 0600 that has them. |
| `BATCHGEN_HARDWARE` | A hardware profile, by name or file, to plan with instead of this machine's. |
| `BATCHGEN_ISA` | One instruction set for all kernels, instead of the fastest for each shape: `scalar`, `avx2`, \
`avx_vnni`, `avx512`, `avx512_vnni`, `avx512_bf16`, `zen4`, `amx`, `neon` or `neon_dot`. |
| `BATCHGEN_NUM_THREADS` | The number of threads of the kernels. Without it `OMP_NUM_THREADS` counts, then the \
number of cores. |
| `BATCHGEN_LOG` | The least level of the log records that a job shows as lines: `DEBUG`, `INFO` (default), `WARNING` \
or `ERROR`. With `DEBUG` an error shows where in the program it was raised, too. |
| `BATCHGEN_HELM_ENGINE` | Where HELM's jobs run: `in-process`, `files`, or the path of a `batchgen` program. |
"""


def describe(group: click.Group) -> str:
    """The whole page."""
    described: dict[str, str] = {}  # row of an option -> the first command that has it
    return INTRODUCTION + "".join(_command(name, command, described) for name, command in group.commands.items())


def _command(name: str, command: click.Command, described: dict[str, str]) -> str:
    """A command's section. Options that an earlier command has, word for word, are only named."""
    paragraphs = [_escaped(" ".join(paragraph.split())) for paragraph in (command.help or "").split("\n\n")]
    options = [(option, _row(option)) for option in command.params if isinstance(option, click.Option)]
    rows = "".join(row for _, row in options if row not in described)
    known: dict[str, list[str]] = {}
    for option, row in options:
        if row in described:
            known.setdefault(described[row], []).append(f"`{option.opts[-1]}`")
        else:
            described[row] = name
    text = "\n\n".join([f"\n## batchgen {name}", *paragraphs, "| option | value | meaning |\n|---|---|---|\n" + rows])
    return text + "".join(f"\nAs for `{first}`: {', '.join(names)}.\n" for first, names in known.items())


def _row(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    meaning = [_escaped(option.help or "")]
    if option.required:
        meaning.append("Required.")
    if option.multiple and "repeated" not in (option.help or ""):
        meaning.append("May be repeated.")
    if option.show_default and not option.is_flag:
        meaning.append(f"Default: `{option.default}`.")
    return f"| {flags} | {_value(option)} | {' '.join(filter(None, meaning))} |\n"


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return ", ".join(f"`{choice}`" for choice in option.type.choices)
    kind = {click.INT: "a whole number", click.FLOAT: "a number"}.get(option.type, "text")
    return f"`{option.metavar}`" if option.metavar else kind


def _escaped(text: str) -> str:
    """The text with nothing in it that a Markdown table would take for its own."""
    return re.sub(r"([|<>*\\])", r"\\\1", text)


if __name__ == "__main__":
    import describe_options

    OUTPUT.write_text(describe(cli), encoding="utf-8")
    describe_options.OUTPUT.write_text(describe_options.describe(), encoding="utf-8")
