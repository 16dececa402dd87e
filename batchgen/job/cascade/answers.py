"""Answers of a model in the output of a job, and the confidence that the model has in each.

The confidence is the probability of the answer's tokens; of several continuations, the share of the most likely one.
It need not be calibrated: the cascade's threshold is bounded for any numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.core.typed_json import check_nesting, parse_json
from batchgen.job.cascade.bound import Floats
from batchgen.job.options import JobOptions

NO_ANSWER = -1.0  # confidence in a row that failed


@dataclass(frozen=True)
class AnswerColumns:
    """The columns of an output that hold a model's answers.

    Attributes:
        prefix: The prefix of the output columns' names.
        scores: True where the answer is the most likely continuation; False where it is a text.
        is_json: True where the texts are JSON, whose order of keys and spaces do not matter.
        within: Largest difference of two numbers of JSON answers that agree.
    """

    prefix: str
    scores: bool
    is_json: bool
    within: float

    @classmethod
    def of(cls, options: JobOptions, output_columns: list[str]) -> AnswerColumns:
        """The columns of answers of a job.

        Args:
            options: The job's options.
            output_columns: Names of the columns that the job has added.
        """
        scores = options.task == "score"
        first = "text" if not scores else "choice" if options.choices or options.choices_column else "logprobs"
        is_json = options.sampling.json_schema is not None
        return cls(output_columns[0].removesuffix(first), scores, is_json, options.agree_within)

    def confidences(self, rows: pa.Table) -> Floats:
        """The model's confidence [rows] in each row's answer, 0 to 1; `NO_ANSWER` in rows that failed."""
        logprobs = rows.column(self.prefix + "logprobs").combine_chunks()
        failed = np.array([error is not None for error in self._errors(rows)], bool)
        if self.scores:
            values = [0.0 if not each else _largest_share(each) for each in logprobs.to_pylist()]
        else:
            lengths = pc.fill_null(pc.list_value_length(logprobs), 0).to_numpy(zero_copy_only=False)
            tokens = logprobs.flatten().field("logprob").to_numpy(zero_copy_only=False).astype(np.float64)
            sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(tokens, nan=-math.inf))])
            ends = np.cumsum(lengths)
            values = list(np.exp(np.minimum(sums[ends] - sums[ends - lengths], 0.0)))
        return np.where(failed, NO_ANSWER, np.array(values, np.float64))

    def answers(self, rows: pa.Table) -> list[Any]:
        """The answer of each row, to be compared by `agree`; None in rows that failed."""
        name = self.prefix + ("logprobs" if self.scores else "text")
        values = rows.column(name).to_pylist()
        return [
            None if error is not None else self._answer(v) for v, error in zip(values, self._errors(rows), strict=True)
        ]

    def agree(self, answer: Any, other: Any) -> bool:
        """True where two answers are the same, but for numbers of JSON that differ by at most `within`."""
        if answer is None or other is None:
            return False
        return _same(answer, other, self.within) if self.is_json else bool(answer == other)

    def _answer(self, value: Any) -> Any:
        if self.scores:
            return max(range(len(value)), key=lambda i: -math.inf if math.isnan(value[i]) else value[i])
        if not self.is_json:
            return value
        try:
            answer = parse_json(value)
            check_nesting(answer, value)
            return answer
        except ValueError:  # cut at --max-tokens, or nested too deeply to be compared
            return value

    def _errors(self, rows: pa.Table) -> list[str | None]:
        errors: list[str | None] = rows.column(self.prefix + "error").to_pylist()
        return errors


def _largest_share(logprobs: list[float]) -> float:
    """The probability of the most likely one of several continuations, among these alone."""
    known = [value for value in logprobs if not math.isnan(value)]
    best = max(known, default=-math.inf)
    if best == -math.inf:
        return 0.0
    return 1.0 / sum(math.exp(value - best) for value in known)


def _differ_by(value: float, other: float) -> float:
    try:
        return abs(value - other)
    except OverflowError:  # of an integer that is larger than any float
        return math.inf


def _same(value: Any, other: Any, within: float) -> bool:
    numbers = (int, float)
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, numbers) and isinstance(other, numbers):
        return value == other or _differ_by(value, other) <= within
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key], within) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_same(a, b, within) for a, b in zip(value, other, strict=True))
    return bool(value == other)
