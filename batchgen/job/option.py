"""An option of commands and of the Python API: its name, type, default and help, declared once.

An option is declared at the field for its value (`option`), or in `SAMPLING_OPTIONS` if it is a field of
`SamplingParams`. The modules of options import nothing that takes long, as `batchgen --help` waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

# The groups, in the order in which help shows them.
MODEL, INPUT, SAMPLING, RESOURCES, RUN = GROUPS = ("model", "input", "sampling", "resources", "run")
# Takers of options: the commands, BatchgenLM, HELM's client, `Engine`, and MapFunction, which takes those of `Engine`
# too.
TAKERS = ("run", "plan", "bench", "profile", "convert", "serve-batches", "lm_eval", "helm", "engine", "map")
COMMANDS, ROWS = "run plan bench", "run plan"  # those of a job; those whose rows come from somewhere
# Kinds of values that name something to read: a file; a file or a name; a text or @FILE; a file on the command line,
# whose text is the value in Python.
FILE, FILE_OR_NAME, AT_FILE, TEXT_OF_FILE = "FILE", "FILE|NAME", "@FILE", "text of FILE"
_DECLARED = "option"


@dataclass(frozen=True)
class Option:
    """An option, with its name, its type and its help for all commands and functions that take it.

    Attributes:
        name: The name in Python, TOML and JSON.
        flags: The flags of the command line.
        group: The group in which help shows the option.
        takers: The members of `TAKERS` that take the option.
        default: The value where the option is not given.
        type: A function from text to a value, or to each value where the option may be repeated; bool for a switch.
        help: The sentence that help shows.
        metavar: The word that stands for the value in help.
        choices: The allowed values; empty: any.
        multiple: True for an option that may be repeated.
        required: True for an option that must be given.
        typed: True for text in which a typed \\n and \\t are a newline and a tab (`batchgen.core.text.typed`).
        common: True for an option that the short help shows.
        reads: The kind of file that the value names: `FILE`, `FILE_OR_NAME`, `AT_FILE` or `TEXT_OF_FILE`; None: it
            names no file.
        python: The type of the value in Python, where it may be more than the field holds; None: the field's type.
    """

    name: str
    flags: tuple[str, ...]
    group: str
    takers: frozenset[str]
    default: Any = None
    type: Callable[[str], Any] = str
    help: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    required: bool = False
    typed: bool = False
    common: bool = False
    reads: str | None = None
    python: str | None = None

    @property
    def flag(self) -> str:
        """The flag by which messages name the option."""
        return self.flags[-1].partition("/")[0]

    @property
    def decides_results(self) -> bool:
        """True where the results of rows depend on the option. Others decide where, when and how fast rows are run."""
        return self.group in (MODEL, INPUT, SAMPLING)


def option(group: str, takers: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """The dataclass field of an option.

    Args:
        group: The group in which help shows the option.
        takers: Names of the option's takers, with spaces between.
        *flags: The flags, where they are not the field's name.
        default: The value where the option is not given.
        **more: Further fields of `Option`.
    """
    metadata = {_DECLARED: {"group": group, "takers": frozenset(takers.split()), "flags": flags, **more}}
    return field(metadata=metadata) if more.get("required") else field(default=default, metadata=metadata)


def named(name: str, default: Any, declared: dict[str, Any]) -> Option:
    """An option, from its name, its default value and the other fields of its declaration."""
    flags = declared["flags"] or ("--" + name.replace("_", "-"),)
    return Option(name=name, default=default, **{**declared, "flags": flags})


def declared_in(owner: type) -> tuple[Option, ...]:
    """The options that are declared at the fields of a dataclass, in the order of the fields."""
    return tuple(
        named(f.name, None if f.default is MISSING else f.default, dict(f.metadata[_DECLARED]))
        for f in fields(owner)
        if _DECLARED in f.metadata
    )
