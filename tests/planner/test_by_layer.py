"""KV by layer: what the planner counts of a placement, what the runtime allocates for it, and when it is looked for."""

from dataclasses import replace

import pytest
from planner_cases import GIB, gpu_box, opt

from batchgen.core.workload import Lengths, Workload
from batchgen.planner.costs import moved_bytes
from batchgen.planner.explain import make_plan
from batchgen.planner.memory import peak_bytes
from batchgen.planner.problem import Allowed, Problem
from batchgen.planner.search import prune_nothing, search
from batchgen.planner.simulation import memory_of
from batchgen.planner.strategies import PIE, NotApplicable, added_candidates

MODEL = opt(1024, 12, 8)
LONG = Workload(12, Lengths((4000,)), Lengths((64, 128)), 128)


def problem_with(gpu_memory, **changes):
    fields = {"admissions": ("continuous",), "longest_tokens": 4128} | changes
    return Problem(
        gpu_box(), MODEL, LONG, {"gpu": gpu_memory, "cpu": 8 * GIB, "disk": 0}, "float16", ("float16",), ("float16",),
        **fields,
    )  # fmt: skip


def candidates_by_layer(problem):
    return [candidate for candidate in added_candidates(problem, prune_nothing) if candidate.counts.kv_layers]


@pytest.mark.parametrize("gpu_memory", [GIB, 3 * GIB // 2, 2 * GIB])
def test_memory_counted_for_kv_by_layer_holds_what_is_allocated(gpu_memory):
    problem = problem_with(gpu_memory)
    found = search(PIE.restrict(problem))
    s, counts = found.inputs, found.counts
    at = counts.placement(s)
    assert 0 < counts.kv_layers < 12 and {c for c, n in counts.kv_seqs.items() if n} == {"streamed"}
    assert at.kv_gpu == pytest.approx(counts.kv_layers / 12) and at.kv_gpu + at.kv_streamed == pytest.approx(1)
    plan = make_plan(replace(problem, model_name="m", max_model_len=4128, share_prefixes=False), found, startup_s=0.0)
    assert plan.policy.kv_layers == counts.kv_layers
    memory = memory_of(plan, MODEL)
    assert memory.kv_blocks["cpu"] >= s.max_num_seqs * s.seq_blocks, "the block at full length"
    of_pool = s.layers.mean_block * memory.kv_blocks["cpu"]
    # What the budget has beside is of use when fewer layers stream.
    spare = {"gpu": memory.parts["gpu"]["KV"] - counts.kv_layers * of_pool}
    for tier, peak in peak_bytes(s, at).items():
        assert sum(memory.parts[tier].values()) - spare.get(tier, 0) <= peak * 1.001 + (1 << 20)
        assert sum(memory.parts[tier].values()) <= memory.budgets[tier]
    assert 0 <= spare["gpu"] <= (12 - counts.kv_layers) * of_pool
    assert memory.parts["cpu"]["KV"] == (12 - counts.kv_layers) * of_pool


def test_each_token_goes_to_the_host_once_in_the_layers_that_stream():
    found = search(PIE.restrict(problem_with(GIB)))
    s, at = found.inputs, found.counts.placement(found.inputs)
    for phase in found.phases:
        out = moved_bytes(s, phase, at)["d2h"] - at.act_cpu * phase.tokens * s.hidden_bytes * (1 - 1 / 12)
        streamed = (12 - found.counts.kv_layers) / 12
        assert out == pytest.approx(streamed * (phase.prefill_tokens + phase.decode_seqs) * s.kv_token_bytes)


def test_plans_by_layer_are_no_faster_than_their_bound_and_no_slower_with_more_memory():
    found = [search(PIE.restrict(problem_with(size))) for size in (GIB, 3 * GIB // 2, 2 * GIB)]
    for candidate in found:
        assert candidate.seconds >= candidate.relaxed.seconds * (1 - 1e-6)
    seconds = [candidate.seconds for candidate in found]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"allowed": Allowed(kv_placements=("gpu", "cpu", "disk"))},
        {"allowed": Allowed(weight_tiers=("cpu",))},
    ],
)
def test_kv_by_layer_is_not_tried_where_it_is_not_allowed(changes):
    assert candidates_by_layer(problem_with(GIB))
    assert not candidates_by_layer(problem_with(GIB, **changes))


def test_kv_by_layer_is_not_tried_where_weights_do_not_fit():
    assert not candidates_by_layer(problem_with(GIB // 4))
    with pytest.raises(NotApplicable, match="more than the GPU's 256"):
        PIE.restrict(problem_with(GIB // 4))
