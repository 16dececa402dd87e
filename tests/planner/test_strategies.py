"""GPU-only, FlexGen, NEO, APEX and Pie beside the plan: which one it uses as the machine changes."""

from dataclasses import replace

import pytest
from known_plans import plan_problem
from planner_cases import GIB, constant, cpu_box, gpu_box, opt

from batchgen.core.hardware import ComputeRates, Rates
from batchgen.core.workload import Lengths, Workload
from batchgen.planner.deferred_attention import with_deferred_attention
from batchgen.planner.explanation import explanation_of
from batchgen.planner.plan_selection import choose, simulate_candidates
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import Allowed, problem_of
from batchgen.planner.sampled_simulation import simulate_sampled
from batchgen.planner.search import search
from batchgen.planner.simulation import simulate_job
from batchgen.planner.strategies import FLEXGEN, GPU_ONLY, ON_CPU, PIE, WITH_GPU, strategies_for, strategy_of
from batchgen.planner.strategy_times import strategy_lines, with_strategies

# Few layers, so that a deferred token takes few sweeps; few words, so that logits take little of a small GPU's memory.
MODEL = replace(opt(1024, 6, 8), vocab_size=2048)
# Decoding is what there is to do. Outputs of different lengths end one by one, as the cost model has it.
DECODING = Workload(2000, Lengths((16,)), Lengths(tuple(range(64, 128, 4))), 128)


def slow_cpu(ratio, **changes):
    """A GPU whose attention is `ratio` times as fast as the CPU's, with matmuls as long for 1 token as for 256."""
    gpu = replace(
        gpu_box().gpu,
        gemm_flops_per_s={"float16": Rates(("tokens",), ((1, 2e11), (256, 5.12e13), (1024, 6e13)))},
        step_overhead_s=1e-6,
    )
    memory = {"gpu_memory_bytes": int(0.4 * GIB), "cpu_memory_bytes": int(0.8 * GIB), "dram_bytes_per_s": 1e12}
    overheads = {"sweep_overhead_s": 1e-4, "sequence_overhead_s": 1e-7, "sampling_logits_per_s": 1e12}
    cpu = ComputeRates(decode_attention_bytes_per_s={"float16": constant(2e11 / ratio)})
    return gpu_box(gpu=gpu, cpu=cpu, **(memory | overheads | changes))


def planning(hardware, workload=DECODING, model=MODEL, **options):
    given = {"process_bytes": 100 << 20, "disk_memory": 0, "admission": "continuous", "max_model_len": 2048} | options
    return problem_of(hardware, model, workload, dtype="float16", **given)


def planned(hardware, workload=DECODING, **options):
    """The plan and its time beside those of the strategies."""
    problem = planning(hardware, workload, **options)
    plan = plan_problem(problem)
    return with_strategies(plan, problem)


@pytest.mark.parametrize(("ratio", "deferred"), [(1.5, False), (10, True)])
def test_two_batches_give_way_to_deferred_attention_as_the_cpu_gets_slower(ratio, deferred):
    """NEO's pipelining against APEX's overlap: inequality (6) of APEX, as far as memory and the job's length allow."""
    problem = planning(slow_cpu(ratio))
    two = search(replace(problem, num_gpu_batches=2, allowed=Allowed(kv_placements=("gpu", "cpu"))))
    alone = search(replace(problem, num_gpu_batches=1, allowed=Allowed(kv_placements=("gpu",))))
    beside = with_deferred_attention(problem, alone)
    for seconds_of in (lambda c: c.seconds, lambda c: simulate_sampled(plan_of(problem, c), c).seconds):
        one_s, two_s = seconds_of(beside), seconds_of(two)
        assert (one_s < two_s) == deferred, (one_s, two_s)
        assert one_s < seconds_of(alone)


def test_attention_is_deferred_for_fewer_sequences_where_the_gpu_has_no_memory_for_all_that_host_memory_holds():
    """More host memory took deferred attention away: of the sequences that it holds either all fitted or none did."""
    seconds = []
    for host in (0.725, 4):
        box = slow_cpu(10, gpu_memory_bytes=int(0.21 * GIB), cpu_memory_bytes=int(host * GIB))
        problem = planning(box)
        alone = search(replace(problem, num_gpu_batches=1, allowed=Allowed(kv_placements=("gpu",))))
        beside = with_deferred_attention(problem, alone)
        assert beside is not None and beside.job_s < alone.job_s
        seconds.append(beside.job_s)
    assert seconds[1] <= 1.02 * seconds[0]


def test_deferred_sequences_take_no_weights_off_the_gpu():
    """Deferred sequences take the GPU's memory from other sequences, not from weights that would stream then."""
    problem = planning(slow_cpu(10, gpu_memory_bytes=int(0.36 * GIB), h2d_bytes_per_s=1e10))
    alone = search(replace(problem, num_gpu_batches=1, allowed=Allowed(("gpu",), ("gpu",))))
    beside = with_deferred_attention(problem, alone)
    assert beside.counts.weight_layers == alone.counts.weight_layers
    assert 0 < beside.counts.kv_seqs["gpu"] < alone.counts.kv_seqs["gpu"] and beside.seconds < alone.seconds


@pytest.mark.thorough
def test_the_plan_has_two_batches_or_deferred_attention_by_how_fast_the_cpu_is():
    fast, slow = (planned(slow_cpu(ratio)) for ratio in (1.5, 10))
    assert fast.policy.num_gpu_batches == 2 and "deferred" not in fast.policy.kv_seqs
    assert fast.policy.kv_seqs["cpu"] > fast.policy.max_num_seqs / 3, "the CPU attends to much of it"
    assert slow.policy.num_gpu_batches == 1 and slow.policy.kv_seqs["deferred"] > slow.policy.max_num_seqs / 4
    assert slow.policy.deferred_rows % slow.policy.kv_seqs["deferred"] == 0, "whole waves of them"
    times = {strategy.name: strategy.seconds for strategy in slow.strategies}
    assert times["chosen"] < 0.97 * min(times["GPU-only"], times["NEO"]) and times["chosen"] <= times["FlexGen"]
    assert (
        strategy_of(slow.policy, WITH_GPU) == "APEX" and slow.strategies[-1].description == 'uses the strategy "APEX"'
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("ratio", "num_batches"), [(1.5, 2), (10, 1)])
def test_the_choice_flips_in_simulated_whole_jobs_too(ratio, num_batches):
    hardware = slow_cpu(ratio)
    problem = planning(hardware)
    found = simulate_candidates(problem)
    best = choose(found)
    assert best.seconds <= 1.02 * min(s.seconds for s in found)
    whole = [simulate_job(plan_of(problem, s.candidate), MODEL, hardware).total_s for s in found]
    assert whole[found.index(best)] <= 1.02 * min(whole)
    assert best.candidate.inputs.num_gpu_batches == num_batches
    assert bool(best.candidate.inputs.deferral) == (num_batches == 1)


@pytest.mark.thorough
def test_a_sampled_simulation_with_deferred_attention_is_near_the_whole_job():
    hardware = slow_cpu(10)
    problem = planning(hardware)
    found = simulate_candidates(problem)
    deferring = [s for s in found if s.candidate.inputs.deferral]
    assert deferring
    for simulated in deferring:
        whole_s = simulate_job(plan_of(problem, simulated.candidate), MODEL, hardware).total_s
        assert simulated.seconds == pytest.approx(whole_s, rel=0.06)


def fast_link():
    """A GPU with a fast link to the host (GH200), and memory for one long sequence and most of another."""
    gpu = ComputeRates(
        gemm_flops_per_s={"float16": Rates(("tokens",), ((1, 1e12), (256, 2.5e14), (1024, 5e14)))},
        decode_attention_bytes_per_s={"float16": constant(2.5e12)},
        prefill_attention_flops_per_s={"float16": constant(3e14)},
        elementwise_bytes_per_s={"float16": constant(2e12)},
        step_overhead_s=1e-6,
    )
    cpu = ComputeRates(decode_attention_bytes_per_s={"float16": constant(3e11)})
    memory = {"gpu_memory_bytes": int(3.6 * GIB), "cpu_memory_bytes": 48 * GIB, "dram_bytes_per_s": 5e11}
    overheads = {"sweep_overhead_s": 1e-4, "sequence_overhead_s": 1e-7, "sampling_logits_per_s": 1e12}
    return gpu_box(gpu=gpu, cpu=cpu, h2d_bytes_per_s=4e11, d2h_bytes_per_s=3.7e11, **memory, **overheads)


def few_long_rows():
    """Of a model whose weights are small beside one sequence's KV: else it is as good to stream weights instead."""
    workload = Workload(32, Lengths((19_000,)), Lengths(tuple(range(256, 768, 64))), 1024)
    problem = planning(fast_link(), workload, replace(opt(1024, 24, 8), vocab_size=2048))
    return replace(problem, max_model_len=20_100)


def test_kv_streams_by_layer_where_it_is_a_little_larger_than_the_gpu():
    """Few long sequences: the link does not hide the streaming of a whole one, but that of a few layers of two."""
    problem = few_long_rows()
    whole = replace(FLEXGEN, kv_placements=("gpu", "streamed", "disk")), replace(GPU_ONLY, gpu_batches=None)
    found = [search(strategy.restrict(problem)) for strategy in (PIE, *whole)]
    plans = [plan_of(problem, candidate) for candidate in found]
    parted, *others = (simulate_sampled(*pair).seconds for pair in zip(plans, found, strict=True))
    assert parted < 0.9 * min(others)
    policy = plans[0].policy
    assert policy.kv_seqs == {"streamed": 2} and 12 < policy.kv_layers < 24


@pytest.mark.thorough
def test_the_plan_has_kv_by_layer_where_kv_is_a_little_larger_than_the_gpu():
    problem = few_long_rows()
    plan = plan_problem(problem)
    plan = with_strategies(plan, problem)
    policy, times = plan.policy, {strategy.name: strategy.seconds for strategy in plan.strategies}
    assert strategy_of(policy, WITH_GPU) == "Pie"
    assert policy.kv_seqs == {"streamed": 2} and 12 < policy.kv_layers < 24
    others = [times[name] for name in ("GPU-only", "NEO", "APEX", "FlexGen") if times[name]]
    assert len(others) >= 3 and times["chosen"] < 0.9 * min(others)
    sentences = explanation_of(plan).sentences
    assert any(f"in {policy.kv_layers} of 24 layers" in sentence for sentence in sentences)
    assert type(plan).from_json(plan.to_json()) == plan


def test_a_job_that_is_too_short_defers_nothing():
    """Others end it before one deferred token has come through all layers often enough."""
    plan = planned(slow_cpu(10), replace(DECODING, num_seqs=100))
    assert "deferred" not in plan.policy.kv_seqs and plan.policy.deferred_rows is None
    (apex,) = [strategy for strategy in plan.strategies if strategy.name == "APEX"]
    assert apex.seconds is None and "a deferred token takes 7 sweeps" in apex.reason


# machine, options -> the names of the strategies that apply
MACHINES = {
    "GPU that holds the weights": (slow_cpu(10), {}, {"GPU-only", "FlexGen"}),
    "GPU that does not": (slow_cpu(10, gpu_memory_bytes=int(0.15 * GIB)), {}, {"FlexGen"}),
    "CPU": (cpu_box(), {}, {"in memory"}),
    "CPU with little memory": (
        cpu_box(cpu_memory_bytes=int(0.53 * GIB)), {"disk_memory": 4 * GIB}, {"streamed"},
    ),
}  # fmt: skip
JOB = replace(DECODING, num_seqs=48)


@pytest.mark.parametrize("name", MACHINES)
def test_every_strategy_has_a_time_or_a_reason(name):
    hardware, options, able = MACHINES[name]
    plan = planned(hardware, JOB, **options)
    *strategies, chosen = plan.strategies
    of_papers = [strategy.name for strategy in strategies_for(planning(hardware, JOB, **options))]
    assert [strategy.name for strategy in strategies] == [*of_papers, "quantized"]
    for strategy in strategies:
        assert (strategy.seconds is None) == bool(strategy.reason) and strategy.description, strategy
        assert strategy.seconds is None or strategy.seconds > 0
    assert able <= {strategy.name for strategy in strategies if strategy.seconds}
    assert chosen.name == "chosen" and chosen.seconds == plan.prediction.total_s
    # Ties go to plans that finish their first rows earlier.
    others = [strategy.seconds for strategy in strategies if strategy.seconds]
    assert chosen.seconds <= 1.05 * min(others)
    lines = strategy_lines(plan)
    assert len(lines) == len(plan.strategies) + 1 and all(
        line.startswith(strategy.name) for line, strategy in zip(lines[1:], plan.strategies, strict=True)
    )
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.parametrize("strategies", [WITH_GPU, ON_CPU], ids=["with a GPU", "on a CPU"])
def test_every_policy_uses_one_strategy(strategies):
    policy = planned(cpu_box(), replace(JOB, num_seqs=8)).policy
    changes = {
        "GPU-only": {"weight_layers": {"qkv": (6, 0, 0)}, "kv_seqs": {"gpu": 8}},
        "NEO": {"weight_layers": {"qkv": (6, 0, 0)}, "kv_seqs": {"gpu": 4, "cpu": 4}, "num_gpu_batches": 2},
        "APEX": {"weight_layers": {"qkv": (6, 0, 0)}, "kv_seqs": {"gpu": 4, "deferred": 4}},
        "Pie": {"weight_layers": {"qkv": (6, 0, 0)}, "kv_seqs": {"streamed": 8}, "kv_layers": 4},
        "FlexGen": {"weight_layers": {"qkv": (3, 2, 1)}, "kv_seqs": {"gpu": 4, "streamed": 4}},
        "in memory": {"weight_layers": {"qkv": (0, 6, 0)}, "kv_seqs": {"cpu": 8}},
        "streamed": {"weight_layers": {"qkv": (0, 3, 3)}, "kv_seqs": {"cpu": 8}},
    }
    for strategy in strategies:
        assert strategy_of(replace(policy, **changes[strategy.name]), strategies) == strategy.name


@pytest.mark.parametrize("limit_s", [0.951, 0.2625])
def test_the_plan_is_no_slower_than_any_strategy_within_the_latency(limit_s):
    plan = planned(slow_cpu(8 if limit_s > 0.5 else 3), max_block_latency_s=limit_s)
    *strategies, chosen = plan.strategies
    assert plan.prediction.block_latency_s <= limit_s
    assert chosen.seconds <= 1.02 * min(strategy.seconds for strategy in strategies if strategy.seconds is not None)


def test_a_block_of_one_has_no_second_batch():
    plan = planned(slow_cpu(1.5), max_num_seqs=1)
    neo = next(strategy for strategy in plan.strategies if strategy.name == "NEO")
    assert neo.seconds is None and "--max-num-seqs is 1" in neo.reason


def test_most_of_a_job_with_deferred_attention_is_steady():
    plan = planned(slow_cpu(10))
    assert plan.policy.kv_seqs["deferred"]
    stages = explanation_of(plan).stages
    assert max(stages, key=lambda stage: stage.seconds).name == "steady"
