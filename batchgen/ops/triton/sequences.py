"""Tiles of the packed tokens of several sequences, numbered so that a program finds its own from the starts alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of_tile(starts, num_sequences, tile, TOKENS: tl.constexpr):
    """The sequence that has tile number `tile`, where a tile has up to TOKENS tokens of one sequence.

    Sequence i has the tiles from starts[i] // TOKENS + i on. There are enough of them before the next sequence's, and
    a few that have no tokens. The host launches tokens // TOKENS + sequences programs, and need not know the starts.
    """
    first, last = 0, num_sequences - 1
    while first < last:
        middle = (first + last + 1) // 2
        is_later = (tl.load(starts + middle) // TOKENS + middle).to(tl.int32) > tile
        first = tl.where(is_later, first, middle)
        last = tl.where(is_later, middle - 1, last)
    return first
