"""Writes batchgen/job/run_options.py: the keyword options of `batchgen.run` with their types, for editors and mypy.

    python docs/describe_options.py

`docs/describe_commands.py` does this too, and a test compares the module with the committed one.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from batchgen.core.request import SamplingParams
from batchgen.job.option import Option
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions

OUTPUT = Path(__file__).parents[1] / "batchgen" / "job" / "run_options.py"
WIDTH = 120
HEADER = '''\
"""`RunOptions`, the keyword options of `batchgen.run` as types.

`docs/describe_options.py` makes this module from the table of options in `batchgen/job/option_table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """The keyword options of `batchgen.run`, all optional: those of the command line, with underscores."""
'''
STEPS = '''
    steps: Sequence[Mapping[str, Any]]
    """Steps that each row goes through: a mapping of options for each, as the tables `[[step]]` of a job file."""
'''


def describe() -> str:
    """The text of the module."""
    types = {field.name: str(field.type) for owner in (JobOptions, SamplingParams) for field in fields(owner)}
    options = [option for option in options_of("run") if option.name not in ("model", "input", "output")]
    return HEADER + "".join(f"\n{_declaration(option, types[option.name])}" for option in options) + STEPS


def _declaration(option: Option, declared: str) -> str:
    kind = option.python or _type(option, declared)
    line = f"    {option.name}: {kind}\n"
    if len(line) > WIDTH + 1:
        inside = kind.removeprefix("Literal[").removesuffix("]").split(", ")
        line = f"    {option.name}: Literal[\n{''.join(f'        {choice},{chr(10)}' for choice in inside)}    ]\n"
    return line + _docstring(option)


def _type(option: Option, declared: str) -> str:
    """The type of an option in Python: its field's, where lists do as tuples and choices are named."""
    if option.choices and not option.multiple:
        literal = f"Literal[{', '.join(json.dumps(choice) for choice in option.choices)}]"
        return f"{literal} | None" if option.default is None else literal
    return re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", declared)


def _docstring(option: Option) -> str:
    text = " ".join((option.help or f"The {option.name.replace('_', ' ')}.").split())
    if option.default not in (None, ()) and "[default" not in text:
        text = f"{text} Default: {option.default!r}.".lstrip()
    raw = "r" if "\\" in text else ""
    if len(text) + 11 <= WIDTH:
        return f'    {raw}"""{text}"""\n'
    lines = textwrap.wrap(text, WIDTH - 4, initial_indent=raw + '"""', break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"    {line}" for line in lines) + '\n    """\n'


if __name__ == "__main__":
    OUTPUT.write_text(describe(), encoding="utf-8")
