"""Attention budgets in plans: bytes of summaries, KV that is read, and what is said of them."""

from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box, gemma3_27b, gpu_box, llama_8b

from batchgen.core.workload import Workload
from batchgen.planner.explain import explain, make_plan
from batchgen.planner.memory import kv_bytes
from batchgen.planner.problem import Problem
from batchgen.planner.search import search
from batchgen.planner.simulation import memory_of

MODELS = {"llama": llama_8b(), "gemma3": gemma3_27b()}


def planned(model, budget, hardware=None, prompt_len=6000, **options):
    hardware = hardware or cpu_box(cpu_memory_bytes=64 * GIB)
    budgets = {"cpu": hardware.cpu_memory_bytes, "disk": 0}
    if hardware.gpu is not None:
        budgets |= {"gpu": hardware.gpu_memory_bytes}
    workload = Workload.uniform(200, prompt_len, 400)
    problem = Problem(
        hardware, model, workload, budgets, "float16", ("int4",), ("float16",), admissions=("continuous",),
        attention_budget=budget, **options,
    )  # fmt: skip
    found = search(problem)
    plan = make_plan(replace(problem, model_name="m", max_model_len=8192, share_prefixes=True), found, startup_s=0.0)
    return found, plan


@pytest.mark.parametrize("name", MODELS)
def test_pools_hold_the_summaries_that_are_counted(name):
    model = MODELS[name]
    (dense, _), (found, plan) = (planned(model, budget, max_num_seqs=8) for budget in ("all", "10%"))
    shape, choosing = model.attention_within(None), sum(map(model.chooses_pages, range(model.num_layers)))
    summary_bytes = choosing * shape.num_kv_heads * 2 * shape.head_dim * 2
    s, at = found.inputs, found.counts.placement(found.inputs)
    added = kv_bytes(s, at)["cpu"] - kv_bytes(dense.inputs, dense.counts.placement(dense.inputs))["cpu"]
    assert added == pytest.approx(8 * s.seq_blocks * summary_bytes)
    taken = {}
    for budget in ("all", "10%"):
        memory = memory_of(replace(plan, policy=replace(plan.policy, attention_budget=budget)), model)
        blocks, windowed = memory.kv_blocks["cpu"], memory.window_blocks.get("cpu", 0)
        kept_bytes = sum(size for size, w in zip(s.layers.blocks, model.windows, strict=True) if w is None)
        window_bytes = sum(s.layers.blocks) - kept_bytes
        taken[budget] = memory.parts["cpu"]["KV"] - blocks * kept_bytes - windowed * window_bytes
        if budget == "10%":
            assert taken[budget] == blocks * summary_bytes
    assert taken["all"] == 0 or not memory.window


@pytest.mark.parametrize("machine", [cpu_box(cpu_memory_bytes=64 * GIB), gpu_box()])
def test_a_smaller_budget_never_makes_a_plan_of_long_rows_slower(machine):
    seconds = [planned(MODELS["llama"], b, machine)[1].prediction.total_s for b in ("all", "50%", "10%", "5%")]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.97 * seconds[0], seconds


def test_a_budget_beyond_all_rows_changes_no_plan_but_for_its_memory():
    (_, dense), (_, whole) = (planned(MODELS["llama"], budget, max_num_seqs=8) for budget in ("all", "100000"))
    assert whole.prediction.total_s == pytest.approx(dense.prediction.total_s)
    assert "Rows are so short that each token attends to all tokens before it" in "\n".join(explain(whole))


def test_the_explanation_says_how_many_blocks_are_attended_to():
    text = "\n".join(explain(planned(MODELS["llama"], "10%")[1]))
    assert "The last token of a mean row attends to 40 of its 400 KV blocks in most layers." in text
    assert "attention budget 10%" in text
