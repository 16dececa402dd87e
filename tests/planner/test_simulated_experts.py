"""Experts that are read on demand, simulated: faster where the plan says so, and the bytes that are expected."""

from dataclasses import replace

import pytest
import torch
from known_plans import plan_problem
from model_tables import MODELS
from planner_cases import GIB, cpu_box
from tiered import CPU, generate, make_parts, make_policy

from batchgen.core.dtypes import matmul_key
from batchgen.core.plan import Plan, Policy, Prediction
from batchgen.core.routing import Routing
from batchgen.core.workload import Workload
from batchgen.models.files import read_config, resolve_model
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.costs import job_seconds, layer_lanes, moved_bytes
from batchgen.planner.explanation import explanation_of
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.problem import CostInputs, problem_of
from batchgen.planner.simulation import simulate_job

pytestmark = pytest.mark.usefixtures("one_thread")

NOTHING = Prediction(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, "compute", {"cpu": {"process": 1 << 29}}, {}, {}, (), {}, 0, 0)
MODEL = config_of_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "vocab_size": 8000, "num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 6144,
    }
)  # fmt: skip


def plan_with(rows, tokens):
    """A job whose sweeps all have `rows` tokens."""
    policy = Policy(
        admission="continuous", gpu_batch_size=rows, num_gpu_batches=1, max_num_batched_tokens=512, max_model_len=64,
        kv_block_size=16, kv_blocks={}, share_prefixes=False, weight_format="float16", kv_format="float16",
        weight_layers=dict.fromkeys(MODEL.layer_tensors, (0, 0, 6)), kv_seqs={"cpu": rows}, on_demand_tokens=tokens,
    )  # fmt: skip
    budgets = {"cpu": 8 * GIB, "disk": 0}
    return Plan("model", "machine", "float16", Workload.uniform(rows, 1, 12), budgets, policy, {}, NOTHING)


def simulated_s(rows, tokens):
    return simulate_job(plan_with(rows, tokens), MODEL, cpu_box()).total_s


def in_float32(hardware):
    rates = {name: {"float32": of["float16"]} for name, of in vars(hardware.cpu).items() if isinstance(of, dict) and of}
    return replace(hardware, cpu=replace(hardware.cpu, **rates))


def planned(rows):
    given = {"dtype": "float16", "max_model_len": 64, "process_bytes": 1 << 29}
    problem = problem_of(cpu_box(), MODEL, Workload.uniform(rows, 1, 12), **given)
    problem = replace(problem, budgets={"cpu": 4 * GIB, "disk": 0}, longest_tokens=32)
    return plan_problem(problem)


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


def cost_inputs(plan, config, hardware):
    """What the cost model is given for a plan without KV on disk, and the plan's placement."""
    policy = plan.policy
    s = CostInputs(
        hardware=hardware, model=config, workload=plan.workload, compute_format=plan.dtype,
        weight_format=policy.weight_format, kv_format=policy.kv_format, admission=policy.admission,
        max_num_seqs=policy.max_num_seqs, num_gpu_batches=policy.num_gpu_batches,
        max_num_batched_tokens=policy.max_num_batched_tokens, kv_block_size=policy.kv_block_size, budgets=plan.budgets,
        process_bytes=0, on_demand_tokens=policy.on_demand_tokens,
    )  # fmt: skip
    return s, Counts(dict(policy.weight_layers), dict(policy.kv_seqs), policy.activation_batches, 0).placement(s)


@pytest.mark.parametrize("rows", [1, 4, 16, 200])
@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("exponent", [1.0, 0.6])
@pytest.mark.parametrize("weight_format", ["float16", "int4"])
def test_the_cost_model_and_the_simulator_agree(rows, on_demand, exponent, weight_format):
    """But for the first sweep, in which every layer is read as a whole."""
    plan = plan_with(rows, rows if on_demand else 0)
    policy = replace(plan.policy, weight_format=weight_format)
    plan = replace(plan, policy=policy, workload=replace(plan.workload, routing=Routing(exponent)))
    hardware = cpu_box(disk_read_overhead_s=2e-5)
    starts = {}
    simulate_job(
        plan, MODEL, hardware, on_step=lambda step, start, end: starts.setdefault((step.sweep, step.kind), start)
    )
    simulated = starts[10, "embed"] - starts[4, "embed"]
    s, at = cost_inputs(plan, MODEL, hardware)
    assert job_seconds(s, [Phase(6, 0, 0, rows, 8)], at) == pytest.approx(simulated, rel=0.05)


def slower_in_rows(hardware, factor):
    """The machine with products of weights that lie as they are stored so many times slower."""
    gemm = hardware.cpu.gemm_flops_per_s
    gemm = gemm | {matmul_key("float16", "float16", as_stored=True): gemm["float16"].scaled(1 / factor)}
    return replace(hardware, cpu=replace(hardware.cpu, gemm_flops_per_s=gemm))


@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize("on_disk", [("qkv", "out", "up", "down"), ("up", "down"), ("qkv",), ("up",)])
def test_matmuls_of_streamed_weights_have_rates_of_their_own_in_the_cost_model_and_in_the_simulator(rows, on_disk):
    plan = plan_with(rows, 0)
    layers = {group: (0, 0, 6) if group in on_disk else (0, 6, 0) for group in MODEL.layer_tensors}
    plan = replace(plan, policy=replace(plan.policy, weight_layers=layers))
    took = []
    computing = cpu_box(disk_read_bytes_per_s=1e15, dram_bytes_per_s=1e15)  # so that nothing else counts
    for hardware in (computing, slower_in_rows(computing, 5)):
        starts = {}
        simulate_job(
            plan,
            MODEL,
            hardware,
            on_step=lambda step, start, end, s=starts: s.setdefault((step.sweep, step.kind), start),
        )
        s, at = cost_inputs(plan, MODEL, hardware)
        modelled = job_seconds(s, [Phase(6, 0, 0, rows, 8)], at)
        assert modelled == pytest.approx(starts[10, "embed"] - starts[4, "embed"], rel=0.05)
        took.append(modelled)
    assert took[1] > 1.05 * took[0]


@pytest.mark.parametrize("rows", [4, 200])
def test_bytes_of_the_disk_take_of_the_memorys_bandwidth_where_the_cpu_computes(rows):
    plan, apart, beside = plan_with(rows, 0), cpu_box(dram_bytes_per_s=1e18), cpu_box(dram_bytes_per_s=5e9)
    policy = plan.policy
    layers = dict.fromkeys(policy.weight_layers, (0, 2, 4))
    plan = replace(plan, policy=replace(policy, weight_layers=layers))
    runs = [simulate_job(plan, MODEL, hardware) for hardware in (apart, beside)]
    moved = sum(runs[0].busy_s[f"disk_{way}"] * getattr(apart, f"disk_{way}_bytes_per_s") for way in ("read", "write"))
    assert runs[1].busy_s["compute"] - runs[0].busy_s["compute"] == pytest.approx(moved / 5e9, rel=0.02)
    s, at = cost_inputs(plan, MODEL, apart)
    phase = Phase(1, 0, 0, rows, 8)
    compute_s = [layer_lanes(replace(s, hardware=hardware), phase, at)["compute"] for hardware in (apart, beside)]
    read = moved_bytes(s, phase, at)["disk_read"]
    assert compute_s[1] - compute_s[0] == pytest.approx(read / 5e9, rel=1e-6)


@pytest.mark.parametrize("rows", [3, 9])  # few, and too many to read experts on demand
def test_bytes_of_a_sweep_are_those_that_are_read(rows, tiny_models, tmp_path, monkeypatch):
    """Really, by the cost model, and by the simulator, with routers that choose all experts equally often."""
    path, _ = tiny_models("qwen3_moe", num_experts=16, num_experts_per_tok=2, moe_intermediate_size=192)
    draw = torch.Generator().manual_seed(0)

    def evenly(config, weights, x):
        weights = torch.full((len(x), 2), 0.5)
        return weights, torch.rand(len(x), 16, generator=draw).topk(2).indices

    monkeypatch.setattr("batchgen.models.experts.route", evenly)
    monkeypatch.setattr("batchgen.models.layers.route", evenly)
    layers = len(read_config(resolve_model(str(path))).windows)
    policy = make_policy(
        path, CPU, weight_layers=dict.fromkeys(("qkv", "out", "up", "down"), (0, 0, layers)), kv_seqs={"cpu": rows},
        gpu_batch_size=rows, on_demand_tokens=3,
    )  # fmt: skip
    read = {}  # kind of Step -> bytes of each

    def on_step(step, start, end):
        if step.lane == "disk_read":
            before = sum(sum(of) for of in read.values())
            read.setdefault(step.kind, []).append(parts.executor.bytes_moved["disk_read"] - before)

    parts = make_parts(path, CPU, policy, tmp_path, on_step=on_step)
    generate(parts, [[5 + i] for i in range(rows)], [24] * rows)
    few = {"read_dense", "read_experts"} if rows == 3 else set()
    assert set(read) == {"read_weight"} | few
    budgets = {"cpu": 4 * GIB, "disk": 0}
    plan = Plan("model", "machine", "float32", Workload.uniform(rows, 1, 24), budgets, policy, {}, NOTHING)
    hardware, took = in_float32(cpu_box(disk_read_bytes_per_s=1e6)), {}

    def on_simulated(step, start, end):
        if step.lane == "disk_read":
            took.setdefault(step.kind, []).append(end - start)

    simulate_job(plan, parts.config, hardware, on_step=on_simulated)
    kinds = few or {"read_weight"}
    s, at = cost_inputs(plan, parts.config, hardware)
    wanted = sum(sum(read[kind]) / len(read[kind]) for kind in kinds)  # of a layer
    assert moved_bytes(s, Phase(1, 0, 0, rows, 12), at)["disk_read"] == pytest.approx(wanted, rel=0.05)
    # The last layer is simulated for the rows whose logits are asked for: here all.
    assert sum(1e6 * sum(took[kind]) / len(took[kind]) for kind in kinds) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_kinds_of_steps_are_those_of_the_engine(num_batches, tiny_models, tmp_path):
    family, fields = MODELS["qwen3_moe, 8 of 128, shares as they are"]
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
    simulated = []
    simulate_job(plan, parts.config, in_float32(cpu_box()), on_step=lambda step, start, end: simulated.append(step))

    def of_sweeps(steps):  # what is read ahead when the job ends may be dropped
        kinds = [(s.kind, s.sweep, s.layer, s.batch) for s in steps if s.lane == "compute" or s.kind == "read_experts"]
        return sorted(kinds)

    assert of_sweeps(done) == of_sweeps(simulated)
    assert {"read_weight", "read_dense", "route", "read_experts"} <= {s.kind for s in done}
