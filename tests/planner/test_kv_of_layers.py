"""KV whose size differs by layer: what is counted are the layers that have KV, each with its own heads."""

from dataclasses import replace

import pytest
from planner_cases import GIB, budgets, cpu_box, gpu_box, llama_8b, llama_with_two_head_sizes, qwen36_35b_a3b

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.workload import Workload
from batchgen.planner.batch_load import Attended, BatchLoad
from batchgen.planner.costs import (
    decode_kv_bytes,
    moved_bytes,
    phase_decode_attention_s,
    phase_prefill_attention_s,
    streamed_kv_bytes,
)
from batchgen.planner.explain import make_plan
from batchgen.planner.memory import kv_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.problem import Problem
from batchgen.planner.search import search
from batchgen.planner.simulation import memory_of
from batchgen.planner.step_costs import StepCosts

# Of the layers with KV of their own, the number of those with a window, and bytes of a token's KV by layer, in fp16.
LOCAL, GLOBAL = 2 * 8 * 128 * 2, 2 * 4 * 256 * 2


def planned(model, hardware, **options):
    problem = Problem(
        hardware, model, Workload.uniform(400, 1900, 100), budgets(hardware), "float16", ("float16",), ("float16",),
        admissions=("continuous",), max_model_len=4096, **options,
    )  # fmt: skip
    candidate = search(problem)
    return candidate, make_plan(problem, candidate, startup_s=0.0)


def test_pools_have_the_bytes_of_each_layer():
    candidate, plan = planned(llama_with_two_head_sizes(), cpu_box(), max_num_seqs=16)
    memory = memory_of(plan, candidate.inputs.model)
    kept, windowed = GLOBAL, 4 * LOCAL  # five layers have KV: one of them sees all tokens
    counted = 16 * (kept * memory.kv_blocks["cpu"] + windowed * memory.window_blocks["cpu"])
    assert memory.parts["cpu"]["KV"] == counted
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    chunks = -(-s.max_num_batched_tokens // 16) + 1
    held = s.held_blocks(s.seq_blocks)
    assert kv_bytes(s, at)["cpu"] == 16 * (16 * s.seq_blocks * kept + (16 * held + chunks) * windowed)
    assert s.layers.largest_block == 16 * max(LOCAL, GLOBAL)


def test_attention_of_each_head_size_counts():
    """Sharing layers attend too: to as many keys as the layers that have KV."""
    model = llama_with_two_head_sizes()
    candidate, _ = planned(model, cpu_box(), max_num_seqs=16)
    s, phase = candidate.inputs, Phase(1, 0, 0, 16, 1000)
    read = 16 * (6 * 512 * LOCAL + 2 * 1000 * GLOBAL)
    assert decode_kv_bytes(s, phase) * 8 == pytest.approx(read)
    assert phase_decode_attention_s(s, phase, s.hardware.cpu) * 8 == pytest.approx(read / 1.5e10)
    prompts = replace(phase, prefill_tokens=1900, prefill_seqs=1, decode_seqs=0)
    flops = 4 * (6 * 4096 * 512 + 2 * 8192 * 1900) * 1900 / 2
    assert phase_prefill_attention_s(s, prompts) * 8 == pytest.approx(flops / 2e11)


@pytest.mark.parametrize("model", [llama_8b(), llama_with_two_head_sizes()], ids=["llama", "two head sizes"])
def test_the_simulator_has_the_attention_of_the_cost_model(model):
    """Layer by layer it is, in all, what the cost model has as a mean."""
    hardware = gpu_box(gpu_memory_bytes=80 * GIB)
    candidate, plan = planned(model, hardware, max_num_seqs=16, num_gpu_batches=1)
    costs = StepCosts(plan, model, hardware)
    attended = {KVPlacement.DEVICE: Attended(contexts=(1000,) * 16)}
    load = BatchLoad(tokens=16, sampled=16, logits_rows=16, attended=attended, windowed=attended)
    of_layers = costs.layers_s(lambda kind: costs.attention_s(load.attended[KVPlacement.DEVICE], kind, hardware.gpu))
    modelled = phase_decode_attention_s(candidate.inputs, Phase(1, 0, 0, 16, 1000), hardware.gpu)
    assert sum(of_layers) == pytest.approx(modelled * model.num_layers)


def test_state_layers_have_no_kv():
    model = qwen36_35b_a3b()
    candidate, plan = planned(model, gpu_box(gpu_memory_bytes=80 * GIB), max_num_seqs=16)
    s = candidate.inputs
    assert s.layers.blocks == tuple(16 * 2 * 2 * 256 * 2 if j % 4 == 3 else 0 for j in range(40))
    assert memory_of(plan, model).parts["gpu"]["KV"] == sum(s.layers.blocks) * memory_of(plan, model).kv_blocks["gpu"]


@pytest.mark.parametrize("box", [cpu_box, gpu_box])
def test_a_stage_of_state_layers_alone_is_planned(box):
    """It has no KV at all."""
    model = replace(qwen36_35b_a3b().stage(4, 7))
    candidate, plan = planned(model, box(), max_num_seqs=16)
    assert candidate.inputs.seq_kv_bytes == 0
    assert sum(parts.get("KV", 0) for parts in memory_of(plan, model).parts.values()) == 0


def test_kv_that_layers_reuse_comes_to_each_of_them():
    """Five layers of eight have KV; three more bring in that of the last one of their kind, with its new tokens."""
    model = replace(llama_with_two_head_sizes(), windows=(None,) * 8, global_head_dim=0, global_kv_heads=0)
    candidate, _ = planned(model, gpu_box(gpu_memory_bytes=4 * GIB), max_num_seqs=16)
    s, phase = candidate.inputs, Phase(1, 0, 0, 16, 1000)
    assert streamed_kv_bytes(s, phase) * 8 == pytest.approx(16 * (999 + 7.5) * 8 * LOCAL)
    at = replace(
        candidate.counts.placement(s), w_gpu=1, w_cpu=0, w_disk=0, kv_gpu=0, kv_cpu=0, kv_streamed=0, kv_disk=1
    )
    moved, block = moved_bytes(s, phase, at), 16 * LOCAL
    assert moved["disk_read"] * 8 == pytest.approx(16 * ((999 + 7.5) / 16 * 8 + 3) * block)
    assert moved["disk_write"] * 8 == pytest.approx(16 * 5 * block)
