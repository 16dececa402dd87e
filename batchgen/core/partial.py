"""Partial completions: the tokens of requests that have started and not ended, with which a later run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class PartialSample:
    """The tokens that one sample has so far. All other state of a sample follows from them.

    Attributes:
        token_ids: Generated tokens, int32 [tokens].
        logprobs: For each token its log-probability, the top k log-probabilities and their tokens, fp64
            [tokens, 1 + 2 k]; None: none are asked for.
    """

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any] | None = None

    @property
    def num_bytes(self) -> int:
        return int(self.token_ids.nbytes + (0 if self.logprobs is None else self.logprobs.nbytes))


@dataclass(frozen=True, eq=False)
class PartialCompletion:
    """The samples that a request has so far.

    Attributes:
        row: Number of the request's row in its dataset.
        digest: Digest of the request's tokens and sampling parameters (`request_digest`).
        samples: Samples of all prompts, those included that have ended or not begun.
    """

    row: int
    digest: bytes
    samples: tuple[PartialSample, ...]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples in memory."""
        return sum(sample.num_bytes for sample in self.samples)
