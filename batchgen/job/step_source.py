"""The input of a job with several steps, and the prompts of each step over the columns of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Request
from batchgen.dataset.templates import compile_template
from batchgen.job.options import JobOptions
from batchgen.job.source import (
    RequestSource,
    check_output_schema,
    generate_source,
    generated_columns,
    open_input,
    open_source,
)
from batchgen.job.step import Step
from batchgen.job.step_tables import options_of_step
from batchgen.output.columns import Columns
from batchgen.output.step_columns import FilterColumns, StepColumns

if TYPE_CHECKING:
    from batchgen.dataset import Dataset
    from batchgen.models.config import ModelConfig
    from batchgen.models.tokenizers.tokenizer import Tokenizer

_STAND_IN = "word "  # a token or so: later prompts are planned as if earlier answers had their full length


@dataclass(frozen=True)
class CompiledStep:
    """A step that was checked against the columns that rows have when they come to it.

    Attributes:
        step: The step.
        schema: The columns that a row has: those of the input, then those of earlier steps.
        options: The options of the step's prompts; None: it filters.
        source: Its prompts; None: it filters.
        keeps: Function from rows, each {column: value}, to true for a row that goes on, or to the error of the row;
            None: the step generates.
        reads: Names of the columns that it reads.
    """

    step: Step
    schema: pa.Schema
    options: JobOptions | None
    source: RequestSource | None
    keeps: Callable[[Sequence[Mapping[str, Any]]], Iterator[bool | RowError]] | None
    reads: frozenset[str]

    @property
    def columns(self) -> Columns:
        """The columns that the step adds, without the step's name."""
        return FilterColumns() if self.source is None else self.source.columns

    @property
    def schema_after(self) -> pa.Schema:
        """The columns of a row that has come through the step."""
        added = StepColumns(((self.step.name, self.columns),)).types()
        return pa.schema([*self.schema, *(pa.field(name, kind) for name, kind in added.items())])


@dataclass(frozen=True)
class SteppedSource(RequestSource):
    """The input of a job with several steps. Its requests are those for planning; `RowFlow` makes those that are run.

    Attributes:
        steps: The steps.
    """

    steps: tuple[CompiledStep, ...] = ()

    @property
    def requests_per_row(self) -> int:
        return sum(step.source is not None for step in self.steps)

    def for_model(self, config: ModelConfig, tokenizer: Tokenizer, options: JobOptions) -> RequestSource:
        compiled: list[CompiledStep] = []
        for each in self.steps:
            schema = compiled[-1].schema_after if compiled else each.schema
            source = each.source
            if source is not None and each.options is not None:
                alone = replace(source, dataset=_Columns(schema))  # type: ignore[arg-type]  # its columns are asked for
                source = alone.for_model(config, tokenizer, each.options)
            compiled.append(replace(each, schema=schema, source=source))
        stepped = _stepped(self.dataset, compiled)
        stepped.output_names(options)
        return stepped


@dataclass(frozen=True)
class _Columns:
    """The columns of rows that come to a step, in place of a dataset."""

    schema: pa.Schema


def open_rows(options: JobOptions, dataset: Dataset | None = None) -> RequestSource:
    """Open a job's input, and check the input, its prompts or steps, and the names of the output columns.

    Args:
        options: The job's options.
        dataset: The rows of the input; None: they are opened.

    Raises:
        InputError: The input cannot be read, or lacks a column that the options name.
    """
    dataset = dataset or open_input(options)
    if not options.steps:
        return open_source(options, dataset)
    if dataset.format == "openai":
        raise InputError("steps have prompts of their own, and an OpenAI batch has whole requests: leave out the steps")
    if dataset.num_rows == 0:
        columns = _columns(dataset, [(step.name, _columns_without_rows(step, options)) for step in options.steps])
        source = replace(open_source(replace(options, output=None), dataset), columns=columns)
        check_output_schema(options, source)
        return source
    compiled: list[CompiledStep] = []
    for step in options.steps:
        schema = compiled[-1].schema_after if compiled else dataset.schema
        compiled.append(_compiled(step, options, schema))
        _columns(dataset, [(step.step.name, step.columns) for step in compiled])  # a later step reads each by its name
    source = _stepped(dataset, compiled)
    check_output_schema(options, source)
    return source


def _columns_without_rows(step: Step, options: JobOptions) -> Columns:
    """The columns that a step adds to an input without rows, whose columns may be unknown."""
    return FilterColumns() if step.filter is not None else generated_columns(options_of_step(step, options))


def _compiled(step: Step, options: JobOptions, schema: pa.Schema) -> CompiledStep:
    try:
        if step.filter is not None:
            columns, keeps = _filter(step.filter, schema)
            return CompiledStep(step, schema, None, None, keeps, frozenset(columns))
        own = options_of_step(step, options)
        source = generate_source(own, _Columns(schema))
        return CompiledStep(step, schema, own, source, None, source.reads)
    except InputError as error:
        raise InputError(f"step {step.name}: {error}") from error


def _filter(
    expression: str, schema: pa.Schema
) -> tuple[tuple[str, ...], Callable[[Sequence[Mapping[str, Any]]], Iterator[bool | RowError]]]:
    """The columns that a filter reads, and its function."""
    columns, render = compile_template("{{ 1 if (" + expression + ") else 0 }}", schema)

    def keeps(rows: Sequence[Mapping[str, Any]]) -> Iterator[bool | RowError]:
        for text in render([{name: row[name] for name in columns} for row in rows]):
            yield RowError(str(text)) if isinstance(text, Exception) else text == "1"

    return columns, keeps


def _stepped(dataset: Dataset, steps: Sequence[CompiledStep]) -> SteppedSource:
    """The source of a job with these steps."""
    sources = [step.source for step in steps if step.source is not None]
    notices = [f"step {step.step.name}: {line}" for step in steps if step.source for line in step.source.notices]
    of_input = frozenset(dataset.schema.names)
    return SteppedSource(
        dataset,
        lambda batch, first: _planned_requests(steps, batch, first),
        {"steps": [step.step.identity() | _identity_of(step) for step in steps]},
        any(source.needs_chat_template for source in sources),
        _columns(dataset, [(step.step.name, step.columns) for step in steps]),
        frozenset().union(*(step.reads for step in steps)) & of_input,
        chat=sources[0].chat,
        notices=tuple(notices),
        steps=tuple(steps),
    )


def _columns(dataset: Dataset, steps: Iterable[tuple[str, Columns]]) -> StepColumns:
    """The columns that steps add to an input.

    Args:
        dataset: The input.
        steps: The name and the columns of each step.

    Raises:
        InputError: A step adds a column whose name the input or an earlier step has.
    """
    columns, taken = StepColumns(tuple(steps)), dict.fromkeys(dataset.schema.names, "the input")
    for step in columns.steps:
        for name in StepColumns((step,)).types():
            if name in taken:
                raise InputError(f"step {step[0]} adds a column {name}, which {taken[name]} has: rename the step")
            taken[name] = f"step {step[0]}"
    return columns


def _identity_of(step: CompiledStep) -> dict[str, Any]:
    if step.source is None or step.options is None:
        return {}
    return {"prompt": step.source.identity, "sampling": step.options.sampling.to_json()}


def _planned_requests(steps: Sequence[CompiledStep], batch: pa.RecordBatch, first: int) -> Iterator[Request]:
    """The requests of all steps that generate, with a text of the full length in place of each earlier answer."""
    by_step = [list(_planned_of_step(step, steps, batch, first)) for step in steps if step.source is not None]
    for requests in zip(*by_step, strict=True):
        yield from requests


def _planned_of_step(
    step: CompiledStep, steps: Sequence[CompiledStep], batch: pa.RecordBatch, first: int
) -> Iterator[Request]:
    assert step.source is not None
    stand_ins = {
        f"{earlier.step.name}_text": _stand_in(earlier.options)
        for earlier in steps[: steps.index(step)]
        if earlier.options is not None
    }
    arrays = []
    for field in step.schema:
        if field.name in batch.schema.names:
            arrays.append(batch.column(field.name))
        elif field.name in stand_ins and pa.types.is_string(field.type):
            arrays.append(pa.array([stand_ins[field.name]] * batch.num_rows, field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    rows = pa.RecordBatch.from_arrays(arrays, schema=step.schema)
    for request in step.source.requests_of(rows.replace_schema_metadata(batch.schema.metadata), first):
        assert isinstance(request, Request)
        yield replace(request, reasoning_apart=request.reasoning_apart and step.source.reasoning_apart)


def _stand_in(options: JobOptions) -> str:
    sampling = options.sampling
    if sampling.choice:
        return max(sampling.choice, key=len)
    length = options.expected_output_len or sampling.max_tokens
    return (_STAND_IN * length).rstrip()
