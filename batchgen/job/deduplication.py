"""Deduplication: of identical greedy requests of a job one is computed, and the others get its result."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from batchgen.core.request import PLAIN_CHAT, Completion, Embedded, PositionLogprobs, Request, SamplingParams

# Bytes of results that are kept for later rows. Beyond them the least recently used ones are evicted, some at once.
_MOST_RESULT_BYTES = 64 << 20
_KEPT_FRAC = 0.95
# Duplicates that wait for a result at once; further ones are computed, so that memory stays bounded.
_MOST_WAITING = 1 << 16
_encode = json.JSONEncoder(default=int).encode  # token ids may be numpy's
# A request of no row, which fails at once: its result lets the thread that reads results hand on others that are ready.
WAKING = Request("", error="no row")


@dataclass(slots=True)
class _First:
    """The request that is computed for a group of identical requests.

    Attributes:
        result: Its result; None: it still runs.
        result_bytes: Approximate bytes of the result.
        waiting: Duplicates that wait for the result.
    """

    result: Completion | None = None
    result_bytes: int = 0
    waiting: list[Request] = field(default_factory=list)


class Deduplication:
    """A filter that removes duplicates from a job's requests, and adds their results to those of the other requests.

    Greedy completions depend on the prompt and the sampling parameters alone, so a duplicate's result is what it would
    have been. One thread reads `unique` while another reads `with_duplicates`.

    Attributes:
        count: Number of duplicates, which were not computed.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        """`sampling`: parameters of requests that bring none."""
        self.count = 0
        self._sampling = sampling
        self._chat, self._chat_identity = PLAIN_CHAT, _encode(PLAIN_CHAT.identity()).encode()
        self._firsts: OrderedDict[bytes, _First] = OrderedDict()
        self._first_of_row: dict[int, _First] = {}  # of rows in flight
        self._ready: deque[Completion] = deque()
        self._num_waiting = self._result_bytes = 0
        self._lock = threading.Lock()

    def unique(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Yield the requests that must be computed: all but duplicates.

        Where None tells that a while passes, `WAKING` comes before it if results of duplicates are ready.
        """
        for request in requests:
            if request is None and self._ready:
                yield WAKING
            key = self._key(request)
            if key is None or not self._is_duplicate(key, request):
                yield request

    def with_duplicates(self, results: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield all results: those of computed requests, and those of their duplicates as soon as they are known.

        Args:
            results: Results of the requests that `unique` has yielded, in any order; their order is kept. They are
                closed at the end.
        """
        with contextlib.closing(results):
            for result in results:
                self._take(result)
                yield result
                if self._ready:
                    yield from self._drain()
        yield from self._drain()

    def _key(self, request: Any) -> bytes | None:
        """Hash of a request that is equal for identical requests; None for a request that may not be a duplicate."""
        if not isinstance(request, Request) or request.error is not None or request.row is None:
            return None
        sampling = request.sampling or self._sampling
        if not sampling.is_greedy:
            return None
        if request.chat is not self._chat:  # most rows have the same one
            self._chat, self._chat_identity = request.chat, _encode(request.chat.identity()).encode()
        given, kind = request.prompt, b"text"
        if not isinstance(given, str) or request.more_prompts or request.pair is not None:
            several = (given, *request.more_prompts, *(() if request.pair is None else (request.pair,)))
            given, kind = _encode([one if isinstance(one, str) else list(one) for one in several]), b"prompts"
        options = sampling.identity_bytes, self._chat_identity, b"%d" % request.reasoning_apart, kind
        return blake2b(b"\0".join((*options, given.encode(errors="surrogatepass"))), digest_size=16).digest()

    def _is_duplicate(self, key: bytes, request: Request) -> bool:
        assert request.row is not None
        with self._lock:
            first = self._firsts.get(key)
            if first is None:
                self._firsts[key] = self._first_of_row[request.row] = _First()
                return False
            if self._num_waiting >= _MOST_WAITING:
                return False
            self._num_waiting += 1
            self._firsts.move_to_end(key)
            if first.result is None:
                first.waiting.append(replace(request, prompt="", more_prompts=(), sampling=None, pair=None))
            else:
                self._ready.append(_for(request, first.result))
            return True

    def _take(self, result: Any) -> None:
        """Keep a result for waiting and later duplicates."""
        with self._lock:
            first = self._first_of_row.pop(result.row, None)
            if first is None:
                return
            if first.waiting:
                self._ready.extend([_for(request, result) for request in first.waiting])
                first.waiting = []
            first.result, first.result_bytes = result, _size_bytes(result)
            self._result_bytes += first.result_bytes
            if self._result_bytes > _MOST_RESULT_BYTES:
                for oldest in list(self._oldest(int(_KEPT_FRAC * _MOST_RESULT_BYTES))):
                    self._result_bytes -= self._firsts.pop(oldest).result_bytes

    def _oldest(self, most_bytes: int) -> Iterator[bytes]:
        """Keys of the oldest results, which are dropped so that the others take no more bytes than `most_bytes`."""
        kept_bytes = self._result_bytes
        for key, first in self._firsts.items():
            if kept_bytes <= most_bytes:
                return
            if first.result is not None:
                kept_bytes -= first.result_bytes
                yield key

    def _drain(self) -> Iterator[Completion]:
        while True:
            with self._lock:
                if not self._ready:
                    return
                result = self._ready.popleft()
                self._num_waiting -= 1
                self.count += 1
            yield result


def _for(request: Request, result: Completion) -> Completion:
    return replace(result, row=request.row, id=result.id if request.id is None else request.id)


def _size_bytes(result: Completion) -> int:
    """Approximate bytes of a result."""
    size = 1000 + 2 * len(result.error or "")
    if isinstance(result, Embedded):
        return size + (0 if result.vector is None else result.vector.nbytes)
    for sample in result.samples:
        size += 2 * len(sample.text) + _positions_bytes(sample.token_ids, sample.logprobs)
    return size + sum([_positions_bytes(prompt.token_ids, prompt.logprobs) for prompt in result.prompts])


def _positions_bytes(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] | None) -> int:
    """Approximate bytes of tokens and their log-probabilities."""
    size = 40 * len(token_ids)
    return size + len(logprobs) * 200 * (1 + len(logprobs[-1].top)) if logprobs else size
