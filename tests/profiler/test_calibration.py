"""Factors between what single operations take and what they take in whole sweeps."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from batchgen.core.hardware import HardwareProfile
from batchgen.models.hf.config import config_of_hf
from batchgen.profiler import calibration
from batchgen.profiler.calibration import calibrated
from batchgen.profiler.calibration import fit as fit_within
from batchgen.profiler.shipped import shipped_profile

TINY = config_of_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    }
)
KINDS = 5


def fit(terms, times, most=3.0):
    return fit_within(terms, times, [(0.5, most)] * terms.shape[1])


def test_fit_recovers_factors():
    rng = np.random.default_rng(0)
    factors = np.array([0.8, 1.2, 1.0, 1.6, 2.4])
    terms = rng.uniform(0.0, 0.2, (10, KINDS))
    terms[np.arange(10), np.arange(10) % KINDS] += 1.0  # each kind is most of two sweeps
    assert fit(terms, terms @ factors) == pytest.approx(factors, rel=0.02)
    noisy = (terms @ factors) * rng.uniform(0.97, 1.03, 10)
    assert fit(terms, noisy) == pytest.approx(factors, rel=0.05)


def test_fit_weighs_short_sweeps_as_much_as_long_ones():
    terms = np.diag([1e-4, 1e-2, 1.0, 1e-3, 10.0])
    factors = np.array([1.5, 0.7, 1.1, 2.0, 0.9])
    assert fit(terms, terms @ factors) == pytest.approx(factors, rel=0.01)


def test_fit_leaves_alone_what_it_cannot_know():
    terms = np.zeros((4, KINDS))
    terms[:, 0] = [1, 2, 3, 4]  # no sweep says anything about the others
    assert fit(terms, 2 * terms[:, 0]) == pytest.approx([2, 1, 1, 1, 1], rel=0.01)
    # Two kinds that always come together share what is found.
    terms[:, 1] = terms[:, 0]
    assert fit(terms, 3 * terms[:, 0]) == pytest.approx([1.5, 1.5, 1, 1, 1], rel=0.01)


def test_fit_has_limits():
    terms = np.eye(KINDS)
    assert fit(terms, np.full(KINDS, 100.0)) == pytest.approx(np.full(KINDS, 3.0))
    assert fit(terms, np.full(KINDS, 0.01)) == pytest.approx(np.full(KINDS, 0.5))


def test_what_a_kind_at_its_limit_cannot_take_is_left_to_the_others():
    """One of the best factors without limits is cut.

    The others are the best beside it, and not what they were beside the uncut one.
    """
    terms = np.array([[n, 1.0] for n in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)] * 3)
    times = terms @ np.array([1.0, 6.0])
    assert fit(terms, times, most=10.0) == pytest.approx([1, 6], rel=0.05)
    first, second = fit(terms, times)
    assert second == 3.0

    def error(*factors):
        return np.square(terms @ factors / times - 1).sum()

    assert error(first, second) < 0.8 * error(1.0, 3.0)
    assert error(first, second) <= 1.05 * min(error(other, 3.0) for other in np.linspace(0.5, 3.0, 251))


def untouched(profile):
    """Everything that sweeps say nothing about."""
    values = profile.to_json()
    curves = ("gemm", "elementwise", "prefill_attention", "decode_attention", "shared_attention", "step_overhead_s")
    values["cpu"] = {name: value for name, value in values["cpu"].items() if not name.startswith(curves)}
    return {name: value for name, value in values.items() if name != "measured"}


def test_a_tiny_model_is_calibrated():
    before = replace(shipped_profile("zen4"), measured={"threads": 2})
    after = calibrated(before, TINY, "float32")
    factors = after.measured["sweep_factors"]["float32"]
    rates = {"gemm_few", "gemm_many", "elementwise", "prefill_attention", "decode_attention", "shared_attention"}
    assert set(factors) == rates | {"step_overhead"}
    assert 0.5 <= factors["step_overhead"] <= 10.0
    fixed_s = before.cpu.step_overhead_s * factors.pop("step_overhead")
    assert after.cpu.step_overhead_s == pytest.approx(fixed_s, rel=2e-3, abs=1e-9)
    assert all(0.5 <= factor <= 3.0 for factor in factors.values())
    assert after.measured["threads"] == 2
    for tokens in (1, 16, 1024):
        gemm = [p.cpu.gemm_flops_per_s["float32"].at(tokens=tokens, width=512) for p in (before, after)]
        assert gemm[1] == pytest.approx(gemm[0] / calibration.gemm_slowing(factors)(tokens), rel=2e-3)
    rates = [p.cpu.elementwise_bytes_per_s["float32"].at(tokens=50) for p in (before, after)]
    assert rates[1] == pytest.approx(rates[0] / factors["elementwise"], rel=2e-3)
    for group in (1, 2, 8):
        rates = [p.cpu.decode_attention_bytes_per_s["float32"].at(group=group) for p in (before, after)]
        assert rates[1] == pytest.approx(rates[0] / factors["decode_attention"], rel=2e-3)
    shared = after.cpu.shared_attention_flops_per_s["float32"].at(context=500)
    alone = before.cpu.prefill_attention_flops_per_s["float32"].at(context=500)
    assert shared == pytest.approx(alone / factors["shared_attention"], rel=2e-3)
    assert untouched(after) == untouched(before)
    assert HardwareProfile.from_json(after.to_json()) == after


def test_a_machine_that_differs_in_known_ways_is_recognised(monkeypatch):
    """Sweeps are timed by a profile that is off by known factors instead of a clock."""
    believed = shipped_profile("zen4")
    believed = replace(
        believed, cpu=replace(believed.cpu, shared_attention_flops_per_s=believed.cpu.prefill_attention_flops_per_s)
    )
    products = {"gemm_few": 2.0, "gemm_many": 1.3}
    slower = {
        "elementwise": 1.2,
        "prefill_attention": 2.0,
        "decode_attention": 0.8,
        "shared_attention": 1.4,
    }
    true = believed.scaled(**{name: 1 / factor for name, factor in slower.items()})
    slowing = calibration.gemm_slowing(products)
    gemm = {kind: rates.slowed(slowing) for kind, rates in true.cpu.gemm_flops_per_s.items()}
    fixed_s = 4 * believed.cpu.step_overhead_s
    true = replace(true, cpu=replace(true.cpu, gemm_flops_per_s=gemm, step_overhead_s=fixed_s))
    model = replace(TINY, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192)

    def sweep_s(profile, sweep, model=model):
        return sum(calibration._terms(profile, model, "float32", sweep))

    monkeypatch.setattr(
        calibration, "_runner", lambda part, dtype, *_: nullcontext(lambda sweep: sweep_s(true, sweep, part))
    )
    monkeypatch.setattr(calibration, "_LONGEST_S", 60.0)
    found = calibrated(believed, model, "float32")
    factors = found.measured["sweep_factors"]["float32"]
    assert {name: factors[name] for name in products} == pytest.approx(products, rel=0.05)
    for sweep in calibration._SWEEPS:
        assert abs(sweep_s(believed, sweep) / sweep_s(true, sweep) - 1) > 0.1
        assert sweep_s(found, sweep) == pytest.approx(sweep_s(true, sweep), rel=0.05)


def test_a_sweep_is_what_its_layers_take(monkeypatch):
    """What comes before and after them is measured elsewhere: of few layers it would be most of their fixed cost."""
    made = []

    class Executor:
        def __init__(self, *_, on_step, **__):
            self.on_step, self.closed = on_step, False
            made.append(self)

        def run(self, batches, on_logits):
            for kind, start, end in (
                ("embed", 0, 5),
                ("pre", 6, 7),
                ("attention", 7, 9),
                ("post", 9, 10),
                ("head", 12, 20),
            ):
                self.on_step(SimpleNamespace(kind=kind), start, end)

        def close(self):
            self.closed = True

    monkeypatch.setattr("batchgen.runtime.in_memory.in_memory", Executor)
    sweeps = list(calibration._SWEEPS[:2])
    with calibration._runner(TINY, "float32", HardwareProfile.kernels, sweeps) as run:
        assert [run(sweep) for sweep in sweeps] == [4, 4]
    assert made[0].closed


@pytest.mark.parametrize(("until_s", "rounds"), [(0.0, 2), (float("inf"), 6)])
def test_rounds_end_with_the_time_and_tell_how_alike_they_were(monkeypatch, until_s, rounds):
    runs = []

    def run(sweep):
        runs.append(sweep)
        return 0.01 * (1 + runs.count(sweep) % 2)

    monkeypatch.setattr(calibration, "_runner", lambda *_: nullcontext(run))
    found = calibrated(shipped_profile("zen4"), TINY, "float32", until_s)
    assert {runs.count(sweep) for sweep in calibration._SWEEPS} == {rounds + 1}, "the first is a warm-up"
    assert found.measured["spread"] == 2.0
