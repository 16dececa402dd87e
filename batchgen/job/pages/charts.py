"""Charts for an HTML page, as SVG text. Colours are CSS classes that `html_page` defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batchgen.core.text import visible
from batchgen.job.pages.html_page import COLOURS, escaped

_WIDTH, _LABEL, _VALUE, _ROW = 860, 190, 180, 24
_MOST_LABEL, _CHAR = 400, 6.8  # px of the longest label, and of a character of it
_PLOT_HEIGHT, _LEFT, _BOTTOM, _TOP = 260, 80, 42, 14
_MOST_BINS = 40  # of a histogram
_LEAST_PX = 0.5  # width below which Steps are merged
Show = Callable[[float], str]


@dataclass(frozen=True)
class Bar:
    """One bar of a bar chart, made of stacked parts.

    Attributes:
        label: Name of the bar.
        parts: (index of the colour, name, value) of each part, from left to right.
        limit: Value at which a line crosses the bar; None: no line.
    """

    label: str
    parts: tuple[tuple[int, str, float], ...]
    limit: float | None = None


@dataclass(frozen=True)
class Span:
    """A coloured stretch of a timeline.

    Attributes:
        start: Seconds at which the stretch begins.
        end: Seconds at which the stretch ends.
        colour: Index of the colour.
        name: Name in the tooltip.
    """

    start: float
    end: float
    colour: int
    name: str


def bars(title: str, rows: Sequence[Bar], show: Show) -> str:
    """A chart of horizontal bars, each with the sum of its parts.

    Args:
        title: Title of the chart.
        rows: The bars.
        show: Function from a value to text.
    """
    totals = [sum(value for _, _, value in row.parts) for row in rows]
    most = max([*totals, *(row.limit or 0 for row in rows)], default=0) or 1.0
    label_px = min(_MOST_LABEL, max([_LABEL, *(_CHAR * len(visible(row.label)) + 12 for row in rows)]))
    scale = (_WIDTH - label_px - _VALUE) / most
    shapes = []
    for i, (row, total) in enumerate(zip(rows, totals, strict=True)):
        top, x = i * _ROW, float(label_px)
        shapes.append(_text(label_px - 8, top + 16, row.label, "end"))
        for colour, name, value in row.parts:
            shapes.append(_rect(x, top + 3, value * scale, _ROW - 6, colour, f"{row.label}, {name}: {show(value)}"))
            x += value * scale
        of = ""
        if row.limit is not None:
            at = label_px + row.limit * scale
            shapes.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + _ROW}"/>')
            of, x = f" of {show(row.limit)}", max(x, at)
        shapes.append(_text(x + 6, top + 16, show(total) + of))
    return _svg(title, len(rows) * _ROW + 4, shapes)


def columns(title: str, values: Sequence[tuple[str, float]], x_label: str, y_label: str, colour: int = 0) -> str:
    """A chart of vertical bars side by side.

    Args:
        title: Title of the chart.
        values: (name, value) of each bar.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        colour: Index of the colour.
    """
    most = max((value for _, value in values), default=0) or 1.0
    plot = _Plot((0.0, float(len(values) or 1)), (0.0, most))
    shapes = plot.frame(x_label, y_label, x_ticks=False)
    for i, (name, value) in enumerate(values):
        left, width = plot.x(i), plot.x(i + 1) - plot.x(i)
        top = plot.y(value)
        shapes.append(_rect(left, top, max(width - 1, 1), plot.y(0) - top, colour, f"{name}: {value:,.0f}"))
    last = len(values) - 1
    for i in sorted({0, len(values) // 2, last} if values else ()):
        x, anchor = (plot.x(i + 1), "end") if i == last > 0 else ((plot.x(i) + plot.x(i + 1)) / 2, "middle")
        shapes.append(_text(x, _PLOT_HEIGHT - _BOTTOM + 16, values[i][0], anchor))
    return _svg(title, _PLOT_HEIGHT, shapes)


def line(
    title: str,
    points: Sequence[tuple[float, float]],
    x_label: str,
    y_label: str,
    *,
    dots: Sequence[str] = (),
    ring: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A chart with a line through points; the axes begin at (0, 0).

    Args:
        title: Title of the chart.
        points: (x, y) of each point, x rising.
        x_label: Label of the x axis, with the unit.
        y_label: Label of the y axis, with the unit.
        dots: Tooltip of each point; empty: points are not marked.
        ring: (x, y) of a point that is marked by a ring.
        marks: (x, text) of vertical lines.
    """
    shown = [*points, *([ring] if ring else [])] or [(1.0, 1.0)]
    plot = _Plot((0.0, max(x for x, _ in shown)), (0.0, max(y for _, y in shown)))
    shapes = plot.frame(x_label, y_label)
    path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in points)
    shapes.append(f'<polyline class="line s0" points="{path}"/>')
    for (x, y), text in zip(points, dots, strict=False):
        shapes.append(f'<circle class="f0" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="4">{_tip(text)}</circle>')
    if ring is not None:
        x, y = ring
        shapes.append(f'<circle class="ring" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="8">{_tip("chosen")}</circle>')
    for x, text in marks:
        at, bottom = plot.x(x), _PLOT_HEIGHT - _BOTTOM
        shapes.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}">{_tip(text)}</line>')
    return _svg(title, _PLOT_HEIGHT, shapes)


def timeline(title: str, lanes: Mapping[str, Sequence[Span]], show: Show) -> str:
    """A timeline with a row for each lane.

    Args:
        title: Title of the chart.
        lanes: Spans of each lane in order of time, by the lane's name.
        show: Function from seconds to text.
    """
    spans = [span for row in lanes.values() for span in row]
    first = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - first or 1.0
    scale = (_WIDTH - _LABEL - 10) / length
    shapes = []
    for i, (lane, row) in enumerate(lanes.items()):
        top = i * (_ROW + 4)
        shapes.append(_text(_LABEL - 8, top + 16, lane, "end"))
        for span in _merged(row, _LEAST_PX / scale):
            x, width = _LABEL + (span.start - first) * scale, (span.end - span.start) * scale
            shapes.append(
                _rect(x, top + 2, max(width, 0.3), _ROW - 4, span.colour, f"{span.name}: {show(span.end - span.start)}")
            )
    bottom = len(lanes) * (_ROW + 4)
    for part in range(5):
        x = _LABEL + part / 4 * (_WIDTH - _LABEL - 10)
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        shapes.append(_text(x, bottom + 14, show((x - _LABEL) / scale), anchor))
    return _svg(title, bottom + 20, shapes)


def histogram(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """The columns of a histogram: (range of lengths, count). counts: number of items of each length."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // _MOST_BINS)
    bins = [0] * ((high - low) // width + 1)
    for length, count in counts.items():
        bins[(length - low) // width] += count
    starts = [low + i * width for i in range(len(bins))]
    ends = [min(start + width - 1, high) for start in starts]
    names = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in zip(starts, ends, strict=True)]
    return list(zip(names, map(float, bins), strict=True))


def ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0 to about `most`, for an axis."""
    if not (most > 0 and math.isfinite(most)):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if most / (power * part) <= 8)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Plot:
    """The plane of a chart, with (least, most) of x and of y."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / ((high - low) or 1.0) * (_WIDTH - _LEFT - 20)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _PLOT_HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (_PLOT_HEIGHT - _BOTTOM - _TOP)

    def frame(self, x_label: str, y_label: str, x_ticks: bool = True) -> list[str]:
        bottom = _PLOT_HEIGHT - _BOTTOM
        shapes = [f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 20}"/>']
        for value in ticks(self.y_range[1]):
            y = self.y(value)
            shapes.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
            shapes.append(_text(_LEFT - 6, y + 4, _number(value), "end"))
        for value in ticks(self.x_range[1]) if x_ticks else ():
            shapes.append(_text(self.x(value), bottom + 16, _number(value), "middle"))
        shapes.append(_text((_LEFT + _WIDTH) / 2, _PLOT_HEIGHT - 6, x_label, "middle"))
        middle = (_TOP + bottom) / 2
        shapes.append(
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
            f"{escaped(y_label)}</text>"
        )
        return shapes


def _merged(spans: Sequence[Span], least: float) -> list[Span]:
    """Spans of a timeline, in which those shorter than `least` seconds are merged with the next close one."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and span.start - last.end < least and (span.end - span.start < least or last.end - last.start < least):
            longer = span if span.end - span.start > last.end - last.start else last
            name = last.name if last.name in (span.name, "several") else "several"
            merged[-1] = Span(last.start, max(last.end, span.end), longer.colour, name)
        else:
            merged.append(span)
    return merged


def _svg(title: str, height: float, shapes: Sequence[str]) -> str:
    svg = f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escaped(title)}">{"".join(shapes)}</svg>'
    return f'<div class="wide">{svg}</div>\n'


def _rect(x: float, y: float, width: float, height: float, colour: int, text: str) -> str:
    return (
        f'<rect class="f{colour % COLOURS}" x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}"'
        f' height="{max(height, 0):.1f}">{_tip(text)}</rect>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _tip(text: str) -> str:
    return f"<title>{escaped(text)}</title>"
