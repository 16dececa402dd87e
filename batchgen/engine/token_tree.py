"""What has to be run to score continuations of a context: as few sequences as there can be, and where each score is found.

Continuations of one context are a tree of tokens. A continuation's last token is never run, as only what comes before it
decides how likely it is; so a sequence per leaf of the tree without last tokens is enough, and continuations of a single
token need the context alone. Each node of the tree is scored in one sequence only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Tokens = Sequence[int]
# Of one token of a continuation: the path, the position there (counted in those that are scored), the target there.
Node = tuple[int, int, int]


@dataclass(frozen=True)
class Path:
    """Tokens to run. targets: of the last ones, one by one, the tokens that may follow and are asked for."""

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


def paths_of(context: Tokens, continuations: Sequence[Tokens]) -> tuple[list[Path], list[list[Node]]]:
    """The paths, none of them empty, and for each continuation the node of each of its tokens. None may be empty."""
    context = tuple(context)
    runs = sorted({tuple(tokens[:-1]) for tokens in continuations})
    # In this order a run comes right before those that go on from it, which serve it too.
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
        found = []
        for j, token in enumerate(tokens):
            owner = owners[path][j]
            position = j - starts[owner]
            there = targets[owner][position]
            found.append((owner, position, there.setdefault(token, len(there))))
        nodes.append(found)
    paths = [Path(context + run, tuple(map(tuple, there))) for run, there in zip(runs, targets, strict=True)]
    return paths, nodes


def windows_of(first: int, tokens: Tokens, length: int) -> Iterator[Path]:
    """A text that is longer than a context of `length` tokens, as paths in which each of its tokens is a target once.

    `first` stands before the text. Every window but the first begins with a token before those that it scores, the last
    one reaches back as far as the context does: lm_eval's rolling windows.
    """
    before = (first, *tokens)
    for start in range(0, len(tokens), length):
        stop = min(start + length, len(tokens))
        yield Path(before[max(0, stop - length) : stop], tuple((token,) for token in tokens[start:stop]))


def _common(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
