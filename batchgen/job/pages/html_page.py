"""The parts of an HTML page: frame, sections, tables and texts.

All text from elsewhere is escaped here or in `charts`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from batchgen.core.text import visible

# With this policy a browser fetches and runs nothing, whatever text a row has.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# The first colours are those of Okabe and Ito, which colour-blind people can tell apart; lighter ones on dark ground.
_LIGHT = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
    "#8a8a00", "#7f7f7f", "#5e3c99", "#a6611a", "#80cdc1", "#404040",
)  # fmt: skip
_DARK = (
    "#4aa3df", "#f0b93a", "#2fc49a", "#e29cc4", "#8fd0f5", "#ff8a47",
    "#d6d64a", "#a8a8a8", "#b09be0", "#d9a066", "#c7eae5", "#e0e0e0",
)  # fmt: skip
COLOURS = len(_LIGHT)


def escaped(text: object) -> str:
    """Text escaped for an element or a quoted attribute, with control characters made visible."""
    return html.escape(visible(str(text), lines=True), quote=True)


def page(title: str, lines: Sequence[str], sections: Sequence[str]) -> str:
    """A whole HTML document.

    Args:
        title: Title, plain text.
        lines: Lines under the title, plain text.
        sections: Sections, HTML.
    """
    head = "".join(f"<p>{escaped(line)}</p>" for line in lines)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_style()}</style></head>"
        f"<body><h1>{escaped(title)}</h1>{head}{''.join(sections)}</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A section with a heading of plain text, and parts of HTML."""
    return f"<section><h2>{escaped(heading)}</h2>{''.join(parts)}</section>\n"


def note(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escaped(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose cells are plain text; the first cell of a row names it."""
    top = "".join(f"<th scope=col>{escaped(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def legend(names: Sequence[str]) -> str:
    """A legend of a chart: names of its colours, in the order of their indices."""
    return (
        "<p>"
        + " ".join(
            f'<span class="key"><span class="swatch b{i % COLOURS}"></span>{escaped(name)}</span>'
            for i, name in enumerate(names)
        )
        + "</p>"
    )


def _style() -> str:
    def variables(colours: Sequence[str], ground: str, ink: str, faint: str) -> str:
        own = "".join(f"--c{i}:{colour};" for i, colour in enumerate(colours))
        return f":root{{{own}--ground:{ground};--ink:{ink};--faint:{faint};}}"

    light = variables(_LIGHT, "#ffffff", "#1a1a1a", "#c8c8c8")
    dark = variables(_DARK, "#16181c", "#e8e8e8", "#4a4d55")
    classes = "".join(
        f".f{i}{{fill:var(--c{i})}}.s{i}{{stroke:var(--c{i})}}.b{i}{{background:var(--c{i})}}" for i in range(COLOURS)
    )
    return (
        f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}section{{break-inside:avoid}}}}"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "background:var(--ground);color:var(--ink);print-color-adjust:exact;-webkit-print-color-adjust:exact}"
        "h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}p{margin:.4rem 0}"
        "svg{width:100%;height:auto;display:block;font:12px system-ui,sans-serif}svg text{fill:var(--ink)}"
        ".axis{stroke:var(--faint);fill:none}.line{fill:none;stroke-width:2}"
        ".mark{stroke:var(--ink);stroke-dasharray:4 3}"
        ".ring{fill:none;stroke:var(--ink);stroke-width:2}"
        "table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto}"
        "th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--faint);vertical-align:top;"
        "white-space:pre-wrap;overflow-wrap:anywhere}td:first-child{white-space:nowrap}"
        ".key{margin-right:1rem;white-space:nowrap}"
        ".swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em}" + classes
    )
