"""`batchgen run --lora-column`: rows are grouped by their adapter, which is merged into the model for its rows.

Each group is a job of its own. Rows without an adapter are run by the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError
from batchgen.dataset import Dataset
from batchgen.job.embedding import for_task
from batchgen.job.joint.jobs import Jobs, files_of, joint_summary, over_rows, run_jobs, write_output
from batchgen.job.joint.rows import (
    Part,
    Rows,
    bad_rows,
    column,
    errors_among,
    first_row,
    merged,
    rows_among,
    write_rows,
)
from batchgen.job.options import JobOptions
from batchgen.job.run import run_job
from batchgen.job.source import open_input
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import resolve_model

_SCAN_ROWS = 4096
_MOST = 1000  # of one input: each is a job


def run_adapters(options: JobOptions) -> dict[str, Any]:
    """Run a job whose rows name their adapters, or resume it; returns the report. Raises what `run_jobs` raises."""
    if options.dry_run:
        return run_job(replace(options, lora_column=None))
    return run_jobs(options, _run, "--lora-column")


def _run(jobs: Jobs) -> dict[str, Any]:
    """Run the job of each adapter and write the output; returns what the report says of them."""
    dataset = open_input(jobs.options)
    groups = _groups(dataset, str(jobs.options.lora_column))
    for adapter in groups:  # a wrong one is refused before the first job
        files = resolve_model(jobs.options.model, adapter or None)
        if adapter:
            open_checkpoint(for_task(files, jobs.options))
    bad = bad_rows(dataset) if jobs.options.on_bad_line == "skip" else {}
    parts, first = [], first_row(dataset)
    for number, (adapter, rows) in enumerate(groups.items(), 1):
        name = f"adapter-{json_sha256(adapter)[:12]}" if adapter else "no-adapter"
        jobs.say(f"adapter {number} of {len(groups)}: {adapter or 'none'}, {len(rows):,} rows")
        given = jobs.input_of(name)
        write_rows(given, dataset.schema, _rows_of(dataset, rows), first + rows, errors_among(bad, rows))
        options = replace(over_rows(jobs.options, given), lora=adapter or None)
        parts.append(Part(rows, jobs.run(name, options)))
    return _written(jobs, dataset, parts, {adapter or None: len(rows) for adapter, rows in groups.items()})


def _groups(dataset: Dataset, name: str) -> dict[str, Rows]:
    """Numbers of the rows of each adapter, in the order in which the adapters come; "" is no adapter.

    Args:
        dataset: The input.
        name: Name of the column with the adapters' directories.

    Raises:
        InputError: There is no such column, or it has no texts, or too many different ones.
    """
    if name not in dataset.schema.names:
        raise InputError(f"the input has no column {name}: --lora-column is one of {', '.join(dataset.schema.names)}")
    kind = dataset.schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise InputError(f"--lora-column {name} has values of type {kind}: it has the adapters' directories, as texts")
    groups: dict[str, list[int]] = {}
    offset = None
    for first, batch in dataset.batches(0, _SCAN_ROWS, [name]):
        offset = first if offset is None else offset
        for row, adapter in enumerate(batch.column(name).to_pylist(), first - offset):
            groups.setdefault(adapter or "", []).append(row)
        if len(groups) > _MOST:
            raise InputError(f"--lora-column {name} has more than {_MOST:,} adapters: give them in several jobs")
    if not groups:
        groups[""] = []  # a job without rows: its output has the columns
    return {adapter: np.array(rows, np.int64) for adapter, rows in groups.items()}


def _numbered(dataset: Dataset) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of an input, numbered from 0 also where `--shard` leaves out those before."""
    first = 0
    for _, batch in dataset.batches(0, _SCAN_ROWS):
        yield first, pa.Table.from_batches([batch])
        first += batch.num_rows


def _rows_of(dataset: Dataset, rows: Rows) -> Iterator[pa.Table]:
    """Yield tables with some rows of an input. rows: their numbers, ascending."""
    return rows_among(_numbered(dataset), rows)


def _written(jobs: Jobs, dataset: Dataset, parts: Sequence[Part], counts: dict[str | None, int]) -> dict[str, Any]:
    """Write the output; returns what the report says of it. counts: rows of each adapter."""
    types = jobs.added_columns()
    schema = pa.schema([*dataset.schema, *(pa.field(name, kind) for name, kind in types.items())])
    error = next(name for name in reversed(types) if name.endswith("error"))

    def batches() -> Iterator[pa.RecordBatch]:
        for each in merged(_numbered(dataset), parts):
            assert each.results is not None  # every row is in one of the jobs
            arrays = [column(each.rows, field.name, field.type) for field in dataset.schema]
            arrays += [column(each.results, name, kind) for name, kind in types.items()]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def about(rows: int) -> dict[str, Any]:
        adapters = [{"adapter": adapter, "rows": count} for adapter, count in counts.items()]
        return {"output_columns": list(types), "adapters": adapters}

    asked = {
        "files": files_of(part.path for part in parts),
        "order": json_sha256([part.rows.tolist() for part in parts]),
    }
    return write_output(jobs, asked, schema, batches(), error, about)


def adapters_summary(report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run --lora-column` prints at its end. report: the report of the run."""
    counts = [f"{each['adapter'] or 'no adapter'}: {each['rows']:,} rows" for each in report.get("adapters", ())]
    return joint_summary(report, counts)
