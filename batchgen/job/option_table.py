"""The table of all options.

The command line, `batchgen.run`, lm_eval's `--model_args`, HELM's deployments and `MapFunction` take names, types,
defaults and help from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from batchgen.job.command_options import BenchOptions, ConvertOptions, PlanOptions, ProfileOptions, ServeOptions
from batchgen.job.option import GROUPS, Option, declared_in
from batchgen.job.options import JobOptions
from batchgen.job.sampling_options import SAMPLING_OPTIONS

OPTIONS = tuple(
    option
    for owner in (JobOptions, PlanOptions, BenchOptions, ServeOptions, ProfileOptions, ConvertOptions)
    for option in (*declared_in(owner), *(SAMPLING_OPTIONS if owner is JobOptions else ()))
)


def options_of(*takers: str) -> tuple[Option, ...]:
    """The options of one or several takers, sorted by group. takers: members of `TAKERS`."""
    taken = [option for option in OPTIONS if not option.takers.isdisjoint(takers)]
    return tuple(option for group in GROUPS for option in taken if option.group == group)


def names_of(*takers: str) -> tuple[str, ...]:
    """Names of the options of one or several takers. takers: members of `TAKERS`."""
    return tuple(option.name for option in options_of(*takers))


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that a function does not take, with the nearest name that it takes.

    Args:
        function: Name of the function.
        given: The keywords.
        known: The names of all its options.
    """
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        raise TypeError(f"{function}() has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def flag_of(name: str) -> str:
    """The flag by which messages name an option of `batchgen run`. name: name of the option in Python."""
    return next(option.flag for option in options_of("run") if option.name == name)
