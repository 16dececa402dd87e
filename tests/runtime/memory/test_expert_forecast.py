"""Forecasts of the experts that a layer's next sweep needs."""

import numpy as np

from batchgen.runtime.memory.expert_forecast import ExpertForecast


def sweep(forecast, layer, *batches):
    likely = forecast.likely(layer)
    for experts in batches:
        forecast.add(layer, experts)
    return likely


def test_what_all_micro_batches_of_five_sweeps_needed_is_likely():
    forecast = ExpertForecast(2, 8)
    for _ in range(5):
        assert sweep(forecast, 0, [5, 1], [1, 3]) == []
    assert forecast.likely(0) == [1, 3, 5]
    assert forecast.likely(1) == [], "layers are counted apart"


def test_a_sweep_that_read_all_experts_at_once_says_nothing():
    forecast = ExpertForecast(1, 4)
    for _ in range(5):
        sweep(forecast, 0, [2])
    assert sweep(forecast, 0) == sweep(forecast, 0) == [2]


def test_experts_that_nearly_all_sweeps_need_stay_expected_and_rare_ones_do_not():
    forecast, draw = ExpertForecast(1, 16), np.random.default_rng(0)
    expected = np.zeros(16)
    for _ in range(200):
        needed = [*range(4), *(4 + np.flatnonzero(draw.random(12) < 0.3)).tolist()]
        expected[sweep(forecast, 0, needed)] += 1
    assert expected[:4].tolist() == [195] * 4
    assert expected[4:].max() < 40


def test_a_change_of_what_is_needed_is_followed_within_a_few_sweeps():
    forecast = ExpertForecast(1, 8)
    for _ in range(20):
        sweep(forecast, 0, [0, 1])
    for _ in range(5):
        sweep(forecast, 0, [6])
    assert forecast.likely(0) == [6]
