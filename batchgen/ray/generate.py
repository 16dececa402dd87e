"""The class `Generate` for Ray Data's actors: it gets tables, and returns them with the output columns added."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.core.request import Completion, SamplingParams
from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests
from batchgen.dataset.sampling_column import RowSampling
from batchgen.job.option_table import names_of
from batchgen.models.tokenizers.thinking import gives_reasoning
from batchgen.output.columns import SampleColumns
from batchgen.output.join import output_schema
from batchgen.output.row_result import RowResult
from batchgen.ray.loading import load_stream
from batchgen.ray.stream import EngineStream

_PROMPT_OPTIONS = {  # option -> field of PromptSpec
    "prompt_column": "column",
    "prompt_template": "template",
    **{name: name for name in ("messages_column", "system_prompt", "chat", "chat_template_kwargs", "continue_final")},
}


class Generate:
    """The class to give to `Dataset.map_batches` of Ray Data: it generates for every row of a table.

        dataset.repartition(target_num_rows_per_block=64).map_batches(
            batchgen.ray.Generate,
            fn_constructor_kwargs={"model": "demo", "prompt_column": "question", "max_tokens": 32},
            batch_format="pyarrow", batch_size=64, num_cpus=8,
            compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=8),
        )

    Rows keep their order and their columns. The columns of `batchgen run` are added: text, finish_reason,
    prompt_tokens, generated_tokens, error, reasoning for models that think before they answer, and logprobs if asked
    for. With n > 1 they hold lists. A failed row has its error in the column error.

    The model is loaded at the first call in a process. Calls may overlap: rows of the next batch then run together with
    the last rows of the previous batch. A pickle of this object holds its options only.

    The engine uses the cores and the memory that Ray has given to the actor (`num_cpus=...`, `memory=...`). Without
    `memory` it may use the same part of Ray's memory on the machine as of Ray's cores.

    Args:
        model: The model, as `batchgen run --model` takes it.
        plans: Plan for each kind of machine, from `batchgen.ray.cluster_plans`. Without a plan for its machine, an
            engine holds the model in memory, with 256 samples in flight.
        **options: Options of prompts, sampling and the engine, as `MapFunction` takes them.

    Raises:
        TypeError: There is no such option.
        InputError: An option is invalid, or random draws have no id_column to belong to.
    """

    def __init__(
        self, model: str = "demo", *, plans: Mapping[str, dict[str, Any]] | None = None, **options: Any
    ) -> None:
        if unknown := sorted(set(options) - set(names_of("map", "engine"))):
            raise TypeError(f"Generate() has no option {unknown[0]!r}")
        self._model, self._options, self._plans = os.fspath(model), options, dict(plans or {})
        sampling = {name: options[name] for name in SamplingParams.names() if name in options}
        self._sampling = SamplingParams(**sampling, choice=options.get("choices", ()))
        self._id_column, self._prefix = options.get("id_column"), options.get("output_prefix", "")
        if not self._sampling.is_greedy and self._id_column is None:
            raise InputError("draws belong to rows, and Ray does not number them: give an id_column")
        self._prompts = PromptSpec(
            **{_PROMPT_OPTIONS[name]: options[name] for name in _PROMPT_OPTIONS if name in options}
        )
        self._stream: EngineStream | None = None
        self._process: int | None = None
        self._reasoning: bool | None = None  # whether the model writes thoughts; None: unknown so far
        self._lock = threading.Lock()

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """A batch of rows with the output columns added. Raises InputError."""
        if self._reasoning is None:
            self._reasoning = await asyncio.to_thread(
                gives_reasoning, self._model, self._sampling, self._options.get("chat_template")
            )
        token_ids = bool(self._options.get("token_ids"))
        columns = SampleColumns.of(self._sampling, reasoning=self._reasoning, token_ids=token_ids)
        schema = output_schema(batch.schema, columns, self._prefix)
        if batch.num_rows == 0:
            return schema.empty_table()
        compiled = compile_prompts(self._prompts, batch.schema, self._id_column)
        rows = batch.combine_chunks().to_batches()[0]
        stream = await asyncio.to_thread(self._stream_here)
        tokenizer = stream.engine.parts.tokenizer
        compiled = compiled.for_template(tokenizer.renders_texts)
        if compiled.uses_chat:
            tokenizer.require_chat_template(compiled.chat)
        requests = list(rows_to_requests(rows, 0, compiled, RowSampling(self._sampling), self._id_column))
        completions: list[Completion] = await asyncio.wrap_future(stream.submit(requests))
        results = RowResult.to_batch(
            {i: RowResult.from_completion(c, token_ids=token_ids) for i, c in enumerate(completions)}
        )
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays([*rows.columns, *columns.arrays(rows, results)], schema=schema)]
        )

    def close(self) -> None:
        """Close the engine and free its memory. A later call loads the model again."""
        if self._stream is not None and self._process == os.getpid():
            self._stream.close()
        self._stream = None

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "plans": self._plans, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], plans=state["plans"], **state["options"])  # type: ignore[misc]

    def _stream_here(self) -> EngineStream:
        """The engine of this process, which is loaded at the first use."""
        with self._lock:
            if self._stream is None or self._process != os.getpid():
                options = {name: value for name, value in self._options.items() if name in names_of("engine")}
                self._stream = load_stream(self._model, self._sampling, options, self._plans)
                self._process = os.getpid()
            return self._stream
