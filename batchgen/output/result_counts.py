"""Counts over all results of an output: how texts ended, and which short answers are the most frequent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.output.columns import Columns
from batchgen.output.parts import newest_results
from batchgen.output.row_result import FILTERED, SKIPPED

LENGTH = "length"  # the finish reason of a text that was cut
_SHORT_CHARS = 60  # an answer with more characters is no label that somebody would count
_MOST_SHOWN = 10
_MOST_KEPT = 20_000  # different answers that are kept while counting


@dataclass(frozen=True)
class AnswerCount:
    """A short answer and how often it was given.

    Attributes:
        answer: The text, without white space at its ends.
        count: Number of texts that are this answer.
    """

    answer: str
    count: int


@dataclass(frozen=True)
class ResultCounts:
    """Counts over the results of an output. Each sample of a row counts; failed rows do not.

    Attributes:
        finish_reasons: Number of texts by finish reason.
        cut_tokens: The fewest and the most tokens of texts with the finish reason "length"; None: there are none.
        answers: The most frequent answers that were given at least twice, the most frequent first.
        answers_exact: True where the counts of `answers` are exact. Otherwise there were too many different answers,
            and each count is a lower bound.
        answered: Number of texts, or of choices, that were looked at for `answers`.
    """

    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    cut_tokens: tuple[int, int] | None = None
    answers: tuple[AnswerCount, ...] = ()
    answers_exact: bool = True
    answered: int = 0


class AnswerCounter:
    """A counter of the most frequent texts that keeps a bounded number of them (lossy counting, Manku & Motwani 2002).

    Where more different texts come than it keeps, it drops the rarer half. A text that comes back may have been
    counted before, at most `_lost` times.
    """

    def __init__(self, most_kept: int = _MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._counts: Counter[str] = Counter()
        self._missed: dict[str, int] = {}  # the most that may be missing from a text's count
        self._lost = 0  # the most times that a text was seen that is not kept

    def add(self, counts: Mapping[str, int]) -> None:
        """Count texts. counts: number of occurrences by text."""
        if self._lost:
            self._missed.update((text, self._lost) for text in counts if text not in self._counts)
        self._counts.update(counts)
        if len(self._counts) > self._most_kept:
            self._drop_rare()

    def _drop_rare(self) -> None:
        ordered = self._counts.most_common()
        kept = ordered[: self._most_kept // 2]
        dropped = ordered[self._most_kept // 2 :]
        self._lost = max(self._lost, *(count + self._missed.get(text, 0) for text, count in dropped))
        self._counts = Counter(dict(kept))
        self._missed = {text: missed for text, missed in self._missed.items() if text in self._counts}

    def most_common(self, most: int) -> tuple[list[AnswerCount], bool]:
        """The most frequent texts that occurred at least twice, and whether their counts and their choice are exact.

        Args:
            most: The most texts to return.
        """
        ordered = self._counts.most_common()
        shown = [AnswerCount(text, count) for text, count in islice(ordered, most) if count > 1]
        rarest = shown[-1].count if len(shown) == most else 1
        others = (count + self._missed.get(text, 0) for text, count in islice(ordered, len(shown), None))
        exact = not any(self._missed.get(one.answer) for one in shown) and max([self._lost, *others]) <= rarest
        return shown, exact


class ResultCounter:
    """A running count over batches of results, in bounded memory."""

    def __init__(self) -> None:
        self._counts = ResultCounts()
        self._reasons: Counter[str] = Counter()
        self._answers = AnswerCounter()

    def add(self, results: pa.RecordBatch, answers: pa.Array | None) -> None:
        """Count a batch of results.

        Args:
            results: Results, with the columns of part files.
            answers: The answers of these rows, texts or lists of texts; None: the job gives none.
        """
        if "finish_reason" in results.schema.names:
            self._add_reasons(results)
        if answers is not None:
            texts = (answers.flatten() if pa.types.is_list(answers.type) else answers).drop_null()
            self._counts = replace(self._counts, answered=self._counts.answered + len(texts))
            short = texts.filter(pc.less_equal(pc.utf8_length(texts), _SHORT_CHARS))
            self._answers.add(_value_counts(pc.utf8_trim_whitespace(short)))

    def _add_reasons(self, results: pa.RecordBatch) -> None:
        reasons, counts = results.column("finish_reason").flatten(), results.column("generated_tokens").flatten()
        of_text = pc.invert(pc.is_in(reasons, pa.array([FILTERED, SKIPPED])))
        reasons, counts = reasons.filter(of_text), counts.filter(of_text)
        self._reasons.update(_value_counts(reasons))
        tokens = counts.filter(pc.equal(reasons, LENGTH))
        if len(tokens):
            bounds = pc.min_max(tokens).as_py()
            fewest, most = self._counts.cut_tokens or (bounds["min"], bounds["max"])
            cut_tokens = min(fewest, bounds["min"]), max(most, bounds["max"])
            self._counts = replace(self._counts, cut_tokens=cut_tokens)

    def counts(self) -> ResultCounts:
        """The counts of all batches so far."""
        answers, exact = self._answers.most_common(_MOST_SHOWN)
        reasons = dict(sorted(self._reasons.items(), key=lambda item: (-item[1], item[0])))
        return replace(self._counts, finish_reasons=reasons, answers=tuple(answers), answers_exact=exact)


def count_parts(paths: Sequence[Path], columns: Columns) -> ResultCounts:
    """Count the results in part files. Of a row with several results the newest counts.

    Args:
        paths: The part files, oldest first.
        columns: The output columns of the job.

    Raises:
        DamagedPart: A part file is damaged.
    """
    counter = ResultCounter()
    for results in _batches(paths, columns.counted):
        counter.add(results, columns.answers(None, results))
    return counter.counts()


def _batches(paths: Sequence[Path], names: Sequence[str]) -> Iterable[pa.RecordBatch]:
    for table in newest_results(paths, names):
        yield from table.combine_chunks().to_batches()


def _value_counts(values: pa.Array) -> dict[str, int]:
    counts = pc.value_counts(values)
    return dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))
