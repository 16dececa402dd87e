"""A pool of KV by layer that is cut anew between sweeps: no block is lost, or shared by those who may not."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.kv_expansion import KVExpansion
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence

BLOCK, LAYERS, MOST = 4, 4, 40
LONGEST = 12  # blocks


def make_scheduler(share_prefixes=True):
    expansion = KVExpansion((True, False, False, False), (0, 2, 1, 3), (1,) * LAYERS, MOST, 16, MOST, LONGEST, 1)
    pool = BlockManager(expansion.num_blocks, BLOCK, share_prefixes, expansion=expansion)
    limits = SchedulerLimits(8, 24, kv_seqs={KVPlacement.STREAMED: 8}, compute_tier="gpu")
    return Scheduler({"cpu": pool}, limits, lambda s: 1)


@dataclass
class Memory:
    """The tokens that each block of the pool holds."""

    tokens: dict[int, list[int]] = field(default_factory=dict)

    def write(self, sweep):
        for sequence, num_tokens in sweep:
            for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
                block, offset = sequence.block_table[position // BLOCK], position % BLOCK
                self.tokens[block] = [*self.tokens.get(block, [])[:offset], sequence.tokens[position]]

    def recut(self, recut):
        for old, new in recut.moved.items():
            assert old >= recut.after.num_blocks > new and new not in recut.moved
            self.tokens[new] = self.tokens[old]
        self.tokens = {block: tokens for block, tokens in self.tokens.items() if block < recut.num_blocks}

    def of(self, sequence):
        held = [token for block in sequence.block_table for token in self.tokens.get(block, [])]
        return held[: sequence.num_computed]


@settings(max_examples=some_draws(60), deadline=None)
@given(rng=st.randoms(use_true_random=False), shares=st.booleans())
def test_every_sequence_keeps_its_tokens_whatever_is_cut(rng, shares):
    scheduler, memory = make_scheduler(shares), Memory()
    prefixes = [[rng.randrange(3) for _ in range(16)] for _ in range(2)]
    left = {}
    for i in range(16):
        prompt = [*rng.choice(prefixes)[: rng.randint(0, 16)], *(rng.randrange(9) for _ in range(rng.randint(1, 9)))]
        sequence = Sequence(i, i, 0, prompt, SamplingParams(max_tokens=16))
        left[sequence] = rng.randint(1, 16)
        scheduler.add(sequence)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        if rng.random() < 0.3:
            recut = scheduler.recut(rng.choice(scheduler.expansion.choices))
            memory.recut(recut)
            assert scheduler.pools["cpu"].num_blocks == recut.after.num_blocks
        for sequence in scheduler.running:
            assert max(sequence.block_table, default=0) < scheduler.pools["cpu"].num_blocks
            assert memory.of(sequence) == sequence.tokens[: sequence.num_computed]
        sweep = scheduler.schedule()
        memory.write(sweep)
        scheduler.commit(sweep)
        for sequence, _ in sweep:
            if sequence.num_remaining == 0:
                sequence.tokens.append(100 + sequence.row_id)
                left[sequence] -= 1
                if not left[sequence]:
                    scheduler.finish(sequence)
    assert not scheduler.has_work and scheduler.pools["cpu"].num_used == 0
    assert scheduler.pools["cpu"].num_available == scheduler.pools["cpu"].num_blocks


def test_the_youngest_are_preempted_where_blocks_go_and_run_again():
    scheduler = make_scheduler(share_prefixes=False)
    rows = [Sequence(i, i, 0, [i] * 20, SamplingParams(max_tokens=1)) for i in range(8)]
    for row in rows:
        scheduler.add(row)
    while len(scheduler.running) < 7:
        sweep = scheduler.schedule()
        scheduler.commit(sweep)
        for sequence, _ in sweep:
            if sequence.num_remaining == 0:
                sequence.tokens.append(0)
    in_flight = list(scheduler.running)
    scheduler.recut(4)
    assert list(scheduler.running) == in_flight[: len(scheduler.running)]
    assert 0 < len(scheduler.running) < len(in_flight)
    assert scheduler.pools["cpu"].num_used <= scheduler.pools["cpu"].num_blocks == 14


def test_a_known_prefix_is_found_after_a_change_that_has_room_for_it():
    scheduler = make_scheduler()
    pool = scheduler.pools["cpu"]
    first = Sequence(0, 0, 0, list(range(20)), SamplingParams(max_tokens=1))
    scheduler.add(first)
    scheduler.commit(scheduler.schedule())
    scheduler.finish(first)
    for number in (4, 1, 2):
        scheduler.recut(number)
        assert pool.num_shareable([*range(20), 5]) == 20


def test_nothing_is_cut_while_another_call_of_the_engine_has_blocks_in_the_pool():
    scheduler = make_scheduler()
    other = Scheduler(scheduler.pools, scheduler.limits)
    other.add(Sequence(0, 0, 0, [1] * 9, SamplingParams(max_tokens=4)))
    other.commit(other.schedule())
    assert scheduler.recut(4) is None and scheduler.pools["cpu"].num_blocks == MOST
    assert other.recut(4) is not None


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_is_cut_says_which_layers_come_and_go(number):
    scheduler = make_scheduler()
    recut = scheduler.recut(number)
    assert recut.coming == (0, 2, 1, 3)[1:number] and not recut.leaving
    back = scheduler.recut(1)
    assert back.leaving == recut.coming and not back.coming
