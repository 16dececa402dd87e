"""The columns that a job adds to those of its input: their types, and their values from the rows of part files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.core.request import SamplingParams
from batchgen.output.json_columns import JsonColumns
from batchgen.output.row_result import OPTIONAL_FIELDS, SAMPLE_LOGPROBS_TYPE


class Columns(Protocol):
    """The columns that a kind of job (generate or score) adds to the rows of the input.

    Attributes:
        results_per_row: Number of results that the run directory has for each row: one a step.
    """

    @property
    def results_per_row(self) -> int: ...

    def types(self) -> dict[str, pa.DataType]:
        """The Arrow type of each added column by name, in the order in which the columns are written."""

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        """The added columns' values for some rows, in the order of `types`.

        Args:
            rows: The rows of the input.
            results: The results of these rows, in the same order, as part files have them.
        """

    @property
    def counted(self) -> tuple[str, ...]:
        """The columns of part files that `answers` and the counts over an output read."""

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        """The answers of some rows, as texts or lists of texts; null or empty for failed rows.

        Args:
            rows: The rows of the input; None: they are not at hand.
            results: The results of these rows, as part files have them.

        Returns:
            The answers; None where the job gives none, or where they cannot be known without the input.
        """


# All columns that a job that generates may have beside those of JSON.
_NAMES = (
    "text", "reasoning", "finish_reason", "prompt_tokens", "generated_tokens", "error", "logprobs", "prompt_logprobs",
    "prompt_token_ids", "token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class SampleColumns:
    """The output columns of a job that generates text.

    With n > 1, the columns text, those of JSON, reasoning, finish_reason, generated_tokens, logprobs and token_ids have
    lists of n entries.

    Attributes:
        n: Samples of each row.
        logprobs: True where log-probabilities are a column.
        reasoning: True where the reasoning text is a column, as the model may reason before it answers.
        prompt_logprobs: True where log-probabilities of the prompt are a column.
        token_ids: True where token ids of prompt and samples are columns.
        json: The columns of the properties of answers that are JSON objects; None: there are none.
    """

    n: int = 1
    logprobs: bool = False
    reasoning: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    json: JsonColumns | None = None
    results_per_row: ClassVar[int] = 1

    @classmethod
    def of(cls, sampling: SamplingParams, *, reasoning: bool = False, token_ids: bool = False) -> SampleColumns:
        """The output columns for a job's sampling parameters."""
        logprobs, prompt_logprobs = sampling.logprobs is not None, sampling.prompt_logprobs is not None
        return cls(sampling.n, logprobs, reasoning, prompt_logprobs, token_ids)

    def types(self) -> dict[str, pa.DataType]:
        def per_sample(kind: pa.DataType) -> pa.DataType:
            return pa.list_(kind) if self.n > 1 else kind

        of_json = {} if self.json is None else self.json.types(_NAMES)
        types = {
            "text": per_sample(pa.string()),
            **{name: per_sample(kind) for name, kind in of_json.items()},
            **({"reasoning": per_sample(pa.string())} if self.reasoning else {}),
            "finish_reason": per_sample(pa.string()),
            "prompt_tokens": pa.int32(),
            "generated_tokens": per_sample(pa.int32()),
            "error": pa.string(),
        }
        token_list = pa.list_(pa.int32())
        return {
            **types,
            **({"logprobs": per_sample(SAMPLE_LOGPROBS_TYPE)} if self.logprobs else {}),
            **({"prompt_logprobs": SAMPLE_LOGPROBS_TYPE} if self.prompt_logprobs else {}),
            **({"prompt_token_ids": token_list, "token_ids": per_sample(token_list)} if self.token_ids else {}),
        }

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        columns = {name: results.column(name) for name in results.schema.names}
        for field in OPTIONAL_FIELDS:
            columns.setdefault(field.name, pa.nulls(results.num_rows, field.type))
        error, reason = columns["error"], columns["finish_reason"]
        for name in columns:
            if name.startswith("prompt_") and name != "prompt_tokens":  # a row has one prompt
                columns[name] = _first(columns[name])
        if self.n > 1:
            failed_reason = pa.array([["error"]], reason.type)[0]
            columns["finish_reason"] = pc.if_else(error.is_valid(), failed_reason, reason)
        else:
            for name in ("text", "reasoning", "logprobs", "token_ids"):
                columns[name] = _first(columns[name])
            columns["finish_reason"] = pc.fill_null(_first(reason), "error")
            columns["generated_tokens"] = pc.fill_null(_first(columns["generated_tokens"]), 0)
        if self.json is not None:
            columns |= zip(self.json.types(_NAMES), self.json.arrays(columns["text"]), strict=True)
        return [columns[name] for name in self.types()]

    @property
    def counted(self) -> tuple[str, ...]:
        return ("text", "finish_reason", "generated_tokens")

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        return results.column("text")


ONE_SAMPLE = SampleColumns()


@dataclass(frozen=True)
class ScoreColumns:
    """The output columns of a job that scores: lists with one entry per continuation, null in failed rows.

    Attributes:
        whole: True where the prompt itself is scored: the columns then have numbers instead of lists, and there is a
            column of the perplexity.
        choices: The continuations, where every row has the same.
        choices_column: The input column of the continuations. With `choices_column` or `choices` there is a column of
            the most likely continuation, without spaces at its beginning.
        token_logprobs: True where each token's log-probability is a column.
    """

    whole: bool = False
    choices: tuple[str, ...] = ()
    choices_column: str | None = None
    token_logprobs: bool = False
    results_per_row: ClassVar[int] = 1

    def types(self) -> dict[str, pa.DataType]:
        if self.whole:
            types = {"logprob": pa.float64(), "num_tokens": pa.int32(), "perplexity": pa.float64()}
        else:
            types = {
                "logprobs": pa.list_(pa.float64()),
                "is_greedy": pa.list_(pa.bool_()),
                "num_tokens": pa.list_(pa.int32()),
            }
        if self.choices or self.choices_column:
            types = {"choice": pa.string(), "choice_index": pa.int32()} | types
        types |= {"prompt_tokens": pa.int32(), "error": pa.string()}
        kind = SAMPLE_LOGPROBS_TYPE if self.whole else pa.list_(SAMPLE_LOGPROBS_TYPE)
        return types | ({"token_logprobs": kind} if self.token_logprobs else {})

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        failed = results.column("error").is_valid()
        lists = [_null_where(failed, results.column(name)) for name in ("logprobs", "is_greedy", "num_tokens")]
        each_token = results.column("token_logprobs")
        if self.whole:
            total, _, count = (_first(values) for values in lists)
            perplexity = pc.exp(pc.negate(pc.divide(total, count.cast(pa.float64()))))
            arrays, each_token = [total, count, perplexity], _first(each_token)
        else:
            arrays = lists
        if self.choices or self.choices_column:
            arrays = [*self._choice(rows, lists[0]), *arrays]
        arrays += [results.column("prompt_tokens"), results.column("error")]
        return [*arrays, *([each_token] if self.token_logprobs else [])]

    @property
    def counted(self) -> tuple[str, ...]:
        return ("logprobs", "error")

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        if not self.choices and (rows is None or not self.choices_column):
            return None
        logprobs = _null_where(results.column("error").is_valid(), results.column("logprobs"))
        return self._choice(rows, logprobs)[0]

    def _choice(self, rows: pa.RecordBatch | None, logprobs: pa.ListArray) -> list[pa.Array]:
        index = [None if values is None else _argmax(values) for values in logprobs.to_pylist()]
        if self.choices:
            texts = [None if i is None else self.choices[i] for i in index]
        else:
            assert rows is not None
            column = rows.column(self.choices_column)
            texts = [None if i is None else column[row].as_py()[i] for row, i in enumerate(index)]
        # Spaces before a text are for its tokens, which continue the prompt: they are no part of the answer.
        texts = [None if text is None else text.lstrip(" ") for text in texts]
        return [pa.array(texts, pa.string()), pa.array(index, pa.int32())]


def _argmax(logprobs: list[float]) -> int:
    """The index of the largest number, the first of equal ones; NaN is ignored."""
    return max(range(len(logprobs)), key=lambda i: -math.inf if math.isnan(logprobs[i]) else logprobs[i])


def _null_where(mask: pa.BooleanArray, values: pa.Array) -> pa.Array:
    return pc.if_else(mask, pa.scalar(None, values.type), values)


def _first(lists: pa.ListArray) -> pa.Array:
    """The first element of each list, null for an empty or null list."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    starts = np.cumsum(lengths) - lengths
    return lists.flatten().take(pa.array(starts, pa.int64(), mask=lengths == 0))
