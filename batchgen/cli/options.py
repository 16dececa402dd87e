"""The options of commands, declared to click, and job files. Flags keep vLLM's names where vLLM has the option."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from batchgen.core.errors import InputError
from batchgen.core.text import repair_surrogates, typed
from batchgen.core.text_file import read_text
from batchgen.job.option import AT_FILE, FILE, FILE_OR_NAME, GROUPS, MODEL, TEXT_OF_FILE, Option
from batchgen.job.option_table import names_of, options_of
from batchgen.job.step_tables import STEP_OPTIONS

STEPS = "batchgen.steps"  # key of a context's `meta` under which the tables of steps are
_READ = {option.name: option.reads for option in options_of("run") if option.reads in (FILE, AT_FILE, TEXT_OF_FILE)}


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The options in a TOML file, by their names with underscores.

    Args:
        path: The job file. File names in it are relative to its folder, if there is such a file, and else to the
            working directory.

    Raises:
        InputError: The file cannot be read, or is not valid TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {path} is not valid TOML: {error}") from error
    if "step" in values:
        tables = values["step"] if isinstance(values["step"], list) else [values["step"]]
        values["step"] = [_values_beside(path, table) if isinstance(table, dict) else table for table in tables]
    return _values_beside(path, values)


def _values_beside(path: str | Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a table of a job file, by names with underscores, with files found beside the job file."""
    names = {key: key.replace("-", "_") for key in values}
    return {name: _beside(path, name, values[key]) for key, name in names.items()}


def _config_file(context: click.Context, _: click.Parameter, path: str | None) -> str | None:
    """Callback of --config: the values in the job file become defaults, which flags override."""
    if path is None:
        return None
    values = read_job_file(path)
    # `plan` takes the file of a `run` as well, and ignores options of `run` alone.
    known = {p.name for p in context.command.params} | set(names_of("run"))
    parameters = {p.name: p for p in context.command.params}
    steps = values.pop("step", None)
    if steps is not None:
        context.meta[STEPS] = [_checked_step(f"--config {path}, step {n}", step) for n, step in enumerate(steps, 1)]
    for key, value in values.items():
        if key not in known or key == "config":
            raise InputError(f"--config {path}: {key!r} is no option of batchgen {context.info_name}")
        if key in parameters:
            values[key] = _checked(f"--config {path}: {key}", parameters[key], value)
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _checked_step(where: str, table: Any) -> Any:
    """A table of a step, with its values checked by type and its JSON schema read."""
    if not isinstance(table, dict):
        return table  # `steps_of` refuses it
    parameters = {option.name: _click_parameter(option) for option in STEP_OPTIONS}
    return {
        key: _checked(f"{where}: {key}", parameters[key], value) if key in parameters else value
        for key, value in table.items()
    }


def _checked(where: str, parameter: click.Parameter, value: Any) -> Any:
    """A value of a job file, checked by type, since click would convert `true` to a number, and anything to text.

    Args:
        where: Noun phrase that names the value in a message.
        parameter: click's parameter for the option.
        value: The value.

    Raises:
        InputError: The value has the wrong type.
    """
    if isinstance(value, dict) and isinstance(parameter, click.Option) and parameter.metavar == "JSON":
        return json.dumps(value, default=str)  # a TOML date becomes text
    if parameter.multiple:
        items = value if isinstance(value, list) else [value]
        return [_checked_item(where, parameter.type, item) for item in items]
    return _checked_item(where, parameter.type, value)


def _checked_item(where: str, kind: click.ParamType, value: Any) -> Any:
    name, types = _TOML_TYPES.get(type(kind), ("a text", (str, int, float)))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InputError(f"{where} must be {name}, not {value!r}")
    return value


# TOML types that an option takes; numbers may be texts too.
_TOML_TYPES = {
    type(click.BOOL): ("true or false", (bool,)),
    type(click.INT): ("a whole number", (int, str)),
    type(click.FLOAT): ("a number", (int, float, str)),
}


def _beside(config: str | Path, key: str, value: Any) -> Any:
    if key not in _READ or not isinstance(value, str):
        return value
    mark = "@" if _READ[key] == AT_FILE else ""
    name = value.removeprefix(mark)
    folder = os.path.dirname(os.path.abspath(config))
    there, pattern = os.path.join(folder, name), os.path.join(glob.escape(folder), name)
    if not name or not value.startswith(mark):
        return value
    if os.path.exists(there):
        return mark + there
    return mark + pattern if glob.glob(pattern) else value


class _Text(click.types.StringParamType):
    """The click type of options with text, which must be valid in a file name or in a prompt."""

    def __init__(self, option: Option) -> None:
        self._option = option

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Check that a text is valid; returns it. Raises InputError."""
        text, flag = str(super().convert(value, parameter, context)), self._option.flag
        if "\x00" in text:
            raise InputError(f"{flag} has a NUL character, which nothing can be named after or made of")
        if not text and self._option.reads in (FILE, FILE_OR_NAME, TEXT_OF_FILE):
            raise InputError(f"{flag} is empty: name something, or leave it out")
        if self._option.metavar not in _NAMES_OF_FILES and not text.startswith("@") and repair_surrogates(text) != text:
            raise InputError(f"{flag} is not UTF-8: write it in a terminal, or a file, that is")
        return text


_NAMES_OF_FILES = ("FILE", "PATH", "DIR", "MODEL", "FILE|NAME")


# The file that options come from.
CONFIG = Option(
    "config", ("--config",), MODEL, frozenset(), metavar="FILE",
    help="TOML file of these options, which flags override. Files it names are looked for beside it first.",
    common=True,
)  # fmt: skip


class Command(click.Command):
    """A click command whose help shows its options in groups.

    Attributes:
        groups: Group of each option, by the option's name.
        common: Names of the options that the short help shows; empty: there is no short help, `--help` shows all.
    """

    groups: dict[str, str]
    common: frozenset[str] = frozenset()

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help, in a section for each group."""
        whole = not self.common or context.meta.get(_WHOLE_HELP)
        shown = [p for p in self.get_params(context) if whole or p.name not in self.groups or p.name in self.common]
        for group in (*GROUPS, None):
            members = [p for p in shown if self.groups.get(p.name or "") == group]
            records = [record for p in members if (record := p.get_help_record(context)) is not None]
            if records:
                with formatter.section((group or "other").capitalize()):
                    formatter.write_dl(records)


_WHOLE_HELP = "batchgen.whole_help"


def _show_all(context: click.Context, _: click.Parameter, given: bool) -> None:
    """Callback of --help-all: the help with all options, and the end of the command."""
    if given:
        context.meta[_WHOLE_HELP] = True
        click.echo(context.get_help())
        context.exit()


def takes_options(taker: str, *more: Option, short_help: bool = False) -> Callable[[Callable], Command]:
    """A decorator that makes a click command of a function.

    Args:
        taker: Name of the command in the options' `takers`; the command gets these options.
        *more: Options of the command line alone, which stand behind the model.
        short_help: Whether `--help` shows the common options only, and `--help-all` shows all of them.
    """
    options = [_for_command(taker, option) for option in options_of(taker)]
    options[1:1] = more
    required = [f"{option.flags[0]} {option.metavar}" for option in options if option.required]

    def decorate(function: Callable) -> Command:
        for option in reversed(options):
            function = _click_option(option)(function)
        if short_help:
            function = click.option(
                "--help-all", is_flag=True, expose_value=False, is_eager=True, callback=_show_all,
                help=f"All {len(options)} options; docs/command_line.md has them too.",
            )(function)  # fmt: skip
        command = click.command(cls=Command, options_metavar=" ".join([*required, "[OPTIONS]"]))(function)
        command.groups = {option.name: option.group for option in options}
        if short_help:
            command.common = frozenset(option.name for option in options if option.common or option.required)
        return command

    return decorate


def _for_command(taker: str, option: Option) -> Option:
    """An option as a command declares it; `batchgen plan` does not require an input."""
    if taker != "plan" or option.name != "input":
        return option
    return replace(option, required=False, help=f"{option.help} Or --num-prompts, --input-len and --output-len.")


def _typed(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Callback of options with text: a typed \\n and \\t become a newline and a tab; values of a job file stay."""
    if value is None or context.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
        return value
    return tuple(map(typed, value)) if parameter.multiple else typed(value)


def _typed_unless_file(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Callback of an option with text or @FILE."""
    return value if isinstance(value, str) and value.startswith("@") else _typed(context, parameter, value)


def _click_option(option: Option) -> Callable:
    more: dict[str, Any] = {"is_eager": True, "callback": _config_file} if option is CONFIG else {}
    if option.typed:
        more["callback"] = _typed if option.reads is None else _typed_unless_file
    return click.option(*option.flags, option.name, **_declaration(option), **more)


def _click_parameter(option: Option) -> click.Option:
    """The parameter of click that checks values of an option."""
    return click.Option([*option.flags, option.name], **_declaration(option))


def _declaration(option: Option) -> dict[str, Any]:
    """The arguments with which an option is declared to click, besides its flags and its name."""
    more: dict[str, Any] = {"help": option.help, "required": option.required}
    if option.type is bool:
        more["is_flag"] = True
    else:
        text = _Text(option) if option.type is str else option.type
        more["type"] = click.Choice(option.choices) if option.choices else text
        more |= {"metavar": option.metavar, "multiple": option.multiple}
        more["show_default"] = option.default not in (None, "", ())
    if not option.required:
        more["default"] = option.default
    return more
