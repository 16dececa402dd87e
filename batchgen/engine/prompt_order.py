"""The order in which requests start: that of their prompts, so that those with a common prefix follow each other.

A job's rows come in any order. Where few sequences are in flight, the KV of a prefix that others will share is evicted
before they come. Prompts in lexicographic order are a walk through the tree of their tokens: all that have a prefix
come one after the other, so its KV is computed once, and no longer needed when it is evicted (BatchLLM: Zheng et al.,
2024, section 4). The order is kept among the requests that wait; of a larger input, each prefix is met in several of
these walks.
"""

from __future__ import annotations

import sys
import time
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol, TypeVar

from batchgen.engine.prefetch import Prefetch

MOST_REQUESTS = 4096
BYTES_PER_TOKEN = 4  # of prompts that wait
_POLL_S = 0.002
_MOST_TOKENS = 1 << 22  # of their prompts, which take eight bytes each
_AT_ONCE = 64  # requests that are taken from the source before it is looked whether there is space for more


class Prompted(Protocol):
    """A prepared request.

    Attributes:
        prompt: Token ids of its prompt, of four bytes each; None: nothing of it is to be run.
    """

    @property
    def prompt(self) -> array[int] | None: ...


P = TypeVar("P", bound=Prompted)


class PromptOrder(Iterator[P]):
    """The prepared requests of a source, each the one that waits whose prompt follows on that of the one before it.

    After the last prompt comes the first one again. Requests with nothing to run come at once. An exception of the
    source is raised when all requests before it have been taken.
    """

    def __init__(self, source: Prefetch[P], most_requests: int = MOST_REQUESTS) -> None:
        """Let no more than `most_requests` wait, of the prepared requests of `source`."""
        self._source, self._most_requests = source, most_requests
        self._at_once: deque[P] = deque()
        self._waiting: list[tuple[bytes, int, P]] = []  # prompt, number of arrival, request
        self._num_tokens = self._num_arrived = 0
        self._last = b""
        self._error: BaseException | None = None
        self._ended = False

    @property
    def ready(self) -> bool:
        """True where the next request, or the exception in its place, is there, so that `next` does not wait."""
        return bool(self._at_once or self._waiting or self._ended) or self._source.ready

    def take(self, most: int) -> list[P]:
        """The next requests, as many as are there and at most `most`. It waits for one; there is none after the last.

        Requests that come meanwhile do not come between these.
        """
        self._take_ready()
        while not (self._at_once or self._waiting or self._ended):
            self._take(1)
        if self._at_once:
            return [self._at_once.popleft() for _ in range(min(most, len(self._at_once)))]
        if self._waiting:
            return self._following(most)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return []

    def __next__(self) -> P:
        for request in self.take(1):
            return request
        raise StopIteration

    def fill(self, seconds: float) -> None:
        """Wait until as many requests wait as may, or all there are, so that the first ones come in order too.

        Args:
            seconds: The longest time to wait.
        """
        until = time.monotonic() + seconds
        self._take_ready()
        while not self._ended and self._space > 0 and time.monotonic() < until:
            time.sleep(_POLL_S)
            self._take_ready()

    def close(self) -> None:
        self._source.close()
        self._ended = True
        self._waiting.clear()
        self._at_once.clear()

    @property
    def _space(self) -> int:
        """Requests that may wait beside those that do."""
        return self._most_requests - len(self._waiting) if self._num_tokens < _MOST_TOKENS else 0

    def _take_ready(self) -> None:
        """Take what the source has ready, while there is space for it."""
        while not self._ended and (space := self._space) > 0 and self._source.ready:
            self._take(min(space, _AT_ONCE))

    def _take(self, most: int) -> None:
        """Take requests of the source, at most `most`, or its end. The first may have to be waited for."""
        try:
            requests = self._source.take(most)
        except BaseException as error:  # raised in its place, after the requests that came before it
            self._error, self._ended = error, True
            return
        self._ended = not requests
        for request in requests:
            prompt = request.prompt
            if prompt is None:
                self._at_once.append(request)
                continue
            self._wait(_comparable(prompt), self._num_arrived, request)
            self._num_arrived += 1
            self._num_tokens += len(prompt)

    def _wait(self, prompt: bytes, number: int, request: P) -> None:
        """Let a request wait. prompt: Bytes of its prompt. number: Number of its arrival."""
        insort(self._waiting, (prompt, number, request))

    def _following(self, most: int) -> list[P]:
        """Take the requests that come next, at most `most`."""
        chosen = self._next_ones(most)
        taken = self._waiting[chosen]
        del self._waiting[chosen]
        self._last = taken[-1][0]
        self._num_tokens -= sum([len(prompt) for prompt, _, _ in taken]) // BYTES_PER_TOKEN
        return [request for _, _, request in taken]

    def _next_ones(self, most: int) -> slice:
        """The waiting requests that come next, at most `most`."""
        position = self._next_position()
        return slice(position, position + most)

    def _next_position(self) -> int:
        """The position of the waiting prompt that is the first at or after the last one, or the first of all."""
        position = bisect_left(self._waiting, (self._last, -1))
        return position if position < len(self._waiting) else 0


def _comparable(prompt: array[int]) -> bytes:
    """Token ids as bytes that compare as they do: big-endian ones."""
    if sys.byteorder == "big":
        return prompt.tobytes()
    swapped = prompt[:]
    swapped.byteswap()
    return swapped.tobytes()
