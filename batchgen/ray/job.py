"""From Parquet to Parquet over a Ray cluster, with a rerun that goes on with the rows that are left."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.core.atomic_file import write_atomically
from batchgen.core.errors import InputError
from batchgen.job.options import options_of
from batchgen.models.files import model_identity, resolve_model
from batchgen.output.manifest import describe_changes
from batchgen.ray.generate import Generate

_JOB = "_job.json"


def run(
    model: str,
    input: str,
    output: str | Path,
    *,
    id_column: str,
    concurrency: int = 1,
    num_cpus: float = 1,
    batch_size: int = 256,
    **options: Any,
) -> dict[str, int]:
    """Run every row of Parquet files, on a Ray cluster whose machines all see the input and the output.

    Rows come out in any order. The same call goes on after an interruption with the rows whose ids are not in the output yet.

    Args:
        model: As of `batchgen run`.
        input: A Parquet file, a directory or a list of them, as `ray.data.read_parquet` takes it.
        output: A directory of Parquet files, made where there is none.
        id_column: Has another value in every row; it seeds the row's draws.
        concurrency: Actors, each with a model.
        num_cpus: Cores of each.
        batch_size: Rows that an actor is given at a time; it works at several batches at once.
        **options: As of `Generate`.

    Returns:
        rows, and rows_resumed of them that were there before.

    Raises:
        InputError: The output is another job's, or ids are not unique.
    """
    import ray.data

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    _check_job(folder, model, {"id_column": id_column, **options})
    dataset = ray.data.read_parquet(input)
    done = ids_done(folder, id_column)
    total = dataset.count()
    if len(done) < total:
        left = dataset
        if len(done):
            left = dataset.map_batches(
                without_ids, fn_args=(ray.put(done), id_column), batch_format="pyarrow", zero_copy_batch=True
            )
        generated = left.map_batches(
            Generate,
            fn_constructor_kwargs={"model": model, "id_column": id_column, **options},
            batch_format="pyarrow",
            batch_size=batch_size,
            concurrency=concurrency,
            num_cpus=num_cpus,
        )
        for _ in generated.map_batches(
            write_part, fn_args=(str(folder), id_column), batch_format="pyarrow", batch_size=None
        ).iter_batches(batch_format="pyarrow"):
            pass
    now = ids_done(folder, id_column)
    if len(now) != total or pc.count_distinct(now).as_py() != total:
        raise InputError(
            f"column {id_column!r} has the same value in several rows: give an id_column whose values differ"
        )
    return {"rows": total, "rows_resumed": len(done)}


def ids_done(folder: Path, id_column: str) -> pa.Array:
    """The ids of the rows in an output, in any order."""
    columns = [pq.read_table(path, columns=[id_column]).column(0) for path in sorted(folder.glob("part-*.parquet"))]
    chunks = [chunk for column in columns for chunk in column.chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([])


def without_ids(batch: pa.Table, done: pa.Array, id_column: str) -> pa.Table:
    """The rows whose id is not among `done`."""
    return batch.filter(pc.invert(pc.is_in(batch.column(id_column), value_set=done)))


def write_part(batch: pa.Table, folder: str, id_column: str) -> pa.Table:
    """Write finished rows atomically, under a name made of their ids: Ray may run a task again. Returns how many they were."""
    if batch.num_rows:
        ids = json.dumps(batch.column(id_column).to_pylist(), default=str).encode()
        sink = pa.BufferOutputStream()
        pq.write_table(batch, sink, compression="zstd")
        name = f"part-{hashlib.sha256(ids).hexdigest()[:24]}.parquet"
        write_atomically(Path(folder) / name, sink.getvalue().to_pybytes(), contended=True)
    return pa.table({"rows": [batch.num_rows]})


def _check_job(folder: Path, model: str, options: dict[str, Any]) -> None:
    """Note in the output which job it is of. Raises InputError where it is another one's."""
    deciding = {option.name for option in options_of("map", "engine") if option.decides_results}
    decided = {name: value for name, value in options.items() if name in deciding or name == "output_prefix"}
    job = {"model": model_identity(resolve_model(model)), "options": decided}
    job = json.loads(json.dumps(job, default=str))
    path = folder / _JOB
    if not path.exists():
        if any(folder.iterdir()):
            raise InputError(f"{folder} has files of something else: give an output of its own")
        write_atomically(path, json.dumps(job, indent=1, sort_keys=True).encode())
    elif changes := describe_changes(json.loads(path.read_text()), job):
        raise InputError(f"{folder} has rows made with other settings: {changes}. Give another output")
