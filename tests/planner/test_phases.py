"""The fluid model of a job: nothing is lost, and it follows the scheduler."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.workload import Lengths, Workload
from batchgen.planner import fluid
from batchgen.planner.phases import deferral_of, phases_of


@settings(max_examples=some_draws(60), deadline=None)
@example(235, [14], [1, 1, 1, 1, 12], 7, 67, "continuous")
@given(
    rows=st.integers(1, 5000),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    outputs=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    max_num_seqs=st.integers(1, 400),
    budget=st.integers(64, 8192),
    admission=st.sampled_from(["continuous", "static"]),
)
def test_every_token_is_accounted_for(rows, prompts, outputs, max_num_seqs, budget, admission):
    workload = Workload(rows, Lengths(tuple(prompts)), Lengths(tuple(outputs)), max(outputs))
    phases = phases_of(workload, admission, max_num_seqs, budget)
    prefilled = sum(s.sweeps * s.prefill_tokens for s in phases)
    generated = sum(s.sweeps * s.sampled for s in phases)
    assert prefilled == pytest.approx(rows * workload.prompt_len.mean, rel=1e-6)
    assert generated == pytest.approx(rows * workload.output_len.mean, rel=1e-6)
    assert all(s.decode_seqs <= max_num_seqs * 1.05 + 1 for s in phases)


def test_static_admission_is_flexgens_block_schedule():
    """One sweep prefills the block, n - 1 decode it (FlexGen 4.3)."""
    prefill, decode = phases_of(Workload.uniform(144, 512, 32), "static", 144, 144 * 512)
    assert (prefill.sweeps, prefill.prefill_tokens, prefill.decode_seqs) == (1, 144 * 512, 0)
    assert (decode.sweeps, decode.prefill_tokens, decode.decode_seqs) == (31, 0, pytest.approx(144))
    assert decode.context == pytest.approx(512 + 16, abs=0.51)


def test_continuous_admission_keeps_the_block_fuller_than_static():
    lengths = Lengths((100,)), Lengths(tuple(range(8, 129, 8)))
    workload = Workload(4000, *lengths, 128)
    sweeps = {a: sum(s.sweeps for s in phases_of(workload, a, 128, 4096)) for a in ("continuous", "static")}
    assert sweeps["continuous"] < 0.75 * sweeps["static"]


def test_a_long_job_takes_as_many_sweeps_as_the_scheduler_would():
    """Against the scheduler itself, with prompts and outputs of many lengths."""
    import random

    from batchgen.core.request import SamplingParams
    from batchgen.schedule.block_manager import BlockManager
    from batchgen.schedule.scheduler import Scheduler
    from batchgen.schedule.scheduler_limits import SchedulerLimits
    from batchgen.schedule.sequence import Sequence

    draw = random.Random(3)
    rows = [(draw.randint(20, 200), draw.randint(1, 60)) for _ in range(1500)]
    for max_num_seqs, budget in ((32, 512), (64, 256), (200, 4096)):
        scheduler = Scheduler({"cpu": BlockManager(1 << 16, 16, False)}, SchedulerLimits(max_num_seqs, budget))
        for i, (prompt, output) in enumerate(rows):
            scheduler.add(Sequence(i, i, 0, [1] * prompt, SamplingParams(max_tokens=output)))
        sweeps = 0
        while scheduler.has_work:
            sweep = scheduler.schedule()
            scheduler.commit(sweep)
            for part in list(sweep):
                sequence = part.sequence
                if sequence.num_computed == len(sequence.tokens):
                    sequence.tokens.append(1)
                    if sequence.num_generated >= sequence.sampling.max_tokens:
                        scheduler.finish(sequence)
            sweeps += 1
        workload = Workload(len(rows), Lengths.of(p for p, _ in rows), Lengths.of(o for _, o in rows), 60)
        expected = sum(s.sweeps for s in phases_of(workload, "continuous", max_num_seqs, budget))
        assert expected == pytest.approx(sweeps, rel=0.08), (max_num_seqs, budget)


def test_a_shared_prefix_is_not_computed_again():
    phases = phases_of(Workload.uniform(100, 500, 4, shared_prefix_len=400), "continuous", 32, 2048)
    assert sum(s.sweeps * s.prefill_tokens for s in phases) == pytest.approx(100 * 100)


@pytest.mark.parametrize("rows", [200, 900, 5000])
@pytest.mark.parametrize("outputs", [Lengths((40,)), Lengths((20, 40, 60))])
def test_deferred_sequences_end_with_the_job(rows, outputs):
    """All tokens are accounted for, and no slot has more than one at a time, with as many slots as the job fills."""
    workload = Workload(rows, Lengths((100,)), outputs, outputs.max)
    deferral = deferral_of(workload, 16, 50, 9)
    if deferral is None:
        assert rows < 16 * (outputs.max * 9) / outputs.mean, "others end the job before one deferred sequence has"
        return
    assert 1 <= deferral.seqs <= 50 and deferral.rows % deferral.seqs == 0 and deferral.rows < rows
    phases = phases_of(workload, "continuous", 16, 512, deferral)
    deferred = sum(phase.sweeps * phase.deferred_tokens for phase in phases)
    decoded = sum(phase.sweeps * phase.decode_seqs for phase in phases)
    assert deferred == pytest.approx(deferral.rows * (outputs.mean - 1))
    assert deferred + decoded == pytest.approx(rows * (outputs.mean - 1))
    assert sum(phase.sweeps * phase.prefill_tokens for phase in phases) == pytest.approx(100 * rows)
    # Each is in flight for so many sweeps a token, and there are no more sweeps than the others take.
    sweeps = sum(phase.sweeps for phase in phases)
    assert deferred * deferral.sweeps_per_token <= deferral.seqs * sweeps * (1 + 1e-9)
    assert all(phase.tokens <= 512 + 16 + deferral.seqs for phase in phases)


@pytest.mark.parametrize("rows", [40, 2_000])
def test_prompts_of_many_sweeps_take_few_steps(rows, monkeypatch):
    """As many sweeps as in steps of one sweep each, which would be a hundred times as many as there are rows."""
    workload = Workload.uniform(rows, 100_000, 32)
    sizes = [fluid.Setting("continuous", size, budget) for size in (1, 4, rows) for budget in (1024, 4096, 20_000)]
    steps = []
    simulate = fluid._simulate
    monkeypatch.setattr(fluid, "_simulate", lambda *args: [taken := simulate(*args), steps.append(len(taken.there))][0])
    found = fluid.flow_through(workload, sizes)
    assert max(steps) < 10 * rows + 100
    if rows > 40:
        return
    monkeypatch.setattr(fluid, "_STEPS_PER_PROMPT", 1e9)
    for means, finer in zip(found, fluid.flow_through(workload, sizes), strict=True):
        for field in ("prefill_tokens", "prefill_seqs", "decode_seqs"):
            done, wanted = (sum(m.sweeps * getattr(m, field) for m in group) for group in (means, finer))
            assert done == pytest.approx(wanted, rel=1e-3)
        assert sum(m.sweeps for m in means) == pytest.approx(sum(m.sweeps for m in finer), rel=0.06)
