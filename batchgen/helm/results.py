"""Results of HELM jobs by row id, and the files of a job.

A job is a folder whose name is a hash of its rows:

    requests.parquet    the job's input: a table row for each Row to generate, or for several Rows to score; with their
        ids
    job.toml            the job's options: `cd` there and `batchgen run --config job.toml`
    results.parquet     the job's output, written when it is complete; results.parquet.batchgen while the job runs
    report.json         the job's report
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.errors import InputError
from batchgen.helm.rows import GENERATE, SCORE

REQUESTS, OPTIONS, RESULTS, REPORT = "requests.parquet", "job.toml", "results.parquet", "report.json"
METADATA_KEY = b"batchgen.helm"  # in the requests' schema: options that the rows decide, as JSON

# The column of a job's table with the ids of its Rows, and the columns that results are read from.
ID_COLUMN = {GENERATE: "id", SCORE: "ids"}
_COLUMNS = {GENERATE: ["text", "finish_reason", "logprobs", "error"], SCORE: ["token_logprobs", "error"]}


@dataclass(frozen=True)
class Timing:
    """The work of the last process that ran a job.

    Attributes:
        rows: Number of Rows that it ran.
        wall_s: Seconds that it took.
    """

    rows: int
    wall_s: float


def read_requests(job: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """The options of a job that depend on its rows; and for each row of its table, the ids of the Rows in it."""
    options = json.loads(pq.read_schema(job / REQUESTS).metadata[METADATA_KEY])
    return options, _ids(pq.read_table(job / REQUESTS, columns=[ID_COLUMN[options["task"]]]))


class Results(Mapping[str, dict[str, Any]]):
    """Results of Rows by Row id.

    A result is {"logprobs": positions, "error": text or None}; a generated one has "text" and "finish_reason" too.
    Results are kept as Arrow tables, and converted to Python values at each look-up.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[pa.Table, Timing | None]] = []
        self._positions: dict[str, tuple[int, int, int]] = {}  # table, row, index in the row

    def add(self, job: Path) -> None:
        """Add the results of a finished job. Raises InputError where they do not match its requests."""
        options, requested = read_requests(job)
        task, path = options["task"], job / RESULTS
        try:
            table = pq.read_table(path, columns=[ID_COLUMN[task], *_COLUMNS[task]])
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path} is no output of {job / OPTIONS}: {error}") from error
        if _ids(table.select([0])) != requested:
            raise InputError(f"{path} does not answer {job / REQUESTS}: run {job / OPTIONS} again, whole")
        for row, ids in enumerate(requested):
            for index, row_id in enumerate(ids):
                self._positions[row_id] = (len(self._tables), row, index)
        rows_each = sum(map(len, requested)) / len(requested)
        self._tables.append((table.drop_columns([ID_COLUMN[task]]), _timing(job, rows_each)))

    def timing(self, row_id: str) -> Timing | None:
        """The timing of the job that ran a Row; None: the job has no report."""
        return self._tables[self._positions[row_id][0]][1]

    def __getitem__(self, row_id: str) -> dict[str, Any]:
        table, row, index = self._positions[row_id]
        result = self._tables[table][0].slice(row, 1).to_pylist()[0]
        if "token_logprobs" in result:
            scores = result.pop("token_logprobs")
            result["logprobs"] = scores[index] if scores else None
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def _ids(table: pa.Table) -> list[list[str]]:
    return [[value] if isinstance(value, str) else value for value in table.column(0).to_pylist()]


def _timing(job: Path, rows_each: float) -> Timing | None:
    try:
        report = json.loads((job / REPORT).read_bytes())
        rows = report["rows_ok"] + report["rows_failed"] - report["rows_resumed"]
        return Timing(round(rows * rows_each), report["wall_s"]) if rows > 0 else None
    except (OSError, ValueError, KeyError):  # results from elsewhere may come without a report
        return None
