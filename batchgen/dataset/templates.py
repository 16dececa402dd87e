"""Prompt templates: Jinja, sandboxed, and bounded in the time and the text that one row may take.

A template is code over data: one row with a long list in it can make a template run for hours or fill the memory. What
Jinja executes is counted where it can be: each turn of a loop, each call, each filter, each piece of the output and
the operators that make long values of short ones.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchgen.core.errors import InputError, RowError, one_line
from batchgen.dataset.column_types import closest

_HELD = (str, bytes, list, tuple, dict, set)  # what is in memory as long as it says
_PADDING = {
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "indent",
    "batch",
    "slice",
    "lipsum",
    "generate_lorem_ipsum",
}
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*?(\d+)")
_PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z\d]*(\d+)")


@dataclass(frozen=True)
class TemplateLimits:
    """What a template may take for one row.

    Attributes:
        seconds: Of rendering.
        length: Of all that is made, steps on the way to the prompt included: characters of texts, elements of lists.
    """

    seconds: float = 10.0
    length: int = 64 << 20


def compile_template(
    text: str, schema: pa.Schema, limits: TemplateLimits | None = None
) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], str]]:
    """Check a template against the columns of the input.

    Args:
        text: The template.
        schema: The input's columns.
        limits: What it may take for one row.

    Returns:
        The columns that it uses, and {column: value} -> text, which raises RowError.

    Raises:
        InputError: It is no valid template, or uses what is no column.
    """
    environment = _Bounded(limits or TemplateLimits())
    for name in set(schema.names) & set(environment.globals):  # a column named "range" is that column
        del environment.globals[name]
    try:
        tree = environment.parse(text)
        template = environment.from_string(_counted(environment.parse(text)))
    except TemplateSyntaxError as error:
        raise InputError(f"--prompt-template, line {error.lineno}: {one_line(error.message)}") from error
    if any(True for _ in meta.find_referenced_templates(tree)):
        raise InputError("--prompt-template cannot include, import or extend other templates: put all in one")
    variables = meta.find_undeclared_variables(tree)
    for name in sorted(variables - set(schema.names) - {"row"}):
        raise InputError(f"--prompt-template: {name!r} is not a column{closest(name, schema)}")
    whole_row = "row" in variables and "row" not in schema.names
    columns = tuple(name for name in schema.names if whole_row or name in variables)

    def render(row: dict[str, Any]) -> str:
        try:
            return environment.render(template, {"row": row, **row} if whole_row else row)
        except Exception as error:  # whatever the expressions of a template can raise, on this row
            name = "" if isinstance(error, _OverLimit) else f"{type(error).__name__}: "
            raise RowError(f"prompt template: {name}{one_line(error)}") from error

    return columns, render


class _OverLimit(Exception):
    """A row takes more than its template may take."""


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox that counts what a row takes."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(undefined=StrictUndefined, finalize=lambda value: "" if value is None else value)
        self._limits = limits
        self._taken = _Taken()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}

    def render(self, template: Any, variables: dict[str, Any]) -> str:
        """A row's text."""
        self._taken.begin(self._limits.seconds)
        pieces = []
        for piece in template.generate(variables):
            self.count(piece)
            pieces.append(piece)
        return "".join(pieces)

    def count(self, made: Any) -> Any:
        """Take note of what a step made, which is returned. Raises _OverLimit."""
        if isinstance(made, _HELD):
            self._expect(len(made))
            self._taken.length += len(made)
        if time.monotonic() > self._taken.deadline_s:
            raise _OverLimit(f"the row takes longer than {self._limits.seconds:g} s to render: shorten its values")
        return made

    def turn(self) -> None:
        """What a turn of a loop calls, to be counted."""

    def joined(self, *values: Any) -> str:
        """What the operator ~ calls."""
        return "".join(map(str, values))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in _PADDING:
            self._expect_widths((*args, *kwargs.values()))
        elif name in ("format", "format_map"):
            self._expect(
                max(
                    map(int, _FORMAT_WIDTH.findall(str(getattr(function, "__wrapped__", function).__self__))), default=0
                )
            )
        return self.count(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, _HELD) and isinstance(times, int):
                    self._expect(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._expect(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            self._expect(max(map(int, _PERCENT_WIDTH.findall(left)), default=0))
        return self.count(super().call_binop(context, operator, left, right))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name in _PADDING:
                self._expect_widths((*args, *kwargs.values()))
            return self.count(function(*args, **kwargs))

        return bounded

    def _expect(self, length: int) -> None:
        if self._taken.length + length > self._limits.length:
            raise _OverLimit(f"the row makes more than {self._limits.length:,} characters of text: shorten its values")

    def _expect_widths(self, values: Iterable[Any]) -> None:
        self._expect(max((value for value in values if isinstance(value, int)), default=0))


class _Taken(threading.local):
    """What the row that a thread renders has taken so far."""

    deadline_s = float("inf")
    length = 0

    def begin(self, seconds: float) -> None:
        self.deadline_s, self.length = time.monotonic() + seconds, 0


class _Joins(NodeTransformer):
    """The operator ~ as a call, which is counted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


def _counted(tree: nodes.Template) -> nodes.Template:
    """The template with a call at each turn of a loop, each start of a macro and each ~."""
    node: Any
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        call = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    counted: nodes.Template = _Joins().visit(tree)
    return counted


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON, not escaped for HTML as Jinja's own."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
