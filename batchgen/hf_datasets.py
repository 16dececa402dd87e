"""`MapFunction`, with which `Dataset.map` of the library `datasets` generates."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.core.request import Completion, PositionLogprobs, Request, SamplingParams
from batchgen.dataset.prompts import CompiledPrompts, PromptSpec, compile_prompts
from batchgen.job.option_table import check_names, names_of, options_of
from batchgen.models.files import resolve_model
from batchgen.models.identity import model_identity
from batchgen.models.tokenizers.thinking import gives_reasoning
from batchgen.output.columns import SampleColumns
from batchgen.output.join import output_prefix, output_schema

if TYPE_CHECKING:
    import datasets

    from batchgen.engine.engine import Engine


class MapFunction:
    """A function for `Dataset.map(..., batched=True)` that generates for every row of a batch.

        dataset.map(batchgen.MapFunction("demo", prompt_column="question", max_tokens=32), batched=True)

    It adds the columns of a job: text, finish_reason, prompt_tokens, generated_tokens, error and, if asked for,
    logprobs. With n > 1 they hold lists. If the dataset has a column with one of these names, all get the prefix gen_.
    `datasets` infers a column's type from the first batch, so no column has nulls: error is "" for a row that has not
    failed, text is "" for a failed row. An empty list of logprobs has no type: with logprobs, also pass
    `features=function.features(dataset.features)` to `map`.

    The engine is loaded at the first call in a process, with the model in memory. It is closed by `close`, at the end
    of a `with` block, or with the process. Functions with equal options and equal model files have equal hashes in
    every process, so that the cache of `map` finds earlier results. A pickle of the function does not hold the engine.

    Random draws are seeded by row: with a temperature, give an id_column, or call map(..., with_indices=True).

    Args:
        model: The model, as `batchgen run --model` takes it.
        **options: Options of prompts (prompt_column, prompt_template, messages_column, system_prompt, chat,
            chat_template_kwargs, continue_final, id_column) and of columns (output_prefix, token_ids); fields of
            SamplingParams, of which choice is named choices; and options of `Engine`: dtype, device, gpu_memory,
            cpu_memory, admission, max_num_seqs, max_num_batched_tokens, max_model_len, share_prefixes,
            expected_output_len, on_overlong and chat_template.

    Raises:
        TypeError: There is no such option.
        InputError: An option is invalid.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        known = {option.name: option for option in options_of("map", "engine") if option.name != "model"}
        check_names("MapFunction", options, known)
        given = {name: options.get(name, option.default) for name, option in known.items()}
        self._model = os.fspath(model)
        self._prompts = PromptSpec(
            given["prompt_column"],
            given["prompt_template"],
            given["messages_column"],
            given["system_prompt"],
            given["chat"],
            given["chat_template_kwargs"],
            given["continue_final"],
        )
        self._sampling = SamplingParams(
            **{n: given[n] for n in SamplingParams.names() if n in given}, choice=given["choices"]
        )
        self._id_column, self._prefix = given["id_column"], given["output_prefix"]
        self._token_ids = bool(given["token_ids"])
        self._engine_options = {name: value for name, value in options.items() if name in names_of("engine")}
        self._identity: dict | None = None
        self._forget_engine()

    def __call__(self, batch: Mapping[str, Sequence] | pa.Table, indices: Sequence[int] | None = None) -> dict:
        """The output columns of a batch of rows.

        Args:
            batch: The rows, as columns.
            indices: Numbers of the rows in the dataset, which seed random draws; None: an id_column seeds them.
        """
        if not self._sampling.is_greedy and self._id_column is None and indices is None:
            raise InputError("draws belong to rows: give an id_column, or map(..., with_indices=True)")
        names, read = _columns(batch)
        schema = _schema(names, read, self._prompts, self._id_column)
        compiled = compile_prompts(self._prompts, schema, self._id_column)
        added = self._output_columns()
        prefix = output_prefix(schema, added, self._prefix)
        columns = {name: read(name) for name in {*(compiled.columns or names[:1]), self._id_column} - {None}}
        num_rows = len(next(iter(columns.values())))
        engine = self._engine_here()
        compiled = compiled.for_template(engine.parts.tokenizer.renders_texts)
        if compiled.uses_chat:
            engine.parts.tokenizer.require_chat_template(compiled.chat)
        rows: list[dict] = [{}] * num_rows
        for completion in engine.generate(self._requests(compiled, columns, indices, num_rows)):
            rows[completion.index] = self._row(completion)
        return {prefix + name: [row[name] for row in rows] for name in added.types()}

    def features(self, features: datasets.Features) -> datasets.Features:
        """The features of the mapped dataset, for `map(features=...)`, which outputs with logprobs need.

        Args:
            features: The features of the dataset.
        """
        import datasets

        schema = output_schema(features.arrow_schema, self._output_columns(), self._prefix)
        added = {field.name: field.type for field in schema if field.name not in features}
        return datasets.Features(features | datasets.Features.from_arrow_schema(pa.schema(list(added.items()))))

    def close(self) -> None:
        """Close the engine and free its memory. A later call loads the model again."""
        if self._finalizer is not None:
            self._finalizer()
        self._forget_engine()

    def __enter__(self) -> MapFunction:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict:
        """All values that the outputs depend on, as one text that is the same in every process."""
        if self._identity is None:
            self._identity = self._model_identity()
        state = {
            "model": self._model,
            "identity": self._identity,
            "prompts": self._prompts.identity(),
            "sampling": self._sampling.to_json(),
            "id_column": self._id_column,
            "prefix": self._prefix,
            "token_ids": self._token_ids,
            "engine": self._engine_options,
        }
        return {"json": json.dumps(state, sort_keys=True)}

    def __setstate__(self, pickled: dict) -> None:
        state = json.loads(pickled["json"])
        self._model, self._identity = state["model"], state["identity"]
        prompts = state["prompts"]
        template = prompts.pop("template")
        self._prompts = PromptSpec(**prompts)
        object.__setattr__(self._prompts, "template", template)  # its text, even one that begins with "@"
        self._sampling = SamplingParams(**state["sampling"])
        self._id_column, self._prefix, self._engine_options = state["id_column"], state["prefix"], state["engine"]
        self._token_ids = state["token_ids"]
        self._forget_engine()

    def _model_identity(self) -> dict:
        from batchgen.models.tokenizers.loading import load_tokenizer

        files = resolve_model(self._model, self._engine_options.get("lora"))
        return {"files": model_identity(files), "tokenizer": load_tokenizer(files).identity()}

    def _forget_engine(self) -> None:
        self._engine: Engine | None = None
        self._process: int | None = None
        self._reasoning: bool | None = None  # whether the model writes thoughts; None: unknown so far
        self._finalizer: weakref.finalize | None = None

    def _engine_here(self) -> Engine:
        """The engine of this process, loaded at the first use. A forked process loads its own."""
        if self._engine is None or self._process != os.getpid():
            from batchgen.engine.engine import Engine

            self._engine = Engine(self._model, sampling=self._sampling, **self._engine_options)
            self._process = os.getpid()
            self._finalizer = weakref.finalize(self, _close_in, self._process, self._engine)
        return self._engine

    def _requests(
        self, compiled: CompiledPrompts, columns: dict[str, Sequence], indices: Sequence[int] | None, num_rows: int
    ) -> Iterator[Request]:
        rows = ({name: columns[name][i] for name in compiled.columns} for i in range(num_rows))
        for i, prompt in enumerate(compiled.render(rows)):
            given_id = None if self._id_column is None else columns[self._id_column][i]
            row_id = given_id if given_id is not None else i if indices is None else int(indices[i])
            if isinstance(prompt, Exception):
                yield Request("", id=row_id, error=str(prompt))
            else:
                yield Request(prompt, id=row_id, chat=compiled.chat)

    def _output_columns(self) -> SampleColumns:
        """The columns that are added to a batch."""
        if self._reasoning is None:
            self._reasoning = gives_reasoning(self._model, self._sampling, self._engine_options.get("chat_template"))
        return SampleColumns.of(self._sampling, reasoning=self._reasoning, token_ids=self._token_ids)

    def _row(self, completion: Completion) -> dict:
        n, samples = self._sampling.n, completion.samples
        per_sample: dict[str, list[Any]] = {
            "text": [s.text for s in samples] or [""] * n,
            "reasoning": [s.reasoning or "" for s in samples] or [""] * n,
            "finish_reason": [s.finish_reason for s in samples] or ["error"] * n,
            "generated_tokens": [len(s.token_ids) for s in samples] or [0] * n,
            "logprobs": [_logprobs(s.logprobs) for s in samples] or [[]] * n,
            "token_ids": [list(s.token_ids) for s in samples] or [[]] * n,
        }
        columns: dict[str, Any] = {name: values[0] if n == 1 else values for name, values in per_sample.items()}
        return columns | {
            "prompt_tokens": completion.prompt_tokens,
            "prompt_logprobs": _logprobs(completion.prompt_logprobs),
            "prompt_token_ids": list(completion.prompt_token_ids or ()),
            "error": completion.error or "",
        }


def _close_in(process: int, engine: Engine) -> None:
    if os.getpid() == process:
        engine.close()


def _columns(batch: Mapping[str, Sequence] | pa.Table) -> tuple[list[str], Callable[[str], Sequence]]:
    """The names of a batch's columns, and a function that reads a column by name: columns may be costly to decode.

    Args:
        batch: The rows, as columns.

    Raises:
        InputError: The batch is a single row.
    """
    if isinstance(batch, pa.Table):
        return batch.column_names, lambda name: batch.column(name).to_pylist()
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is a dict of columns, not a {type(batch).__name__}: leave out input_columns")

    def read(name: str) -> Sequence:
        values = batch[name]
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            raise InputError("these are not columns but the values of one row: give map(..., batched=True)")
        return values

    return list(batch), read


def _schema(names: list[str], read: Callable[[str], Sequence], prompts: PromptSpec, id_column: str | None) -> pa.Schema:
    """The schema from which prompts are compiled: all column names, with types of the columns that are used.

    A column with nulls only is declared as text, as its values in other batches may be text.

    Args:
        names: Names of the batch's columns.
        read: Function that reads a column.
        prompts: Options of prompts.
        id_column: Name of the column with ids; None: there is none.
    """
    typed = {prompts.column, prompts.messages_column, id_column}
    if prompts.template is None and typed <= {None, id_column}:
        known = {"messages", "conversations", "prompt", "text"}
        # Without one of these, the only column of text has the prompts.
        typed |= known & set(names) or {name for name in names if any(isinstance(v, str) for v in read(name))}

    def type_of(name: str) -> pa.DataType:
        column_type = pa.array(read(name)).type if name in typed else pa.null()
        return pa.string() if pa.types.is_null(column_type) else column_type

    try:
        return pa.schema([(name, type_of(name)) for name in names])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"a column of prompts or ids holds values of several types: {one_line(error)}") from error


def _logprobs(positions: Sequence[PositionLogprobs] | None) -> list[dict]:
    """Log-probabilities at each position, with the fields of the output's `logprobs` column; empty for None."""

    def fields(token) -> dict:
        return {"token": token.token, "token_id": token.token_id, "logprob": token.logprob}

    return [fields(p.chosen) | {"top": [fields(t) for t in p.top]} for p in positions or ()]
