"""Steps from the tables of a job file, or from Python dictionaries, and the options of each step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.request import GRAMMARS, SamplingParams
from batchgen.job.option import INPUT, SAMPLING
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions
from batchgen.job.step import Step

_PROMPTS = ("prompt_column", "prompt_template", "messages_column")  # sources of prompts, of which a step has one
_CHOICES = ("choices", "choices_column")
STEP_OPTIONS = tuple(
    option
    for option in options_of("run")
    if option.name in _CHOICES
    or ("map" in option.takers and option.group in (INPUT, SAMPLING) and option.name != "id_column")
)
_UNCONSTRAINED = SamplingParams().__dict__


def steps_of(tables: Iterable[Mapping[str, Any]], where: str = "steps") -> tuple[Step, ...]:
    """Make steps from tables.

    Args:
        tables: A table for each step: "name", and either "filter" or options by their names in Python.
        where: Noun phrase for the place of the tables, for messages.

    Raises:
        InputError: A table is not valid.
    """
    steps = [_step_of(table, f"{where}, step {number}") for number, table in enumerate(tables, 1)]
    names = [step.name for step in steps]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{where}: two steps have the name {repeated[0]!r}: columns are named after steps")
    if steps and all(step.filter is not None for step in steps):
        raise InputError(f"{where}: no step generates: give one of them a prompt-template")
    return tuple(steps)


def _step_of(table: Mapping[str, Any], where: str) -> Step:
    if not isinstance(table, Mapping):
        raise InputError(f"{where} must be a table, not {table!r}")
    options = {key.replace("-", "_"): value for key, value in table.items()}
    name, condition = options.pop("name", None), options.pop("filter", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise InputError(f"{where} needs a name of letters, digits and _, after which its columns are named")
    known = {*(option.name for option in STEP_OPTIONS), *SamplingParams.names()}
    for key in options:
        if key not in known:
            near = get_close_matches(key, [*known, "name", "filter"], 1)
            hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
            raise InputError(f"{where}: {key.replace('_', '-')!r} is no option of a step{hint}")
    if condition is None:
        return Step(name, options)
    if not isinstance(condition, str) or options:
        raise InputError(f"{where}: a filter is one Jinja expression such as \"'yes' in judge_text\", and nothing else")
    return Step(name, filter=condition)


def options_of_step(step: Step, options: JobOptions) -> JobOptions:
    """The options of a job that consists of one step that generates.

    Args:
        step: The step.
        options: The options of the whole job.
    """
    given = dict(step.options)
    sampling = {name: given.pop(name) for name in SamplingParams.names() if name in given}
    if any(name in given for name in _PROMPTS):
        given = dict.fromkeys(_PROMPTS) | given
    inherited = options.sampling
    if not sampling.keys().isdisjoint(GRAMMARS) or not given.keys().isdisjoint(_CHOICES):
        given = {"choices": (), "choices_column": None} | given
        inherited = replace(inherited, **{name: _UNCONSTRAINED[name] for name in GRAMMARS})
    if "choices" in given:
        given["choices"] = tuple(given["choices"])
    own = replace(inherited, **sampling)
    return replace(options, sampling=own, output=None, output_prefix="", steps=(), **given)
