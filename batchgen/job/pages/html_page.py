"""The parts of an HTML page: frame, sections, tables and legends, rendered from the templates beside this module.

The templates escape all text. Charts, which are SVG, and parts that were rendered before are passed as `Markup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from batchgen.core.text import visible

if TYPE_CHECKING:
    from jinja2 import Environment

# The first colours are those of Okabe and Ito, which colour-blind people can tell apart; lighter ones on dark ground.
_LIGHT = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
    "#8a8a00", "#7f7f7f", "#5e3c99", "#a6611a", "#80cdc1", "#404040",
    "#882255",
)  # fmt: skip
_DARK = (
    "#4aa3df", "#f0b93a", "#2fc49a", "#e29cc4", "#8fd0f5", "#ff8a47",
    "#d6d64a", "#a8a8a8", "#b09be0", "#d9a066", "#c7eae5", "#e0e0e0",
    "#e07ab0",
)  # fmt: skip
COLOURS = len(_LIGHT)
# Colours that mean one thing in all charts of a page.
PURPOSE_COLOURS = {"weights": 0, "KV": 1, "activations": 2, "buffers": 3, "state": 12, "process": 7}
TIER_COLOURS = {"gpu": 8, "cpu": 9, "disk": 10}
PREDICTED, MEASURED, FAILED, COUNT = 4, 6, 5, 11


def purpose_colour(name: str) -> int:
    """The index of the colour of a purpose of memory."""
    return PURPOSE_COLOURS.get(name, COUNT)


def escaped(text: object) -> str:
    """Text escaped for an element or a quoted attribute, with control characters made visible."""
    return str(escape(visible(str(text), lines=True)))


def page(title: str, lines: Sequence[str], sections: Sequence[str]) -> str:
    """A whole HTML document.

    Args:
        title: Title, plain text.
        lines: Lines under the title, plain text.
        sections: Sections, HTML.
    """
    template = _templates().get_template("page.html.jinja")
    parts = [Markup(part) for part in sections]
    return template.render(title=title, lines=lines, sections=parts, light=_LIGHT, dark=_DARK) + "\n"


def section(heading: str, *parts: str) -> str:
    """A section with a heading of plain text, and parts of HTML."""
    return _part("section", heading, [Markup(part) for part in parts])


def note(text: str) -> str:
    """A paragraph of plain text."""
    return _part("note", text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose cells are plain text; the first cell of a row names it. Without a header it has no head."""
    return _part("table", header, rows)


def legend(keys: Sequence[tuple[int, str]]) -> str:
    """A legend of a chart. keys: (index of the colour, name) of each."""
    return _part("legend", keys)


def _part(name: str, *values: Any) -> str:
    macro = getattr(_templates().get_template("parts.html.jinja").module, name)
    return str(macro(*values))


@lru_cache(maxsize=1)
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("batchgen.job.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    """A value as text with control characters made visible; HTML stays as it is."""
    return value if isinstance(value, Markup) else visible(str(value), lines=True)
