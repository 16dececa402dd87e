"""Sampling parameters of rows: those of the job, which a column of parameters or of choices overrides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import pyarrow as pa

from batchgen.core.errors import InputError, RowError, one_line
from batchgen.core.request import GRAMMARS, SamplingParams
from batchgen.dataset.column_types import is_text, value_type
from batchgen.dataset.continuations import CompiledContinuations, ContinuationSpec, compile_continuations


@dataclass(frozen=True)
class SamplingColumn:
    """A checked column of sampling parameters: structs, or JSON objects as text, with fields of SamplingParams.

    A null value or field leaves the job's parameters unchanged.

    Attributes:
        name: Name of the column.
        job: The job's sampling parameters.
    """

    name: str
    job: SamplingParams

    def of_row(self, value: Any) -> SamplingParams:
        """The sampling parameters of a row from its value in the column. Raises RowError."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RowError(f"column {self.name!r} is not valid JSON: {one_line(error)}") from error
            if isinstance(value, dict) and isinstance(value.get("json_schema"), dict):
                value["json_schema"] = json.dumps(value["json_schema"], ensure_ascii=False)
        if value is None:
            return self.job
        if not isinstance(value, dict):
            raise RowError(f"column {self.name!r} is not an object of sampling parameters")
        own = {name: _without_nulls(item) for name, item in value.items() if item is not None}
        unknown = sorted(set(own) - set(SamplingParams.names()))
        if unknown:
            raise RowError(f"column {self.name!r}: {unknown[0]!r} is no sampling parameter")
        own = {name: _typed(name, item) for name, item in own.items()}
        if own.keys() & set(GRAMMARS):  # a row has one grammar: its own
            own = dict.fromkeys(GRAMMARS) | own
        try:
            sampling = replace(self.job, **own)
        except InputError as error:
            raise RowError(f"column {self.name!r}: {error}") from error
        if sampling.n > 1 and self.job.n == 1:
            raise RowError(f"column {self.name!r}: n is {sampling.n}, but the job's is 1: give it -n as well")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(sampling, name) is not None and getattr(self.job, name) is None:
                flag = "--" + name.replace("_", "-")
                raise RowError(f"column {self.name!r}: {name} are given, but not to the job: give it {flag} as well")
        return sampling


def _without_nulls(value: Any) -> Any:
    """A dict without its null values; other values unchanged.

    Arrow structs have the fields of all rows, with null for fields that a row does not have.
    """
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of rows.

    Attributes:
        job: The job's sampling parameters.
        column: Column of sampling parameters, which override the job's; None: there is none.
        choices: Texts, one of which is a row's text, from a column; None: there is no such column.
    """

    job: SamplingParams
    column: SamplingColumn | None = None
    choices: CompiledContinuations | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that hold parameters."""
        return (*((self.column.name,) if self.column else ()), *(self.choices.columns if self.choices else ()))

    def of_row(self, row: dict[str, Any]) -> SamplingParams:
        """The sampling parameters of a row, given as {column: value}. Raises RowError."""
        sampling = self.job if self.column is None else self.column.of_row(row[self.column.name])
        if self.choices is None or self.choices.of_row is None:
            return sampling
        try:
            return replace(sampling, choice=cast("tuple[str, ...]", self.choices.of_row(row)))
        except InputError as error:
            raise RowError(str(error)) from error


def compile_row_sampling(
    column: str | None, choices: ContinuationSpec, schema: pa.Schema, job: SamplingParams
) -> RowSampling:
    """Check the columns of sampling parameters against the columns of the input. Raises InputError.

    Args:
        column: Column of sampling parameters; None: there is none.
        choices: Column of choices, or the job's choices, which `job` has already.
        schema: The input's columns.
        job: The job's sampling parameters.
    """
    if choices.choices_column is not None and job.constrained:
        raise InputError(f"--choices-column and {job.given_grammars[0]} exclude each other: give one")
    return RowSampling(
        job,
        None if column is None else _compile_sampling_column(column, schema, job),
        None if choices.choices_column is None else compile_continuations(choices, schema),
    )


def _compile_sampling_column(name: str, schema: pa.Schema, job: SamplingParams) -> SamplingColumn:
    """Check the type and the field names of a column of sampling parameters. Raises InputError.

    Args:
        name: Name of the column.
        schema: The input's columns.
        job: The job's sampling parameters.
    """
    kind = value_type(schema, name, "--sampling-column")
    if pa.types.is_struct(kind):
        unknown = [field.name for field in kind if field.name not in SamplingParams.names()]
        if unknown:
            raise InputError(
                f"--sampling-column {name!r} has a field {unknown[0]!r}: it is none of"
                f" {', '.join(SamplingParams.names())}"
            )
    elif not is_text(kind):
        raise InputError(f"--sampling-column {name!r} holds {kind}: it must be structs, or JSON objects as text")
    return SamplingColumn(name, job)


# Of each parameter: what its values are, and in words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda v: isinstance(v, int) and not isinstance(v, bool), "an integer"),
    "float": (lambda v: isinstance(v, int | float) and not isinstance(v, bool), "a number"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "str": (lambda v: isinstance(v, str), "text"),
    "str | Mapping[str, Any] | type": (lambda v: isinstance(v, str), "the text of a JSON schema"),
    "tuple[str, ...]": (
        lambda v: isinstance(v, str) or (isinstance(v, list | tuple) and all(isinstance(s, str) for s in v)),
        "a text or a list of texts",
    ),
    "tuple[tuple[int, float], ...]": (
        lambda v: isinstance(v, dict | list | tuple),  # what is in it is checked where it is used
        "an object of token ids and numbers",
    ),
    "tuple[int, ...]": (
        lambda v: isinstance(v, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in v),
        "a list of token ids",
    ),
}


def _typed(name: str, value: Any) -> Any:
    """The value of a sampling parameter, unchanged. Raises RowError where it has the wrong type."""
    kind = next(str(f.type) for f in fields(SamplingParams) if f.name == name).removesuffix(" | None")
    test, words = _KINDS[kind]
    if not test(value):
        raise RowError(f"{name} must be {words}, not {one_line(json.dumps(value, ensure_ascii=False, default=str))}")
    return value
