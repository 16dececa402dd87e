"""Up to how many tokens a plan for a GPU multiplies 4-bit weights as they are stored, and what it counts for that."""

from dataclasses import replace

import pytest
from planner_cases import CARDS, MIXTURE, inputs, llama_8b

from batchgen.core.dtypes import packed_matmul_key
from batchgen.core.workload import Workload
from batchgen.planner.costs import phase_dequantize_s, phase_matmul_s
from batchgen.planner.explanation import explanation_of
from batchgen.planner.packed_products import packed_tokens
from batchgen.planner.phases import Phase
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import problem_of
from batchgen.planner.simulation import simulate_job
from batchgen.profiler.shipped import shipped_profile

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_s(s, tokens):
    phase = Phase(1, 0, 0, tokens, 1)
    return phase_matmul_s(s, phase) + phase_dequantize_s(s, phase)


@pytest.mark.parametrize("model", [None, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", CARDS)
def test_products_are_those_that_are_faster_for_any_number_of_tokens(name, model):
    s = inputs(name, model)
    most = packed_tokens(s)
    chosen, packed, numbers = (replace(s, packed_tokens=tokens) for tokens in (most, 1 << 30, 0))
    assert most >= 64
    for tokens in (1, 16, most // 2, most, most + 1, 2 * most, 100_000):
        assert layer_s(chosen, tokens) == pytest.approx(min(layer_s(packed, tokens), layer_s(numbers, tokens)))
    assert layer_s(packed, 1) < layer_s(numbers, 1) / 4


def test_mixtures_multiply_as_stored_up_to_more_tokens():
    """All their experts would be dequantized, and each multiplies some of the tokens."""
    assert packed_tokens(inputs(model=MIXTURE)) > 3 * packed_tokens(inputs())


def test_several_micro_batches_read_the_weights_each():
    few, many = (packed_tokens(inputs(num_gpu_batches=batches, max_num_seqs=64)) for batches in (1, 16))
    assert few > 64 and many != few


@pytest.mark.parametrize("case", ["cpu", "t4", "other weights", "no rate"])
def test_nothing_is_multiplied_as_stored_where_no_kernel_can(case):
    s = inputs(case if case in ("cpu", "t4") else "h100")
    if case == "other weights":
        s = replace(s, weight_format="bfloat16")
    if case == "no rate":
        gpu = s.hardware.compute
        tables = {name: rates for name, rates in gpu.gemm_flops_per_s.items() if "int4" not in name}
        s = replace(s, hardware=replace(s.hardware, gpu=replace(gpu, gemm_flops_per_s=tables)))
    assert packed_tokens(s) == 0


def test_rates_of_either_16_bit_dtype_serve_the_other():
    rates = shipped_profile("h100").compute
    assert rates.has_rates("gemm_flops_per_s", packed_matmul_key("float16"))
    assert not rates.has_rates("gemm_flops_per_s", packed_matmul_key("float32"))
    assert packed_tokens(inputs(compute_format="float16")) == packed_tokens(inputs())


def planned(rows):
    given = {"dtype": "bfloat16", "weights": "int4", "max_model_len": 64, "process_bytes": 1 << 29}
    return plan_problem(problem_of(shipped_profile("h100"), llama_8b(), Workload.uniform(rows, 1, 32), **given))


def test_a_plan_says_in_which_sweeps_and_is_simulated_so():
    plan = planned(rows=16)
    most = plan.policy.packed_tokens
    assert plan.policy.weight_format == "int4" and most >= 64
    assert f"In sweeps of {most} tokens or fewer, weights are multiplied as they are stored." in " ".join(
        explanation_of(plan).sentences
    )
    as_numbers = replace(plan, policy=replace(plan.policy, packed_tokens=0))
    packed_s, numbers_s = (simulate_job(p, llama_8b(), shipped_profile("h100")).total_s for p in (plan, as_numbers))
    assert packed_s < 0.7 * numbers_s
