"""Sweeps of dummy rows for a device that has not computed anything yet (`Executor.warm_up`).

Also rows of every kind to take the logits of these sweeps. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from itertools import count

import numpy as np

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.runtime.grammar import Unconstrained
from batchgen.schedule.packed_batch import PackedBatch
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import LogitsRow, Sequence

# Tokens of a long row, at most: two sweeps' where these have fewer.
_LONG = 640
# Of each row: by the sweep that prefills, and by the one that decodes.
_TOKENS = 2


def dummy_sweeps(  # a plain function of what a sweep is made with, so that the generator needs no engine
    scheduler: Scheduler,
    split: Callable[[list[ScheduledSequence]], list[list[ScheduledSequence]]],
    pack: Callable[[list[ScheduledSequence]], PackedBatch],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    longest: int,
    vocab_size: int,
    sampling: SamplingParams,
    sampled_token: int,
    dense_tokens: int = 0,
) -> Iterator[list[PackedBatch]]:
    """Yield the micro-batches of some sweeps, each to be run before the next is asked for.

    First the largest that prefill and that decode, with sequences of all KV placements as far as they are admitted.
    Then sweeps of a quarter as many tokens, a sixteenth, and so on: libraries have other matrix products for few rows
    than for many. Then one that does both. Last a long row in each KV placement, alone: its prompt is cut into chunks,
    of which the second reads KV of the first.

    Args:
        scheduler: scheduler with empty pools, used for nothing else.
        longest: most tokens of one sequence.
        sampling: sampling parameters of most rows.
        sampled_token: stands for sampled tokens in the next sweep; but the host knows those that it penalises.
        dense_tokens: most tokens of a row that attends to all of its KV pages; the long rows have more, if they fit.
    """
    if sampling.penalizes_output:
        sampled_token = 0
    numbers = count()

    def rows(num: int, length: int) -> list[Sequence]:
        length = max(1, min(length, longest - _TOKENS))
        own = replace(sampling, max_tokens=max(1, min(_TOKENS, longest - length)))
        return [
            Sequence(i, i, 0, [(7919 * i + j) % vocab_size for j in range(length)], own)
            for i in (next(numbers) for _ in range(num))
        ]

    sizes = [max(max_num_batched_tokens, max_num_seqs)]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // 4))
    length = max_num_batched_tokens // max_num_seqs
    # Half of them leave their quotas to others, whose prompts then come with tokens of the rest.
    some = rows(max_num_seqs, length)
    for sequence in some[::2]:
        sequence.sampling = replace(sequence.sampling, max_tokens=1)
    limits, long = scheduler.limits, max(min(_LONG, 2 * max_num_batched_tokens), dense_tokens + 1)
    groups = [(limits, [rows(min(max_num_seqs, tokens), tokens // max_num_seqs)]) for tokens in sizes]
    groups.append((limits, [some, rows(max_num_seqs // 2, length)]))
    for placement in KVPlacement:
        if placement.tier in scheduler.pools and limits.quota(placement):
            most = min(scheduler.pools[placement.tier].longest_tokens, limits.most_tokens(placement) or longest)
            groups.append((replace(limits, kv_seqs={placement: 1}), [rows(1, min(long, most - _TOKENS))]))
    for own_limits, waves in groups:
        scheduler.limits = own_limits
        while True:
            for sequence in waves.pop(0) if waves else ():
                scheduler.add(sequence)
            sweep = scheduler.schedule()
            if not sweep:
                break
            yield [pack(batch) for batch in split(sweep)]
            scheduler.waiting.clear()  # those that there is no quota for
            # Tokens that begin go through all layers before the next sweep is asked for.
            sampled = [s.sequence for s in sweep if s.samples or s.defers]
            scheduler.commit(sweep)
            for sequence in sampled:
                # Of placement DEFERRED no token is begun after one that the host does not know.
                is_deferred = sequence.kv_placement is KVPlacement.DEFERRED
                sequence.tokens.append(0 if is_deferred else sampled_token)
                if sequence.num_generated == sequence.sampling.max_tokens:
                    scheduler.finish(sequence)
        assert not scheduler.running, "a dummy row has not run to its end"


def sampled_every_way(sequences: List[Sequence], vocab_size: int) -> Iterator[list[Sequence]]:
    """For each way of sampling, yield sequences in place of the given ones: all with it, or every other one as well."""
    sampling = SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, logprobs=3, repetition_penalty=1.5)

    def varied(own: Sequence) -> Sequence:
        made = Sequence(own.request_index, own.row_id, 0, [0], sampling)
        made.constraint = Unconstrained(np.full(-(-vocab_size // 32), -1, dtype=np.int32))
        return made

    greedy = SamplingParams()
    yield [Sequence(own.request_index, own.row_id, 0, [0], greedy) for own in sequences]
    for step in (1, 2):
        yield [own if i % step else varied(own) for i, own in enumerate(sequences)]


def scored(rows: List[LogitsRow]) -> list[LogitsRow]:
    """Positions to be scored, in place of the given rows."""
    sampling = SamplingParams(logprobs=3)
    return [(Sequence(i, i, 0, [0], sampling, targets=((0, 1),)), 0) for i in range(len(rows))]
