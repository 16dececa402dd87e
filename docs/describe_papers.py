"""Writes the tables of docs/papers.md, whose figures come from benchmarks/results/papers.json.

    python docs/describe_papers.py

`make docs` runs this, and a test compares the page with the committed one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

from paper_row import PaperRow  # noqa: E402
from papers import read_rows, summary  # noqa: E402

_HEADER = "| where | setting | unit | published | predicted | error | |\n|---|---|---|---:|---:|---:|---|"


def described() -> str:
    """The page, with its tables as the result file has them."""
    parts = PAGE.read_text().split("<!-- table -->\n")
    tables = [_overview(), *(_table(rows) for rows in read_rows().values())]
    assert len(parts) == 2 * len(tables) + 1
    for number, table in enumerate(tables):
        parts[2 * number + 1] = f"{table}\n"
    return "<!-- table -->\n".join(parts)


def _overview() -> str:
    lines = ["| paper | rows | off by at most a quarter | median error |", "|---|---:|---:|---:|"]
    for paper, rows in read_rows().items():
        found = summary(rows)
        lines.append(f"| {paper} | {found['rows']} | {found['close']} | {found['median_error']:.0%} |")
    return "\n".join(lines)


def _table(rows: list[PaperRow]) -> str:
    lines = [_HEADER]
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.0%}"
        published, predicted = (_shown(value) for value in (row.published, row.predicted))
        lines.append(
            f"| {row.item} | {row.setting} | {row.unit} | {published} | {predicted} | {error} | {row.reason} |"
        )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(described())
