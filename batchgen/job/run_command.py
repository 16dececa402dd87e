"""The command line that runs a planned job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from batchgen.core.text import as_typed, without_credentials
from batchgen.job.option import AT_FILE, Option
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions

# Options that are left to the machine where the job is run.
_OF_THE_PLAN = frozenset({"hardware", "trace", "progress"})
_PLACEHOLDERS = {"input": "INPUT"}


def run_command(options: JobOptions, *, skip: Collection[str] = _OF_THE_PLAN, **more: Any) -> str:
    """The text of a `batchgen run` command, with all options that differ from their defaults.

    Credentials in URLs are hidden.

    Args:
        options: The job's options. An input without a name is shown as a word in capitals.
        skip: Names of options that are left out.
        more: Further options, by name.
    """
    files = dict(options.read_before)
    words = ["batchgen", "run"]
    for option in options_of("run"):
        holder = options if hasattr(options, option.name) else options.sampling
        value = more.get(option.name, getattr(holder, option.name))
        if value is None or (option.name in _PLACEHOLDERS and not isinstance(value, str | Path)):
            value = _PLACEHOLDERS.get(option.name)
        if option.name in skip or value == option.default:
            continue
        words += map(without_credentials, _words(option, files.get(option.flag, value)))
    return shlex.join(words)


def torchrun_command(command: str, hosts: int, of_host: int) -> str:
    """The text of a `torchrun` command that starts a job's ranks on one of several hosts.

    Words in capitals are different on each host, and are for the user to fill in.

    Args:
        command: The job's `batchgen run` command.
        hosts: Number of hosts.
        of_host: Number of ranks on each host.
    """
    rest = command.removeprefix("batchgen ")
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {of_host} --node-rank RANK --master-addr HOST --master-port 29500"
        f" -m batchgen {rest}"
    )


def _words(option: Option, value: Any) -> list[str]:
    """Words of an option on the command line."""
    if isinstance(value, bool):
        on, _, off = option.flags[-1].partition("/")
        return [on if value else off]
    if isinstance(value, Mapping):
        return [option.flag, json.dumps(value)]
    words = []
    for item in value if option.multiple else (value,):
        text = f"{item[0]}={item[1]}" if isinstance(item, tuple) else str(item)
        words += [option.flag, as_typed(text) if option.typed and not _names_file(option, text) else text]
    return words


def _names_file(option: Option, value: str) -> bool:
    return option.reads == AT_FILE and value.startswith("@")
