"""The columns that a job adds to those of its input: their types, and their values from the rows of part files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.output.json_columns import JsonColumns
from batchgen.output.row_result import SAMPLE_LOGPROBS_TYPE


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
    "text", "reasoning", "finish_reason", "prompt_tokens", "generated_tokens", "error", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class SampleColumns:
    """The output columns of a job that generates text.

    With n > 1, the columns text, those of JSON, reasoning, finish_reason, generated_tokens and logprobs have lists of n
    entries.

    Attributes:
        n: Samples of each row.
        logprobs: True where log-probabilities are a column.
        reasoning: True where the reasoning text is a column, as the model may reason before it answers.
        json: The columns of the properties of answers that are JSON objects; None: there are none.
    """

    n: int = 1
    logprobs: bool = False
    reasoning: bool = False
    json: JsonColumns | None = None
    results_per_row: ClassVar[int] = 1

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
        return types | ({"logprobs": per_sample(SAMPLE_LOGPROBS_TYPE)} if self.logprobs else {})

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        text, reason, prompt, generated, error, logprob = (results.column(i) for i in range(1, 7))
        thoughts = pa.nulls(len(text), text.type)
        if "reasoning" in results.schema.names:
            thoughts = results.column("reasoning")
        if self.n > 1:
            failed_reason = pa.array([["error"]], reason.type)[0]
            reason = pc.if_else(error.is_valid(), failed_reason, reason)
        else:
            text, thoughts, logprob = _first(text), _first(thoughts), _first(logprob)
            reason = pc.fill_null(_first(reason), "error")
            generated = pc.fill_null(_first(generated), 0)
        of_json = [] if self.json is None else self.json.arrays(text)
        texts = [text, *of_json, *([thoughts] if self.reasoning else [])]
        return [*texts, reason, prompt, generated, error, *([logprob] if self.logprobs else [])]

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
