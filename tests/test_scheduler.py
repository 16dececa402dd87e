"""The scheduler and block manager under random loads: every token runs once, no block leaks, nothing starves."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.request import SamplingParams
from batchgen.runtime.block_manager import BlockManager
from batchgen.runtime.scheduler import Scheduler, SchedulerLimits
from batchgen.runtime.sequence import Sequence

BLOCK = 4


def make(index, prompt, max_tokens):
    return Sequence(index, index, 0, list(prompt), SamplingParams(max_tokens=max_tokens))


@st.composite
def loads(draw):
    prefixes = [list(range(100 * p, 100 * p + draw(st.integers(0, 24)))) for p in range(3)]
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)),
            min_size=1,
            max_size=25,
        )
    )
    prompts = [
        (prefixes[p] + [1000 + i] * own, budget, min(wish, budget)) for i, (p, own, budget, wish) in enumerate(rows)
    ]
    longest = max(-(-(len(prompt) + budget) // BLOCK) for prompt, budget, _ in prompts)
    return (
        prompts,
        longest + draw(st.integers(0, 20)),
        draw(st.sampled_from([1, 3, 8, 64])),
        draw(st.sampled_from([1, 5, 16, 200])),
        draw(st.sampled_from(["continuous", "static"])),
        draw(st.booleans()),
        draw(st.sampled_from([None, 1, 3])),
    )


@settings(max_examples=200, deadline=None)
@given(loads())
def test_every_token_runs_once_and_no_block_leaks(load):
    prompts, num_blocks, max_seqs, max_tokens, admission, share, expected = load
    blocks = BlockManager(num_blocks, BLOCK, share)
    scheduler = Scheduler(
        blocks, SchedulerLimits(max_seqs, max_tokens, admission), (lambda s: expected) if expected else None
    )
    wanted = {}
    for i, (prompt, budget, wish) in enumerate(prompts):
        scheduler.add(make(i, prompt, budget))
        wanted[i] = wish
    content = {}  # block -> {offset: token chain}: what the KV of each slot was computed from
    done = {}
    for _ in range(5000):
        if not scheduler.has_work:
            break
        sweep = scheduler.schedule()
        assert sweep, "a scheduler with work gave an empty sweep"
        assert len(scheduler.running) <= max_seqs
        decodes = sum(len(s.sequence.tokens) - s.sequence.num_computed == 1 for s in sweep)
        assert sum(s.num_tokens for s in sweep) <= max(max_tokens, decodes)
        assert len({id(s.sequence) for s in sweep}) == len(sweep)
        users = Counter(b for s in scheduler.running for b in s.block_table)
        assert blocks.num_used == len(users) and all(blocks._users[b] == n for b, n in users.items())
        written = set()
        for s in sweep:  # all of the sweep's KV is written before any of it is read
            sequence = s.sequence
            for position in range(sequence.num_computed, sequence.num_computed + s.num_tokens):
                block, offset = sequence.block_table[position // BLOCK], position % BLOCK
                assert (block, offset) not in written
                written.add((block, offset))
                content[block, offset] = tuple(sequence.tokens[: position + 1])
        for s in sweep:
            sequence = s.sequence
            for position in range(sequence.num_computed + s.num_tokens):
                slot = sequence.block_table[position // BLOCK], position % BLOCK
                assert content[slot] == tuple(sequence.tokens[: position + 1]), "attends to another prompt's KV"
        sampling = [s.sequence for s in sweep if s.samples]
        scheduler.commit(sweep)
        for sequence in sampling:
            sequence.tokens.append(5000 + sequence.num_generated)
            if sequence.num_generated == wanted[sequence.request_index]:
                scheduler.finish(sequence)
                done[sequence.request_index] = sequence.generated
    assert sorted(done) == list(range(len(prompts)))
    assert all(len(done[i]) == wanted[i] for i in done)
    assert blocks.num_used == 0 and blocks.num_available == num_blocks and scheduler._reserved == 0
    if expected is None:
        assert scheduler.num_preempted == 0, "worst-case admission never makes a sequence give way"


def run_prompts(prompts, **kwargs):
    scheduler = Scheduler(BlockManager(500, BLOCK, **kwargs), SchedulerLimits(64, 64))
    for i, prompt in enumerate(prompts):
        scheduler.add(make(i, prompt, 1))
    ran = 0
    while scheduler.has_work:
        sweep = scheduler.schedule()
        ran += sum(s.num_tokens for s in sweep)
        scheduler.commit(sweep)
        for s in sweep:
            if s.sequence.num_computed == len(s.sequence.tokens):
                scheduler.finish(s.sequence)
    return ran


def test_a_common_prefix_is_prefilled_once():
    prompts = [[*range(40), 900 + i, 901 + i] for i in range(30)]
    assert run_prompts(prompts) == 40 + 30 * 2
    assert run_prompts(prompts, share_prefixes=False) == 30 * 42


def test_equal_prompts_still_run_their_last_token():
    assert run_prompts([list(range(40))] * 5) == 40 + 4 * 4


def test_static_admission_takes_no_one_in_until_the_block_is_done():
    scheduler = Scheduler(BlockManager(6, BLOCK), SchedulerLimits(64, 64, "static"))
    for i in range(4):  # each takes two blocks: three fit
        scheduler.add(make(i, [i] * 4, 4))
    entered = []
    while scheduler.has_work:
        sweep = scheduler.schedule()
        entered.append(sorted(s.sequence.request_index for s in sweep))
        sampling = [s.sequence for s in sweep if s.samples]
        scheduler.commit(sweep)
        for sequence in sampling:
            sequence.tokens.append(1)
            # Sequence 0 ends early; its place stays empty until the whole block has ended.
            if sequence.num_generated == (1 if sequence.request_index == 0 else 4):
                scheduler.finish(sequence)
    assert entered == [[0, 1, 2], [1, 2], [1, 2], [1, 2], [3], [3], [3], [3]]


def test_releasing_a_block_twice_is_caught():
    blocks = BlockManager(2, BLOCK)
    block = blocks.allocate()
    blocks.release([block])
    with pytest.raises(AssertionError, match="twice"):
        blocks.release([block])
