"""A job's input and the requests made of its rows, with prompts from a dataset or from an OpenAI batch."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.core.errors import InputError
from batchgen.core.request import PLAIN_CHAT, ChatOptions, Request, ScoreRequest
from batchgen.core.units import parse_shard
from batchgen.dataset import Dataset, open_dataset
from batchgen.dataset.continuations import ContinuationSpec
from batchgen.dataset.row_numbers import ROW_NUMBERS
from batchgen.job.default_output import default_output
from batchgen.job.earlier_rows import earlier_fingerprint
from batchgen.job.options import CLASSIFY, EMBED, GENERATE, OF_VECTORS, RERANK, SCORE
from batchgen.job.row_sizes import SCAN_ROWS
from batchgen.job.run_command import run_command
from batchgen.job.standard_input import StandardInput, is_standard_input
from batchgen.models.tokenizers.thinking import Thinking
from batchgen.output.columns import Columns, SampleColumns, ScoreColumns
from batchgen.output.embed_columns import EmbedColumns, LabelColumns
from batchgen.output.formats import check_writable
from batchgen.output.join import output_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.dataset.field_order import FreeLines
    from batchgen.dataset.prompts import CompiledPrompts, NoPromptColumn, PromptSpec
    from batchgen.job.options import JobOptions
    from batchgen.models.config import ModelConfig
    from batchgen.models.pooling import VectorSpec
    from batchgen.models.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FIRST_ROWS = 100  # tell a column of numbers in a CSV file
_NUMBER = re.compile(r"[\d\s.,:;/%+\-TZeE]*|true|false|nan|null|none|n/a", re.IGNORECASE)
_WITH_TEMPLATE = "prompts: {}, in the model's chat template (--no-chat: as plain text, which base models are for)"
_WITHOUT_TEMPLATE = "prompts: {}, as plain text: the model has no chat template"


class DoneRows(Protocol):
    """The interface of a set with the numbers of rows that are done."""

    def __contains__(self, row: int) -> bool: ...

    def next_unfinished(self, row: int) -> int: ...


@dataclass(frozen=True)
class RequestSource:
    """A job's input, and the functions that make requests of its rows.

    Attributes:
        dataset: The input.
        requests_of: Function from (record batch, number of its first row) to the requests of its rows.
        identity: All values that the prompts depend on, as JSON values.
        needs_chat_template: Whether prompts are chat messages; None: they are texts that become messages if the model
            has a chat template (`for_template`).
        columns: Columns that the output adds.
        reads: Names of the input's columns that requests are made of.
        scores_prompts: Whether the prompts themselves are scored, not continuations of them.
        head: Pooling of a job that embeds texts, and what follows it; None: the job embeds none.
        format_row: Function that formats the output of an OpenAI batch; None: the input is not one.
        chat: Options for chat messages.
        notices: Lines that tell a person how columns are read.
        reasoning_apart: Whether a model's thoughts between tags get a column of their own, apart from the text.
        for_template: Function that gives the source for a model with a chat template, or without one; None: it would be
            this source.
    """

    dataset: Dataset
    requests_of: Callable[[Any, int], Iterator[Request | ScoreRequest]]  # (record batch, first row)
    identity: dict[str, Any]
    needs_chat_template: bool | None
    columns: Columns
    reads: frozenset[str] = frozenset()
    scores_prompts: bool = False
    head: VectorSpec | None = None
    format_row: Callable[[dict[str, Any], dict[str, Any]], tuple[str, dict[str, Any]]] | None = None
    chat: ChatOptions = PLAIN_CHAT
    notices: tuple[str, ...] = ()
    reasoning_apart: bool = True
    for_template: Callable[[bool], RequestSource] | None = None

    @property
    def requests_per_row(self) -> int:
        """Number of requests that `requests_of` makes of each row."""
        return 1

    @property
    def is_openai(self) -> bool:
        return self.format_row is not None

    def output_names(self, options: JobOptions) -> list[str]:
        """Names of the columns that the output adds to the input's; none for an OpenAI batch.

        Args:
            options: The job's options.

        Raises:
            InputError: The input has a column of such a name.
        """
        if self.is_openai:
            return []
        schema = output_schema(self.dataset.schema, self.columns, options.output_prefix)
        return list(schema.names[len(self.dataset.schema) :])

    def for_model(self, config: ModelConfig, tokenizer: Tokenizer, options: JobOptions) -> RequestSource:
        """The source with the prompts and the output columns of a model: its chat template, a column of its thoughts.

        Args:
            config: The model's configuration.
            tokenizer: The model's tokenizer.
            options: The job's options.

        Raises:
            InputError: The input has a column of such a name, or the model lacks the chat template that prompts need.
        """
        if self.identity.get("chat", False) is None:
            source = self if self.for_template is None else self.for_template(tokenizer.renders_texts)
            identity = self.identity | {"chat": tokenizer.renders_texts}
            source = replace(source, dataset=self.dataset, identity=identity)
            return source.for_model(config, tokenizer, options)
        if self.needs_chat_template or self.chat.chat_template_kwargs:
            tokenizer.require_chat_template(self.chat)
        if not isinstance(self.columns, SampleColumns):
            return self
        thinks = options.reasoning_column and Thinking.of(tokenizer, options.sampling.regex) is not None
        if not (config.has_channels or thinks):
            return replace(self, reasoning_apart=options.reasoning_column and self.is_openai)
        source = replace(self, columns=replace(self.columns, reasoning=True), reasoning_apart=options.reasoning_column)
        source.output_names(options)
        return source

    def with_head(self, head: VectorSpec, options: JobOptions) -> RequestSource:
        """The source of a job that computes vectors, once its model is known.

        Args:
            head: Pooling, and what follows it.
            options: The job's options.

        Raises:
            InputError: The input has a column of an output column's name.
        """
        identity = self.identity | {"head": head.identity(), "vector_dtype": options.vector_dtype}
        if self.is_openai:
            return replace(self, head=head, identity=identity, format_row=_embedding_formatter(head, options))
        columns: Columns = EmbedColumns(head.size, options.vector_dtype)
        if options.task == CLASSIFY:
            columns = LabelColumns(head.labels)
        elif options.task == RERANK:
            columns = LabelColumns(head.labels[-1:], head.size)
        source = replace(self, head=head, identity=identity, columns=columns)
        check_output_schema(options, source)
        return source

    def batches(self, start_row: int = 0, batch_rows: int = 1024) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(number of the first row, record batch) of the dataset, with the columns that requests are made of.

        Args:
            start_row: Number of the row to begin at.
            batch_rows: The most rows of a record batch.
        """
        return self.dataset.batches(start_row, batch_rows, self.reads | {ROW_NUMBERS})

    def requests(self, done: DoneRows) -> Iterator[Request | ScoreRequest]:
        """The requests of all rows that are not in `done`, each with the number of its row."""
        for first, batch in self.batches(done.next_unfinished(0)):
            needed = [row not in done for row in range(first, first + batch.num_rows)]
            if not any(needed):
                continue
            for offset, request in enumerate(self.requests_of(batch, first)):
                if needed[offset]:
                    yield self.numbered(request, first + offset)

    def numbered(self, request: Request | ScoreRequest, row: int) -> Request | ScoreRequest:
        """The request with the number of its row, which the result has too."""
        if isinstance(request, ScoreRequest):
            return replace(request, row=row)
        return request.numbered(row, reasoning_apart=self.reasoning_apart)


def open_input(options: JobOptions, *, copy_streams: bool = False) -> Dataset:
    """Open the rows of a job's input. Raises InputError where it cannot be read.

    Args:
        options: The job's options.
        copy_streams: True to identify streams by all of their values (`open_dataset`).
    """
    given = StandardInput(options.input_format) if is_standard_input(options.input) else None
    dataset = open_dataset(
        given.path if given else options.input,
        input_format=options.input_format,
        split=options.split,
        limit=options.limit,
        shard=parse_shard(options.shard) if options.shard else None,
        on_bad_line=options.on_bad_line,
        csv_delimiter=options.csv_delimiter,
        copy_streams=copy_streams,
    )
    if given is not None:
        weakref.finalize(dataset, given.close)
    for line in dataset.notices:
        logger.info(line)
    return dataset


def open_source(options: JobOptions, dataset: Dataset) -> RequestSource:
    """The source of a job without steps, whose prompts and names of output columns are checked.

    Args:
        options: The job's options.
        dataset: The rows of the input.

    Raises:
        InputError: The input lacks a column that the options name.
    """
    if dataset.format == "openai":
        return _openai_source(options, dataset)
    if options.reorder_fields is not None and options.prompt_template is not None:
        options = _with_reordered_fields(options, dataset)
    if dataset.num_rows == 0:
        source = _source_without_rows(options, dataset, _prompts_of(options))
    else:
        source = _source_with_rows(options, dataset)
    check_output_schema(options, source)
    return source


def _with_reordered_fields(options: JobOptions, dataset: Dataset) -> JobOptions:
    """The options with the lines of the template in the order in which most of them begins alike.

    An output with rows keeps the order that these have, though more rows of a grown input would ask for another.

    Raises:
        InputError: A field is no column, or its line cannot change places.
    """
    from batchgen.dataset.field_order import FieldValues, free_lines

    names = [name.strip() for name in str(options.reorder_fields).split(",")]
    free = free_lines(str(options.prompt_template), names, dataset.schema)
    if (kept := _kept_order(options, free)) is not None:
        logger.info(f"--reorder-fields: the prompts have {', '.join(kept)}, in the order of the output's rows")
        return replace(options, prompt_template=free.arranged(kept), reorder_fields=",".join(kept))
    values = FieldValues.of((batch for _, batch in dataset.batches(0, SCAN_ROWS, names)), names)
    order = values.best_order(free.fields)
    if values.num_rows:
        counts = ", ".join(f"{name} ({values.distinct[frozenset([name])]:,} values)" for name in order)
        logger.info(f"--reorder-fields: the prompts have {counts}, in this order")
    return replace(options, prompt_template=free.arranged(order), reorder_fields=",".join(order))


def _kept_order(options: JobOptions, free: FreeLines) -> tuple[str, ...] | None:
    """The order of fields in the prompts of an output's rows; None where it has none, or none of this template."""
    if options.output is None or options.overwrite:
        return None
    prompt = (earlier_fingerprint(Path(options.output)) or {}).get("prompt", {})
    order = tuple(str(prompt.get("reorder_fields", "")).split(","))
    if sorted(order) != sorted(free.fields) or prompt.get("template") != free.arranged(order):
        return None
    return order


def check_output_schema(options: JobOptions, source: RequestSource) -> None:
    """Raise InputError where the output's format cannot hold the columns of a job."""
    if options.output is not None:
        check_writable(
            Path(options.output), output_schema(source.dataset.schema, source.columns, options.output_prefix)
        )


def _prompts_of(options: JobOptions) -> PromptSpec:
    """The source of prompts that the options name."""
    from batchgen.dataset.prompts import PromptSpec

    return PromptSpec(
        options.prompt_column,
        options.prompt_template,
        options.messages_column,
        options.system_prompt,
        True if options.chat is None and options.chat_template is not None else options.chat,
        options.chat_template_kwargs,
        options.continue_final,
    )


def _source_with_rows(options: JobOptions, dataset: Dataset) -> RequestSource:
    """The source of an input with rows, whose only column of words has the prompts where no option names one."""
    from batchgen.dataset.prompts import NoPromptColumn

    sources = {GENERATE: generate_source, SCORE: _score_source}
    source = sources.get(options.task, _vector_source)
    try:
        return source(options, dataset)
    except NoPromptColumn as error:
        words = error.among(lambda name: _holds_words(dataset, name))
        if isinstance(words, NoPromptColumn):
            raise InputError(_with_command(words, options)) from error
        return source(replace(options, prompt_column=words), dataset)


def _holds_words(dataset: Dataset, column: str) -> bool:
    """True where the first values of a column of text are more than numbers and dates, which are text in CSV files."""
    _, rows = next(dataset.batches(0, _FIRST_ROWS, [column]))
    values = (value for value in rows.column(column).to_pylist() if isinstance(value, str))
    return any(_NUMBER.fullmatch(value) is None for value in values)


def _with_command(error: NoPromptColumn, options: JobOptions) -> str:
    """The message for an input without a certain column of prompts, with a command line to copy where there is one."""
    if not isinstance(options.input, str):
        return str(error)
    given: dict[str, Any] = {error.option: error.value}
    if options.output == default_output(options):
        given["output"] = None
    return f"{error.reason}: say what to ask, as in: {run_command(replace(options, **given))}"


def _source_without_rows(options: JobOptions, dataset: Dataset, spec: PromptSpec) -> RequestSource:
    """The source of an input without rows. Its columns are not checked, as they may be unknown or have no types."""
    return RequestSource(dataset, lambda batch, first: iter(()), _identity(options, spec), False, _columns(options))


def _identity(options: JobOptions, spec: PromptSpec) -> dict[str, Any]:
    """All that decides the requests of rows, as JSON values; "chat" is None where that depends on the model."""
    identity = spec.identity() | {"chat": spec.makes_chat}
    if spec.makes_chat is None and not _asks(options):
        identity["chat"] = False
    if options.tools_column is not None:
        identity["tools_column"] = options.tools_column
    if options.task == "score":
        fields = {} if options.reorder_fields is None else {"reorder_fields": options.reorder_fields}
        return identity | {"continuations": _continuations(options).identity()} | fields
    if options.task in OF_VECTORS:
        return identity | ({} if options.pair_column is None else {"pair_column": options.pair_column})
    given = {name: getattr(options, name) for name in ("sampling_column", "choices_column", "reorder_fields")}
    return identity | {name: value for name, value in given.items() if value is not None}


def _asks(options: JobOptions) -> bool:
    """True where prompts are questions, with answers; False where a text is scored, or what follows a text."""
    return options.task == "generate" or bool(options.choices or options.choices_column)


def _continuations(options: JobOptions) -> ContinuationSpec:
    return ContinuationSpec(options.continuations_column, options.choices, options.choices_column)


def _columns(options: JobOptions) -> Columns:
    """The columns that the output adds to the input's."""
    if options.task == "generate":
        return generated_columns(options)
    if options.task in OF_VECTORS:  # the number of values and the labels are known with the model
        if options.task == EMBED:
            return EmbedColumns(1, options.vector_dtype)
        return LabelColumns(("0", "1") if options.task == CLASSIFY else ("1",))
    wanted = _continuations(options)
    return ScoreColumns(
        wanted.whole, wanted.choices, wanted.choices_column, token_logprobs=options.sampling.logprobs is not None
    )


def generated_columns(options: JobOptions) -> SampleColumns:
    """The columns that a job that generates adds to the input's."""
    of_json = None
    if options.json_columns and options.sampling.json_schema is not None:
        from batchgen.job.json_columns import json_columns

        of_json = json_columns(str(options.sampling.json_schema))
    return replace(SampleColumns.of(options.sampling, token_ids=options.token_ids), json=of_json)


def generate_source(options: JobOptions, dataset: Any) -> RequestSource:
    """The source of requests to generate.

    Args:
        options: The job's options.
        dataset: The input; of one step of a job, an object with the columns (`schema`) that its rows have.

    Raises:
        InputError: A column that the options name does not exist, or has an unsuitable type.
    """
    from batchgen.dataset.prompts import compile_prompts, rows_to_requests
    from batchgen.dataset.sampling_column import compile_row_sampling

    spec = _prompts_of(options)
    row_sampling = compile_row_sampling(
        options.sampling_column, _continuations(options), dataset.schema, options.sampling
    )

    def source(compiled: CompiledPrompts) -> RequestSource:
        return RequestSource(
            dataset,
            lambda batch, first: rows_to_requests(batch, first, compiled, row_sampling, options.id_column),
            _identity(options, spec),
            compiled.uses_chat,
            _columns(options),
            _names(*compiled.columns, *compiled.tools_columns, options.id_column, *row_sampling.columns),
            chat=_chat_of(compiled),
            notices=compiled.notices,
        )

    compiled = compile_prompts(spec, dataset.schema, options.id_column)
    return _for_any_model(source, compiled.with_tools(options.tools_column, dataset.schema))


def _for_any_model(source: Callable[[CompiledPrompts], RequestSource], compiled: CompiledPrompts) -> RequestSource:
    """The source before the model is known.

    Args:
        source: Function that makes the source of compiled prompts.
        compiled: The compiled prompts.
    """
    if compiled.uses_chat is not None:
        return source(compiled)

    def for_template(has_template: bool) -> RequestSource:
        line = _WITH_TEMPLATE if has_template else _WITHOUT_TEMPLATE
        known = compiled.for_template(has_template)
        return source(replace(known, notices=(line.format(compiled.origin), *known.notices)))

    return replace(source(compiled), for_template=for_template)


def _chat_of(compiled: CompiledPrompts) -> ChatOptions:
    """The options for chat messages. Raises InputError where such an option is given, but prompts are not messages."""
    if not compiled.uses_chat and (given := compiled.chat.identity()):
        flag = "--" + next(iter(given)).replace("_", "-")
        raise InputError(f"{flag} is for chat messages, and these prompts are none: add --chat, or leave it out")
    return compiled.chat


def _names(*columns: str | None) -> frozenset[str]:
    """Names of the columns that are not None."""
    return frozenset(name for name in columns if name is not None)


def _score_source(options: JobOptions, dataset: Dataset) -> RequestSource:
    from batchgen.dataset.continuations import compile_continuations
    from batchgen.dataset.prompts import compile_prompts, rows_to_score_requests

    spec = _prompts_of(options)
    wanted = _continuations(options)
    continuations = compile_continuations(wanted, dataset.schema)
    compiled = compile_prompts(spec, dataset.schema, options.id_column, may_be_empty=not wanted.whole)
    if not _asks(options):
        compiled = compiled.for_template(False)
    compiled = compiled.with_tools(options.tools_column, dataset.schema)
    if wanted.whole and compiled.uses_chat:
        raise InputError("chat messages are contexts: give --continuations-column or --choices, what may follow them")
    logprobs = options.sampling.logprobs

    def source(compiled: CompiledPrompts) -> RequestSource:
        return RequestSource(
            dataset,
            lambda batch, first: rows_to_score_requests(
                batch, first, compiled, continuations, logprobs, options.id_column
            ),
            _identity(options, spec),
            compiled.uses_chat,
            _columns(options),
            _names(*compiled.columns, *compiled.tools_columns, *continuations.columns, options.id_column),
            scores_prompts=wanted.whole,
            chat=_chat_of(compiled),
            notices=compiled.notices,
        )

    return _for_any_model(source, compiled)


def _vector_source(options: JobOptions, dataset: Dataset) -> RequestSource:
    """The source of texts, or of pairs of texts, whose vectors are computed."""
    from batchgen.dataset.prompts import compile_prompts, rows_to_requests, text_column, with_pairs
    from batchgen.dataset.sampling_column import compile_row_sampling

    if options.task == RERANK:
        options = _with_pairs(options, dataset.schema.names)
    spec = _prompts_of(options)
    # There may be special tokens around an empty text.
    compiled = compile_prompts(spec, dataset.schema, options.id_column, may_be_empty=True).for_template(False)
    compiled = compiled.with_tools(options.tools_column, dataset.schema)
    if compiled.uses_chat:
        compiled = replace(compiled, chat=replace(compiled.chat, is_whole=True))
    sampling = compile_row_sampling(None, _continuations(options), dataset.schema, options.sampling)
    pair = options.pair_column
    if pair is not None:
        text_column(dataset.schema, pair, "--pair-column")

    def requests_of(batch: Any, first: int) -> Iterator[Request]:
        requests = rows_to_requests(batch, first, compiled, sampling, options.id_column)
        return requests if pair is None else with_pairs(requests, batch, pair)

    return RequestSource(
        dataset,
        requests_of,
        _identity(options, spec),
        compiled.uses_chat,
        _columns(options),
        _names(*compiled.columns, *compiled.tools_columns, options.id_column, pair),
        chat=_chat_of(compiled),
        notices=compiled.notices,
    )


def _with_pairs(options: JobOptions, names: list[str]) -> JobOptions:
    """The options with the usual columns of a query and a document, where they name none."""
    if options.pair_column is None:
        options = replace(options, pair_column="document")
    has_prompt = options.prompt_column or options.prompt_template
    return options if has_prompt or "query" not in names else replace(options, prompt_column="query")


def _embedding_formatter(
    head: VectorSpec, options: JobOptions
) -> Callable[[dict[str, Any], dict[str, Any]], tuple[str, dict[str, Any]]]:
    """A function that formats a row of an OpenAI batch of embeddings, and its result."""
    import json

    import numpy as np

    from batchgen.dataset.openai_response import format_embeddings, format_error

    def format_row(row: dict[str, Any], result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if result["error"] is not None:
            return "errors", format_error(row["custom_id"], result["error"], result["row"])
        vectors = np.asarray(result["embedding"], np.float32).reshape(-1, head.size)
        asked = json.loads(row["body"]).get("dimensions")
        if asked is not None and asked > head.size:
            message = f"dimensions {asked} are more than the {head.size} of the model"
            return "errors", format_error(row["custom_id"], message, result["row"])
        if asked is not None and asked < head.size:
            vectors = vectors[:, :asked]
            if head.normalize:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        tokens, model = result["prompt_tokens"], str(options.model)
        return "output", format_embeddings(row["custom_id"], row["body"], vectors, tokens, model, result["row"])

    return format_row


def _each(columns: dict[str, list[Any] | None]) -> list[dict[str, Any]]:
    """The samples or prompts of a row, from lists with an entry for each; one without values where all are None."""
    count = max((len(values) for values in columns.values() if values), default=1)
    return [{name: values[i] if values else None for name, values in columns.items()} for i in range(count)]


def _openai_source(options: JobOptions, dataset: Dataset) -> RequestSource:
    """The source of an OpenAI batch, whose lines have their own prompts and parameters."""
    from batchgen.dataset.openai_batch import rows_to_embed, rows_to_requests
    from batchgen.dataset.openai_response import format_error, format_response

    given = {
        f"--task {options.task}": options.task not in (GENERATE, EMBED),
        "--vector-dtype": options.task == EMBED and options.vector_dtype != "float32",
        "--sampling-column": options.sampling_column,
        "--prompt-column": options.prompt_column,
        "--prompt-template": options.prompt_template,
        "--reorder-fields": options.reorder_fields,
        "--messages-column": options.messages_column,
        "--system": options.system_prompt,
        "--chat" if options.chat else "--no-chat": options.chat is not None,
        "--continue-final": options.continue_final,
        "--tools-column": options.tools_column,
        "--id-column": options.id_column,
        "--output-prefix": options.output_prefix,
        "--json-schema": options.sampling.json_schema,
        "--json-columns": options.json_columns,
        "--regex": options.sampling.regex,
        "--grammar": options.sampling.grammar,
        "--choices": options.choices,
        "--choices-column": options.choices_column,
    }
    for flag, value in given.items():
        if value:
            raise InputError(f"{flag} has no meaning for an OpenAI batch, whose lines are whole requests: leave it out")

    chat = ChatOptions(options.chat_template_kwargs or {})
    if options.task == EMBED:
        return RequestSource(
            dataset,
            lambda batch, first: rows_to_embed(batch, first, dataset.duplicate_rows),
            {"format": "openai"},
            False,
            EmbedColumns(1),
            frozenset(dataset.schema.names),
            format_row=lambda row, result: ("errors", {}),  # until the model is known
        )

    def format_row(row: dict[str, Any], result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if result["error"] is not None:
            return "errors", format_error(row["custom_id"], result["error"], result["row"])
        names = ("text", "reasoning", "finish_reason", "logprobs", "token_ids")
        answer = {
            "samples": _each({name: result.get(name) for name in names}),
            "prompts": _each({name: result.get(f"prompt_{name}") for name in ("logprobs", "token_ids")}),
            "prompt_tokens": result["prompt_tokens"],
            "generated_tokens": result["generated_tokens"],
        }
        return "output", format_response(row["custom_id"], row["body"], answer, str(options.model), result["row"])

    return RequestSource(
        dataset,
        lambda batch, first: rows_to_requests(batch, first, options.sampling, dataset.duplicate_rows, chat),
        {"format": "openai", **chat.identity()},
        False,
        SampleColumns(),
        frozenset(dataset.schema.names),
        format_row=format_row,
        chat=chat,
    )
