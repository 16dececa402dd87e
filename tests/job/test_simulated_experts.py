"""Experts that are read on demand, simulated: faster where the plan says so, and the bytes that are expected."""

from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box
from tiered import CPU, generate, make_parts, make_policy
from tiny_models import MODELS

from batchgen.core.plan import Plan, Policy, Prediction
from batchgen.core.workload import Workload
from batchgen.job.planning import PlanRequest, plan_job, problem_of
from batchgen.job.simulation import simulate_job
from batchgen.models.config import ModelConfig
from batchgen.planner.explanation import explanation_of

pytestmark = pytest.mark.usefixtures("one_thread")

NOTHING = Prediction(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, "compute", {"cpu": {"process": 1 << 29}}, {}, {})
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 8000, "num_experts": 128,
        "num_experts_per_tok": 8, "intermediate_size": 6144,
    }
)  # fmt: skip


def simulated_s(rows, tokens):
    """Of a job whose sweeps all have `rows` tokens."""
    policy = Policy(
        admission="continuous", gpu_batch_size=rows, num_gpu_batches=1, max_num_batched_tokens=512, max_model_len=64,
        kv_block_size=16, kv_blocks={}, share_prefixes=False, weight_format="float16", kv_format="float16",
        weight_layers=dict.fromkeys(MODEL.layer_tensors, (0, 0, 6)), kv_seqs={"cpu": rows}, on_demand_tokens=tokens,
    )  # fmt: skip
    budgets = {"cpu": 8 * GIB, "disk": 0}
    plan = Plan("model", "machine", "float16", Workload.uniform(rows, 1, 12), budgets, policy, {}, NOTHING)
    return simulate_job(plan, MODEL, cpu_box()).total_s


def planned(rows):
    request = PlanRequest("model", "float16", 64, process_bytes=1 << 29)
    problem = problem_of(cpu_box(), MODEL, Workload.uniform(rows, 1, 12), request)
    problem = replace(problem, budgets={"cpu": 4 * GIB, "disk": 0}, longest_tokens=32)
    return plan_job(problem, request, startup_s=0.0, loading_s=0.0, output_len_known=True)


def test_a_plan_says_in_which_sweeps_experts_are_read_on_demand():
    plan = planned(rows=4)
    most = plan.policy.on_demand_tokens
    assert plan.policy.weight_layers["up"][2] and 4 <= most < 64
    said = " ".join(explanation_of(plan).sentences)
    assert f"In sweeps of {most} tokens or fewer, only those experts are read" in said
    assert f"From {plan.prediction.break_even_tokens:,} tokens a sweep on" in said


def test_few_tokens_are_simulated_faster_and_many_slower():
    for rows in (1, 4):
        assert simulated_s(rows, tokens=rows) < 0.8 * simulated_s(rows, tokens=0)
    assert simulated_s(200, tokens=200) > simulated_s(200, tokens=0)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_kinds_of_steps_are_those_of_the_engine(num_batches, tiny_models, tmp_path):
    family, fields = MODELS["qwen3_moe, 8 of 64, shares as they are"]
    path, _ = tiny_models(family, **fields)
    policy = make_policy(
        path, CPU, weight_layers=dict.fromkeys(("qkv", "out", "up", "down"), (0, 0, 2)), kv_seqs={"cpu": 3},
        gpu_batch_size=3 // num_batches, num_gpu_batches=num_batches, activation_batches=(0, num_batches),
        on_demand_tokens=3,
    )  # fmt: skip
    done = []
    parts = make_parts(path, CPU, policy, tmp_path, on_step=lambda step, start, end: done.append(step))
    generate(parts, [[5], [9], [30]], [6, 6, 6])
    budgets = {"cpu": 4 * GIB, "disk": 0}
    plan = Plan("model", "machine", "float32", Workload.uniform(3, 1, 6), budgets, policy, {}, NOTHING)
    hardware = cpu_box()
    rates = {name: {"float32": of["float16"]} for name, of in vars(hardware.cpu).items() if isinstance(of, dict) and of}
    simulated = []
    simulate_job(
        plan, parts.config, replace(hardware, cpu=replace(hardware.cpu, **rates)),
        on_step=lambda step, start, end: simulated.append(step),
    )  # fmt: skip

    def of_sweeps(steps):  # what is read ahead when the job ends may be dropped
        kinds = [(s.kind, s.sweep, s.layer, s.batch) for s in steps if s.lane == "compute" or s.kind == "read_experts"]
        return sorted(kinds)

    assert of_sweeps(done) == of_sweeps(simulated)
    assert {"read_weight", "read_dense", "route", "read_experts"} <= {s.kind for s in done}
