"""Figures of the four papers beside what the planner predicts for the same settings.

Each number of FlexGen's tables and of NEO's, APEX's and Pie's figures that the planner can predict is a row: published,
predicted, the error, and a sentence where it is off by more than a quarter. Nothing of it runs on a GPU. What the
planner cannot predict is in docs/papers.md, with the reason.

    python benchmarks/papers.py                          # writes benchmarks/results/papers.json
    python benchmarks/papers.py --only NEO --only APEX   # these rows anew; those of other papers stay
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict

from flexgen_rows import flexgen_rows
from paper_row import PaperRow
from recording import joined, result_path, write
from strategy_rows import apex_rows, neo_rows, pie_rows

PAPERS: dict[str, Callable[[], Iterator[PaperRow]]] = {
    "FlexGen": flexgen_rows,
    "NEO": neo_rows,
    "APEX": apex_rows,
    "Pie": pie_rows,
}


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PAPERS, help="a paper whose rows are predicted anew")
    for name in parser.parse_args().only or PAPERS:
        rows = []
        for row in PAPERS[name]():
            rows.append(row)
            shown = "none" if row.predicted is None else f"{row.predicted:.3g}"
            print(f"{name}, {row.item}, {row.setting}: {row.published} {row.unit}, predicted {shown}", flush=True)
        print(f"{name}: {summary(rows)}")
        predicted = {name: [asdict(row) for row in rows]}
        write(result_path("papers"), {"papers": joined(result_path("papers"), "papers", predicted, list(PAPERS))})


if __name__ == "__main__":
    main()
