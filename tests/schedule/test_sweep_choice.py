"""Sequences that the CPU attends to: left out of a sweep where they would hold it up, and never for good."""

from dataclasses import replace

import pytest

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import LaneCosts
from batchgen.core.request import SamplingParams
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.sweep_choice import SweepChoice
from batchgen.schedule.sweep_estimate import BatchCut, CpuLoad, SweepLoad, sweep_seconds

# A sweep of 4 sequences on the device takes 14 s. Others take 10 s more for the second micro-batch and 1 s each, and
# the CPU attends to each in 0.5 s.
COSTS = LaneCosts(batch_s=10.0, token_s=1.0, cpu_seq_s=0.5)
UNEQUAL = BatchCut(2, "neo", 10)
ON_DEVICE, ON_CPU, OUTPUT = 4, 12, 60


class Job:
    """Rows that run until all of them have ended, on a machine whose CPU takes so many times what was planned."""

    def __init__(self, rows, cut=UNEQUAL, device=ON_DEVICE, blocks=2000, costs=COSTS, contention=1.0):
        """contention: factor on sweeps with CPU attention, which both processors make longer for each other."""
        quotas = {KVPlacement.DEVICE: device, KVPlacement.CPU: ON_CPU}
        limits = SchedulerLimits(device + ON_CPU, 64, kv_seqs=quotas, compute_tier="gpu")
        pools = {"gpu": BlockManager(blocks, 16, False), "cpu": BlockManager(5000, 16, False)}
        self.scheduler = Scheduler(pools, limits)
        self.choice = self.scheduler.sweep_choice = SweepChoice(costs, cut, ON_CPU)
        self.costs, self.contention = costs, contention
        self.cut, self.seconds, self.kept, self.ended = cut, 0.0, [], []
        for i in range(rows):
            self.scheduler.add(Sequence(i, i, 0, [5], SamplingParams(max_tokens=OUTPUT)))

    def sweep(self, slower):
        """Run a sweep, and return the numbers of the rows in it that the CPU attends to."""
        sweep = self.scheduler.schedule()
        assert sweep
        attended = [s for s in sweep if s.sequence.kv_placement is KVPlacement.CPU and s.decodes]
        decodes = sum(s.decodes for s in sweep) - len(attended)
        load = SweepLoad(sum(s.num_tokens for s in sweep if not s.decodes), 0, len(sweep), decodes)
        costs = replace(self.costs, cpu_seq_s=slower * self.costs.cpu_seq_s)
        taken = sweep_seconds(costs, self.cut, load, CpuLoad(len(attended)))
        longer = self.contention if attended else 1.0
        self.seconds += longer * taken.total
        busy_s = {"compute": longer * taken.compute, "cpu_attention": longer * taken.cpu_attention}
        self.choice.measured(longer * taken.total, busy_s)
        self.scheduler.commit(sweep)
        for sequence in [s.sequence for s in sweep]:
            if sequence.num_computed == len(sequence.tokens):
                sequence.tokens.append(7)
            if sequence.is_complete:
                self.scheduler.finish(sequence)
                self.ended.append(sequence.row_id)
        self.kept.append([s.sequence.row_id for s in attended])
        return self.kept[-1]

    def run(self, slower):
        while self.scheduler.has_work:
            self.sweep(slower)
        return self.seconds


def test_a_cpu_as_fast_as_planned_attends_to_all_of_its_sequences():
    job = Job(ON_DEVICE + ON_CPU)
    job.run(slower=1.0)
    assert job.choice.num_left_out == job.scheduler.num_moved == 0


# A CPU that takes some time for each micro-batch, which is as planned however slow it is.
FIXED = replace(COSTS, cpu_batch_s=4.0)


@pytest.mark.parametrize(
    ("slower", "costs", "contention"),
    [(40.0, COSTS, 1.0), (100.0, COSTS, 1.0), (40.0, FIXED, 1.0), (1.0, COSTS, 2.2)],
    ids=["slow", "very slow", "slow but for what each batch takes", "slow with CPU attention only"],
)
def test_cpu_attention_that_does_not_pay_costs_little_more_than_none(slower, costs, contention):
    rows = 10 * (ON_DEVICE + ON_CPU)
    without = Job(rows)
    without.scheduler.limits = SchedulerLimits(
        ON_DEVICE, 64, kv_seqs={KVPlacement.DEVICE: ON_DEVICE}, compute_tier="gpu"
    )
    late = Job(rows, costs=costs, contention=contention)
    late.run(slower)
    assert late.seconds < 1.1 * without.run(slower)
    assert sorted(late.ended) == list(range(rows))
    always = Job(rows, costs=costs, contention=contention)
    always.choice.choose = lambda sweep: sweep
    assert always.run(slower) > 1.2 * late.seconds


@pytest.mark.parametrize(
    ("cut", "slower"), [(UNEQUAL, 8), (BatchCut(2, "neo", None), 8), (BatchCut(3, "mixed", None), 9)]
)
def test_a_sweep_has_as_many_as_hold_up_nothing(cut, slower):
    """A CPU that much slower than planned has the time to attend to some of them."""
    job = Job(ON_DEVICE + ON_CPU, cut)
    for _ in range(30):
        kept = job.sweep(slower)
    load = SweepLoad(0, 0, ON_DEVICE, ON_DEVICE)
    assert 0 < len(kept) < ON_CPU
    assert sweep_seconds(COSTS, cut, load, CpuLoad(len(kept)), cpu_factor=slower).hidden
    assert not sweep_seconds(COSTS, cut, load, CpuLoad(len(kept) + 1), cpu_factor=slower).hidden


def test_no_row_starves_where_the_device_never_has_a_place():
    """Each has its turn, however late the CPU is, and turns take a small part of the time."""
    job = Job(ON_DEVICE + ON_CPU)
    for sequence in job.scheduler.waiting:
        sequence.sampling = SamplingParams(max_tokens=4000)
    for _ in range(40):
        job.sweep(50)
    before_s = job.seconds
    turns = [row for _ in range(1000) for row in job.sweep(50)]
    assert set(turns) == set(range(ON_DEVICE, ON_DEVICE + ON_CPU))
    assert (
        job.seconds - before_s
        < 1.1 * 1000 * sweep_seconds(COSTS, UNEQUAL, SweepLoad(0, 0, ON_DEVICE, ON_DEVICE), CpuLoad()).total
    )


def test_sequences_that_were_left_out_take_the_next_places_on_the_device():
    job = Job(3 * (ON_DEVICE + ON_CPU))
    job.run(slower=1e3)
    assert job.scheduler.num_moved >= ON_CPU - 1
    assert set(job.ended[ON_DEVICE : 2 * ON_DEVICE]) & set(range(ON_DEVICE, ON_DEVICE + ON_CPU))


def test_the_cpu_is_tried_again_and_used_once_it_is_fast():
    job = Job(4000)
    for _ in range(300):
        job.sweep(slower=100)
    assert sum(map(len, job.kept[-100:])) < 10
    for _ in range(2000):
        job.sweep(slower=1.0)
    assert len(job.kept[-1]) >= ON_CPU - 1


def test_a_cpu_that_stays_slow_is_tried_less_and_less_often():
    job = Job(4000)
    for _ in range(6000):
        job.sweep(slower=100)
    tries = [sum(map(bool, job.kept[start : start + 2000])) for start in (0, 4000)]
    assert 0 < tries[1] < tries[0] / 2


def test_a_row_too_long_for_the_device_goes_to_the_cpu_however_late_it_is():
    job = Job(60, blocks=20)
    job.scheduler.waiting[40].sampling = SamplingParams(max_tokens=16 * 20 + 2)
    for _ in range(2000):
        if job.scheduler.has_work:
            job.sweep(1e3)
    assert sorted(job.ended) == list(range(60))
