"""Figures of FlexGen's paper beside what the planner predicts for the same settings.

Each cell of its tables that the planner can predict is a row: published, predicted, the error, and a sentence where it
is off by more than a quarter. Nothing of it runs on a GPU. What the planner cannot predict is in docs/papers.md, with
the reason.

    python benchmarks/papers.py     # writes benchmarks/results/papers.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict

from flexgen_rows import flexgen_rows
from paper_row import PaperRow
from recording import result_path, write


def read_rows() -> dict[str, list[PaperRow]]:
    """The rows of each paper in the result file."""
    papers = json.loads(result_path("papers").read_text())["papers"]
    return {name: [PaperRow(**row) for row in rows] for name, rows in papers.items()}


def summary(rows: list[PaperRow]) -> dict[str, float]:
    """Number of rows and of those that are close, and the median error."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    return {
        "rows": len(rows),
        "close": sum(row.is_close for row in rows),
        "median_error": statistics.median(errors) if errors else 0.0,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = []
    for row in flexgen_rows():
        rows.append(row)
        shown = "memory is short" if row.predicted is None else f"{row.predicted:.3g}"
        print(f"{row.item}, {row.setting}: {row.published} {row.unit}, predicted {shown}", flush=True)
    print(summary(rows))
    write(result_path("papers"), {"papers": {"FlexGen": [asdict(row) for row in rows]}})


if __name__ == "__main__":
    main()
