"""Drafts in a plan: some where weights stream, none where computation binds, and seconds as the simulator has them."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import inputs

from batchgen.core.draft_rates import NO_RATES, DraftRates, expected_accepted
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.drafts import drafted_phases
from batchgen.planner.explain import explain
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import problem_of
from batchgen.planner.simulation import simulate_job
from batchgen.planner.sizes import held_logit_rows
from batchgen.profiler.shipped import shipped_profile

SHAPES = Path(__file__).parents[2] / "recipes" / "throughput" / "shapes"
GIB = 1 << 30
NEARLY_ALL, HALF, FORCED = DraftRates(1.0, 0.95), DraftRates(0.5, 0.7), DraftRates(0.3, 0.5, forced=0.8)


def shape(name):
    return config_of_hf(json.loads((SHAPES / name / "config.json").read_text()))


@functools.cache
def planned(rates, *, memory, rows=32, **given):
    """The plan of a job of Llama-3.1-8B on a CPU."""
    job = replace(Workload.uniform(rows, 160, 96), drafts=rates)
    problem = problem_of(
        shipped_profile("zen4"), shape("llama-3.1-8b"), job, dtype="bfloat16", max_model_len=256,
        process_bytes=400 << 20, cpu_memory=memory, max_num_seqs=rows, **given,
    )  # fmt: skip
    return plan_problem(problem)


def simulated_s(plan):
    """The seconds of a plan's job, simulated from the first row to the last."""
    return simulate_job(plan, shape("llama-3.1-8b"), shipped_profile("zen4")).total_s


def sweeps_s(plan):
    return plan.prediction.total_s - plan.prediction.startup_s


@pytest.mark.parametrize("rates", [NEARLY_ALL, HALF, FORCED])
def test_a_plan_that_streams_weights_has_drafts_and_predicts_what_they_save(rates):
    without = planned(None, memory=7 * GIB)
    plan = planned(rates, memory=7 * GIB)
    assert without.prediction.drafts == ()
    assert plan.prediction.most_drafts(32) >= 4
    assert sweeps_s(plan) == pytest.approx(simulated_s(plan), rel=0.15)
    assert sweeps_s(plan) < sweeps_s(without) / (1 + 0.4 * (rates.accepted_of(8) + rates.forced) ** 0.5)
    assert any(line.startswith("drafts in a sweep: ") for line in explain(plan))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("most", [0, 4])
def test_forced_tokens_take_no_sweep_in_a_plan_without_drafts_too(most):
    rates = replace(NO_RATES, most=most, forced=0.8)
    for memory in (8 * GIB, 30 * GIB):
        without = planned(None, memory=memory, rows=64)
        plan = planned(rates, memory=memory, rows=64)
        assert plan.prediction.drafts == ()
        assert sweeps_s(plan) == pytest.approx(simulated_s(plan), rel=0.15)
        assert plan.prediction.sweeps == pytest.approx(without.prediction.sweeps / 1.8, rel=0.15)
        assert sweeps_s(plan) < (0.8 if memory == 8 * GIB else 0.95) * sweeps_s(without)
        lines = explain(plan)
        assert "forced tokens, which take no sweep: 0.80 for each other one" in lines
        assert any("drafts" in line for line in lines) == (memory == 8 * GIB and most > 0)
    budget = planned(rates, memory=30 * GIB, attention_budget="10%")
    assert not any("forced" in line for line in explain(budget))


def test_streaming_alone_has_drafts_where_only_that_is_asked_for():
    rates = replace(NEARLY_ALL, only_while_streaming=True)
    in_memory = planned(rates, memory=24 * GIB)
    assert in_memory.prediction.drafts == ()
    assert not any("drafts" in line for line in explain(in_memory))
    assert planned(rates, memory=8 * GIB).prediction.drafts
    unknown = planned(NO_RATES, memory=8 * GIB)
    assert unknown.prediction.drafts == ()
    assert "drafts are not counted, as no job with these prompts has measured any" in explain(unknown)


def test_nothing_is_drafted_where_computation_binds():
    without = planned(None, memory=30 * GIB, rows=256)
    plan = planned(DraftRates(0.5, 0.3), memory=30 * GIB, rows=256)
    assert plan.prediction.most_drafts(256) == 0
    assert sweeps_s(plan) == pytest.approx(simulated_s(plan), rel=0.15)
    assert sweeps_s(plan) <= 1.02 * sweeps_s(without)


def test_a_plan_says_why_nothing_can_be_drafted():
    plan = planned(NEARLY_ALL, memory=8 * GIB, attention_budget="10%")
    assert "no drafts: --attention-budget is 10%" in explain(plan)


def test_no_more_are_planned_than_the_option_allows():
    plan = planned(replace(NEARLY_ALL, most=3), memory=8 * GIB)
    assert 0 < max(drafts for _, drafts in plan.prediction.drafts) <= 3


def test_the_time_left_counts_drafts():
    without = planned(None, memory=8 * GIB)
    plan = planned(NEARLY_ALL, memory=8 * GIB)
    full = [times.prediction.sweep_times.seconds[0][-1][0] for times in (without, plan)]
    assert full[1] < full[0] / 2, "the seconds in which each sequence gains a token"


def test_expected_drafts_are_a_geometric_sum():
    assert expected_accepted(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert expected_accepted(1, 4) == 4
    assert DraftRates(0.5, 0.5).accepted_of(2) == pytest.approx(0.375)


def delta_net(**changes):
    """A shape of Qwen3.5 with states in most layers."""
    values = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "layer_types": ["full_attention" if j % 4 == 3 else "linear_attention" for j in range(32)],
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return config_of_hf(values | changes)


def test_a_plan_whose_weights_do_not_fit_keeps_state_slots_for_drafts_that_are_asked_for():
    config, hardware = delta_net(), shipped_profile("zen4")
    plans = {}
    by_default = replace(NEARLY_ALL, only_while_streaming=True)
    for rates in (None, NEARLY_ALL, by_default):
        job = replace(Workload.uniform(32, 160, 96), drafts=rates)
        problem = problem_of(
            hardware, config, job, dtype="bfloat16", max_model_len=256, process_bytes=400 << 20, cpu_memory=12 * GIB,
            max_num_seqs=32,
        )  # fmt: skip
        plans[rates] = plan_problem(problem)
    plan, without = plans[NEARLY_ALL], plans[None]
    assert plan.states.slots["cpu"] == without.states.slots["cpu"] + 32
    assert plan.prediction.drafts
    assert plans[by_default].states == without.states
    run = simulate_job(plan, config, hardware)
    assert sweeps_s(plan) == pytest.approx(run.total_s, rel=0.15)
    assert sweeps_s(plan) < sweeps_s(without) / 2


@pytest.mark.parametrize("head_on_gpu", [0, 1])
def test_drafts_have_rows_of_logits_where_these_are_held_for_all_chunks_of_the_vocabulary(head_on_gpu):
    """Streamed weights have many drafts; a head in host memory lets a sweep have fewer."""
    rates = replace(NEARLY_ALL, proposed=1.0)
    s = inputs(max_num_seqs=64, weight_format="bfloat16", workload=replace(Workload.uniform(64, 160, 96), drafts=rates))
    streamed = dict.fromkeys(s.model.layer_tensors, (0, s.model.num_layers, 0))
    at = Counts(streamed, {"gpu": s.max_num_seqs}, (s.num_gpu_batches, 0), head_on_gpu).placement(s)
    (phase,) = drafted_phases(s, [Phase(96.0, 0.0, 0.0, 64.0, 200.0)], at)
    most = held_logit_rows(s.model, int(s.element_bytes), s, s.workload.task)
    assert 64 < most < s.max_num_batched_tokens
    assert (phase.decode_tokens > most) == bool(head_on_gpu) and phase.most_drafts
