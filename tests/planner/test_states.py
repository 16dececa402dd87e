"""States in plans: what they take of each tier and each lane, and the placements that follow from it."""

import bisect
import itertools
import json
import re
from dataclasses import replace

import pytest
from known_plans import plan_problem
from planner_cases import GIB, budgets, constant, cpu_box, gpu_box, llama_8b, qwen36_35b_a3b

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.units import format_bytes, format_seconds, parse_bytes
from batchgen.core.workload import Workload
from batchgen.models.state_layers import DeltaNet, ShortConv, StateRow
from batchgen.planner.costs import decode_state_bytes, layer_lanes, moved_bytes, phase_decode_attention_s
from batchgen.planner.explain import explain, make_plan
from batchgen.planner.explanation import explanation_of
from batchgen.planner.memory import memory_parts, peak_bytes
from batchgen.planner.mip import fits
from batchgen.planner.phases import Phase
from batchgen.planner.problem import Allowed, Problem
from batchgen.planner.replanned import smaller_states_s
from batchgen.planner.search import search
from batchgen.planner.simulation import memory_of, simulate_job
from batchgen.planner.sizes import activation_bytes

STATE = DeltaNet(key_heads=4, value_heads=8, key_dim=128, value_dim=128, kernel=4)
# 8 matrices of 128 x 128 in fp32, and three earlier inputs of 2048 channels in fp16.
ROW = 8 * 128 * 128 * 4 + 3 * 2048 * 2


def hybrid(layers=8, **changes):
    """Of four layers, three keep a state."""
    model = replace(
        llama_8b().first_layers(layers), hidden_size=1024, embed_size=1024, intermediate_size=2048, vocab_size=4096
    )
    return replace(model, state=STATE, state_layers=tuple(j for j in range(layers) if j % 4 != 3), **changes)


def problem_of(hardware, model, workload=None, **options):
    given = {"budgets": budgets(hardware)} | options
    workload = workload or Workload.uniform(1000, 100, 50)
    return Problem(
        hardware, model, workload, compute_format="float16", weight_formats=("float16",), kv_formats=("float16",),
        admissions=("continuous",), max_model_len=workload.max_seq_len, **given,
    )  # fmt: skip


def planned(problem):
    candidate = search(problem)
    return candidate, make_plan(problem, candidate, startup_s=0.0)


def test_a_row_has_the_matrices_and_the_last_inputs_of_the_convolution():
    assert StateRow(STATE, "float32", "float16").num_bytes == ROW == 131 * 4096
    assert StateRow(STATE, "bfloat16", "float16").matrix_bytes == 8 * 128 * 128 * 2
    assert StateRow(ShortConv(2048, 3), "float32", "bfloat16").num_bytes == 2 * 2048 * 2


def test_a_sequence_of_qwen36_35b_keeps_65_mb():
    """30 layers of 32 matrices of 128 x 128, and inputs of 8192 channels."""
    candidate, _ = planned(problem_of(gpu_box(gpu_memory_bytes=100 * GIB), qwen36_35b_a3b(), max_num_seqs=8))
    assert candidate.inputs.seq_state_bytes == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == 64_389_120


@pytest.mark.parametrize("gpu_memory", [1.2, 2, 8])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_slots_are_sequences_and_snapshots(gpu_memory, share_prefixes):
    hardware = gpu_box(gpu_memory_bytes=int(gpu_memory * GIB), cpu_memory_bytes=8 * GIB)
    candidate, plan = planned(problem_of(hardware, hybrid(), max_num_seqs=96, share_prefixes=share_prefixes))
    memory, policy = memory_of(plan, hybrid()), plan.policy
    seqs = {"gpu": policy.kv_seqs.get("gpu", 0), "disk": policy.kv_seqs.get("disk", 0)}
    seqs["cpu"] = 96 - sum(seqs.values())
    row = candidate.inputs.state_row_bytes
    for tier, count in seqs.items():
        snapshots = 1 + count // 32 if share_prefixes and count and tier != "disk" else 0
        assert memory.state_slots.get(tier, 0) == count + snapshots
        assert memory.parts[tier].get("state", 0) == (count + snapshots) * 6 * row
        assert sum(memory.parts[tier].values()) <= memory.budgets[tier]


@pytest.mark.parametrize("box", [cpu_box(cpu_memory_bytes=3 * GIB), gpu_box(gpu_memory_bytes=GIB)])
def test_what_is_planned_is_what_is_allocated_or_a_little_more(box):
    candidate, plan = planned(problem_of(box, hybrid(), max_num_seqs=128))
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    memory, planned_parts = memory_of(plan, s.model), memory_parts(s, at)
    for tier, peak in peak_bytes(s, at).items():
        fixed = sum(size for part, size in memory.parts[tier].items() if part not in ("KV", "weights", "process"))
        kv, weights = planned_parts[tier].get("KV", 0), planned_parts[tier].get("weights", 0)
        assert fixed + kv + weights <= peak + 1
        assert sum(planned_parts[tier].values()) == pytest.approx(peak)


def test_states_limit_the_block_of_short_rows():
    """A sequence of 150 tokens keeps 2.5 times as much in states as in KV, so half of that lets in so many more."""
    candidate, _ = planned(problem_of(cpu_box(cpu_memory_bytes=GIB), hybrid(), max_num_seqs=8, share_prefixes=False))
    s, allowed = replace(candidate.inputs, budgets={"cpu": GIB, "disk": 0}), Allowed(weight_tiers=("cpu",))

    def most(inputs):
        sizes = range(1, 1000)
        return bisect.bisect(sizes, False, key=lambda n: not fits(replace(inputs, max_num_seqs=n), allowed))

    kv = 10 * 2 * 16 * 2 * 1024 * 2  # ten blocks of both layers that attend
    assert s.seq_kv_bytes == kv and s.seq_state_bytes == 6 * s.state_row_bytes == 6 * ROW
    halved = replace(s, state_dtype="bfloat16")
    assert most(halved) / most(s) == pytest.approx((kv + 6 * ROW) / (kv + 6 * halved.state_row_bytes), rel=0.1)


@pytest.mark.parametrize(("updates_per_s", "most"), [(1e12, "cpu"), (1e9, "streamed")])
def test_states_that_the_gpu_cannot_hold_are_divided_between_the_cpu_and_the_link(updates_per_s, most):
    """By hand: the CPU reads and writes a state of r bytes in 2 r / rate, the link moves it in r / 1.2e10.

    With two micro-batches the CPU updates some while others come and go, so both have as much to do.
    """
    seqs, workload = 256, Workload.uniform(2000, 20, 200)
    hardware = gpu_box(gpu_memory_bytes=816 << 20, dram_bytes_per_s=1e13)
    cpu = replace(hardware.cpu, state_update_bytes_per_s={"float32": constant(updates_per_s)})
    problem = problem_of(replace(hardware, cpu=cpu), hybrid(), workload, max_num_seqs=seqs, num_gpu_batches=2)
    candidate, plan = planned(replace(problem, allowed=replace(problem.allowed, weight_tiers=("gpu",))))
    counts, s = plan.policy.kv_seqs, candidate.inputs
    assert sum(counts.values()) == seqs and counts[most] > seqs / 2
    kv_bytes = 2 * 120 * (2 * 1024 * 2)  # of 120 tokens in both layers that attend
    cpu_s = counts["cpu"] * (2 * 6 * s.state_row_bytes / updates_per_s + kv_bytes / 2e10)
    link_s = counts["streamed"] * (6 * s.state_row_bytes + kv_bytes) / 1.2e10
    assert cpu_s == pytest.approx(link_s, rel=0.15)


def test_a_streamed_state_moves_whole_both_ways_in_every_sweep():
    hardware = gpu_box(gpu_memory_bytes=2 * GIB)
    candidate, _ = planned(problem_of(hardware, hybrid(), max_num_seqs=64))
    s, phase = candidate.inputs, Phase(1, 0, 0, 64, 100)
    at = replace(
        candidate.counts.placement(s), w_gpu=1, w_cpu=0, w_disk=0, kv_gpu=0, kv_cpu=0, kv_streamed=1, act_cpu=0
    )
    streamed, held = moved_bytes(s, phase, at), moved_bytes(s, phase, replace(at, kv_gpu=1, kv_streamed=0))
    states = 64 * 6 * s.state_row_bytes
    kv = 2 * 2 * 1024 * 2  # of a token, in both layers that attend
    assert (streamed["d2h"] - held["d2h"]) * 8 == pytest.approx(states + 64 * kv)
    assert (streamed["h2d"] - held["h2d"]) * 8 == pytest.approx(states + 64 * kv * (99 + 7.5))
    on_disk = moved_bytes(s, phase, replace(at, kv_streamed=0, kv_disk=1))
    assert on_disk["disk_write"] * 8 == pytest.approx(states + 64 * 2 * s.layers.blocks[3])
    assert decode_state_bytes(s, phase) * 8 == 2 * states


def test_updates_take_as_long_as_memory_needs():
    """A machine without rates of states: its memory's rate counts, for reading and writing."""
    candidate, _ = planned(problem_of(cpu_box(), hybrid(), max_num_seqs=64))
    s, phase = candidate.inputs, Phase(1, 0, 0, 64, 100)
    attention_s = 64 * 2 * 100 * (2 * 1024 * 2) / 1.5e10
    assert phase_decode_attention_s(s, phase, s.rates) * 8 == pytest.approx(
        attention_s + 2 * 64 * 6 * s.state_row_bytes / 4e10
    )
    measured = replace(s.hardware.cpu, state_update_bytes_per_s={"float32": constant(8e10)})
    faster = replace(s, hardware=replace(s.hardware, cpu=measured))
    assert phase_decode_attention_s(faster, phase, measured) * 8 == pytest.approx(
        attention_s + 2 * 64 * 6 * s.state_row_bytes / 8e10
    )


@pytest.mark.parametrize("box", ["cpu", "gpu"])
def test_more_memory_is_never_slower(box):
    seconds = []
    for memory in (0.7, 0.9, 1.2, 1.6, 2.4, 4, 8):
        if box == "cpu":
            hardware = cpu_box(cpu_memory_bytes=int(memory * GIB))
        else:
            hardware = gpu_box(gpu_memory_bytes=int(memory * GIB), cpu_memory_bytes=6 * GIB)
        seconds.append(search(problem_of(hardware, hybrid(), Workload.uniform(250, 100, 50))).seconds)
    assert all(more <= less * (1 + 2e-4) for less, more in itertools.pairwise(seconds)), seconds


def test_a_plan_says_what_states_take_and_what_smaller_ones_would_save():
    problem = problem_of(cpu_box(cpu_memory_bytes=int(0.6 * GIB)), hybrid(), Workload.uniform(2000, 30, 100))
    plan = plan_problem(problem)
    saved_s = smaller_states_s(problem, plan, lambda other: plan_problem(other).prediction.total_s)
    smaller = plan_problem(replace(problem, state_dtype="bfloat16"))
    assert saved_s == plan.prediction.total_s - smaller.prediction.total_s > 0
    assert smaller_states_s(problem, smaller, lambda other: 0.0) is None
    said = "\n".join(explain(plan, explanation_of(plan, smaller_states_s=saved_s)))
    assert "KV float16, states float32" in said and "\nstate " in said and "KV and states" in said
    assert "\nSome layers keep a state of fixed size for each sequence, in place of KV.\n" in said
    assert "states of a sequence take 3.1 MiB (float32), as much as the KV of 393 tokens" in said
    assert f"--state-dtype bfloat16 would save {format_seconds(saved_s)}" in said
    assert "states bfloat16" in "\n".join(explain(smaller)) and "--state-dtype" not in "\n".join(explain(smaller))


def test_a_plan_in_json_is_read_back_with_its_states():
    _, plan = planned(problem_of(cpu_box(cpu_memory_bytes=GIB), hybrid(), max_num_seqs=64))
    assert plan.states.slots == {"cpu": 64 + 3} and plan.states.seq_bytes == 6 * ROW
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("box", [cpu_box(cpu_memory_bytes=int(1.3 * GIB)), gpu_box(gpu_memory_bytes=GIB)])
def test_a_plan_takes_as_long_as_its_simulated_job(box):
    model = hybrid()
    problem = problem_of(box, model, Workload.uniform(200, 100, 30))
    plan = plan_problem(problem)
    predicted_s = plan.prediction.total_s - plan.prediction.startup_s - 200 * box.row_overhead_s
    assert predicted_s == pytest.approx(simulate_job(plan, model, box).total_s, rel=0.15)


def test_lanes_of_a_model_without_states_have_none():
    candidate, plan = planned(problem_of(cpu_box(), llama_8b(), max_num_seqs=8))
    assert candidate.inputs.state_row_bytes == 0 and not memory_of(plan, llama_8b()).state_slots
    assert "state" not in plan.placement_bytes and "state" not in plan.prediction.memory_bytes["cpu"]
    assert all(
        value >= 0
        for value in layer_lanes(
            candidate.inputs, Phase(1, 10, 1, 7, 50), candidate.counts.placement(candidate.inputs)
        ).values()
    )


def test_activations_of_state_layers_are_wider():
    model = hybrid()
    wider = activation_bytes(model, 2, 512, 0, on_gpu=False)
    narrower = activation_bytes(replace(model, state=None, state_layers=()), 2, 512, 0, on_gpu=False)
    assert wider - narrower >= 512 * (2 * STATE.channels + 8 * STATE.value_heads) - 512 * 2 * 4096


@pytest.mark.parametrize(("state_dtype", "rows", "generated_per_s"), [("float32", 128, 13), ("bfloat16", 256, 18)])
def test_qwen36_35b_within_10_gib_is_bound_by_the_disk(state_dtype, rows, generated_per_s):
    """In Q4_0, 256 rows of 64 + 32, a disk of 1.95 GB/s, where computing takes no time: weights stream.

    States of 128 rows in fp32 take 8.2 GB, so 19 GB stream in a sweep, for 128 tokens.
    """
    fast = cpu_box(disk_read_bytes_per_s=1.95e9, disk_write_bytes_per_s=1e9, dram_bytes_per_s=1e12)
    cpu = replace(
        fast.cpu,
        gemm_flops_per_s={"float16": constant(1e15)},
        prefill_attention_flops_per_s={"float16": constant(1e15)},
        decode_attention_bytes_per_s={"float16": constant(1e13)},
        elementwise_bytes_per_s={"float16": constant(1e13)},
    )
    problem = Problem(
        replace(fast, cpu=cpu), qwen36_35b_a3b(), Workload.uniform(256, 64, 32), {"cpu": 10 * GIB, "disk": 500 * GIB},
        "bfloat16", ("q4_0",), ("bfloat16",), state_dtype=state_dtype, process_bytes=400 << 20, max_model_len=96,
    )  # fmt: skip
    plan = plan_problem(problem)
    assert plan.prediction.bottleneck in ("disk_read", "disk")
    in_memory = plan.policy.kv_seqs.get("cpu", 0)
    assert plan.prediction.generated_tokens_per_s == pytest.approx(generated_per_s, rel=0.25), in_memory


class TestSizesThatDoNotFit:
    """A number of sequences that the user fixes: the message names it, and what would fit in its place."""

    MACHINE = cpu_box(cpu_memory_bytes=4 * GIB, disk_bytes=1)
    ROWS = Workload.uniform(2000, 100, 50)

    def problem(self, **options):
        given = {"budgets": {"cpu": self.MACHINE.cpu_memory_bytes, "disk": 0}} | options
        return problem_of(self.MACHINE, hybrid(16), self.ROWS, **given)

    def said(self, **options):
        with pytest.raises(InputError) as caught:
            search(self.problem(**options))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_states_are_named_with_the_most_sequences_that_fit(self):
        text = self.said(max_num_seqs=1500)
        assert text.startswith("no plan fits --max-num-seqs 1500: the model's weights take ")
        assert re.search(rf"1,500 sequences [\d.]+ [MG]iB of KV and {format_bytes(1500 * 12 * ROW)} of states; ", text)
        most = int(re.search(r"give at most --max-num-seqs (\d+), or ", text)[1])
        assert 100 < most < 1500
        search(self.problem(max_num_seqs=most))
        with pytest.raises(InputError):
            search(self.problem(max_num_seqs=most + most // 50))

    def test_the_budget_that_would_do_is_named_where_the_machine_has_it(self):
        text = self.said(max_num_seqs=1500, budgets={"cpu": 2 * GIB, "disk": 0})
        assert re.search(r"give at most --max-num-seqs \d+, or it takes a machine with at least [\d.]+ GiB", text)
        text = self.said(max_num_seqs=300, budgets={"cpu": 2 * GIB, "disk": 0})
        least = parse_bytes(re.search(r"or give at least --cpu-memory ([\d.]+ [KMG]iB)", text)[1])
        search(self.problem(max_num_seqs=300, budgets={"cpu": least, "disk": 0}))

    def test_a_length_of_sweeps_is_named_likewise(self):
        text = self.said(max_num_batched_tokens=400_000)
        assert text.startswith("no plan fits --max-num-batched-tokens 400000: ")
        most = int(re.search(r"give at most --max-num-batched-tokens (\d+)", text)[1])
        search(self.problem(max_num_batched_tokens=most))

    def test_no_option_is_named_where_one_sequence_does_not_fit(self):
        text = self.said(max_num_seqs=2, budgets={"cpu": GIB // 16, "disk": 0})
        assert text.startswith("no plan fits: the model's weights take ") and "at most" not in text
