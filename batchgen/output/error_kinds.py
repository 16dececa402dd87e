"""Groups of similar errors of failed rows, the most frequent first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.output.parts import newest_results

_NUMBER = re.compile(r"\d[\d,.]*")
_MOST_KINDS = 1000  # what is kept while counting: messages may quote their rows


@dataclass(frozen=True)
class ErrorKind:
    """A group of errors whose texts differ only in their numbers.

    Attributes:
        error: The text of the first row's error.
        rows: Number of rows with such an error.
    """

    error: str
    rows: int


def error_kinds(paths: Sequence[Path], most: int = 3, *, results_per_row: int = 1) -> list[ErrorKind]:
    """The most frequent groups of similar errors among the rows in part files.

    Of a row that was retried only the newest result counts.

    Args:
        paths: The part files, oldest first.
        most: The most groups to return.
        results_per_row: Number of results of each row, of which the last one counts.

    Raises:
        DamagedPart: A part file is damaged.
    """
    counts: Counter[str] = Counter()
    first: dict[str, tuple[int, str]] = {}  # the first row of each group, and its error
    for results in newest_results(paths, ["error"]):
        last = results.column("row").to_numpy() % results_per_row == results_per_row - 1
        failed = results.filter(pa.array(last)).filter(pc.is_valid(pc.field("error")))
        by_error = failed.group_by("error").aggregate([("row", "min"), ("row", "count")])
        for entry in by_error.to_pylist():
            kind = _NUMBER.sub("#", entry["error"])
            if kind in counts or len(counts) < _MOST_KINDS:
                counts[kind] += entry["row_count"]
                row = entry["row_min"], entry["error"]
                first[kind] = min(row, first.get(kind, row))
    ordered = sorted(counts, key=lambda kind: (-counts[kind], first[kind]))
    return [ErrorKind(first[kind][1], counts[kind]) for kind in ordered[:most]]
