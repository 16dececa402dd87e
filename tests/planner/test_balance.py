"""Two micro-batches of unequal size, as NEO makes them: costed, simulated and cut by the same shares."""

from dataclasses import replace

import pytest
from planner_cases import constant, gpu_box, inputs_of_batches, llama_8b

from batchgen.core.hardware import ComputeRates, Rates
from batchgen.core.plan import first_batch_cpu_share
from batchgen.planner.balance import with_unequal_batches
from batchgen.planner.costs import layer_lanes, sweep_overhead_s, unequal_batches
from batchgen.planner.lane_costs import lane_costs
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.schedule.sweep_estimate import BatchCut, CpuLoad, SweepLoad, sweep_seconds

FIXED_S, TOKEN_S = 3e-3, 1e-5  # of products in a layer


def box(cpu_attention=2e10):
    """Products take a time of their own and as much again for each token; of all else only attention takes any."""
    flops = 2 * llama_8b().matmul_params_per_layer
    points = tuple((tokens, flops * tokens / (FIXED_S + TOKEN_S * tokens)) for tokens in range(1, 4097))
    gpu = ComputeRates(
        gemm_flops_per_s={"float16": Rates(("tokens",), points)},
        prefill_attention_flops_per_s={"float16": constant(1e18)},
        decode_attention_bytes_per_s={"float16": constant(4e11)},
        elementwise_bytes_per_s={"float16": constant(1e18)},
    )
    cpu = ComputeRates(decode_attention_bytes_per_s={"float16": constant(cpu_attention)})
    links = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s", "dram_bytes_per_s"), 1e18)
    return gpu_box(gpu=gpu, cpu=cpu, gpu_memory_bytes=40 << 30, **links)


def inputs_of(hardware, **changes):
    return replace(inputs_of_batches(hardware, llama_8b(), 2, max_num_batched_tokens=2048), **changes)


def placed(s, on_gpu, on_cpu):
    layers = dict.fromkeys(s.model.layer_tensors, (s.model.num_layers, 0, 0))
    return Counts(layers, {"gpu": on_gpu, "cpu": on_cpu}, (2, 0), 1).placement(s)


def test_the_fixed_time_of_matmuls_is_in_the_plan_as_balance_tokens():
    s = with_unequal_batches(inputs_of(box()), 40)
    assert s.balance.tokens == pytest.approx(FIXED_S / TOKEN_S, rel=0.02)
    assert s.balance.cpu_frac == 40 / 64
    flat = replace(
        box(), gpu=replace(box().gpu, gemm_flops_per_s={"float16": Rates(("tokens",), ((1, 1.0), (4096, 4096.0)))})
    )
    assert first_batch_cpu_share(2048, 40, with_unequal_batches(inputs_of(flat), 40).balance.tokens) == pytest.approx(
        0.5, abs=1e-3
    )


@pytest.mark.parametrize("prompt_tokens", [0, 500, 1900])
def test_neither_processor_waits_where_both_have_time_enough(prompt_tokens):
    """A layer takes what the busier of both does, whichever that is."""
    phase, bound_by = Phase(1, prompt_tokens, prompt_tokens / 200, 64, 800), set()
    for cpu_attention in (2e9, 2e10, 5e10, 2e11):
        s = with_unequal_batches(inputs_of(box(cpu_attention)), 40)
        lanes = layer_lanes(s, phase, placed(s, 24, 40))
        busier = max(lanes["compute"], lanes["cpu_attention"])
        bound_by.add(lanes["compute"] > lanes["cpu_attention"])
        assert max(lanes.values()) == pytest.approx(busier, rel=2e-3)
        first, second = unequal_batches(s, phase)
        assert first.tokens + second.tokens == pytest.approx(phase.tokens)
    assert bound_by == {True, False}


def test_a_sweep_of_prompts_is_one_batch():
    s = with_unequal_batches(inputs_of(box()), 40)
    first, second = unequal_batches(s, Phase(1, 1500, 7, 0, 200))
    assert (first.tokens, second.tokens) == (1500, 0)


def test_a_running_job_counts_the_second_micro_batch_only_in_sweeps_that_have_one():
    hardware = replace(box(), sweep_overhead_s=1.0, batch_overhead_s=0.25, sequence_overhead_s=0.01)
    s = with_unequal_batches(inputs_of(hardware), 40)
    costs, cut = lane_costs(s, placed(s, 24, 40)), BatchCut(2, "neo", s.balance.tokens)
    between = replace(costs, **dict.fromkeys(("batch_s", "token_s", "row_s", "cpu_batch_s", "sent_seq_s"), 0.0))
    nothing = replace(between, cpu_seq_s=0.0, cpu_key_s=0.0)
    alone, both = (sweep_seconds(nothing, cut, SweepLoad(), CpuLoad(seqs)).total for seqs in (0, 40))
    assert both == pytest.approx(sweep_overhead_s(s, Phase(1, 0, 0, 64, 1.0)))
    assert both - alone == pytest.approx(0.25)
