"""tests/BUDGET.md: the tests that take long on an idle machine, and what only `make test-all` runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

LIMIT_S = 10.0
_MOST_SHOWN = 20


def read_budget(path: Path = Path(__file__).parents[1] / "BUDGET.md") -> dict[str, float]:
    """Seconds of tests in the page's tables, `| test | seconds | reason |`; a name without parameters is for all."""
    cells = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in path.read_text().splitlines())
    return {row[0]: float(row[1]) for row in cells if len(row) == 3 and "::" in row[0]}


def listed(budget: dict[str, float], node_id: str) -> float | None:
    """A test's seconds in the budget; None where it is not listed."""
    node_id = node_id if node_id.startswith("tests/") else f"tests/{node_id}"
    return budget.get(node_id, budget.get(node_id.partition("[")[0]))


def longest_first(items: list, budget: dict[str, float]) -> None:
    """Puts the listed tests before all others, so that no worker is left with a long one at the end."""
    items.sort(key=lambda item: -(listed(budget, item.nodeid) or 0.0))


def not_listed(seconds: Counter[str], budget: dict[str, float]) -> list[str]:
    """A report of the tests that took longer than LIMIT_S and are not in the budget; empty where there are none."""
    over = [(s, test) for test, s in seconds.most_common() if s > LIMIT_S and listed(budget, test) is None]
    lines = [f"{s:6.1f} s  {test}" for s, test in over[:_MOST_SHOWN]]
    if len(over) > _MOST_SHOWN:
        lines.append(f"and {len(over) - _MOST_SHOWN} more")
    return lines
