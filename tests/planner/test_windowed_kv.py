"""KV of layers with a sliding window: what a plan counts is what its pools take, and more sequences fit."""

from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box, gemma3_27b, gpt_oss_20b, gpu_box, llama_8b, opt

from batchgen.core.plan import window_blocks
from batchgen.core.workload import Workload
from batchgen.planner.costs import streamed_kv_bytes
from batchgen.planner.explain import make_plan
from batchgen.planner.memory import kv_bytes
from batchgen.planner.problem import Problem
from batchgen.planner.search import search
from batchgen.planner.simulation import memory_of

MODELS = {
    "opt": opt(768, 12, 12),
    "llama": llama_8b(),
    "gpt_oss": gpt_oss_20b(),
    "gemma3": gemma3_27b(),
    "all windows": replace(llama_8b(), windows=(512,) * 32),
    "windows of the context": replace(llama_8b(), windows=(4096,) * 32),
}
KEEPING = {"gpt_oss": 12, "gemma3": 10, "all windows": 0}  # layers; the others keep all


def planned(model, workload, cpu_memory, **options):
    hardware = options.pop("hardware", None) or cpu_box(cpu_memory_bytes=cpu_memory)
    budgets = {"cpu": cpu_memory, "disk": 0} | options.pop("budgets", {})
    problem = Problem(
        hardware, model, workload, budgets, "float16", ("int4",), ("float16",), admissions=("continuous",), **options
    )
    found = search(problem)
    plan = make_plan(replace(problem, model_name="m", max_model_len=4096, share_prefixes=True), found, startup_s=0.0)
    return found, memory_of(plan, model)


def long_rows(num_seqs=400):
    return Workload.uniform(num_seqs, 2900, 100)


@pytest.mark.parametrize("name", MODELS)
def test_pools_hold_the_block_and_take_what_is_counted(name):
    model = MODELS[name]
    found, memory = planned(model, long_rows(), 48 * GIB, max_num_seqs=16)
    s, at = found.inputs, found.counts.placement(found.inputs)
    in_windows = s.layers.mean_block * (model.num_layers - KEEPING.get(name, model.num_layers))
    keeping = s.layers.mean_block * KEEPING.get(name, model.num_layers)
    assert memory.kv_blocks["cpu"] >= 16 * s.seq_blocks
    counted = kv_bytes(s, at)["cpu"]
    taken = memory.parts["cpu"]["KV"]
    if name not in KEEPING:
        assert memory.window is None and not memory.window_blocks
        assert taken == keeping * memory.kv_blocks["cpu"] and counted == 16 * s.seq_blocks * keeping
        return
    of_window = window_blocks(memory.window, 16)
    assert s.held_blocks(s.seq_blocks) == of_window < s.seq_blocks
    assert memory.window_blocks["cpu"] >= 16 * of_window
    assert taken == keeping * memory.kv_blocks["cpu"] + in_windows * memory.window_blocks["cpu"]
    # The same blocks, counted by the planner: prompts beyond their windows are a block more.
    chunks = -(-s.max_num_batched_tokens // 16) + 1
    assert counted == 16 * s.seq_blocks * keeping + (16 * of_window + chunks) * in_windows
    assert memory.window_blocks["cpu"] <= 16 * of_window + chunks


@pytest.mark.parametrize(("name", "least"), [("gpt_oss", 1.8), ("gemma3", 2.0), ("all windows", 4.5)])
def test_so_many_times_the_sequences_fit(name, least):
    """Sequences of 3000 tokens beside the same weights: nearly twice as many where half of the layers see 128 tokens.

    They are twice as many where five of six layers see 1024.
    """
    model = MODELS[name]
    counts, pools = [], []
    for own in (model, replace(model, windows=(None,) * model.num_layers)):
        found, memory = planned(own, long_rows(4000), 23 * GIB if name != "gemma3" else 40 * GIB)
        counts.append(found.inputs.max_num_seqs)
        pools.append(memory.parts["cpu"]["KV"])
        assert memory.kv_blocks["cpu"] >= found.inputs.max_num_seqs * found.inputs.seq_blocks
    assert counts[0] >= least * counts[1] and pools[0] <= 1.1 * pools[1]


@pytest.mark.parametrize("name", KEEPING)
def test_rows_within_the_window_lose_nothing(name):
    """Both kinds of layers have as many blocks as all had, where rows are not known to be longer than the window."""
    model = MODELS[name]
    found, memory = planned(model, Workload.uniform(100_000, 60, 40), 24 * GIB)
    s = found.inputs
    without, _ = planned(replace(model, windows=(None,) * model.num_layers), s.workload, 24 * GIB)
    assert s.max_num_seqs >= without.inputs.max_num_seqs
    assert min(memory.kv_blocks["cpu"], memory.window_blocks["cpu"]) >= s.max_num_seqs * s.seq_blocks


def test_less_history_is_streamed():
    """Of a sequence in host memory, layers with a window bring in the window alone."""
    model = MODELS["gpt_oss"]
    hardware = gpu_box(gpu_memory_bytes=24 * GIB)
    found, _ = planned(
        model, long_rows(), 48 * GIB, hardware=hardware, budgets={"gpu": 24 * GIB}, max_num_seqs=64, num_gpu_batches=1
    )
    s, phase = found.inputs, found.phases[0]
    all_kept = replace(s, model=replace(model, windows=(None,) * 24))
    ratio = streamed_kv_bytes(s, phase) / streamed_kv_bytes(all_kept, phase)
    assert 0.5 < ratio < 0.5 + 0.5 * (128 + 32) / 2900
