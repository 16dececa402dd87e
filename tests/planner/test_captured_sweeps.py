"""Up to how many tokens a plan for a GPU runs sweeps as CUDA graphs, and what it counts for that."""

from dataclasses import replace

import pytest
from planner_cases import CARDS, MIXTURE, inputs, llama_8b

from batchgen.core.workload import Workload
from batchgen.planner.captured_sweeps import HIDDEN_FROM, captured_tokens
from batchgen.planner.costs import layer_lanes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import problem_of
from batchgen.planner.sizes import activation_bytes, most_captured_tokens
from batchgen.planner.step_seconds import elementwise_s, matmul_s
from batchgen.profiler.shipped import shipped_profile

pytestmark = pytest.mark.usefixtures("one_thread")

LAUNCH_S = 2.5e-4


def launching(hardware, launch_s):
    """A machine that takes so long to launch a layer."""
    return replace(hardware, gpu=replace(hardware.gpu, launch_overhead_s=launch_s))


def card(name, model=None, launch_s=LAUNCH_S, **changes):
    hardware = launching(shipped_profile(name), launch_s)
    return replace(inputs(name, model), hardware=hardware, weight_format="bfloat16", **changes)


@pytest.mark.parametrize("model", [None, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", CARDS)
def test_sweeps_are_graphs_as_long_as_their_layers_do_not_hide_launches(name, model):
    s = card(name, model)
    most = captured_tokens(s)
    for tokens in {1, most // 2, most, most + 1, 2 * most} - {0}:
        computed_s = matmul_s(s, tokens).total + elementwise_s(s, tokens)
        assert (computed_s < HIDDEN_FROM * LAUNCH_S) == (tokens <= most)


def test_a_faster_card_and_a_slower_host_capture_larger_sweeps():
    assert captured_tokens(card("h100")) > captured_tokens(card("a10g"))
    assert captured_tokens(card("h100", launch_s=2 * LAUNCH_S)) > captured_tokens(card("h100")) > 100


def test_a_device_without_time_of_launches_captures_sweeps_of_a_token_for_each_sequence():
    s = inputs("h100", weight_format="bfloat16")
    assert captured_tokens(s) == 0
    assert most_captured_tokens(s) == s.gpu_batch_size


def lanes(s, tokens, on_gpu):
    layers = s.model.num_layers
    counts = (layers, 0, 0) if on_gpu else (layers - 8, 8, 0)
    counts = Counts(dict.fromkeys(s.model.layer_tensors, counts), {"gpu": 8}, (s.num_gpu_batches, 0), 1)
    return layer_lanes(s, Phase(1, 0, 0, tokens, 1), counts.placement(s))


def test_launches_count_where_a_sweep_is_no_graph():
    s = card("h100", captured_tokens=100)
    assert lanes(s, 100, on_gpu=True)["launch"] == 0
    assert lanes(s, 101, on_gpu=True)["launch"] == LAUNCH_S
    streamed = lanes(s, 100, on_gpu=False)
    assert 0 < streamed["launch"] < streamed["h2d"]
    two = replace(s, num_gpu_batches=2)
    assert lanes(two, 100, on_gpu=True)["launch"] == 2 * LAUNCH_S


def test_a_plan_captures_sweeps_and_has_memory_for_them():
    problem = problem_of(
        launching(shipped_profile("h100"), LAUNCH_S),
        llama_8b(),
        Workload.uniform(200, 200, 100),
        dtype="bfloat16",
        num_gpu_batches=1,
        max_model_len=400,
        process_bytes=1 << 29,
    )
    plan = plan_problem(problem)
    most = plan.policy.captured_tokens
    assert most == min(captured_tokens(card("h100")), plan.policy.max_num_batched_tokens)
    given = {"max_num_batched_tokens": 2048, "logit_rows": 1, "on_gpu": True}
    more = [activation_bytes(llama_8b(), 2, captured_tokens=tokens, **given) for tokens in (0, most)]
    assert more[1] - more[0] > most * 2 * llama_8b().hidden_size
