"""The simulation of a pipeline against its stages as they run: the same sweeps, the same Steps, the same bytes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from planner_cases import gpu_box, opt
from simulated import SMALL_COPIES, Eager, one_byte_a_second, plan_of, planned_stage, prompt_in_order, stages_of
from stages import make_pipeline
from tiered import BUDGETS, EMULATED, make_policy
from tiny_models import make_tiny_model

from batchgen.core.request import Request, SamplingParams
from batchgen.core.workload import Lengths, Workload
from batchgen.engine import pipeline
from batchgen.engine.engine import Engine
from batchgen.engine.pipeline import Stage
from batchgen.models.files import read_config, resolve_model
from batchgen.planner import pipeline as planner_pipeline
from batchgen.planner.memory_requirements import most_kv_tokens
from batchgen.planner.parallel import split_layers
from batchgen.planner.pipeline import simulate_pipeline
from batchgen.planner.simulation import simulated_rows

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 4
WORKLOAD = Workload(14, Lengths((5, 18, 40, 61)), Lengths((1, 4, 9)), 12)
# Policies of a stage; of each group of weights one layer is on the accelerator, or none.
CASES = {
    "streamed weights, two batches": dict(
        gpu_batch_size=4, num_gpu_batches=2, kv_seqs={"gpu": 2, "cpu": 6}, activation_batches=(1, 1), gpu_layers=1
    ),
    "all tiers": dict(
        gpu_batch_size=4,
        num_gpu_batches=2,
        kv_seqs={"gpu": 2, "cpu": 2, "streamed": 2, "disk": 2},
        head_tier="cpu",
        gpu_layers=0,
    ),
    "static": dict(admission="static", kv_seqs={"streamed": 4, "disk": 4}, activation_batches=(0, 1), gpu_layers=1),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, num_hidden_layers=LAYERS)
    return path


def what(step):
    """A Step without its number and what it waits for."""
    return step.kind, step.sweep, step.layer, step.batch, step.weight_slot, step.kv_slot


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_sweeps_steps_and_bytes_are_those_of_the_stages(case, count, model_path, tmp_path, monkeypatch):
    config = read_config(resolve_model(str(model_path)))
    largest = max(stop - first for first, stop in split_layers(config, count))
    changes = dict(CASES[case])
    on_gpu = changes.pop("gpu_layers")
    layers = dict.fromkeys(config.layer_tensors, (on_gpu, largest - on_gpu, 0))
    policy = make_policy(model_path, EMULATED, weight_layers=layers, **changes)
    plan = plan_of(policy, WORKLOAD, BUDGETS, "float32")
    stages = stages_of(plan, config, count)

    run: list[list] = [[] for _ in stages]
    executors = {}
    load_executor = pipeline.load_executor

    def load_and_note(request, *args, **options):
        rank = [first for first, *_ in stages].index(request.config.first_layer)
        noting = replace(request, on_step=lambda step, start_s, end_s: run[rank].append(step))
        executors[rank], tiers = load_executor(noting, *args, **options)
        return executors[rank], tiers

    monkeypatch.setattr(pipeline, "load_executor", load_and_note)
    monkeypatch.setattr("batchgen.engine.engine.Prefetch", Eager)
    parts = make_pipeline(
        model_path, EMULATED, [Stage(*own) for own in stages], tmp_path, min_output_len=WORKLOAD.max_output_len,
        longest_tokens=plan.workload.max_seq_len, most_kv_tokens=most_kv_tokens(plan),
    )  # fmt: skip
    draw = random.Random(0)
    requests = [
        Request(prompt_in_order(draw, number, prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for number, (prompt, output) in enumerate(simulated_rows(WORKLOAD))
    ]
    with Engine.from_parts(parts) as engine:
        assert all(c.error is None for c in engine.generate(requests))
        sweeps = engine.stats.sweeps
        for executor in executors.values():
            executor.lanes.drain()  # what the last sweep still stores would be dropped with the engine

    rates, links = one_byte_a_second()
    simulated: list[list] = [[] for _ in stages]
    moved_s = [Counter() for _ in stages]  # seconds of moves are bytes

    def note(rank, step, start_s, end_s):
        simulated[rank].append(step)
        moved_s[rank]["h2d" if step.kind in SMALL_COPIES else step.lane] += end_s - start_s

    simulate_pipeline(plan, config, gpu_box(gpu=rates, cpu=rates, **links), stages, note)
    for rank in range(count):
        assert {step.sweep for step in simulated[rank]} == set(range(sweeps))
        assert Counter(map(what, simulated[rank])) == Counter(map(what, run[rank])), f"stage {rank}"
        moved = executors[rank].bytes_moved
        assert {lane: moved_s[rank][lane] for lane in moved} == pytest.approx(moved), f"stage {rank}"


JOBS = {
    "continuous": Workload(240, Lengths(tuple(range(50, 300, 10))), Lengths(tuple(range(4, 65, 4))), 64),
    "prompts first, then decoding": Workload.uniform(128, 12, 8),
    "long outputs": Workload.uniform(96, 64, 120),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_part_of_the_steps_of_a_pipeline_tells_the_time_of_all(job, monkeypatch):
    """A token of a prompt and a decoded one take different times: a part with more of one must not count as the job."""
    hardware, config = gpu_box(gpu_memory_bytes=1 << 30, h2d_bytes_per_s=1e9), opt(2048, 12, 32)
    plan = planned_stage(hardware, config, JOBS[job], 2, max_num_seqs=64)
    plan = replace(
        plan, policy=replace(plan.policy, batch_order="even", balance_tokens=None)
    )  # whatever is planned today
    stages = stages_of(plan, config, 2)

    def seconds(most_steps, most_scheduled=10**9):
        monkeypatch.setattr(planner_pipeline, "_MOST_STEPS", most_steps)
        monkeypatch.setattr(planner_pipeline, "_MOST_SCHEDULED", most_scheduled)
        return simulate_pipeline(plan, config, hardware, stages)

    whole = seconds(10**9)
    assert seconds(3_000) == pytest.approx(whole, rel=0.05)
    assert seconds(3_000, 3_000) == pytest.approx(whole, rel=0.15)
