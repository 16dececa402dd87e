"""A proposer that knows the answers of rows, and mixes wrong tokens in."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.sequence import Sequence


class PartlyRight:
    """Drafts that are right up to a random one; every length of what is accepted and refused has its turn.

    Args:
        answers: Tokens of the answer by those of the prompt, and number of the sample.
        seed: Seed of which are wrong.
    """

    def __init__(self, answers: Mapping[tuple[tuple[int, ...], int], tuple[int, ...]], seed: int) -> None:
        self._answers, self._rng = answers, random.Random(seed)

    def begin(self, sequences) -> None:
        pass

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        answer = self._answers[tuple(sequence.tokens[: sequence.num_prompt]), sequence.sample_index]
        tokens = list(answer[sequence.num_generated :])[:most]
        tokens += [5] * (most - len(tokens))  # after the end of the answer
        right = self._rng.randint(0, most)
        tokens[right:] = [(token + 1) % 200 for token in tokens[right:]]
        return Proposal(tokens[: self._rng.randint(1, most)], 0) if most else None

    def ended(self, sequence: Sequence) -> None:
        pass


def partly_right(answers: Mapping, *, most: int, seed: int = 1) -> Callable[[], Drafting]:
    """Makes drafts for `Engine.from_parts`, up to `most` for each sequence in each sweep."""
    return lambda: Drafting([PartlyRight(answers, seed)], always=most)


def by_prompt(prompts, answers) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
    """The answers of rows of one sample by their prompts."""
    return {(tuple(prompt), 0): tuple(answer) for prompt, answer in zip(prompts, answers, strict=True)}
