"""A processor with the settings and columns of those in `ray.data.llm`, which runs batchgen in place of vLLM.

    from batchgen.ray import ProcessorConfig, build_processor  # of ray.data.llm: vLLMEngineProcessorConfig

    config = ProcessorConfig(
        model_source="demo", engine_kwargs={"max_model_len": 2048}, concurrency=2, batch_size=64, num_cpus=8
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": row["question"]}],
            "sampling_params": {"max_tokens": 32},
        },
        postprocess=lambda row: {"answer": row["generated_text"], **row},
    )
    dataset = processor(dataset)

It also runs on nodes without a GPU. The names of settings and columns are those of Ray 2.60 and vLLM.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.request import Completion, Request, SamplingParams
from batchgen.dataset.openai_batch import VLLM_GRAMMARS
from batchgen.job.option_table import names_of
from batchgen.ray.loading import load_stream
from batchgen.ray.stream import EngineStream

Row = dict[str, Any]

DATA = "__data"  # column of a whole row while it is in the processor
ERROR = "__inference_error__"
# Options of vLLM's engine with another name here; and those that only say how vLLM runs, and decide no row.
_ENGINE_NAMES = {"enable_prefix_caching": "share_prefixes"}
_OF_VLLM_ALONE = {
    *("block_size", "disable_log_stats", "distributed_executor_backend", "enable_chunked_prefill", "enforce_eager"),
    *("gpu_memory_utilization", "load_format", "max_parallel_loading_workers", "pipeline_parallel_size", "swap_space"),
    *("task_type", "tensor_parallel_size"),
}
# Sampling parameters of vLLM that batchgen lacks, with the values that change nothing.
_NO_SAMPLING = {"detokenize": (True, False), "skip_special_tokens": (True,), "min_tokens": (0,), "best_of": (None, 1)}
_PROMPTS = ("tokenized_prompt", "prompt", "messages")
_VLLM_DEFAULTS = {"max_tokens": 16, "temperature": 1.0}


@dataclass(frozen=True)
class ProcessorConfig:
    """Settings of a processor, with the names that `ray.data.llm.vLLMEngineProcessorConfig` uses.

    Attributes:
        model_source: The model, as `batchgen run --model` takes it.
        engine_kwargs: Options of `batchgen.Engine`, also by vLLM's names. Options that only concern vLLM on GPUs are
            ignored.
        concurrency: Number of actors.
        batch_size: Number of rows that an actor is given at a time.
        num_cpus: CPU cores of an actor.
        max_concurrent_batches: Number of batches that an actor runs at once.
        should_continue_on_error: Whether a failed row gets its error in the column `__inference_error__`; otherwise it
            ends the job.
        ray_remote_args: Further Ray arguments of the actors, such as `memory`.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 1
    batch_size: int = 32
    num_cpus: float = 1
    max_concurrent_batches: int = 8
    should_continue_on_error: bool = False
    ray_remote_args: Mapping[str, Any] = field(default_factory=dict)


def build_processor(
    config: ProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Any], Any]:
    """A function that adds a model's outputs to a `ray.data.Dataset`; it returns a lazy dataset.

    Args:
        config: The model and the actors.
        preprocess: Function that adds `prompt` or `messages`, and `sampling_params`, to a row; other columns are kept.
        postprocess: Function from a row with all columns to the resulting row, not called for failed rows. None: all
            columns.

    Raises:
        InputError: An engine option is unknown here.
    """
    engine_options(config.engine_kwargs)
    before, after = preprocess or (lambda row: row), postprocess or (lambda row: row)

    def processor(dataset: Any) -> Any:
        import ray.data

        calls = config.max_concurrent_batches
        generated = dataset.map(lambda row: {DATA: {**row, **before(row)}}).map_batches(
            Stage,
            fn_constructor_kwargs={"config": config},
            batch_size=config.batch_size,
            compute=ray.data.ActorPoolStrategy(
                size=config.concurrency, max_tasks_in_flight_per_actor=2 * calls, max_concurrent_calls_per_actor=calls
            ),
            num_cpus=config.num_cpus,
            **config.ray_remote_args,
        )
        return generated.map(lambda row: finished(row[DATA], after, config.should_continue_on_error))

    return processor


def finished(row: Row, postprocess: Callable[[Row], Row], with_error: bool) -> Row:
    """The row that the processor returns: a failed row unchanged, any other row after `postprocess`.

    Args:
        row: A row with all columns.
        postprocess: Function from a row to the resulting row.
        with_error: Whether rows have a column of errors.
    """
    if row.get(ERROR):
        return row
    return {**postprocess(row), ERROR: ""} if with_error else postprocess(row)


class Stage:
    """The stage of a processor that runs in an actor: it adds the columns of vLLM's stage to batches of rows."""

    def __init__(self, config: ProcessorConfig) -> None:
        self._config = config
        self._stream: EngineStream | None = None
        self._lock = threading.Lock()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run a batch of rows, which is the list `DATA` in it. Raises BatchgenError where a row fails and must not."""
        rows = list(batch[DATA])
        requests = [request_of(row) for row in rows]
        stream = await asyncio.to_thread(self._stream_here)
        completions = await asyncio.wrap_future(stream.submit(requests))
        go_on = self._config.should_continue_on_error
        return {DATA: [answered(row, completion, go_on) for row, completion in zip(rows, completions, strict=True)]}

    def close(self) -> None:
        """Close the engine."""
        if self._stream is not None:
            self._stream.close()

    def _stream_here(self) -> EngineStream:
        with self._lock:
            if self._stream is None:
                config = self._config
                self._stream = load_stream(config.model_source, SamplingParams(), engine_options(config.engine_kwargs))
            return self._stream


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `batchgen.Engine` from `engine_kwargs`. Raises InputError for one that is unknown here."""
    options = {}
    for name, value in given.items():
        engine_name = _ENGINE_NAMES.get(name, name)
        if engine_name in names_of("engine") and engine_name != "model":
            options[engine_name] = value
        elif name not in _OF_VLLM_ALONE:
            raise InputError(
                f"engine_kwargs has {name!r}, which means nothing here: leave it out on nodes without a GPU"
            )
    return options


def request_of(row: Row) -> Request:
    """The request of a row; where the row is not valid, a request with an error.

    Args:
        row: A row with `tokenized_prompt`, `prompt` or `messages`, and `sampling_params`.
    """
    try:
        sampling, row_id = sampling_of(plain(row.get("sampling_params")) or {})
        prompt = next((plain(row[name]) for name in _PROMPTS if row.get(name) is not None), None)
        if prompt is None:
            raise InputError("it has neither prompt nor messages")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = [{name: value for name, value in message.items() if value is not None} for message in prompt]
        return Request(prompt, sampling, row_id, reasoning_apart=False)  # vLLM's text has all of it
    except InputError as error:
        return Request("", error=str(error))


def sampling_of(given: Row) -> tuple[SamplingParams, str | int]:
    """Sampling parameters from vLLM's, and the id that random draws depend on.

    With a seed the id is the same at each call; without one it is new.

    Args:
        given: vLLM's sampling parameters by name.

    Raises:
        InputError: A parameter is not supported.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    for name, neutral in _NO_SAMPLING.items():
        if name in asked and asked.pop(name) not in neutral:
            raise InputError(f"sampling_params has {name!r}, which means nothing here")
    structured = {
        name: value for name, value in (asked.pop("structured_outputs", None) or {}).items() if value is not None
    }
    if unknown := sorted({*structured} - {*VLLM_GRAMMARS}) + sorted({*asked} - {*SamplingParams.names()}):
        raise InputError(f"sampling_params has {unknown[0]!r}, which means nothing here")
    if asked.get("n", 1) != 1:
        raise InputError("sampling_params has n above 1: rows have one answer each")
    if isinstance(bias := asked.get("logit_bias"), Mapping):
        asked["logit_bias"] = {token: value for token, value in bias.items() if value is not None}
    row_id: str | int = 0 if "seed" in asked else uuid.uuid4().hex
    grammar = {VLLM_GRAMMARS[name]: value for name, value in structured.items()}
    return SamplingParams(**{**_VLLM_DEFAULTS, **asked, **grammar}), row_id


def answered(row: Row, completion: Completion, go_on: bool) -> Row:
    """A row with the columns of vLLM's stage added.

    Args:
        row: The row.
        completion: The completion of the row's request.
        go_on: Whether a failed row gets its error in the column `ERROR`.

    Raises:
        BatchgenError: The row has failed, and `go_on` is false.
    """
    if completion.error is not None and not go_on:
        raise BatchgenError(
            f"a row failed: {completion.error} (should_continue_on_error notes it in the row and goes on)"
        )
    kept = {name: value for name, value in row.items() if name != "sampling_params"}
    sample = completion.samples[0] if completion.samples else None
    tokens = list(sample.token_ids) if sample else []
    added = {
        "generated_text": sample.text if sample else "",
        "generated_tokens": tokens,
        "num_generated_tokens": len(tokens),
        "num_input_tokens": completion.prompt_tokens,
    }
    return {**kept, **added, **({ERROR: completion.error or ""} if go_on else {})}


def plain(value: Any) -> Any:
    """A value from Ray with NumPy arrays converted to lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in value.items()} if isinstance(value, dict) else value
