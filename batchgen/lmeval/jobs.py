"""A job for all lm_eval requests of one type, whose files let an interrupted evaluation go on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import storage_error, written_atomically
from batchgen.core.errors import BatchgenError, one_line

_ROW_GROUP = 4096
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workplace:
    """The directory and the options of the jobs of an evaluation.

    Attributes:
        model: The model, as `batchgen.run` takes it.
        options: Options of `batchgen.run`.
        identity: JSON values that the results depend on, besides the rows.
        directory: Directory with a folder for each job, named by its kind and a hash of all that its results depend on.
        resume: Whether results of earlier evaluations are used.
    """

    model: str
    options: dict[str, Any]
    identity: dict[str, Any]
    directory: Path
    resume: bool = True

    def run(self, kind: str, rows: pa.Table, results: Sequence[str], **options: Any) -> pa.Table:
        """Run a job for requests of one type. Rows that an earlier call has finished are not run again.

        Args:
            kind: Type of the requests.
            rows: Rows of the job.
            results: Names of the output columns to return.
            **options: Further options of the job.

        Returns:
            The columns, in the order of the rows.

        Raises:
            BatchgenError: A row failed.
        """
        import batchgen

        folder = self.directory / f"{kind}-{self._digest(kind, rows, options)}"
        requests, output = folder / "requests.parquet", folder / "results.parquet"
        try:
            if not requests.exists():
                _write(rows, requests)
        except OSError as error:
            raise storage_error(error, f"write {requests}") from error
        logger.info("%s: %s rows, in %s", kind, f"{rows.num_rows:,}", folder)
        given = dict(self.options)
        if options.get("task") == "score":
            given.pop("expected_output_len", None)  # an option of jobs that generate
        report = batchgen.run(
            self.model, str(requests), output, report=str(folder / "report.json"),
            overwrite=not self.resume, retry_failed=self.resume, max_failed="100%", reasoning_column=False,
            **given, **options,
        )  # fmt: skip
        if report["state"] == "already complete":
            logger.warning("%s: taken from %s, where it was done before; resume=False does it again", kind, folder)
        if report["rows_failed"]:
            errors = pq.read_table(output, columns=["error"])["error"].drop_null()
            raise BatchgenError(
                f"{len(errors):,} of {rows.num_rows:,} {kind} rows failed (the first: {one_line(errors[0])});"
                " the same command tries them again"
            )
        return pq.read_table(output, columns=list(results))

    def _digest(self, kind: str, rows: pa.Table, options: dict[str, Any]) -> str:
        digest = hashlib.sha256(json.dumps([self.identity, kind, options], sort_keys=True, default=str).encode())
        for column in rows.columns:
            _add(column.combine_chunks(), digest)
        return digest.hexdigest()[:24]


def token_lists(rows: Sequence[bytes]) -> pa.ListArray:
    """A list<int32> Arrow array of token ids. rows: the token ids of each row as bytes, four for each."""
    offsets = np.cumsum([0, *(len(row) // 4 for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(b"".join(rows), np.int32)))


def nested_token_lists(rows: Sequence[Sequence[bytes]]) -> pa.ListArray:
    """A list<list<int32>> Arrow array of token ids. rows: for each row several lists, four bytes for each token id."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), token_lists([ids for row in rows for ids in row]))


def _add(array: pa.Array, digest: Any) -> None:
    """Add the values and list lengths of an Arrow array to a hash, text as JSON."""
    while pa.types.is_list(array.type):
        digest.update(np.asarray(array.value_lengths()).tobytes())
        array = array.flatten()
    is_text = pa.types.is_string(array.type)
    digest.update(json.dumps(array.to_pylist()).encode() if is_text else np.asarray(array).tobytes())


def _write(rows: pa.Table, path: Path) -> None:
    """Write a Parquet file atomically, in row groups so small that a resumed job reads only those that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as file:
        pq.write_table(rows, file, row_group_size=_ROW_GROUP)
