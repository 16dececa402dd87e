"""Knowledge of a machine's rates, and its correction by measured times."""

import math
from dataclasses import asdict

import pytest

from batchgen.core.knowledge import DECODE, FEW, MANY, MEASURED, SPEED, Knowledge, few_share
from batchgen.core.typed_json import read_typed

PROMPTS, DECODING = {SPEED: 1.0, MANY: 0.9, DECODE: 0.1}, {SPEED: 1.0, FEW: 0.5, DECODE: 0.5}


def test_nothing_is_known_at_first_but_within_what_machines_of_a_kind_differ_by():
    first = Knowledge("avx2, 2 cores")
    low, high = first.interval(PROMPTS)
    assert first.mean(PROMPTS) == 0 and low * high == pytest.approx(1)
    assert 1.8 < high < 3


def test_a_measured_time_is_believed_as_far_as_its_noise_allows():
    first = Knowledge("avx2, 2 cores")
    exact, vague = (first.after(PROMPTS, math.log(2), noise) for noise in (0.01, 2.0))
    assert math.exp(exact.mean(PROMPTS)) == pytest.approx(2, rel=0.01)
    assert 1 < math.exp(vague.mean(PROMPTS)) < 1.1
    assert exact.deviation(PROMPTS) < 0.1 < vague.deviation(PROMPTS) < first.deviation(PROMPTS)


def test_a_slow_machine_is_slow_at_what_was_not_measured_too_but_that_is_less_certain():
    after = Knowledge("avx2, 2 cores").after(PROMPTS, math.log(2), 0.05)
    assert 1.5 < math.exp(after.mean(DECODING)) < 2
    assert after.deviation(PROMPTS) < after.deviation(DECODING) < Knowledge("avx2, 2 cores").deviation(DECODING)


def test_two_kinds_of_work_are_told_apart_by_times_with_other_parts():
    known = Knowledge("avx2, 2 cores")
    true = {SPEED: math.log(1.5), DECODE: math.log(1.4)}
    for _ in range(20):
        for parts in (PROMPTS, DECODING, {SPEED: 1.0, DECODE: 1.0}):
            known = known.after(parts, sum(share * true.get(name, 0.0) for name, share in parts.items()), 0.05)
    for parts in (PROMPTS, DECODING):
        expected = sum(share * true.get(name, 0.0) for name, share in parts.items())
        assert known.mean(parts) == pytest.approx(expected, abs=0.02)


def test_intervals_hold_nine_times_in_ten(seeded=7):
    """Machines are drawn from the prior, measured once with noise, and asked for another time."""
    import numpy as np

    draw = np.random.default_rng(seeded)
    sd = {SPEED: 0.4, FEW: 0.25, MANY: 0.1, DECODE: 0.25}
    inside = 0
    for _ in range(2000):
        machine = {name: draw.normal(0, value) for name, value in sd.items()}

        def time(parts, machine=machine):
            return sum(share * machine[name] for name, share in parts.items())

        known = Knowledge("t").after(PROMPTS, time(PROMPTS) + draw.normal(0, 0.1), 0.1)
        low, high = known.interval(DECODING)
        moment = draw.normal(0, 0.08)
        inside += low <= math.exp(time(DECODING) + moment - known.mean(DECODING)) <= high
    assert inside / 2000 == pytest.approx(0.9, abs=0.025)


def test_the_speed_drifts_from_job_to_job_and_what_is_peculiar_stays():
    known = Knowledge("t").after(PROMPTS, 0.3, 0.02)
    later = known.drifted().drifted()
    assert later.means == known.means
    assert later.deviation(PROMPTS) > known.deviation(PROMPTS)


def test_a_job_beside_others_is_expected_to_take_longer_and_less_certainly():
    known = Knowledge("t").after(PROMPTS, 0.3, 0.02)
    beside = known.slowed(2.0)
    assert math.exp(beside.mean(PROMPTS) - known.mean(PROMPTS)) == pytest.approx(2)
    assert beside.deviation(PROMPTS) > 2 * known.deviation(PROMPTS)
    assert known.slowed(1.0).mean(PROMPTS) == known.mean(PROMPTS)
    # Others that are expected to end may go on.
    passing = known.slowed(1.0, 2.0)
    assert passing.mean(PROMPTS) == known.mean(PROMPTS) and passing.deviation(PROMPTS) == beside.deviation(PROMPTS)


def test_a_measured_table_is_known_better():
    assert Knowledge(f"{MEASURED} x", prior=0.3).deviation(PROMPTS) < 0.5 * Knowledge("t").deviation(PROMPTS)


def test_models_and_formats_are_forgotten_in_the_order_of_their_last_use_but_kinds_of_work_are_not():
    known = Knowledge("t")
    for i in range(50):
        known = known.after({SPEED: 1.0, MANY: 1.0, f"model {i}": 1.0}, 0.1, 0.1)
    assert SPEED in known.means and "model 49" in known.means and "model 0" not in known.means
    assert len(known.means) < 50


@pytest.mark.parametrize(
    ("known", "source"),
    [
        (Knowledge("avx2, 2 cores"), "this machine's kind"),
        (Knowledge("avx2, 2 cores", probe_s=0.84), "this machine's kind and a probe of 0.8 s"),
        (Knowledge("avx2, 2 cores", probe_s=0.84, jobs=1), "this machine's kind and 1 earlier job"),
        (Knowledge("avx2, 2 cores", jobs=3), "this machine's kind and 3 earlier jobs"),
        (Knowledge(f"{MEASURED} cpu-12"), "this machine's measured rates"),
        (Knowledge("t", jobs=3).slowed(1.1), "this machine's kind and 3 earlier jobs"),
        (Knowledge("t").slowed(2), "this machine's kind; other programs slow it down 2.0 times"),
    ],
)
def test_the_source_is_said_in_words(known, source):
    assert known.source == source


def test_it_is_the_same_after_json():
    known = Knowledge("t", jobs=2, probe_s=0.5).after(PROMPTS, 0.2, 0.1)
    assert read_typed(Knowledge, asdict(known)) == known


def test_products_of_more_tokens_are_less_like_those_of_one():
    shares = [few_share(tokens) for tokens in (0, 1, 8, 64, 4096)]
    assert shares == pytest.approx([1, 1, 0.5, 0, 0])
