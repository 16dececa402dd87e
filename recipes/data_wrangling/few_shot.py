"""A few-shot prompt as a Jinja template: an instruction, answered examples, and the entry that a row is put into."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import jinja2


@dataclass(frozen=True)
class Prompt:
    """entry: a Jinja template over a row's columns, which ends where the answer begins. shots: how many examples; seed:
    of their draw; hard: how many of them are hard ones, where there are such."""

    instruction: str
    entry: str
    shots: int
    seed: int
    hard: int = 0

    def template(self, examples: Iterable[tuple[dict[str, str], str]]) -> str:
        """The whole template: instruction and examples, pairs of a row and its answer, as plain text, then the entry.

        Every row's prompt therefore begins with the same text. Raises ValueError where an example looks like Jinja.
        """
        entry = jinja2.Template(self.entry)
        prefix = self.instruction + "".join(f"{entry.render(row)} {answer}\n\n" for row, answer in examples)
        if re.search(r"\{[{%#]", prefix):
            raise ValueError("an example holds Jinja markup: choose another seed")
        return prefix + self.entry + "\n"  # Jinja drops one newline at the end of a template
