"""The order in which requests start where streamed weights bind: those with the longest outputs come first.

A sweep takes as long with few sequences as with many, so long outputs that begin late run nearly alone in the end.
Prompts with a common prefix stay together: the group of the longest comes first (longest processing time first:
Graham, 1969).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

from batchgen.core.request import SamplingParams
from batchgen.engine.prefetch import Prefetch
from batchgen.engine.prompt_order import BYTES_PER_TOKEN, MOST_REQUESTS, Prompted, PromptOrder

_GROUP_TOKENS = 64  # that the prompts of a group begin with
_ENOUGH_ENDED = 32  # sequences that must have ended before others are expected to be like them
_PRIOR = 8.0  # sequences of the mean length of all that those of a prompt length are counted with
_MUCH_LONGER = 1.1  # times the expected length, for which the order of prompts is left

P = TypeVar("P", bound=Prompted)


class ExpectedLengths:
    """The tokens that sequences are expected to generate, by the lengths of their prompts.

    Attributes:
        num_ended: Number of sequences that have ended.
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self._counts = [0] * 64  # by the number of bits of the prompt's length
        self._sums = [0.0] * 64

    def ended(self, prompt_len: int, generated: int) -> None:
        """Count a sequence that has ended, with the tokens that it generated."""
        self.num_ended += 1
        self._counts[prompt_len.bit_length()] += 1
        self._sums[prompt_len.bit_length()] += generated

    def expected(self, prompt_len: int, sampling: SamplingParams) -> float:
        """The tokens that a sequence with a prompt of so many tokens is expected to generate."""
        if sampling.ignore_eos or self.num_ended < _ENOUGH_ENDED:
            return sampling.max_tokens
        mean, kind = sum(self._sums) / self.num_ended, prompt_len.bit_length()
        of_kind = (self._sums[kind] + _PRIOR * mean) / (self._counts[kind] + _PRIOR)
        return min(of_kind, sampling.max_tokens)


class LongestFirst(PromptOrder[P]):
    """The prepared requests of a source, the groups with the longest expected outputs first, each in prompt order."""

    def __init__(
        self,
        source: Prefetch[P],
        length: Callable[[P], float],
        most_requests: int = MOST_REQUESTS,
        group_tokens: int = _GROUP_TOKENS,
    ) -> None:
        """Let no more than `most_requests` wait.

        Args:
            source: The prepared requests.
            length: Function that gives the tokens that a request is expected to generate.
            most_requests: The most requests that wait.
            group_tokens: First tokens that prompts of a group have in common.
        """
        super().__init__(source, most_requests)
        self._length, self._group_bytes = length, group_tokens * BYTES_PER_TOKEN
        self._longest: list[tuple[float, bytes, int]] = []  # less its length, prompt, number of arrival; a heap

    def learn(self) -> None:
        """Ask for the lengths of all that wait anew."""
        self._longest = [(-self._length(request), prompt, number) for prompt, number, request in self._waiting]
        heapq.heapify(self._longest)

    def _wait(self, prompt: bytes, number: int, request: P) -> None:
        super()._wait(prompt, number, request)
        if len(self._longest) >= 2 * self._most_requests:  # half of them have started, and their prompts take memory
            self.learn()
        else:
            heapq.heappush(self._longest, (-self._length(request), prompt, number))

    def _next_ones(self, most: int) -> slice:
        position = self._next_position()  # the one after it may belong to another group
        return slice(position, position + 1)

    def _next_position(self) -> int:
        position = super()._next_position()
        prompt, _, following = self._waiting[position]
        group = prompt[: self._group_bytes]
        if len(group) == self._group_bytes and self._last.startswith(group):
            return position
        while True:
            length, prompt, number = self._longest[0]
            of_longest = bisect_left(self._waiting, (prompt, number))
            if of_longest < len(self._waiting) and self._waiting[of_longest][:2] == (prompt, number):
                break
            heapq.heappop(self._longest)
        if -length <= _MUCH_LONGER * self._length(following):
            return position
        return min(of_longest, bisect_left(self._waiting, (prompt[: self._group_bytes], -1)))
