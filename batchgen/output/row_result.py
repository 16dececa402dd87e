"""The result of one input row of a job that generates text, and its form as an Arrow batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchgen.core.made_often import made_often
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


@made_often
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
        if _is_plain(completion) and not token_ids:
            (sample,) = samples
            return cls((sample.text,), (sample.finish_reason,), completion.prompt_tokens, (len(sample.token_ids),))
        prompts = completion.prompts if completion.error is None else ()
        columns = [(s.text, s.finish_reason, s.token_ids, s.logprobs, s.reasoning) for s in samples]
        text, finish_reason, generated, logprobs, reasoning = zip(*columns, strict=True) if columns else ((),) * 5
        of_prompts = [(p.token_ids, p.logprobs) for p in prompts]
        prompt_ids, prompt_logprobs = zip(*of_prompts, strict=True) if of_prompts else ((), ())
        return cls(
            text,
            finish_reason,
            completion.prompt_tokens,
            tuple(map(len, generated)),
            completion.error,
            logprobs=_known(logprobs, ()),
            reasoning=_known(reasoning, None),
            prompt_logprobs=_known(prompt_logprobs, ()),
            prompt_token_ids=prompt_ids if token_ids and prompts else None,
            token_ids=generated if token_ids and samples else None,
        )

    @property
    def memory_bytes(self) -> int:
        """An estimate of the bytes that the result takes in memory, used to limit buffers."""
        size_bytes = 500 + 2 * (len(self.error or "") + sum(map(len, self.text)))
        if self.reasoning is not None:
            size_bytes += sum(2 * len(text or "") for text in self.reasoning)
        for token_ids in (*(self.token_ids or ()), *(self.prompt_token_ids or ())):
            size_bytes += 40 * len(token_ids)
        return size_bytes + positions_bytes(self.logprobs) + positions_bytes(self.prompt_logprobs)

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


def _is_plain(completion: Completion) -> bool:
    """True for one sample without log-probabilities or reasoning, as most rows have."""
    samples, prompts = completion.samples, completion.prompts
    return (
        completion.error is None
        and len(samples) == 1
        and samples[0].logprobs is None
        and samples[0].reasoning is None
        and not any([prompt.logprobs is not None for prompt in prompts])
    )


def _known(values: tuple[Any, ...], otherwise: Any) -> tuple[Any, ...] | None:
    """The values, with another one in place of those that are None; None: all of them are."""
    if values.count(None) == len(values):
        return None
    return tuple([otherwise if value is None else value for value in values])


def positions_bytes(logprobs: Positions | None) -> int:
    """An estimate of the bytes that log-probabilities take in memory."""
    return sum(len(p) * 200 * (1 + (len(p[-1].top) if p else 0)) for p in logprobs) if logprobs else 0


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
