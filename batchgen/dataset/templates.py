"""Prompt templates: Jinja over the columns of a row, rendered within limits of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from batchgen.core.errors import InputError, RowError
from batchgen.core.templates import DEFAULT_LIMITS, Row, SafeTemplate, TemplateFailed, TemplateLimits, TemplateSyntax
from batchgen.dataset.column_types import closest

_OPTION = "--prompt-template"
_WHOLE_ROW = "row"  # the variable that has all columns
_JINJAS_OWN = "self"  # the template's blocks, whatever a row has of that name


def compile_template(
    text: str, schema: pa.Schema, limits: TemplateLimits = DEFAULT_LIMITS, *, option: str = _OPTION
) -> tuple[tuple[str, ...], Callable[[Iterable[Row]], Iterator[str | Exception]]]:
    """Check a Jinja template for prompts against the columns of the input.

    Args:
        text: The template.
        schema: The input's columns.
        limits: Limits of time, memory and length for one row.
        option: The option that gives the template, for messages.

    Returns:
        The columns that the template uses, and a function that renders rows, each {column: value}, into texts. The
            function yields a RowError for a row that cannot be rendered. An exception in place of a row is yielded
            unchanged.

    Raises:
        InputError: The template is not valid, or uses a name that is not a column.
    """
    template = SafeTemplate("rows", text, limits)
    try:
        use = template.use(schema.names)
    except TemplateSyntax as error:
        raise InputError(f"{option}, line {error.line}: {error}") from error
    except TemplateFailed as error:
        raise InputError(f"{option}: {error}") from error
    if use.includes:
        raise InputError(f"{option} cannot include, import or extend other templates: put all in one")
    variables = set(use.variables)
    if _JINJAS_OWN in variables and _JINJAS_OWN in schema.names:
        raise InputError(f'{option}: self is Jinja\'s own: write row["self"] for the column of that name')
    for name in sorted(variables - set(schema.names) - {_WHOLE_ROW, _JINJAS_OWN}):
        raise InputError(f"{option}: {name!r} is not a column{closest(name, schema)}")
    single = [] if variables else [column for column in schema.names if f"{{{column}}}" in text]
    if single:
        raise InputError(f"{option} names no column: write {{{{ {single[0]} }}}}, not {{{single[0]}}}")
    whole_row = _WHOLE_ROW in variables
    columns = tuple(name for name in schema.names if whole_row or name in variables)

    def render(rows: Iterable[Row]) -> Iterator[str | Exception]:
        given = (row if isinstance(row, Exception) or not whole_row else {**row, _WHOLE_ROW: row} for row in rows)
        for result in template.render(given):
            yield _row_error(result, option) if isinstance(result, TemplateFailed) else result

    return columns, render


def _row_error(failed: TemplateFailed, option: str) -> RowError:
    return RowError(f"{option.strip('-').replace('-', ' ')}: {failed.kind}{': ' * bool(failed.kind)}{failed}")
