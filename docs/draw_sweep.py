"""Draws docs/sweep.svg: one sweep over three tiers of memory, as a timeline with a row for each lane.

    python docs/draw_sweep.py

The same drawing comes out every time, and a test compares it with the committed file.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUTPUT = Path(__file__).with_name("sweep.svg")
WIDTH, HEIGHT = 960, 400
LEFT, TOP = 236, 62  # where the timeline begins
LAYER = 176  # width of the time that one layer takes
LAYERS = (1, 2, 3, 4)
ROW = 30  # height of a lane's boxes
COLOURS = {"weights": "#f2c14e", "cache": "#8fc1e3", "first": "#7fb069", "second": "#b5d99c", "cpu": "#e08e79"}
# Tier -> colour of its band and its lanes from top to bottom.
TIERS = {
    "compute device": ("#eef5ea", ("compute",)),
    "host memory": ("#fdf6e3", ("d2h", "cpu_attention", "h2d")),
    "disk": ("#eef1f6", ("disk_read", "disk_write")),
}
LANES = {
    "compute": "products, attention",
    "d2h": "device to host",
    "h2d": "host to device",
    "cpu_attention": "attention on the CPU",
    "disk_read": "weights, KV",
    "disk_write": "KV",
}


def lane_tops() -> dict[str, int]:
    """The y coordinate of each lane's boxes."""
    tops, y = {}, TOP
    for _, lanes in TIERS.values():
        for lane in lanes:
            tops[lane] = y + 8
            y += ROW + 16
        y += 12
    return tops


def box(x: int, y: int, width: int, colour: str, label: str) -> str:
    """A Step: a rectangle with a label in its middle."""
    middle_x, middle_y = x + width // 2, y + ROW // 2 + 4
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{ROW}" rx="4" fill="{colour}" stroke="#555"/>'
        f'<text x="{middle_x}" y="{middle_y}" text-anchor="middle">{escape(label)}</text>'
    )


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    """What a Step waits for."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" class="wait" marker-end="url(#head)"/>'


def bands(tops: dict[str, int]) -> list[str]:
    """The tiers, with their names and their lanes' names."""
    drawn = []
    for tier, (colour, lanes) in TIERS.items():
        y, height = tops[lanes[0]] - 8, len(lanes) * (ROW + 16)
        drawn.append(f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{height}" rx="8" fill="{colour}"/>')
        drawn.append(f'<text x="22" y="{y + 27}" class="tier">{escape(tier)}</text>')
        for lane in lanes:
            text = tops[lane] + ROW // 2
            drawn.append(f'<text x="{LEFT - 12}" y="{text - 2}" text-anchor="end" class="lane">{lane}</text>')
            drawn.append(f'<text x="{LEFT - 12}" y="{text + 11}" text-anchor="end" class="note">{LANES[lane]}</text>')
    return drawn


def steps(tops: dict[str, int]) -> list[str]:
    """Boxes of micro-batches A and B through four layers, weights one layer ahead of use and two ahead of the link."""
    drawn = []
    quarter = LAYER // 4
    for index, layer in enumerate(LAYERS):
        x = LEFT + index * LAYER
        work = (("first", "A qkv"), ("second", "B qkv"), ("first", "A rest"), ("second", "B rest"))
        for part, (colour, label) in enumerate(work):
            drawn.append(box(x + part * quarter, tops["compute"], quarter - 2, COLOURS[colour], label))
        for part, batch in ((1, "A"), (2, "B")):
            begin = x + part * quarter
            drawn.append(box(begin + 3, tops["d2h"], 17, COLOURS["cache"], batch))
            drawn.append(box(begin + 22, tops["cpu_attention"], quarter - 24, COLOURS["cpu"], batch))
        drawn.append(box(x, tops["h2d"], LAYER - 54, COLOURS["weights"], f"weights {layer + 1}"))
        drawn.append(box(x + LAYER - 52, tops["h2d"], 50, COLOURS["cache"], f"KV {layer + 1}"))
        drawn.append(box(x, tops["disk_read"], LAYER - 74, COLOURS["weights"], f"weights {layer + 2}"))
        drawn.append(box(x + LAYER - 72, tops["disk_read"], 50, COLOURS["cache"], f"KV {layer + 2}"))
        if index:
            drawn.append(box(x + quarter, tops["disk_write"], 50, COLOURS["cache"], f"KV {layer - 1}"))
    return drawn


def waits(tops: dict[str, int]) -> list[str]:
    """Arrows for one layer: disk to host to device, and a micro-batch's way to the CPU and back."""
    second, third = LEFT + LAYER, LEFT + 2 * LAYER
    quarter = LAYER // 4
    return [
        arrow(LEFT + LAYER - 74, tops["disk_read"], second + 12, tops["h2d"] + ROW),
        arrow(second + LAYER - 54, tops["h2d"], third + 8, tops["compute"] + ROW),
        arrow(second + quarter - 6, tops["compute"] + ROW, second + quarter + 8, tops["d2h"]),
        arrow(second + quarter + 14, tops["d2h"] + ROW, second + quarter + 26, tops["cpu_attention"]),
        arrow(second + 2 * quarter - 6, tops["cpu_attention"], second + 2 * quarter + 1, tops["compute"] + ROW),
    ]


def draw() -> str:
    """The drawing as the text of an SVG file."""
    tops = lane_tops()
    title = "A sweep: every layer once, for all rows in flight"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        "<style>text{font:12px sans-serif;fill:#222}.tier{font-weight:bold}.lane{font-family:monospace}"
        ".note{font-size:10px;fill:#666}.title{font-size:16px;font-weight:bold}"
        ".wait{fill:none;stroke:#b0413e;stroke-width:1.6}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#b0413e"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="22" y="28" class="title">{title}</text>',
        *bands(tops),
    ]
    for index, layer in enumerate(LAYERS):
        x = LEFT + index * LAYER
        lines.append(f'<path d="M{x - 1} {TOP - 12} V{HEIGHT - 40}" stroke="#bbb" stroke-dasharray="3 4"/>')
        lines.append(f'<text x="{x + LAYER // 2}" y="{TOP - 8}" text-anchor="middle">layer {layer}</text>')
    lines += [*steps(tops), *waits(tops)]
    legend = (
        "A and B are micro-batches. A box is a Step, a row is a lane, a red arrow is what a Step waits for."
        " Time runs to the right."
    )
    lines.append(f'<text x="22" y="{HEIGHT - 14}">{legend}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
