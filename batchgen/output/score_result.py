"""The result of one input row of a job that scores, and its form as an Arrow batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.request import PositionLogprobs, Scored
from batchgen.output.row_result import SAMPLE_LOGPROBS_TYPE, make_batch, position_tuples, positions_bytes

# One row a result. Lists have an entry a continuation, none for a failed row; token_logprobs is null where not asked
# for.
SCORE_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("logprobs", pa.list_(pa.float64())),
        ("is_greedy", pa.list_(pa.bool_())),
        ("num_tokens", pa.list_(pa.int32())),
        ("prompt_tokens", pa.int32()),
        ("error", pa.string()),
        ("token_logprobs", pa.list_(SAMPLE_LOGPROBS_TYPE)),
    ]
)


@dataclass(frozen=True)
class ScoreResult:
    """The result of one scored row: either an error, or tuples with one entry per continuation.

    Attributes:
        logprobs: Natural logarithm of each continuation's probability, summed over its tokens.
        is_greedy: For each continuation, True where each of its tokens is the most likely one.
        num_tokens: Number of tokens of each continuation.
        prompt_tokens: Number of tokens of the context.
        error: The reason why the row failed; None where it succeeded.
        token_logprobs: Log-probabilities [continuations][positions]; None where they were not asked for.
    """

    logprobs: tuple[float, ...]
    is_greedy: tuple[bool, ...]
    num_tokens: tuple[int, ...]
    prompt_tokens: int
    error: str | None = None
    token_logprobs: tuple[tuple[PositionLogprobs, ...], ...] | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != bool(self.logprobs):
            raise ValueError(f"a row has scores or an error, not both or neither: {self!r}")

    @classmethod
    def from_scored(cls, scored: Scored, *, whole: bool, token_logprobs: bool) -> ScoreResult:
        """Convert a `Scored` of the engine to the result that part files keep.

        Args:
            scored: The engine's result.
            whole: True where the row's prompt itself was scored.
            token_logprobs: True to keep the log-probabilities of each token.
        """
        scores = scored.scores if scored.error is None else ()
        num_tokens = tuple(len(score.token_ids) for score in scores)
        return cls(
            logprobs=tuple(score.logprob for score in scores),
            is_greedy=tuple(score.is_greedy for score in scores),
            num_tokens=num_tokens,
            prompt_tokens=sum(num_tokens) if whole else scored.context_tokens,
            error=scored.error,
            token_logprobs=tuple(score.tokens for score in scores) if token_logprobs and scores else None,
        )

    @property
    def memory_bytes(self) -> int:
        """An estimate of the bytes that the result takes in memory, used to limit buffers."""
        return 500 + 2 * len(self.error or "") + 100 * len(self.logprobs) + positions_bytes(self.token_logprobs)

    @staticmethod
    def to_batch(results: Mapping[int, ScoreResult]) -> pa.RecordBatch:
        """Convert results by row index to an Arrow batch with SCORE_SCHEMA, sorted by row index."""
        rows = sorted(results)
        ordered = [results[row] for row in rows]
        columns: list[list[Any]] = [
            rows,
            [r.logprobs for r in ordered],
            [r.is_greedy for r in ordered],
            [r.num_tokens for r in ordered],
            [r.prompt_tokens for r in ordered],
            [r.error for r in ordered],
            [position_tuples(r.token_logprobs) for r in ordered],
        ]
        return make_batch(columns, SCORE_SCHEMA)
