"""Rates of updates of states, as the profiler measures them."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from batchgen.core.dtypes import STATE_DTYPES
from batchgen.core.hardware import ComputeRates
from batchgen.models.state_layers import DeltaNet, StateRow
from batchgen.profiler import compute, state_rates
from batchgen.profiler.timing import Device, Effort, Trial

SHAPE = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=16, kernel=4)
TINY = Effort(batches=(1, 4, 300), prefill_contexts=(16, 70), point_s=0.001, sample_s=0.0002, pool_bytes=64 << 10)


@dataclass(frozen=True)
class Recorder(Device):
    """A device that runs each trial once and keeps the work it is said to do."""

    work: list = field(default_factory=list)

    def rate(self, trial: Trial, effort: Effort) -> float:
        trial.run(0), trial.run(1)
        self.work.append(trial.work)
        return 1e12


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_an_update_counts_whole_rows_read_and_written(state_dtype):
    device = Recorder("cpu")
    rates = state_rates.update_rates(device, SHAPE, state_dtype, torch.bfloat16, TINY)
    slots = device.pool(getattr(torch, state_dtype), TINY).numel() // math.prod(SHAPE.matrix_shape)
    assert 4 < slots < 300
    assert rates.axes == ("batch",) and [batch for batch, _ in rates.points] == [1, 4, 300]
    row = StateRow(SHAPE, state_dtype, "bfloat16")
    assert device.work == [2 * count * row.num_bytes for count in (1, 4, slots)]


def test_a_prompt_counts_the_flops_of_its_chunks():
    device = Recorder("cpu")
    rates = state_rates.prefill_rates(device, SHAPE, torch.float32, TINY)
    assert rates.axes == ("context",) and device.work == [tokens * SHAPE.prefill_flops for tokens in (16, 70)]


def test_a_state_that_is_larger_than_the_pool_is_measured_alone():
    shape = replace(SHAPE, key_dim=512, value_dim=512)
    device = Recorder("cpu")
    state_rates.update_rates(device, shape, "float32", torch.float32, TINY)
    assert set(device.work) == {2 * StateRow(shape, "float32", "float32").num_bytes}


def test_states_are_measured_for_no_model_and_for_models_that_have_them():
    usual = compute.subjects_of("cpu", TINY, None)
    assert usual.state == state_rates.USUAL
    plain = compute.subjects_of("cpu", TINY, usual.main)
    assert plain.state is None
    assert compute.measure_states(Recorder("cpu"), "float32", plain, TINY, run_now) == ComputeRates()
    rates = compute.measure_states(Recorder("cpu"), "float32", replace(plain, state=SHAPE), TINY, run_now)
    assert set(rates.state_update_bytes_per_s) == set(STATE_DTYPES)
    assert set(rates.state_prefill_flops_per_s) == {"float32"}


def run_now(name, measurement):
    return measurement()
