"""Draws docs/ladder.svg and writes the tables of docs/ladder.md, of all benchmarks/results/ladder-*.json.

    python docs/draw_ladder.py

`make docs` runs this, and a test compares what comes out with the committed files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = (ROOT / "docs" / name for name in ("ladder.md", "ladder.svg"))
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- ladder: begin -->\n", "<!-- ladder: end -->\n"
SHARES = {"0.25": "0.25", "0.5": "0.5", "0.75": "0.75", "1": "1", "1.5": "1.5", "16": "ample"}  # and how they are shown
COLOURS = {
    "batchgen": "#2e7d32", "llama.cpp": "#c75b12", "openvino": "#1565c0", "vllm": "#7b1fa2",
    "transformers": "#8d6e63", "accelerate": "#455a64", "ctranslate2": "#ad1457", "airllm": "#827717",
}  # fmt: skip
_OTHER = "#888"
WIDTH, PANEL, LEFT, TOP = 460, 260, 60, 40  # of a panel; where its plot begins


def results() -> list[dict[str, Any]]:
    """The result of each machine."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("ladder-*.json"))]


def best_cells(entry: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """For each engine and share the fastest cell that is accurate, else one that is not or has failed.

    entry: a model's part of a result.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in entry["cells"].values():
        of_engine = found.setdefault(cell["engine"], {})
        share = f"{cell['share']:g}"
        held = of_engine.get(share)
        if held is None or _order(cell) < _order(held):
            of_engine[share] = cell
    return found


def _order(cell: dict[str, Any]) -> tuple[bool, float]:
    """The sort key of a cell: accurate cells come first, and the fastest of them first."""
    return _judged(cell) and not cell["valid"], cell.get("wall_s", math.inf)


def rate(cell: dict[str, Any] | None, result: dict[str, Any]) -> float | None:
    """Generated tokens per second of a cell; None where it did not do the job, or not as accurately as fp32."""
    if cell is None or "wall_s" not in cell or (_judged(cell) and not cell["valid"]):
        return None
    arguments = result["arguments"]
    return float(arguments["rows"] * arguments["output_tokens"] / cell["wall_s"])


def _judged(cell: dict[str, Any]) -> bool:
    """True where each token was compared with fp32's choice after the same tokens."""
    return "same" in cell


def panel(result: dict[str, Any], name: str, x: int, y: int) -> list[str]:
    """The plot of a model on a machine: tokens per second over the memory limit."""
    cells = best_cells(result["models"][name])
    rates = {engine: [rate(by_share.get(share), result) for share in SHARES] for engine, by_share in cells.items()}
    known = [value for values in rates.values() for value in values if value]
    if not known:
        return []
    low, high = 10 ** math.floor(math.log10(min(known))), 10 ** math.ceil(math.log10(max(known) * 1.0001))
    width, height = WIDTH - LEFT - 110, PANEL - TOP - 40

    def at(share: str, value: float) -> tuple[float, float]:
        across = LEFT + width * list(SHARES).index(share) / (len(SHARES) - 1)
        up = height * (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return x + across, y + TOP + height - up

    drawn = [
        f'<text x="{x + LEFT}" y="{y + 20}" class="title">{escape(name)}, {escape(result["machine"]["cpu"])}</text>'
    ]
    for share in SHARES:
        across, down = at(share, low)
        drawn.append(f'<text x="{across:.1f}" y="{down + 18:.1f}" text-anchor="middle">{SHARES[share]}</text>')
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        (left, down), (right, _) = at("0.25", 10.0**power), at("16", 10.0**power)
        drawn.append(f'<path d="M{left:.1f} {down:.1f} H{right:.1f}" class="grid"/>')
        drawn.append(f'<text x="{left - 8:.1f}" y="{down + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    labels: list[tuple[float, str]] = []
    for engine, values in rates.items():
        points = [at(share, value) for share, value in zip(SHARES, values, strict=True) if value]
        if not points:
            continue
        colour = COLOURS.get(engine, _OTHER)
        line = " L".join(f"{across:.1f} {down:.1f}" for across, down in points)
        drawn.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points]
        labels.append((points[-1][1], engine))
    below = -math.inf
    for down, engine in sorted(labels):
        below = max(down, below + 13)
        colour = COLOURS.get(engine, _OTHER)
        drawn.append(f'<text x="{x + LEFT + width + 8}" y="{below + 4:.1f}" fill="{colour}">{escape(engine)}</text>')
    below_axis = f"limit less {result['arguments']['beside_bytes'] / 2**20:.0f} MiB, in models"
    middle = x + LEFT + width / 2
    drawn.append(f'<text x="{middle:.1f}" y="{y + PANEL - 6}" text-anchor="middle">{below_axis}</text>')
    return drawn


def figure() -> str:
    """The figure: a row of panels for each machine, a panel for each model; generated tokens per second."""
    rows = [[panel(result, name, WIDTH * i, PANEL * j) for i, name in enumerate(result["models"])]
            for j, result in enumerate(results())]  # fmt: skip
    width, height = WIDTH * max(map(len, rows), default=1), PANEL * max(1, len(rows))
    style = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.grid{stroke:#ddd}"
    lines = [line for row in rows for panel_lines in row for line in panel_lines]
    body = "\n".join(lines or ['<text x="20" y="40">No machine has results here yet.</text>'])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>Generated tokens per second over the memory limit</title><style>{style}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def table(result: dict[str, Any], name: str) -> str:
    """The table of a model on a machine."""
    entry = result["models"][name]
    bound = entry.get("bound")  # measured after the last cell
    limits = " | ".join(SHARES.values())
    lines = [
        f"| engine | {limits} | of the roofline | predicted | accuracy | fp32's tokens | settings |",
        f"|---|{'---:|' * len(SHARES)}---:|---:|---:|---:|---|",
    ]
    for engine, cells in best_cells(entry).items():
        ran = [cells[share] for share in reversed(SHARES) if "wall_s" in cells.get(share, {})]
        best = ran[0] if ran else None
        shown = [_shown(cells.get(share), result) for share in SHARES]
        of_bound = f"{bound['bound_s'] / best['wall_s']:.0%}" if best and bound else "-"
        predicted = [cell["predicted_wall_s"] / cell["wall_s"] - 1 for cell in ran if cell.get("predicted_wall_s")]
        errors = f"{min(predicted):+.0%} to {max(predicted):+.0%}" if predicted else "-"
        judged = [cell for cell in ran if _judged(cell)]
        accuracy = f"{min(cell['accuracy'] for cell in judged):.2%}" if judged else "-"
        same = f"{min(cell['same'] for cell in judged):.1%}" if judged else "-"
        settings = ", ".join(f"{key} {value}" for key, value in best["asked"].items()) if best else ""
        lines.append(f"| {engine} | {' | '.join(shown)} | {of_bound} | {errors} | {accuracy} | {same} | {settings} |")
    return "\n".join(lines)


def _cell_text(reason: str) -> str:
    """A reason that an engine gave, as one line of Markdown."""
    return " ".join(reason.split()).replace("|", "/").replace("<", "").rstrip(".")


def _shown(cell: dict[str, Any] | None, result: dict[str, Any]) -> str:
    if cell is None:
        return "-"
    if "failed" in cell:
        return "memory" if cell["failed"] == "out of memory" else "time" if "not done in" in cell["failed"] else "no"
    value = rate(cell, result)
    return f"{value:,.{int(value < 10)}f}" if value is not None else "inaccurate"


def described() -> str:
    """The page, with its tables as the result files have them."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    parts = []
    for result in results():
        machine, arguments = result["machine"], result["arguments"]
        parts.append(f"### {machine['cpu']}, {machine['cores']} cores")
        parts.append(
            f"{arguments['rows']} rows, {arguments['prompt_tokens']} tokens in and {arguments['output_tokens']} out."
        )
        for name, entry in result["models"].items():
            size = f"{entry['weight_bytes'] / 1e6:,.0f} MB"
            parts.append(f"**{name}**, {size} of weights; generated tokens per second, by the limit in models:")
            parts.append(table(result, name))
            if kills := entry.get("kills"):
                same = "the same SHA-256 as undisturbed" if kills.get("same") else "another output than undisturbed"
                parts.append(f"batchgen after {kills.get('killed', 0)} kills: {same} (float32).")
            unjudged = any("wall_s" in cell and not _judged(cell) for cell in entry["cells"].values())
            if entry.get("random"):
                parts.append("Random weights of about 4 bits, with random numbers of their own for each engine.")
            elif unjudged:
                parts.append("Not all tokens of this table are judged: `--judge` does that.")
            ran = {cell["engine"] for cell in entry["cells"].values() if "wall_s" in cell}
            left_out = {c["engine"]: c["failed"] for c in entry["cells"].values() if c["engine"] not in ran}
            if left_out:
                reasons = "; ".join(f"{engine}: {_cell_text(reason)}" for engine, reason in left_out.items())
                parts.append(f"Not run: {reasons}.")
    parts = parts or ["No machine has results here yet."]
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def main() -> None:
    FIGURE.write_text(figure())
    PAGE.write_text(described())


if __name__ == "__main__":
    main()
