"""The limit of failed rows, `--max-failed`: a job with more failed rows stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from batchgen.core.errors import InputError
from batchgen.core.request import Request, ScoreRequest

_FIRST_ROWS = 100
R = TypeVar("R", bound=Request | ScoreRequest)


@dataclass(frozen=True)
class FailureLimit:
    """The value of `--max-failed`. By default a job stops if all its rows, or its first hundred, fail.

    Attributes:
        rows: Number of rows that may fail.
        share: Part of all rows that may fail, 0 to 1.
    """

    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: str | int | None) -> FailureLimit:
        """The limit in a value of `--max-failed`: 12, "12", or a part of all rows such as "5%". Raises InputError."""
        if value is None:
            return cls()
        text = str(value).strip()
        try:
            limit = cls(share=float(text[:-1]) / 100) if text.endswith("%") else cls(rows=int(text))
        except ValueError:
            limit = cls(rows=-1)
        if (limit.rows is not None and limit.rows < 0) or not 0 <= (limit.share or 0) <= 1:
            raise InputError(f"--max-failed must be a number of rows or a share of them such as 5%, not {value!r}")
        return limit

    def exceeded(self, failed: int, total: int | None) -> str | None:
        """The reason why a job must stop for its failed rows; None: it need not.

        Args:
            failed: Number of rows that have failed so far.
            total: Number of the job's rows; None: unknown so far.
        """
        if self.rows is not None and failed > self.rows:
            return f"{failed:,} rows failed, more than --max-failed {self.rows:,}"
        if self.share is not None and total is not None and failed > self.share * total:
            return f"{failed:,} of {total:,} rows failed, more than --max-failed {self.share * 100:g}%"
        if self == FailureLimit() and total and failed == total:
            return "all rows failed" if total > 1 else "the row failed"
        return None


class FailedRows:
    """The failed rows of a running job, compared with its limit.

    Attributes:
        failed: Number of rows that failed in this run.
        done: Number of rows that were finished in this run, failed ones included.
    """

    def __init__(self, limit: FailureLimit, failed_before: int, total: int | None, *, results_per_row: int = 1) -> None:
        """Begin to count.

        Args:
            limit: The job's limit.
            failed_before: Number of rows that failed in earlier runs.
            total: Number of rows of the job; None: unknown.
            results_per_row: Number of results of each row, of which the last one says whether the row has failed.
        """
        self.failed = self.done = 0
        self._per_row = results_per_row
        self._limit, self._failed_before, self._total = limit, failed_before, total
        # The first rows of the input: rows that fail end before others in flight.
        self._first: dict[int, None] = {}
        self._first_failed: set[int] | None = set() if limit == FailureLimit() else None

    def watch(self, requests: Iterable[R | None]) -> Iterator[R | None]:
        """Pass requests on unchanged, and note the numbers of the first rows.

        Args:
            requests: Requests, and None where the next one may take a while.
        """
        for request in requests:
            if request is not None and len(self._first) < _FIRST_ROWS and request.row is not None:
                self._first[request.row // self._per_row] = None
            yield request

    def add(self, number: int, error: str | None) -> str | None:
        """Count a result; returns the reason why the job must stop, or None if it need not.

        Args:
            number: Number of the result: that of the row, where a row has one.
            error: Reason why the row failed; None: it has not failed.
        """
        row, step = divmod(number, self._per_row)
        if step != self._per_row - 1:
            return None
        self.done += 1
        if error is None:
            self._first_failed = None
            return None
        self.failed += 1
        if self._first_failed is not None:
            self._first_failed.add(row)
            if len(self._first) == _FIRST_ROWS and self._first_failed.issuperset(self._first):
                return f"the first {_FIRST_ROWS} rows all failed (--max-failed 100% goes on)"
        if self._limit == FailureLimit():
            return None  # whether all failed is known at the end, when the output is there
        return self._limit.exceeded(self._failed_before + self.failed, self._total)
