"""Messages between ranks: sweeps arrive as they were sent."""

from dataclasses import fields, replace

import numpy as np
import pytest

from batchgen.core.request import SamplingParams
from batchgen.engine.messages import SweepMessage, decode, encode
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.packed_batch import pack
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence

BLOCK = 16


def sweep(tier):
    """A sweep with prompts and sequences that decode."""
    scheduler = Scheduler({tier: BlockManager(64, BLOCK)}, SchedulerLimits(8, 64, compute_tier=tier))
    for i in range(6):
        scheduler.add(Sequence(i, i, 0, [100 * i + j for j in range(20 + i)], SamplingParams(max_tokens=4)))
    scheduled = scheduler.schedule()
    samples = [one.sequence for one in scheduled if one.samples]
    scheduler.commit(scheduled)
    for sequence in samples:
        sequence.tokens.append(1)
    return scheduler.schedule()


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_a_sweep_arrives_with_its_attention_plan(tier):
    options = {"kv_block_size": BLOCK, "key_bytes": 64, "windows": frozenset({None, 8}), "compute_tier": tier}
    batch = replace(pack(sweep(tier), **options, on_card=tier == "gpu"), logits_rows=[])
    (arrived,) = decode(encode(SweepMessage([batch], True))).batches
    (sent,), (segment,) = batch.segments, arrived.segments
    assert segment.plans.keys() == {None, 8} and bool(sent.plans[8].decode) == (tier == "cpu")
    for window, plan in sent.plans.items():
        items = [*zip(plan.decode, segment.plans[window].decode, strict=True)]
        items.append((plan.sequences, segment.plans[window].sequences))
        assert len(items) > (tier == "cpu"), "it has prompts, and sequences that decode"
        for one, other in items:
            for field in fields(one):
                assert np.array_equal(getattr(one, field.name), getattr(other, field.name))
