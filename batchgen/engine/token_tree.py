"""The token tree of a context's continuations: the fewest sequences that score them all.

The log-probability of a token depends only on the tokens before it, so the last token of a continuation is never run.
The tree holds all continuations without their last tokens. One sequence for each leaf is enough; continuations of a
single token need the context alone. Each node of the tree is scored in one sequence only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Tokens = Sequence[int]
# The place of a token's score: index of the path, of the scored position in it, and of the target at that position.
Node = tuple[int, int, int]


@dataclass(frozen=True)
class Path:
    """A sequence that is run to score tokens: a path from the root of the token tree to a leaf.

    Attributes:
        tokens: Token ids of the sequence.
        targets: For each of the last positions of the sequence, the token ids whose log-probability as next token is
            computed.
    """

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


def paths_of(context: Tokens, continuations: Sequence[Tokens]) -> tuple[list[Path], list[list[Node]]]:
    """The fewest sequences that score all continuations of a context, and the place of each score.

    Args:
        context: Token ids of the context.
        continuations: Token ids of each continuation, none of them empty.

    Returns:
        The sequences; and for each token of each continuation, the place of its score.
    """
    context = tuple(context)
    runs = sorted({tuple(tokens[:-1]) for tokens in continuations})
    # In this order a run comes right before those that it is a prefix of, which score its tokens too.
    runs = [run for run, after in itertools.zip_longest(runs, runs[1:]) if after is None or after[: len(run)] != run]
    owners: list[list[int]] = []  # by path and tokens run beyond the context: the path that scores what follows
    starts: list[int] = []
    for i, run in enumerate(runs):
        shared = _common(run, runs[i - 1]) + 1 if i else 0
        owners.append([*(owners[-1][:shared] if i else ()), *[i] * (len(run) + 1 - shared)])
        starts.append(shared)
    targets: list[list[dict[int, int]]] = [
        [{} for _ in range(len(run) + 1 - start)] for run, start in zip(runs, starts, strict=True)
    ]
    nodes = []
    for tokens in continuations:
        path = bisect_left(runs, tuple(tokens[:-1]))
        of_tokens = []
        for j, token in enumerate(tokens):
            owner = owners[path][j]
            position = j - starts[owner]
            indices = targets[owner][position]
            of_tokens.append((owner, position, indices.setdefault(token, len(indices))))
        nodes.append(of_tokens)
    paths = [Path(context + run, tuple(map(tuple, ids))) for run, ids in zip(runs, targets, strict=True)]
    return paths, nodes


def windows_of(first: int, tokens: Tokens, length: int) -> Iterator[Path]:
    """Windows that score a text which is longer than the model's context: each of its tokens is a target once.

    These are lm_eval's rolling windows. A window starts one token before the tokens that it scores. The last window
    scores only the rest of the text; it starts earlier, so that it has `length` tokens too.

    Args:
        first: Token id before the text.
        tokens: Token ids of the text.
        length: The model's context, in tokens.

    Yields:
        The windows, as sequences to run.
    """
    before = (first, *tokens)
    for start in range(0, len(tokens), length):
        stop = min(start + length, len(tokens))
        yield Path(before[max(0, stop - length) : stop], tuple((token,) for token in tokens[start:stop]))


def _common(a: Tokens, b: Tokens) -> int:
    """Number of tokens that two sequences have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
