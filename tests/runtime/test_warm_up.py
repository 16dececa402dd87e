"""The sweeps of dummy rows that warm up a device."""

import pytest

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.runtime.warm_up import dummy_sweeps
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.extents import ExtentManager
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import PENDING

SEQUENCES, TOKENS = 12, 64


def sweeps_of(scheduler, **options):
    return dummy_sweeps(
        scheduler, lambda sweep: [sweep], list, max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS, longest=300,
        vocab_size=50, sampling=SamplingParams(), sampled_token=PENDING, **options,
    )  # fmt: skip


def scheduler_of(placements, admission="continuous"):
    pools = {"gpu": BlockManager(64, 16), "cpu": BlockManager(64, 16), "disk": ExtentManager(64, 16)}
    limits = SchedulerLimits(
        SEQUENCES, TOKENS, admission, dict.fromkeys(placements, SEQUENCES // len(placements)), compute_tier="gpu"
    )
    return Scheduler({tier: pool for tier, pool in pools.items() if tier in {p.tier for p in placements}}, limits)


@pytest.mark.parametrize("admission", ["continuous", "static"])
@pytest.mark.parametrize(
    "placements", [(KVPlacement.DEVICE, KVPlacement.DEFERRED), tuple(KVPlacement)], ids=["two", "all"]
)
def test_rows_of_every_placement_begin_go_on_and_decode(placements, admission):
    """Though the host does not know the tokens that a device with streams has sampled."""
    scheduler, seen = scheduler_of(placements, admission), set()
    limits = scheduler.limits
    for (batch,) in sweeps_of(scheduler):
        for scheduled in batch:
            sequence = scheduled.sequence
            decodes = sequence.num_computed >= sequence.num_prompt
            seen.add(
                (sequence.kv_placement, "decodes" if decodes else "goes on" if sequence.num_computed else "begins")
            )
    assert seen == {(placement, what) for placement in placements for what in ("begins", "goes on", "decodes")}
    assert not scheduler.has_work and limits.max_num_seqs == SEQUENCES


@pytest.mark.parametrize(("num_blocks", "most_staged", "longest"), [(3, None, 47), (64, 80, 79), (64, None, 129)])
def test_long_rows_fit_the_memory_of_their_placement(num_blocks, most_staged, longest):
    kv_seqs = {KVPlacement.DEVICE: 11, KVPlacement.STREAMED: 1}
    limits = SchedulerLimits(SEQUENCES, TOKENS, kv_seqs=kv_seqs, compute_tier="gpu", most_staged_tokens=most_staged)
    scheduler = Scheduler({"gpu": BlockManager(64, 16), "cpu": BlockManager(num_blocks, 16)}, limits)
    lengths = dict.fromkeys(kv_seqs, 0)
    for (batch,) in sweeps_of(scheduler):
        for scheduled in batch:
            placement = scheduled.sequence.kv_placement
            lengths[placement] = max(lengths[placement], scheduled.num_keys)
    assert lengths == {KVPlacement.DEVICE: 129, KVPlacement.STREAMED: longest}


def test_long_rows_are_so_long_that_they_choose_pages():
    scheduler = scheduler_of((KVPlacement.DEVICE,))
    dense_tokens = AttentionBudget.of("270").most_dense_tokens(16)
    longest = max(s.num_keys for (batch,) in sweeps_of(scheduler, dense_tokens=dense_tokens) for s in batch)
    assert longest == dense_tokens + 2 == 274
