"""Drafts from rows of the job that have ended, whose outputs resemble one another. No tensors.

SuffixDecoding (Oliaro et al. 2024) keeps a suffix tree of earlier outputs. Here a ring of their last tokens is indexed
by the hashes of its n-grams of a few lengths: memory is bounded, and a match is followed backwards from what the index
gives. Nearly as many drafts are accepted as with the tree (`benchmarks/draft_sources.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.sequence import NOT_FINITE, Sequence

_RING_TOKENS = 1 << 18  # 1 MiB of tokens, and as much for each index
_LENGTHS = (6, 3, 2, 1)  # tokens of indexed n-grams, the longest first
_MOST_MATCHED = 16  # tokens of a match that are looked at
_END = -1  # after the last token of a row
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class FinishedRowsProposer:
    """Proposes what followed the last tokens of a sequence in the latest row that has them."""

    def __init__(self, ring_tokens: int = _RING_TOKENS) -> None:
        """Know no rows.

        Args:
            ring_tokens: Tokens that are kept, a power of two; the oldest go first.
        """
        self._ring = np.full(ring_tokens, _END, np.int32)
        self._next = 0  # place in the ring
        self._is_empty = True
        # By hash, the place after the latest n-gram.
        self._places = {length: np.full(ring_tokens, -1, np.int32) for length in _LENGTHS}

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: each sequence is looked at by itself."""

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """The tokens that came after the longest indexed match, at most so many; None: there is none."""
        if self._is_empty:
            return None
        last = np.array(sequence.tokens[-_MOST_MATCHED:], np.int32)
        for length in _LENGTHS:
            if len(last) < length:
                continue
            place = int(self._places[length][self._hashes(last[-length:], length)[0]])
            if place < 0 or not np.array_equal(self._ring[place - length : place], last[-length:]):
                continue
            following = self._ring[place : place + most]
            ends = np.flatnonzero(following == _END)
            tokens = following[: ends[0]] if len(ends) else following
            if len(tokens):
                return Proposal(tokens.tolist(), self._matched(place, last))
        return None

    def ended(self, sequence: Sequence) -> None:
        """Keep the output of a sequence, with the last tokens of its prompt before it."""
        begin = max(0, sequence.num_prompt - _LENGTHS[0])
        last = [token for token in sequence.tokens[begin:] if token != NOT_FINITE]  # with which a row may have failed
        tokens = np.array([*last, _END], np.int32)
        if sequence.targets or len(tokens) > len(self._ring):
            return
        if self._next + len(tokens) > len(self._ring):
            self._ring[self._next :] = _END
            self._next = 0
        first, stop = self._next, self._next + len(tokens)
        self._ring[first:stop] = tokens
        for length, places in self._places.items():
            if len(tokens) > length:
                ends = np.arange(first + length, stop, dtype=np.int32)
                places[self._hashes(tokens[:-1], length)] = ends
        self._next, self._is_empty = stop, False

    def _matched(self, place: int, last: np.ndarray) -> int:
        """The number of tokens before a place of the ring that are the last ones of a sequence."""
        count = min(place, len(last))
        differ = np.flatnonzero(self._ring[place - count : place] != last[len(last) - count :])
        return count - 1 - int(differ[-1]) if len(differ) else count

    def _hashes(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """The place in the index of each n-gram of some tokens, int64 [n-grams]."""
        count = len(tokens) - length + 1
        hashes = np.zeros(count, np.uint64)
        with np.errstate(over="ignore"):
            for i in range(length):
                hashes = (hashes ^ tokens[i : i + count].astype(np.uint64)) * _FACTOR
                hashes ^= hashes >> np.uint64(29)
        places: np.ndarray = (hashes & np.uint64(len(self._ring) - 1)).astype(np.int64)
        return places
