"""Partial completions of a shared job, a file for each range, so that the worker that takes over a range goes on."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchgen.core.partial import PartialCompletion
from batchgen.output.partials import PARTIALS_FILE, DamagedPartials, Partials, read_partials, write_partials

logger = logging.getLogger(__name__)


class RangePartials:
    """The files of partial completions of a shared job.

    Tokens depend on the job and the row alone. So two workers that take each other for dead may both write a range's
    file, and either content is right.
    """

    def __init__(self, directory: Path, folder: Path, origin: dict[str, Any], range_of: Callable[[int], str]) -> None:
        """Read and write nothing yet.

        Args:
            directory: The run directory, where an ordinary run may have left tokens.
            folder: The folder of the files.
            origin: JSON values about the job that every file records.
            range_of: Function that returns the name of a row's range.
        """
        self._directory, self._folder, self._origin, self._range_of = directory, folder, origin, range_of
        self._written: set[str] = set()

    def read(self, rows: Sequence[int]) -> dict[int, PartialCompletion]:
        """The tokens of the rows of one range, by row, as far as others have saved them."""
        partials: dict[int, PartialCompletion] = {}
        for path in (self._directory / PARTIALS_FILE, self._path(self._range_of(rows[0]))):
            try:
                partials |= read_partials(path, self._origin)
            except (DamagedPartials, OSError) as error:
                logger.warning("tokens of unfinished rows are damaged, and are generated again: %s", error)
        wanted = set(rows)
        return {row: partial for row, partial in partials.items() if row in wanted}

    def write(self, partials: Partials) -> None:
        """Replace the files of all ranges with unfinished rows, and remove those of others. Raises OSError."""
        by_range: dict[str, list[PartialCompletion]] = defaultdict(list)
        for row, partial in partials.items():
            by_range[self._range_of(row)].append(partial)
        for name in self._written - by_range.keys():
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)
        self._written = set(by_range)
        for name, of_range in by_range.items():
            write_partials(self._path(name), of_range, self._origin)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"
