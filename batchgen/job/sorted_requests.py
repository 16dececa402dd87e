"""The requests of a large input in the order of their prompts' texts, sorted on disk in memory that stays the same.

Texts with a common beginning come one after the other, wherever they are in the input; `engine.prompt_order` then
orders the tokens of those that wait. An external merge sort: runs are sorted in memory and written, and the runs are
merged (Knuth, The Art of Computer Programming, volume 3, section 5.4).
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import shutil
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from batchgen.core import messages
from batchgen.core.frames import read_frame, write_frame
from batchgen.core.plan import Plan
from batchgen.core.request import ChatOptions, Request, SamplingParams, ScoreRequest
from batchgen.engine.prompt_order import MOST_REQUESTS

logger = logging.getLogger(__name__)

_RUN_BYTES = 8 << 20  # of texts that are sorted in memory at once
_CHUNK_BYTES, _CHUNK_ROWS = 32 << 10, 64  # of a run that is in memory while runs are merged
_MOST_RUNS = 64  # that are merged at once
_ROW_BYTES = 200  # about what a request has beside its text
_MOST_SHARED = 64  # values that many requests have, which are kept once
_ROWS_FILE = "rows"  # numbers of the rows in the last order, eight bytes each
_FREE_BYTES = 1 << 30  # that stay free on the disk, for the output

_SORT_S, _SORT_FRAC = 1e-4, 0.01  # of a row, read and sorted: CPU seconds, and the most of the job's time
_SORTED = "{:,} rows are sorted by their prompts in {:.1f} s: each begins with {:.0%} of its text as the row before it"

_Request = Request | ScoreRequest
_TABLE = messages.table_of(Request, ScoreRequest, SamplingParams, ChatOptions)


class NoSpace(Exception):
    """The disk has no space for an input's requests."""


class SortStopped(Exception):
    """The job has ended before its requests were sorted."""


class _Keyed(NamedTuple):
    """A request, the text that it is sorted by, and the number of its row, by which equal texts are sorted."""

    key: bytes
    row: int
    request: _Request


class SortedRequests:
    """The requests of an input, on disk in the order of their prompts' texts.

    Attributes:
        rows: Number of the row of each request, in their order; they are in a file that is mapped.
        shared_part: The part of all bytes of the texts with which a text begins as the one before it, 0 to 1.
    """

    def __init__(
        self,
        requests: Iterable[_Request],
        folder: Path,
        run_bytes: int = _RUN_BYTES,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sort requests.

        Args:
            requests: Requests with the numbers of their rows.
            folder: Folder for the files, which is made anew, and removed by `close`.
            run_bytes: Bytes of texts that are sorted in memory at once.
            should_stop: Function that returns true when the job ends.

        Raises:
            NoSpace: The disk has no space for them.
            SortStopped: The job has ended.
        """
        self.rows = np.zeros(0, np.int64)
        self.shared_part = 0.0
        self._folder, self._run_bytes, self._should_stop = folder, run_bytes, should_stop
        self._shared: list[Any] = []
        self._num_files = 0
        self._first_of_chunk, self._offset_of_chunk = array("q"), array("q")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            runs = [self._written(run) for run in self._runs(requests)]
            while len(runs) > _MOST_RUNS:
                groups = [runs[first : first + _MOST_RUNS] for first in range(0, len(runs), _MOST_RUNS)]
                runs = [self._written(self._merged(group)) for group in groups]
            with (folder / _ROWS_FILE).open("wb") as rows_file:
                self._path = self._written(self._counted(self._merged(runs), rows_file), is_last=True)
            if rows_file_bytes := (folder / _ROWS_FILE).stat().st_size:
                self.rows = np.memmap(folder / _ROWS_FILE, np.int64, "r", shape=(rows_file_bytes // 8,))
        except OSError as error:
            self.close()
            raise NoSpace(f"{folder}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[_Request]:
        """Yield the requests of positions `start` to `stop` - 1 in the order; None: to its end."""
        chunk = bisect_right(self._first_of_chunk, start) - 1
        if chunk < 0:
            return
        position = self._first_of_chunk[chunk]
        with self._path.open("rb") as file:
            file.seek(self._offset_of_chunk[chunk])
            for keyed in self._chunks(file):
                if stop is not None and position >= stop:
                    return
                if position >= start:
                    yield keyed.request
                position += 1

    @property
    def digest(self) -> str:
        """Digest of the order of the rows."""
        return blake2b(self.rows.data, digest_size=16).hexdigest()

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _runs(self, requests: Iterable[_Request]) -> Iterator[list[_Keyed]]:
        """Yield sorted runs of requests."""
        run: list[_Keyed] = []
        size = 0
        for request in requests:
            assert request.row is not None, "a request without a row"
            run.append(_Keyed(text_of(request), request.row, request))
            size += len(run[-1].key) + _ROW_BYTES
            if size >= self._run_bytes:
                yield sorted(run)
                run, size = [], 0
        yield sorted(run)

    def _merged(self, runs: list[Path]) -> Iterator[_Keyed]:
        """Yield the requests of several runs in order, and remove the runs."""
        files = [run.open("rb") for run in runs]
        try:
            yield from heapq.merge(*map(self._chunks, files))
        finally:
            for run, file in zip(runs, files, strict=True):
                file.close()
                run.unlink(missing_ok=True)

    def _counted(self, requests: Iterator[_Keyed], rows_file: BinaryIO) -> Iterator[_Keyed]:
        """Yield the requests in their last order; write their rows to a file, and note what texts have in common."""
        before = b""
        shared = total = 0
        for keyed in requests:
            rows_file.write(keyed.row.to_bytes(8, sys.byteorder))
            shared += _common_bytes(before, keyed.key)
            total += len(keyed.key)
            before = keyed.key
            yield keyed
        self.shared_part = shared / max(1, total)

    def _written(self, requests: Iterable[_Keyed], *, is_last: bool = False) -> Path:
        """Write sorted requests to a file, in chunks; of the last file, the chunks are noted."""
        path = self._folder / str(self._num_files)
        self._num_files += 1
        written = 0
        with path.open("wb") as file:
            for chunk in _chunked(requests):
                if self._should_stop():
                    raise SortStopped
                if is_last:
                    self._first_of_chunk.append(written)
                    self._offset_of_chunk.append(file.tell())
                written += len(chunk)
                requests_of_chunk = [self._with_common_values(keyed.request) for keyed in chunk]
                write_frame(file, messages.encode(requests_of_chunk, _TABLE))
        if shutil.disk_usage(self._folder).free < _FREE_BYTES:
            raise OSError(0, "the disk is nearly full")
        return path

    def _chunks(self, file: BinaryIO) -> Iterator[_Keyed]:
        """Yield the requests of an open file from where it stands."""
        while (requests := _next_chunk(file)) is not None:  # without their bytes, as many files are open
            for request in requests:
                assert request.row is not None, "a request without a row"
                yield _Keyed(text_of(request), request.row, self._with_common_values(request))

    def _with_common_values(self, request: _Request) -> _Request:
        """The request with one object for parameters that many requests have, however often these were read."""
        for name in ("sampling", "chat"):
            value = getattr(request, name, None)
            if value is not None and (common := self._common(value)) is not value:
                object.__setattr__(request, name, common)
        return request

    def _common(self, value: Any) -> Any:
        """The value that is kept for all that equal it; the value itself where there are too many of them."""
        if len(self._shared) >= _MOST_SHARED:  # too many to be compared with each request
            return value
        for known in self._shared:
            if known is value or known == value:
                return known
        self._shared.append(value)
        return value


def sorts_rows(plan: Plan) -> bool:
    """Tell whether a job's rows are to be sorted: prefixes are shared, and sorting takes less than 1 % of its time."""
    seconds_per_row = plan.prediction.total_s / plan.workload.num_seqs
    return plan.policy.share_prefixes and _SORT_FRAC * seconds_per_row >= _SORT_S


def sort_requests(requests: Iterable[_Request], folder: Path, should_stop: Callable[[], bool]) -> SortedRequests:
    """Sort requests, and say so. Raises NoSpace and SortStopped (`SortedRequests`)."""
    started_s = time.monotonic()
    ordered = SortedRequests(requests, folder, should_stop=should_stop)
    logger.info(_SORTED.format(len(ordered.rows), time.monotonic() - started_s, ordered.shared_part))
    return ordered


def in_order_of_texts(
    requests: Callable[[], Iterator[_Request]], folder: Path, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[_Request]:
    """Yield requests in the order of their prompts' texts, or as they come where all of them may wait anyway.

    Args:
        requests: Function that gives the requests in the order of the input.
        folder: Folder for the sorted requests, which is removed at the end.
        should_stop: Function that returns true when the job ends, even in the middle of sorting.
    """
    given = requests()
    first = list(itertools.islice(given, MOST_REQUESTS + 1))
    if len(first) <= MOST_REQUESTS:
        yield from first
        return
    try:
        ordered = sort_requests(itertools.chain(first, given), folder, should_stop)
    except SortStopped:
        return
    except NoSpace as error:
        logger.warning("rows start in the order of the input, as they cannot be sorted (%s)", error)
        yield from requests()
        return
    del first
    try:
        yield from ordered.read()
    finally:
        ordered.close()


def _next_chunk(file: BinaryIO) -> list[_Request] | None:
    """The requests of the next chunk of a file; None at its end."""
    content = read_frame(file)
    return None if content is None else messages.decode(bytes(content), _TABLE)


def text_of(request: _Request) -> bytes:
    """The bytes of a request's prompt or context in their order: texts that begin alike have tokens that do."""
    if request.error is not None:
        return b""
    if isinstance(request, ScoreRequest):
        prompt: Any = request.context
        if not len(prompt):
            prompt = request.continuations[0]
    else:
        prompt = request.prompt
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    if len(prompt) and isinstance(prompt[0], dict):
        # Templates write tools, and then messages in their order.
        return json.dumps([request.chat.identity(), list(prompt)], default=str).encode()
    try:
        return np.asarray(prompt, dtype=">u4").tobytes()
    except OverflowError:  # no model has such tokens, so the request fails when its turn comes
        return b""


def _chunked(requests: Iterable[_Keyed]) -> Iterator[list[_Keyed]]:
    chunk: list[_Keyed] = []
    size = 0
    for keyed in requests:
        chunk.append(keyed)
        size += len(keyed.key) + _ROW_BYTES
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_ROWS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _common_bytes(one: bytes, other: bytes) -> int:
    """The number of first bytes that two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
