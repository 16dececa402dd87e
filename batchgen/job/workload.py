"""The workload of a job, estimated from a tokenized sample of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from batchgen.core.errors import InputError, RowError
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.core.request import Request, SamplingParams, ScoreRequest, cut_overlong
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.embedding import num_pooled, prompted, tokens_to_embed
from batchgen.engine.encode import LengthLimit, encode_all, encode_prompt
from batchgen.engine.scoring import paths_to_run, tokens_of
from batchgen.job.shared_prefixes import SampledPrompt, SharedPrefixes, shared_prefixes
from batchgen.models.tokenizers.harmony import Harmony
from batchgen.models.tokenizers.thinking import Thinking

if TYPE_CHECKING:
    from batchgen.job.options import JobOptions
    from batchgen.job.source import RequestSource
    from batchgen.models.pooling import VectorSpec
    from batchgen.models.tokenizers.tokenizer import Tokenizer

# Neighbouring rows often share a prefix, far ones differ in length: several stretches of rows are read.
_STRETCHES, _STRETCH_ROWS = 8, 32
# An input that is read as a stream has no number of rows; it is planned as if it had many.
UNKNOWN_ROWS = 100_000
_NOTHING = SharedPrefixes(0.0, None)
# Finished rows needed before their output lengths say more than --max-tokens does.
_ENOUGH_FINISHED = 32


class NoUsableRow(InputError):
    """The error for a job none of whose sampled rows makes a prompt."""


class EstimatedWorkload(NamedTuple):
    """An estimated workload.

    Attributes:
        workload: The workload.
        output_len_known: Whether output lengths are known. Otherwise they are bounded by max_tokens only.
        sampled: (number of the row, prompt tokens) of each sampled row that can be run.
    """

    workload: Workload
    output_len_known: bool
    sampled: tuple[tuple[int, int], ...] = ()


def measure_workload(
    source: RequestSource,
    tokenizer: Tokenizer,
    options: JobOptions,
    context: int,
    *,
    rows_left: int | None,
    finished_output_lens: Sequence[int] = (),
) -> EstimatedWorkload:
    """Estimate the workload of the rows that are left, from a sample that is tokenized.

    Sampled rows that would fail are left out; the same part of all other rows is taken to fail.

    Args:
        source: The job's input.
        tokenizer: The model's tokenizer.
        options: The job's options.
        context: The longest prompt plus output, in tokens.
        rows_left: Number of rows that are to be run; None: unknown.
        finished_output_lens: Numbers of tokens generated for rows that are done already.

    Raises:
        NoUsableRow: No sampled row makes a prompt.
    """
    numbered, sampled = _sampled_rows(source, tokenizer, options, context)
    rows = list(numbered.values())
    sequences = list(itertools.chain.from_iterable(rows))
    limits = [sequence.limit for sequence in sequences]
    copies = sum(sequence.copies for sequence in sequences) / len(sequences)
    seqs_per_row = copies * len(sequences) / len(rows)
    rows_to_run = (UNKNOWN_ROWS if rows_left is None else rows_left) * len(rows) / sampled
    expected = options.expected_output_len
    known = expected is not None or options.sampling.ignore_eos or max(limits) == 1
    known = known or all(sequence.of_choice is not None for sequence in sequences)
    if expected is not None:
        outputs = Lengths.of(min(limit, expected) for limit in limits)
    elif len(finished_output_lens) >= _ENOUGH_FINISHED:
        outputs, known = Lengths.of(max(1, min(n, max(limits))) for n in finished_output_lens), True
    else:
        outputs = Lengths.of(sequence.of_choice or sequence.limit for sequence in sequences)
    prompt_len = Lengths.of(len(sequence.tokens) for sequence in sequences)
    scored = [sequence.scored for sequence in sequences if sequence.scored is not None]
    # `sorts_rows` says no where rows take no time.
    are_sorted = source.requests_per_row == 1 and not source.dataset.is_stream
    shared = _shared(rows, copies, rows_to_run, are_sorted=are_sorted) if options.share_prefixes else _NOTHING
    workload = Workload(
        num_seqs=max(1, round(rows_to_run * seqs_per_row)),
        prompt_len=prompt_len,
        output_len=outputs,
        max_output_len=max(limits),
        shared_prefix_len=prompt_len.mean * shared.part,
        # Lengths are rounded: where all tokens are scored, their mean may be above that of the prompts.
        scored_len=min(sum(scored) / len(scored), prompt_len.mean) if len(scored) == len(sequences) else None,
        prefix_seqs=shared.num_seqs,
        is_pooled=source.head is not None,
    )
    tokens = tuple((row, sum(len(sequence.tokens) for sequence in of_row)) for row, of_row in numbered.items())
    return EstimatedWorkload(workload, known, tokens)


def _sampled_rows(
    source: RequestSource, tokenizer: Tokenizer, options: JobOptions, context: int
) -> tuple[dict[int, list[_Sampled]], int]:
    """The sequences of each sampled row that can be run, by its number, and the number of sampled rows.

    Raises:
        NoUsableRow: No row can be run.
    """
    reason = None
    seen: set[int] = set()
    rows: dict[int, list[_Sampled]] = {}
    for row, request in _sample(source):
        seen.add(row)
        try:
            sequences = _sequences(request, tokenizer, options.sampling, context, options.on_overlong, source.head)
            rows.setdefault(row, []).extend(sequences)
        except (RowError, InputError) as error:
            reason = reason or str(error)
    if not seen:
        raise NoUsableRow("the input has no rows: there is nothing to plan")
    if not rows:
        raise NoUsableRow(
            f"none of the {len(seen):,} rows sampled for planning can be run (the first: {reason}):"
            " give an --input that has prompts, or another --prompt-column"
        )
    return rows, len(seen)


@dataclass(frozen=True)
class _Sampled:
    """A sequence that a sampled row needs.

    Attributes:
        tokens: The token ids of the prompt, or of all that is scored.
        limit: The most tokens that the sequence generates.
        of_choice: The tokens of the longest choice, where the text is one of given choices; None: it is not.
        copies: The number of samples of the same prompt.
        scored: The number of last positions whose logits are needed; None: the sequence generates.
        whole_prompt: Whether the prompt's log-probabilities are asked for, so that its first copy takes over no KV.
    """

    tokens: Sequence[int]
    limit: int = 1
    of_choice: int | None = None
    copies: int = 1
    scored: int | None = None
    whole_prompt: bool = False

    @property
    def shareable(self) -> int:
        """Number of first tokens whose KV may be reused from other sequences."""
        return len(self.tokens) - (self.scored or 1)


def _sequences(
    request: Request | ScoreRequest,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    context: int,
    on_overlong: str,
    head: VectorSpec | None,
) -> list[_Sampled]:
    """The sequences of one row. Raises RowError, InputError."""
    if request.error is not None:
        raise RowError(request.error)
    limit = LengthLimit.of(context, on_overlong)
    if head is not None and isinstance(request, Request):
        texts = [prompted(each, head) for each in request.each_prompt]
        each_text = [tokens_to_embed(tokenizer, head, text, limit, on_overlong) for text in texts]
        return [_Sampled(tokens, scored=num_pooled(head, len(tokens))) for tokens in each_text]
    if isinstance(request, ScoreRequest):
        pair = tokens_of(tokenizer, request, encode_all(tokenizer, [request], limit), context, on_overlong)
        paths, _ = paths_to_run(pair, context)
        return [_Sampled(path.tokens, scored=len(path.targets)) for path in paths]
    parameters = request.sampling or sampling
    sequences = []
    for each in request.each_prompt:
        tokens = cut_overlong(encode_prompt(tokenizer, each, limit), parameters.max_tokens, context, on_overlong)
        if not 0 < len(tokens) < context:
            raise RowError("its prompt is too long" if tokens else "it has no prompt")
        limit_tokens, whole = min(parameters.max_tokens, context - len(tokens)), parameters.prompt_logprobs is not None
        longest = _longest_choice(parameters, tokenizer)
        of_choice = None if longest is None else min(longest, limit_tokens)
        sequences.append(_Sampled(tokens, limit_tokens, of_choice, parameters.n, whole_prompt=whole))
    return sequences


def _longest_choice(parameters: SamplingParams, tokenizer: Tokenizer) -> int | None:
    """Tokens of the longest choice and of the end behind it; None: the text is no choice, or thoughts precede it."""
    if not parameters.choice or Harmony.of(tokenizer) is not None or Thinking.of(tokenizer) is not None:
        return None
    return 1 + max(map(len, tokenizer.encode_batch(parameters.choice, add_special_tokens=False)))


def _sample(source: RequestSource) -> Iterator[tuple[int, Request | ScoreRequest]]:
    """Yield (number of the row, a request of the row) for each sampled row."""
    for first, batch in _sampled_batches(source):
        for number, request in enumerate(source.requests_of(batch, first)):
            yield first + number // source.requests_per_row, request


def _sampled_batches(source: RequestSource) -> Iterator[tuple[int, Any]]:
    """Record batches of the sampled rows, each with the number of its first row.

    The rows are spread over a Parquet file; of other inputs, they are the first rows.
    """
    rows = source.dataset.num_rows
    if source.dataset.format != "parquet" or rows is None or rows <= _STRETCHES * _STRETCH_ROWS:
        yield from _first_rows(source.batches(0, _STRETCH_ROWS), _STRETCHES * _STRETCH_ROWS)
        return
    start = next(source.batches(0, 1))[0]  # a shard does not begin at row 0
    for k in range(_STRETCHES):
        offset = k * (rows - _STRETCH_ROWS) // (_STRETCHES - 1)
        yield from _first_rows(source.batches(start + offset, _STRETCH_ROWS), _STRETCH_ROWS)


def _first_rows(batches: Iterator[tuple[int, Any]], count: int) -> Iterator[tuple[int, Any]]:
    for first, batch in batches:
        yield first, batch.slice(0, count)
        count -= batch.num_rows
        if count <= 0:
            return


def _shared(rows: list[list[_Sampled]], copies: float, rows_to_run: float, *, are_sorted: bool) -> SharedPrefixes:
    """The prefixes that the sequences of the job share.

    Args:
        rows: The sequences of each sampled row.
        copies: Mean number of samples of a prompt. Further copies reuse all of it but the last block.
        rows_to_run: Number of rows of the job.
        are_sorted: Whether all rows of the job are sorted.
    """
    prompts = [
        SampledPrompt(sequence.tokens, 0 if sequence.whole_prompt else sequence.shareable, number // _STRETCH_ROWS)
        for number, of_row in enumerate(rows)
        for sequence in of_row
    ]
    whole = sum(prompt.num_shareable // DEFAULT_KV_BLOCK_SIZE * DEFAULT_KV_BLOCK_SIZE for prompt in prompts)
    of_copies = whole / sum(len(prompt.tokens) for prompt in prompts)
    num_seqs = rows_to_run * len(prompts) / len(rows)
    of_rows = shared_prefixes(prompts, num_seqs, are_sorted=are_sorted)
    part = (of_rows.part + (copies - 1) * of_copies) / copies
    if of_rows.num_seqs is None:
        alone = not of_rows.part and copies > 1  # only the copies of a prompt share it
        return SharedPrefixes(part, copies if alone and copies < rows_to_run else None)
    return SharedPrefixes(part, of_rows.num_seqs * copies)
