"""Groups of similar errors of failed rows, the most frequent first."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from batchgen.output.parts import part_columns, part_paths
from batchgen.output.row_map import RowMap

_NUMBER = re.compile(r"\d[\d,.]*")
_MOST_KINDS = 1000  # what is kept while counting: messages may quote their rows


@dataclass(frozen=True)
class ErrorKind:
    """A group of errors whose texts differ only in their numbers.

    Attributes:
        error: The text of one of the errors.
        rows: Number of rows with such an error.
    """

    error: str
    rows: int


def error_kinds(parts_dir: Path, most: int = 3, *, results_per_row: int = 1) -> list[ErrorKind]:
    """The most frequent groups of similar errors among the rows in part files.

    Of a row that was retried only the newest result counts.

    Args:
        parts_dir: The directory of the part files.
        most: The most groups to return.
        results_per_row: Number of results of each row, of which the last one counts.

    Raises:
        DamagedPart: A part file is damaged.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    seen = RowMap(np.uint8)
    for path in reversed(part_paths(parts_dir)):
        table = part_columns(path, ["row", "error"])
        rows = table.column("row").to_numpy()
        first = int(rows.min())
        newest = seen.get(first, int(rows.max()) + 1 - first)[rows - first] == 0
        seen.put(rows, 1)
        newest &= rows % results_per_row == results_per_row - 1
        errors = table.column("error").filter(newest).drop_null()
        for entry in pc.value_counts(errors).to_pylist():
            kind = _NUMBER.sub("#", entry["values"])
            if kind in counts or len(counts) < _MOST_KINDS:
                counts[kind] += entry["counts"]
                examples.setdefault(kind, entry["values"])
    return [ErrorKind(examples[kind], rows) for kind, rows in counts.most_common(most)]
