"""The result of one input row of a job that generates text, and its form as an Arrow batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.request import Completion, PositionLogprobs
from batchgen.core.text import repair_surrogates

_TOKEN = [("token", pa.string()), ("token_id", pa.int32()), ("logprob", pa.float32())]
POSITION_TYPE = pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))])
SAMPLE_LOGPROBS_TYPE = pa.list_(POSITION_TYPE)
# Finish reasons of results that stand for no text, in a job with steps: of a filter, and of a step that a row skipped.
FILTERED, SKIPPED = "filter", "skipped"
Positions = tuple[tuple[PositionLogprobs, ...], ...]  # of each text, its tokens'

# One row a result. Lists have an entry a sample, none for a failed row; logprobs is null where not asked for.
RESULT_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("text", pa.list_(pa.string())),
        ("finish_reason", pa.list_(pa.string())),
        ("prompt_tokens", pa.int32()),
        ("generated_tokens", pa.list_(pa.int32())),
        ("error", pa.string()),
        ("logprobs", pa.list_(SAMPLE_LOGPROBS_TYPE)),
    ]
)

# Columns that are there where a result of the part has them, in this order: lists with an entry a sample, or, of those
# whose names begin with "prompt", an entry a prompt.
OPTIONAL_FIELDS = (
    pa.field("reasoning", pa.list_(pa.string())),
    pa.field("prompt_logprobs", pa.list_(SAMPLE_LOGPROBS_TYPE)),
    pa.field("prompt_token_ids", pa.list_(pa.list_(pa.int32()))),
    pa.field("token_ids", pa.list_(pa.list_(pa.int32()))),
)


def is_result_schema(schema: pa.Schema) -> bool:
    """Tell whether a part file with this schema has results of a job that generates text."""
    known = [field for field in OPTIONAL_FIELDS if field.name in schema.names]
    return bool(schema.equals(pa.schema([*RESULT_SCHEMA, *known])))


@dataclass(frozen=True)
class RowResult:
    """The result of one input row: either an error, or tuples with one entry per sample.

    Attributes:
        text: The generated text of each sample.
        finish_reason: "stop" or "length" of each sample.
        prompt_tokens: Number of tokens of the prompt.
        generated_tokens: Number of generated tokens of each sample.
        error: The reason why the row failed; None where it succeeded.
        logprobs: Log-probabilities [samples][positions]; None where they were not asked for.
        reasoning: The reasoning text of each sample; None where no sample has any.
        prompt_logprobs: Log-probabilities [prompts][positions]; None where they were not asked for.
        prompt_token_ids: Token ids of each prompt; None where they were not asked for.
        token_ids: Token ids of each sample; None where they were not asked for.
    """

    text: tuple[str, ...]
    finish_reason: tuple[str, ...]
    prompt_tokens: int
    generated_tokens: tuple[int, ...]
    error: str | None = None
    logprobs: tuple[tuple[PositionLogprobs, ...], ...] | None = None
    reasoning: tuple[str | None, ...] | None = None
    prompt_logprobs: tuple[tuple[PositionLogprobs, ...], ...] | None = None
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != bool(self.text):
            raise ValueError(f"a row has samples or an error, not both or neither: {self!r}")

    @classmethod
    def from_completion(cls, completion: Completion, *, token_ids: bool = False) -> RowResult:
        """Convert a `Completion` of the engine to the result that part files keep.

        Args:
            completion: The engine's result.
            token_ids: True to keep token ids of prompts and samples.
        """
        samples = completion.samples if completion.error is None else ()
        prompts = completion.prompts if completion.error is None else ()
        wants_logprobs = any(s.logprobs is not None for s in samples)
        wants_prompt = any(p.logprobs is not None for p in prompts)
        return cls(
            text=tuple(s.text for s in samples),
            finish_reason=tuple(s.finish_reason for s in samples),
            prompt_tokens=completion.prompt_tokens,
            generated_tokens=tuple(len(s.token_ids) for s in samples),
            error=completion.error,
            logprobs=tuple(s.logprobs or () for s in samples) if wants_logprobs else None,
            reasoning=tuple(s.reasoning for s in samples) if any(s.reasoning is not None for s in samples) else None,
            prompt_logprobs=tuple(p.logprobs or () for p in prompts) if wants_prompt else None,
            prompt_token_ids=tuple(p.token_ids for p in prompts) if token_ids and prompts else None,
            token_ids=tuple(s.token_ids for s in samples) if token_ids and samples else None,
        )

    @property
    def memory_bytes(self) -> int:
        """An estimate of the bytes that the result takes in memory, used to limit buffers."""
        texts = (self.error, *self.text, *(self.reasoning or ()))
        size_bytes = 500 + sum(2 * len(text or "") for text in texts)
        tokens = sum(map(len, (*(self.token_ids or ()), *(self.prompt_token_ids or ()))))
        return size_bytes + 40 * tokens + positions_bytes(self.logprobs) + positions_bytes(self.prompt_logprobs)

    @staticmethod
    def to_batch(results: Mapping[int, RowResult]) -> pa.RecordBatch:
        """Convert results to an Arrow batch, sorted by row index.

        Args:
            results: Results by row index.

        Returns:
            A batch with RESULT_SCHEMA, and those of OPTIONAL_FIELDS of which a result has values.
        """
        rows = sorted(results)
        ordered = [results[row] for row in rows]
        columns: list[list[Any]] = [
            rows,
            [r.text for r in ordered],
            [r.finish_reason for r in ordered],
            [r.prompt_tokens for r in ordered],
            [r.generated_tokens for r in ordered],
            [r.error for r in ordered],
            [position_tuples(r.logprobs) for r in ordered],
        ]
        optional: dict[str, list[Any]] = {
            "reasoning": [r.reasoning for r in ordered],
            "prompt_logprobs": [position_tuples(r.prompt_logprobs) for r in ordered],
            "prompt_token_ids": [r.prompt_token_ids for r in ordered],
            "token_ids": [r.token_ids for r in ordered],
        }
        given = [field for field in OPTIONAL_FIELDS if any(optional[field.name])]
        return make_batch([*columns, *(optional[field.name] for field in given)], pa.schema([*RESULT_SCHEMA, *given]))


def make_batch(columns: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Make an Arrow batch from columns of Python values; text that is not valid UTF-8 is repaired."""
    try:
        return _batch(columns, schema)
    except UnicodeEncodeError:  # a lone surrogate, as JSON's "\ud800" gives, has no UTF-8 form
        return _batch(repair_surrogates(columns), schema)


def _batch(columns: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(c, type=f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def positions_bytes(logprobs: Positions | None) -> int:
    """An estimate of the bytes that log-probabilities take in memory."""
    return sum(len(p) * 200 * (1 + (len(p[-1].top) if p else 0)) for p in logprobs or ())


def position_tuples(logprobs: Positions | None) -> list[Any] | None:
    """Convert log-probabilities [texts][positions] to tuples in the field order of POSITION_TYPE."""
    if logprobs is None:
        return None
    return [
        [
            (p.chosen.token, p.chosen.token_id, p.chosen.logprob,
             [(t.token, t.token_id, t.logprob) for t in p.top])
            for p in positions
        ]
        for positions in logprobs
    ]  # fmt: skip
