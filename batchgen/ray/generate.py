"""The class that Ray Data's actors hold: tables in, the same tables with the output columns out."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.core.machine import available_memory_bytes
from batchgen.core.request import Completion, SamplingParams
from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests
from batchgen.engine.engine import Engine
from batchgen.job.options import names_of
from batchgen.models.files import read_config, resolve_model
from batchgen.output.columns import SampleColumns
from batchgen.output.join import output_schema
from batchgen.output.row_result import RowResult
from batchgen.ray.stream import EngineStream

_PROMPT_OPTIONS = ("prompt_column", "prompt_template", "messages_column", "system_prompt", "chat")


class Generate:
    """Generates for every row of a table.

        dataset.map_batches(
            batchgen.ray.Generate,
            fn_constructor_kwargs={"model": "demo", "prompt_column": "question", "max_tokens": 32},
            batch_format="pyarrow", batch_size=256, concurrency=2, num_cpus=8,
        )

    Rows in are rows out, in their order, with their columns and those of `batchgen run`: text, finish_reason, prompt_tokens,
    generated_tokens, error, reasoning of models that think in a channel of their own and, if asked for, logprobs; lists where n > 1. A row that fails has its error there.

    The model is loaded at the first call in a process. Calls may overlap, and Ray makes several at a time: rows of the next batch run while the
    last rows of one before are still at it. Pickling keeps the options alone.

    The engine takes the cores that Ray has given to the actor, and the memory (`ray_remote_args={"memory": ...}`), or a share of what is
    free that is as large as that of the cores.

    Args:
        model: As of `batchgen run`.
        **options: Those of `MapFunction`: what a prompt is, sampling, and the engine.

    Raises:
        TypeError: There is no such option.
        InputError: An option means nothing, or random draws have no id_column to belong to.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        if unknown := sorted(set(options) - set(names_of("map", "engine"))):
            raise TypeError(f"Generate() has no option {unknown[0]!r}")
        self._model, self._options = os.fspath(model), options
        self._sampling = SamplingParams(**{name: options[name] for name in SamplingParams.names() if name in options})
        self._id_column, self._prefix = options.get("id_column"), options.get("output_prefix", "")
        if self._sampling.temperature > 0 and self._id_column is None:
            raise InputError("draws belong to rows, and Ray does not number them: give an id_column")
        prompts = {name: options[name] for name in _PROMPT_OPTIONS if name in options}
        self._prompts = PromptSpec(*(prompts.get(name) for name in _PROMPT_OPTIONS[:-1]), prompts.get("chat", False))
        self._stream: EngineStream | None = None
        self._process: int | None = None
        self._reasoning: bool | None = None  # whether the model gives any, once that is known
        self._lock = threading.Lock()

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """The table with the output columns. Raises InputError."""
        if self._reasoning is None:
            self._reasoning = await asyncio.to_thread(lambda: read_config(resolve_model(self._model)).has_channels)
        columns = SampleColumns(self._sampling.n, self._sampling.logprobs is not None, self._reasoning)
        schema = output_schema(batch.schema, columns, self._prefix)
        if batch.num_rows == 0:
            return schema.empty_table()
        compiled = compile_prompts(self._prompts, batch.schema, self._id_column)
        rows = batch.combine_chunks().to_batches()[0]
        stream = await asyncio.to_thread(self._stream_here)
        if compiled.uses_chat:
            stream.engine.parts.tokenizer.require_chat_template()
        requests = list(rows_to_requests(rows, 0, compiled, self._sampling, self._id_column))
        completions: list[Completion] = await asyncio.wrap_future(stream.submit(requests))
        results = RowResult.to_batch({i: RowResult.from_completion(c) for i, c in enumerate(completions)})
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays([*rows.columns, *columns.arrays(rows, results)], schema=schema)]
        )

    def close(self) -> None:
        """Let go of the engine and its memory; another call would load it again."""
        if self._stream is not None and self._process == os.getpid():
            self._stream.close()
        self._stream = None

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], **state["options"])  # type: ignore[misc]

    def _stream_here(self) -> EngineStream:
        """This process's engine, loaded once."""
        with self._lock:
            if self._stream is None or self._process != os.getpid():
                options = {name: value for name, value in self._options.items() if name in names_of("engine")}
                cores, memory = granted_by_ray()
                if cores is not None:
                    use_cores(cores)
                if memory is not None:
                    options.setdefault("cpu_memory", memory)
                self._stream = EngineStream(Engine(self._model, sampling=self._sampling, **options))
                self._process = os.getpid()
            return self._stream


def granted_by_ray() -> tuple[int | None, int | None]:
    """Cores and bytes of memory that Ray has given to this actor; None each outside of one."""
    try:
        import ray
    except ImportError:
        return None, None
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None, None
    return share_of(ray.get_runtime_context().get_assigned_resources(), os.cpu_count() or 1, available_memory_bytes())


def share_of(resources: dict[str, float], cores: int, free_bytes: int) -> tuple[int, int]:
    """What an actor may use of its machine.

    Args:
        resources: What Ray has given to it, under Ray's names.
        cores: Of the machine.
        free_bytes: Of its memory.

    Returns:
        Cores, at least one, and bytes of memory.
    """
    granted = resources.get("CPU", 0.0) or 1.0
    memory = resources.get("memory") or free_bytes * min(1.0, granted / cores)
    return max(1, int(granted)), int(min(memory, free_bytes))


def use_cores(count: int) -> None:
    """Have the kernels of this process use so many threads, unless the environment says how many. To be called before they are loaded."""
    os.environ.setdefault("BATCHGEN_NUM_THREADS", str(count))
