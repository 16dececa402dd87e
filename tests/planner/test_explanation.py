"""What a plan comes to: nothing is counted twice, and nothing is left out."""

import functools
from dataclasses import replace

import pytest
from planner_cases import GIB, budgets, cpu_box, gpu_box, llama_8b, opt

from batchgen.core.errors import InputError
from batchgen.core.plan import STAGES
from batchgen.core.workload import Workload
from batchgen.planner.explain import compare_rows, explain, make_plan, runs_lines
from batchgen.planner.explanation import Resource, explanation_of, price_lines, total_lines
from batchgen.planner.problem import Loading, Problem
from batchgen.planner.replanned import replanned_s, with_more
from batchgen.planner.search import search

UNIFORM = Workload.uniform(400, 256, 32)
SCORED = replace(Workload.uniform(200, 256, 1), scored_len=40.0)
# KV on disk alone, where the block needs more than memory has.
FORCED_TO_DISK = {"max_num_seqs": 200, "hardware": gpu_box(cpu_memory_bytes=30 * GIB), "model": opt(5120, 40, 40)}
CASES = {
    "streamed": {"max_num_seqs": 64},
    "all in memory": {"max_num_seqs": 64, "model": opt(768, 12, 12)},
    "KV on disk": FORCED_TO_DISK,
    "CPU only": {"max_num_seqs": 16, "hardware": cpu_box(), "model": llama_8b()},
    "scored": {"max_num_seqs": 32, "workload": SCORED},
}


def planned(*, max_num_seqs, hardware=None, model=None, workload=UNIFORM, startup_s=5.0, **options):
    hardware, model = hardware or gpu_box(), model or opt(5120, 40, 40)
    formats = {"compute_format": "float16", "weight_formats": ("float16",), "kv_formats": ("float16",)}
    known = {"model_name": "m", "max_model_len": 2048}
    given = {**formats, **known, **options, "max_num_seqs": max_num_seqs}
    problem = Problem(hardware, model, workload, budgets(hardware), **given)
    return problem, make_plan(problem, search(problem), startup_s=startup_s)


@functools.cache
def case_of(name):
    return planned(**CASES[name])


@pytest.fixture(params=CASES)
def case(request):
    return case_of(request.param)


@functools.cache
def streamed_s():
    return search(case_of("streamed")[0]).seconds


def test_stages_add_up_to_the_job(case):
    _, plan = case
    found = explanation_of(plan)
    assert found.stages[0].name == "start-up"
    names = [stage.name for stage in found.stages[1:]]
    assert names == [name for name in STAGES if name in names] and names
    assert sum(stage.seconds for stage in found.stages) == pytest.approx(plan.prediction.total_s)
    assert sum(stage.sweeps for stage in found.stages) == pytest.approx(plan.prediction.sweeps)
    workload = plan.workload
    run = workload.num_seqs * (workload.computed_prompt_len + workload.output_len.mean - 1)
    assert sum(stage.tokens for stage in found.stages) == pytest.approx(run, rel=1e-3)


def test_every_class_has_its_sentence(case):
    _, plan = case
    text = "\n".join(explanation_of(plan).sentences)
    for count in plan.policy.kv_seqs.values():
        assert f"{count:,} sequence" in text
    assert text.count("of weights") == sum(size > 0 for size in plan.placement_bytes["weights"].values())


def test_what_the_search_leaves_open_is_said(case):
    """A part of the time that whole layers and sequences take more than parts of them would, which is proven."""
    _, plan = case
    predicted = plan.prediction
    assert 0 <= predicted.search_gap < 1
    assert explanation_of(plan).search_gap == predicted.search_gap
    assert any(f"at most {predicted.search_gap:.2%} longer than" in line for line in explain(plan))


def test_what_is_written_to_the_disk():
    less = FORCED_TO_DISK | {"hardware": gpu_box(cpu_memory_bytes=12 * GIB)}
    _, plan = planned(**less, loading={"float16": Loading(store_bytes=3 * GIB)})
    written = explanation_of(plan).disk_written_bytes
    on_disk = plan.policy.kv_seqs["disk"] / plan.policy.max_num_seqs
    # Prompts are written once, and each token rewrites its block of 16.
    prompts, tokens = 400 * 256, 400 * 31 * 16
    block = 2 * 5120 * 2 * 40
    assert written["KV"] == pytest.approx(on_disk * (prompts + tokens) * block, rel=0.15)
    assert written["weight store"] == 3 * GIB
    assert any(line.startswith("written to the disk: ") and "3.0 GiB of weight store" in line for line in explain(plan))


def test_rates_with_and_without_the_start_up():
    _, plan = case_of("streamed")
    found, total_s = explanation_of(plan), plan.prediction.total_s
    assert found.prompt_tokens == 400 * 256 and found.generated_tokens == 400 * 32
    assert found.all_rate.whole == pytest.approx(400 * 288 / total_s)
    assert found.all_rate.after_startup == pytest.approx(400 * 288 / (total_s - 5))
    assert found.generated_rate.after_startup == pytest.approx(400 * 32 / (total_s - 5))


def test_cost_and_energy_only_where_they_are_asked_for():
    _, plan = case_of("streamed")
    assert not any(line.startswith(("cost", "energy")) for line in total_lines(explanation_of(plan)))
    found = explanation_of(plan, price_per_hour=3.0, watts=500)
    assert found.cost == pytest.approx(3 * plan.prediction.total_s / 3600)
    assert found.energy_kwh == pytest.approx(0.5 * plan.prediction.total_s / 3600)
    for wrong in ({"price_per_hour": 0.0}, {"watts": -1.0}, {"watts": float("nan")}):
        with pytest.raises(InputError, match="must be above 0"):
            explanation_of(plan, **wrong)


def test_prices_are_those_of_plans_made_anew():
    problem, plan = case_of("streamed")
    asked = []

    def planned_s(changed):
        asked.append(changed)
        return plan.prediction.total_s - 10.0

    anew = replanned_s(problem, plan.prediction, planned_s)
    assert asked == [with_more(problem, resource) for resource in anew] and 1 <= len(anew) <= 2
    assert all(seconds == pytest.approx(10.0) for seconds in anew.values())
    prices = explanation_of(plan, replanned_s=anew).prices
    assert sum(price.replanned_s is not None for price in prices) == len(anew)
    assert any("re-planned 10 s" in line for line in price_lines(explanation_of(plan, replanned_s=anew)))


@pytest.mark.parametrize(
    "resource",
    [
        *(Resource(tier, True) for tier in ("gpu", "cpu", "disk")),
        *(Resource(lane, False) for lane in ("compute", "cpu_attention", "h2d", "d2h", "disk_read", "disk", "dram")),
    ],
    ids=lambda resource: resource.more,
)
def test_more_of_anything_is_a_problem_that_can_be_planned(resource):
    problem, _ = case_of("streamed")
    more = with_more(problem, resource)
    assert more != problem and search(more).seconds <= streamed_s() * (1 + 5e-4)


def test_a_faster_disk_is_not_taken_for_a_larger_one():
    _, plan = case_of("streamed")
    prices = {"lane_price_s": {"disk": 50.0}, "memory_price_s": {"disk": 20.0}}
    named = replace(plan, prediction=replace(plan.prediction, total_s=100.0, startup_s=0.0, **prices))
    assert [(p.what, p.saved_s) for p in explanation_of(named, replanned_s={Resource("disk", False): 30.0}).prices] == [
        ("10 % more disk", 50.0),
        ("1 GiB more disk space", 20.0),
    ]


def test_no_price_is_more_than_the_job():
    """A whole GiB, where the GPU has less than half of one."""
    hardware = gpu_box(gpu_memory_bytes=int(0.44 * GIB))
    _, plan = planned(max_num_seqs=16, hardware=hardware, model=opt(1024, 6, 8), startup_s=0.0)
    prices = explanation_of(plan).prices
    assert prices and all(0 <= price.saved_s <= plan.prediction.total_s for price in prices)


def test_one_sequence_is_spoken_of_as_one():
    _, plan = planned(max_num_seqs=1, model=opt(768, 12, 12))
    assert any(line.startswith("1 sequence keeps its KV ") for line in explanation_of(plan).sentences)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(100.0, "1.00x (a tie)"), (101.0, "0.99x (a tie)"), (99.0, "1.01x (a tie)"), (103.0, "0.97x"), (50.0, "2.00x")],
)
def test_times_that_the_planner_takes_for_equal_are_said_to_be_a_tie(seconds, said):
    """Of those it chooses by other things, so that with more memory a plan may seem slower."""
    _, now = case_of("streamed")

    def lasting(total_s):
        return replace(now, prediction=replace(now.prediction, total_s=total_s))

    speedup = next(
        row for row in compare_rows([("now", lasting(100.0)), ("other", lasting(seconds))]) if row[0] == "speed-up"
    )
    assert speedup == ["speed-up", "1.00x", said]


@pytest.mark.parametrize(
    ("most_s", "said"), [(105.0, None), (55.0, "at least 2 such"), (54.0, "at least 3 such"), (5.0, "more time")]
)
def test_runs_that_are_too_short_for_the_job_are_counted(most_s, said):
    _, plan = case_of("CPU only")
    lines = runs_lines(replace(plan.prediction, total_s=105.0, startup_s=5.0), most_s)
    assert [said in line for line in lines] == ([] if said is None else [True])
