"""Drafts looked up in a row's own prompt and output: what came after the same tokens before. No tensors.

Prompt lookup decoding (Saxena 2023): answers that quote, correct or extract repeat stretches of their prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.sequence import Sequence

# Tokens of a match: fewer say nothing, more are not looked at.
_LEAST, _MOST = 2, 8


class LookupProposer:
    """Proposes what followed the longest earlier match of a sequence's last tokens, the latest of equal ones."""

    def __init__(self) -> None:
        self._texts: dict[Sequence, _Text] = {}

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: each sequence is looked at by itself."""

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """The tokens after the longest earlier match, at most so many; None: there is none of two tokens."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        return longest_match(text.upto_date(sequence.tokens), most)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._texts.pop(sequence, None)


class _Text:
    """The tokens of a sequence, int32, to which new ones are appended."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.int32)
        self._count = 0

    def upto_date(self, tokens: list[int]) -> np.ndarray:
        """All tokens of the sequence, of which only the end is new."""
        if len(tokens) > len(self._ids):
            grown = np.zeros(len(tokens) + len(tokens) // 2 + 64, np.int32)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        begin = min(self._count, len(tokens))
        self._ids[begin : len(tokens)] = tokens[begin:]
        self._count = len(tokens)
        return self._ids[: self._count]


def longest_match(tokens: np.ndarray, most: int) -> Proposal | None:
    """The tokens that followed the longest earlier match of the last tokens; None: there is none.

    Args:
        tokens: Tokens of a text, int32 [tokens].
        most: Most tokens to propose. A match that reaches into what it proposes is a period, which goes on.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match may end
    length, latest = 1, None
    while len(ends) and length < _MOST:
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-1 - length]]
        if len(ends):
            length, latest = length + 1, int(ends[-1])
    if latest is None or length < _LEAST:
        return None
    following = tokens[latest + 1 : latest + 1 + most]
    return Proposal(np.resize(following, most).tolist(), length)
