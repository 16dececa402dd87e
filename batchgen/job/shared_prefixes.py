"""The part of a job's prompt tokens whose KV other rows compute, estimated from a sample of its sequences.

Sequences start in the order of their prompts (`engine.prompt_order`), so a prefix is computed once for all rows that
have it among those that wait, wherever they are in the input; and in a job whose rows are sorted
(`job.sorted_requests`) among all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.engine.prompt_order import MOST_REQUESTS

_LEAST_SEQS = 1.5  # of a prefix: fewer say that hardly any row shares it


@dataclass(frozen=True)
class SampledPrompt:
    """A sequence of the sample.

    Attributes:
        tokens: Token ids of the prompt, or of all that is scored.
        num_shareable: First tokens whose KV may be taken over from other sequences.
        stretch: Number of the stretch of neighbouring rows that it was read with.
    """

    tokens: Sequence[int]
    num_shareable: int
    stretch: int


class SharedPrefixes(NamedTuple):
    """The prefixes that the sequences of a job share.

    Attributes:
        part: The part of all prompt tokens that are in prefixes which an earlier sequence has computed, 0 to 1.
        num_seqs: Mean number of sequences with the same prefix, above 1; None: all have the same one, or none has any.
    """

    part: float
    num_seqs: float | None


def shared_prefixes(prompts: Sequence[SampledPrompt], num_seqs: float, *, are_sorted: bool = False) -> SharedPrefixes:
    """Estimate the prefixes that the sequences of a job share.

    Args:
        prompts: The sample.
        num_seqs: Number of sequences of the job.
        are_sorted: Whether all of them are sorted, beyond those that wait.
    """
    paths = _paths(prompts)
    matched = _matched(prompts, paths)
    with_likes = _with_likes(prompts, paths)
    of_sample = _Tokens(with_likes, with_likes - sum(matched))
    if num_seqs <= len(prompts):
        return _shared(_part(matched, prompts), of_sample, num_seqs)
    # The first half of the sample has been through the tree when the second half is looked up.
    half = len(prompts) // 2
    near = _part(matched[half:], prompts[half:])
    tree = _of_tree(prompts, paths, num_seqs if are_sorted else min(num_seqs, 2 * MOST_REQUESTS))
    of_tree = _part([tree.shared - tree.distinct], prompts)
    if near >= of_tree:
        return _shared(near, tree if tree.shared > tree.distinct else of_sample, num_seqs)
    return _shared(of_tree, tree, num_seqs)


class _Tokens(NamedTuple):
    """Tokens of a sample that other sequences of the job have too, and how many of them are left if each counts once.

    Attributes:
        shared: Tokens in prefixes that several sequences have.
        distinct: Tokens of these prefixes, for each sequence its part.
    """

    shared: float
    distinct: float


def _shared(part: float, tokens: _Tokens, num_seqs: float) -> SharedPrefixes:
    of_prefix = tokens.shared / tokens.distinct if tokens.distinct > 0 else num_seqs
    return SharedPrefixes(part, of_prefix if part and _LEAST_SEQS <= of_prefix < num_seqs / 2 else None)


def _with_likes(prompts: Sequence[SampledPrompt], paths: list[list[int]]) -> float:
    """Tokens of the sample that another prompt of it has too."""
    shareable = [_shareable(prompt, path) for prompt, path in zip(prompts, paths, strict=True)]
    counts = Counter(node for path in paths for node in path)
    return DEFAULT_KV_BLOCK_SIZE * sum(counts[node] > 1 for path in shareable for node in path)


def _part(shared_tokens: Sequence[float], prompts: Sequence[SampledPrompt]) -> float:
    return sum(shared_tokens) / sum(len(prompt.tokens) for prompt in prompts)


def _paths(prompts: Sequence[SampledPrompt]) -> list[list[int]]:
    """The path of each prompt in the tree of all: a node for each block of tokens (prefixes are shared in blocks)."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # (node of the prefix, next block) -> node
    paths = []
    for prompt in prompts:
        path, node = [], 0
        for end in range(DEFAULT_KV_BLOCK_SIZE, len(prompt.tokens) + 1, DEFAULT_KV_BLOCK_SIZE):
            block = tuple(prompt.tokens[end - DEFAULT_KV_BLOCK_SIZE : end])
            node = numbers.setdefault((node, block), len(numbers) + 1)
            path.append(node)
        paths.append(path)
    return paths


def _shareable(prompt: SampledPrompt, path: list[int]) -> list[int]:
    """The part of a prompt's path whose KV may be taken over."""
    return path[: prompt.num_shareable // DEFAULT_KV_BLOCK_SIZE]


def _matched(prompts: Sequence[SampledPrompt], paths: list[list[int]]) -> list[int]:
    """Tokens of each prompt that those before it have."""
    known: set[int] = set()
    matched = []
    for prompt, path in zip(prompts, paths, strict=True):
        shareable = _shareable(prompt, path)
        blocks = next((i for i, node in enumerate(shareable) if node not in known), len(shareable))
        matched.append(blocks * DEFAULT_KV_BLOCK_SIZE)
        known.update(path)
    return matched


def _of_tree(prompts: Sequence[SampledPrompt], whole_paths: list[list[int]], num_waiting: float) -> _Tokens:
    """Tokens that `num_waiting` sequences share of which the sample is one, if its stretches are far from each other.

    Rows of one stretch may be more alike than others, so a row is compared with those of other stretches alone. That a
    row of the sample has no like there does not mean that it has none: those with one and with two tell how many have
    (as the numbers of species seen once and twice tell those not seen: Chao, 1984).
    """
    sizes = Counter(prompt.stretch for prompt in prompts)
    paths = list(map(_shareable, prompts, whole_paths))
    by_node: defaultdict[int, Counter[int]] = defaultdict(Counter)  # node -> rows of each stretch
    for prompt, path in zip(prompts, paths, strict=True):
        for node in path:
            by_node[node][prompt.stretch] += 1
    shared = distinct = 0.0
    for depth in range(max(map(len, paths), default=0)):
        others = []  # rows of other stretches with the same prefix, for each row, as if there were as many as all
        for prompt, path in zip(prompts, paths, strict=True):
            apart = len(prompts) - sizes[prompt.stretch]
            if depth < len(path) and apart:
                of_node = by_node[path[depth]]
                others.append((of_node.total() - of_node[prompt.stretch]) * len(prompts) / apart)
        rows = _rows_with_likes(others, num_waiting / len(prompts))
        shared += DEFAULT_KV_BLOCK_SIZE * rows.shared
        distinct += DEFAULT_KV_BLOCK_SIZE * rows.distinct
    return _Tokens(shared, distinct)


def _rows_with_likes(others: Sequence[float], factor: float) -> _Tokens:
    """The numbers of sampled rows that have a block in common with others, and of those that compute it.

    Args:
        others: Other rows of the sample with the same prefix, for each row.
        factor: Rows of the job for each row of the sample.
    """
    shared = sum(count > 0 for count in others)
    distinct = sum(1 / (factor * (1 + count)) for count in others if count)
    alone, twice, thrice = (sum(k - 0.5 <= count < k + 0.5 for count in others) for k in range(3))
    if not alone or not twice:
        return _Tokens(shared, distinct)
    # Rows of a prefix in a sample, if these are many prefixes of equal size: Poisson.
    mean = max(2 * thrice / twice, twice / alone)
    with_likes = min(alone, twice / mean)
    return _Tokens(shared + with_likes, distinct + with_likes * min(1.0, 1 / (factor * mean)))
