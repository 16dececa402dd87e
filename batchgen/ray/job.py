"""`batchgen.ray.run`: a job from Parquet to Parquet on a Ray cluster, which can be interrupted and run again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import storage_error, write_atomically
from batchgen.core.errors import BatchgenError, InputError
from batchgen.job.option_table import options_of
from batchgen.models.files import resolve_model
from batchgen.models.identity import model_identity
from batchgen.output.manifest import describe_changes
from batchgen.ray.generate import Generate
from batchgen.ray.ids import check_ids, ids_done, rows_left
from batchgen.ray.plans import cluster_plans

_JOB = "_job.json"
# Default rows of a batch: so few that each actor has many batches, and all end at about the same time;
_LEAST_BATCH, _MOST_BATCH, _BATCHES_OF_EACH = 16, 256, 64
# but of short rows as many as take this long, as Ray itself takes some 30 ms for a batch.
_BATCH_S, _FEWEST_BATCHES_OF_EACH = 1.0, 16
_RAISED = re.compile(r"^batchgen\.core\.errors\.(\w+): (.*)$", re.MULTILINE)
_AHEAD = 1.25  # rows that an actor holds, in terms of the rows that its engine has in flight


def run(
    model: str,
    input: str,
    output: str | Path,
    *,
    id_column: str,
    concurrency: int = 1,
    num_cpus: float = 1,
    batch_size: int | None = None,
    plan: bool = True,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, int]:
    """Run every row of Parquet files on a Ray cluster, all of whose machines can access the input and the output.

    Output rows come in any order. After an interruption, the same call goes on with the rows whose ids are not in the
    output yet.

    Args:
        model: The model, as `batchgen run --model` takes it.
        input: A Parquet file, a directory or a list of them, as `ray.data.read_parquet` takes it.
        output: A directory for Parquet files, made where it does not exist.
        id_column: Name of the column with a different value in every row, which seeds the row's random draws.
        concurrency: Number of actors, each with a model.
        num_cpus: CPU cores of each actor.
        batch_size: Number of rows that an actor is given at a time; it runs several batches at once. None: a number
            with which actors end at about the same time.
        plan: Whether the job is planned before it begins, once for each kind of machine; machines without a cached
            profile are measured.
        ray_remote_args: Further Ray arguments of the actors: `memory`, `resources`, `scheduling_strategy`.
        **options: Further options of `Generate`.

    Returns:
        "rows", the number of rows, and "rows_resumed", the number of rows that an earlier call has finished.

    Raises:
        InputError: The output is another job's, ids are not unique, or an option is invalid.
    """
    import ray.data

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    _check_job(folder, model, {"id_column": id_column, **options})
    dataset = ray.data.read_parquet(input)
    # Ray would poll the memory of each batch in a thread.
    dataset.context.memory_usage_poll_interval_s = None
    done = ids_done(folder, id_column)
    total = dataset.count() if len(done) else None  # without finished rows the ids are read and counted anyway
    if total is None or len(done) < total:
        with _refusals():
            total = check_ids(input, id_column)
    if len(done) < total:
        remaining = dataset
        if len(done):
            remaining = dataset.map_batches(
                rows_left, fn_args=(ray.put(done), id_column), batch_format="pyarrow", zero_copy_batch=True
            )
        settings = {"id_column": id_column, **options}
        plans: dict[str, dict[str, Any]] = {}
        if plan:
            num_left = total - len(done)
            with _refusals():
                plans = cluster_plans(model, input, settings, num_cpus=num_cpus, workers=concurrency, rows=num_left)
        rows = batch_size or rows_of_batch(total, concurrency, plans)
        calls = calls_at_once(plans, options, rows)
        # Otherwise a file may be one block, which one actor runs, and which is written when all of it is done.
        written = remaining.repartition(target_num_rows_per_block=rows).map_batches(
            GenerateParts,
            fn_constructor_kwargs={"folder": str(folder), "model": model, "plans": plans, **settings},
            batch_format="pyarrow",
            batch_size=rows,
            compute=ray.data.ActorPoolStrategy(
                size=concurrency, max_tasks_in_flight_per_actor=calls + 1, max_concurrent_calls_per_actor=calls
            ),
            num_cpus=num_cpus,
            **(ray_remote_args or {}),
        )
        with _refusals():
            for _ in written.iter_batches(batch_format="pyarrow"):
                pass
    if len(now := ids_done(folder, id_column)) != total:
        raise InputError(f"{folder} has {len(now):,} rows, the input {total:,}: one of them was changed meanwhile")
    return {"rows": total, "rows_resumed": len(done)}


def rows_of_batch(total: int, concurrency: int, plans: Mapping[str, Mapping[str, Any]]) -> int:
    """The default number of rows of a batch.

    Args:
        total: Number of rows of the job.
        concurrency: Number of actors.
        plans: Plans of the actors, by kind of machine.
    """
    rows_per_s = max((_rows_per_s(plan) for plan in plans.values()), default=0.0)
    few = total // (_BATCHES_OF_EACH * concurrency)
    long = min(int(_BATCH_S * rows_per_s), total // (_FEWEST_BATCHES_OF_EACH * concurrency))
    return max(_LEAST_BATCH, min(_MOST_BATCH, max(few, long)))


def _rows_per_s(plan: Mapping[str, Any]) -> float:
    """Predicted rows per second of an actor."""
    predicted = plan["prediction"]
    sweeps_s = predicted["total_s"] - predicted["startup_s"]
    return float(plan["workload"]["num_seqs"] / sweeps_s) if sweeps_s > 0 else 0.0


def calls_at_once(plans: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], batch_size: int) -> int:
    """The number of batches that an actor has at a time.

    It is one more than the number whose rows fill the engine's queue of waiting rows as `batchgen run` does.

    Args:
        plans: Plans of the actors, by kind of machine.
        options: Options of `Generate`.
        batch_size: Number of rows of a batch.
    """
    samples = max([options.get("max_num_seqs") or 256, *(plan["policy"]["max_num_seqs"] for plan in plans.values())])
    rows = samples * _AHEAD / options.get("n", 1)
    return 1 + math.ceil(rows / batch_size)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise batchgen's own error in place of Ray's error that wraps it, while the block runs tasks or actors."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise (refusal_in(error) or error) from None


def refusal_in(error: BaseException) -> BatchgenError | None:
    """The error of batchgen that a Ray error wraps; None: it wraps another error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BatchgenError) and type(seen).__module__.startswith("batchgen."):
            return seen
        seen = getattr(seen, "cause", None) or seen.__cause__
    if raised := _RAISED.findall(str(error)):  # Ray Data hands over the text of an actor's error alone
        kind, line = raised[-1]
        return InputError(line) if kind == InputError.__name__ else BatchgenError(line)
    return None


class GenerateParts:
    """Generation in a job's actors, which write finished rows to the output, so that none goes back through Ray.

    Args:
        folder: The output.
        id_column: Name of the column with the ids.
        **options: Further options of `Generate`.
    """

    def __init__(self, folder: str, id_column: str, **options: Any) -> None:
        self._folder, self._id_column = folder, id_column
        self._generate = Generate(id_column=id_column, **options)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Generate for a batch of rows and write them to the output; returns a table with the number of rows.

        Raises:
            BatchgenError: The batch cannot be run, or its rows cannot be written.
        """
        done = await self._generate(batch)
        await asyncio.to_thread(write_part, done, self._folder, self._id_column)
        return pa.table({"rows": [done.num_rows]})

    def close(self) -> None:
        """Close the engine and free its memory."""
        self._generate.close()


def write_part(batch: pa.Table, folder: str, id_column: str) -> None:
    """Write finished rows atomically to a file of the output.

    The file's name is a hash of the rows' ids, so that a batch that Ray runs again replaces its own file.

    Args:
        batch: Finished rows.
        folder: The output.
        id_column: Name of the column with the ids.

    Raises:
        BatchgenError: The disk fails.
    """
    if batch.num_rows:
        ids = json.dumps(batch.column(id_column).to_pylist(), default=str).encode()
        sink = pa.BufferOutputStream()
        pq.write_table(batch, sink, compression="zstd")
        name = f"part-{hashlib.sha256(ids).hexdigest()[:24]}.parquet"
        try:
            write_atomically(Path(folder) / name, sink.getvalue().to_pybytes(), contended=True)
        except OSError as error:
            raise storage_error(error, f"write {Path(folder) / name}") from error


def _check_job(folder: Path, model: str, options: dict[str, Any]) -> None:
    """Note in an output the job that it belongs to. Raises InputError where it belongs to another job."""
    deciding = {option.name for option in options_of("map", "engine") if option.decides_results}
    decided = {name: value for name, value in options.items() if name in deciding or name == "output_prefix"}
    job = {"model": model_identity(resolve_model(model, options.get("lora"))), "options": decided}
    job = json.loads(json.dumps(job, default=str))
    path = folder / _JOB
    if not path.exists():
        if any(folder.iterdir()):
            raise InputError(f"{folder} has files of something else: give an output of its own")
        write_atomically(path, json.dumps(job, indent=1, sort_keys=True).encode())
    elif changes := describe_changes(json.loads(path.read_text()), job):
        raise InputError(f"{folder} has rows made with other settings: {changes}. Give another output")
