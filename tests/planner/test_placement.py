"""The linear programme and the search: optimal, within budget, and never worse off with more hardware."""

import itertools
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import GIB, budgets, cpu_box, gpu_box, llama_8b, opt
from thorough import quick_or, some_of

from batchgen.core.dtypes import INT4
from batchgen.core.errors import InputError
from batchgen.core.plan import Plan, spread_layers
from batchgen.core.units import parse_bytes
from batchgen.core.workload import Lengths, Workload
from batchgen.planner.bound import lower_bound_s
from batchgen.planner.costs import head_lanes, job_seconds, layer_lanes
from batchgen.planner.deferred_attention import with_deferred_attention
from batchgen.planner.explain import make_plan
from batchgen.planner.kv_memory import Demand
from batchgen.planner.memory import kv_bytes, peak_bytes, plan_memory
from batchgen.planner.mip import EQUALLY_FAST, in_host_memory, solve
from batchgen.planner.placement import Counts
from batchgen.planner.problem import Allowed, Loading, Problem
from batchgen.planner.search import block_latency_s, frontier, search
from batchgen.planner.search_space import search_space

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from flexgen_check import FlexGenInputs

OPT_13B = opt(5120, 40, 40)
ROWS = quick_or(128, 512)


def problem(hardware=None, model=OPT_13B, workload=None, **options):
    hardware = hardware or gpu_box()
    values = {
        "hardware": hardware,
        "model": model,
        "workload": workload or Workload.uniform(ROWS, 256, 64),
        "budgets": budgets(hardware),
        "compute_format": "float16",
        "weight_formats": ("float16",),
        "kv_formats": ("float16",),
    }
    return Problem(**(values | options))


def check_placement(candidate):
    s, counts = candidate.inputs, candidate.counts
    for tiers in counts.weight_layers.values():
        assert sum(tiers) == s.model.num_layers and all(isinstance(n, int) and n >= 0 for n in tiers)
    assert sum(counts.kv_seqs.values()) == s.max_num_seqs and all(n >= 0 for n in counts.kv_seqs.values())
    assert sum(counts.activation_batches) == s.num_gpu_batches
    at = counts.placement(s)
    assert at.w_gpu + at.w_cpu + at.w_disk == pytest.approx(1)
    assert at.kv_gpu + at.kv_cpu + at.kv_streamed + at.kv_disk == pytest.approx(1)
    assert at.act_gpu + at.act_cpu == pytest.approx(1) and at.head_gpu + at.head_cpu + at.head_disk == pytest.approx(1)
    check_fits(s, at)


def check_fits(s, placement):
    for tier, peak in peak_bytes(s, placement).items():
        assert peak <= s.budgets[tier] * (1 + 1e-9), tier


CASES = {
    "streamed weights": problem(),
    "resident weights": problem(model=llama_8b(), hardware=gpu_box(gpu_memory_bytes=20 * GIB)),
    "weights and KV on disk": problem(model=opt(9216, 64, 72), hardware=gpu_box(cpu_memory_bytes=24 * GIB)),
    "CPU only": problem(cpu_box(), model=llama_8b()),
    "CPU only, model larger than memory": problem(cpu_box(cpu_memory_bytes=12 * GIB), model=llama_8b()),
    "packing allowed": problem(weight_formats=("float16", "int4"), kv_formats=("float16", "int5")),
    "FlexGen's runtime": problem(make_inputs=FlexGenInputs, admissions=("static",)),
    "mixed lengths": problem(
        workload=Workload(900, Lengths((64, 200, 900)), Lengths((4, 40, 128)), 128, shared_prefix_len=100)
    ),
}


@pytest.mark.parametrize("name", some_of(CASES, 3, "integer plans"))
def test_integer_plans_fit_and_come_close_to_the_bound(name):
    best = search(CASES[name])
    check_placement(best)
    assert best.relaxed.seconds * (1 - 1e-6) <= best.seconds <= 1.1 * best.relaxed.seconds
    assert best.seconds == pytest.approx(job_seconds(best.inputs, best.phases, best.counts.placement(best.inputs)))


@pytest.mark.parametrize(("num_prompts", "prompt_len"), [(2000, 70), (16, 200_000)])
def test_kv_of_a_job_that_generates_nothing_goes_to_disk_only_for_want_of_memory(num_prompts, prompt_len):
    """By the cost model KV on disk would be faster: memory is slow where it is used for the first time."""
    workload = replace(Workload.uniform(num_prompts, prompt_len, 1), scored_len=1.0)
    hardware = cpu_box(cpu_memory_bytes=3 * GIB // 2, first_touch_bytes_per_s=1e9)
    kv_seqs = search(problem(hardware, opt(384, 6, 12), workload)).counts.kv_seqs
    assert (kv_seqs["disk"] > 0) == (prompt_len > 1000)


MODELS = (
    opt(768, 12, 12),
    opt(2048, 24, 32),
    OPT_13B,
    llama_8b(),
    replace(llama_8b(), tied_embeddings=True, head_dim=72),
    replace(llama_8b(), windows=(None, 100, 100, 100) * 8),
)


@pytest.mark.parametrize("kv_on_disk", [True, False], ids=["KV may be on disk", "KV stays in memory"])
def test_what_is_known_without_a_solver_is_as_fast_as_the_lp(kv_on_disk):
    """And memory that is used for the first time is slow, which KV on disk would avoid."""
    rng, known = random.Random(1), 0
    for _ in range(12):
        memory = int((rng.uniform(0.5, 3) * OPT_13B.weight_bytes(2) / GIB + 1.5) * GIB)
        rates = {"disk_read_bytes_per_s": rng.choice([3e9, 3e11]), "first_touch_bytes_per_s": rng.choice([None, 1e9])}
        allowed = Allowed(kv_placements=("cpu", "disk") if kv_on_disk else ("cpu",))
        workload = Workload.uniform(rng.choice([30, 3000]), rng.choice([20, 600]), rng.choice([1, 100]))
        of_all = problem(cpu_box(cpu_memory_bytes=memory, **rates), OPT_13B, workload, allowed=allowed)
        for s, phases in rng.sample(list(search_space(of_all)), 3):
            found = in_host_memory(s, phases, allowed)
            if found is not None:
                known += 1
                check_fits(s, found.placement)
                relaxed = solve(s, phases, allowed, integer=False)
                assert relaxed.job_s * (1 - 1e-6) <= found.job_s <= relaxed.job_s * (1 + EQUALLY_FAST + 1e-4)
    assert known > 8


@st.composite
def problems(draw):
    """Machines of all sizes, so that all tiers, KV placements and buffers come into plans."""
    model = draw(st.sampled_from(MODELS))
    size = model.weight_bytes(2) / GIB
    on_gpu = draw(st.booleans())
    memory = {
        "cpu_memory_bytes": int((draw(st.floats(0.05, 3)) * size + 1.5) * GIB),
        "disk_bytes": draw(st.sampled_from([0, 300 * GIB])),
    }
    if on_gpu:
        memory["gpu_memory_bytes"] = int((draw(st.floats(0.02, 1.5)) * size + 0.7) * GIB)
    hardware = (gpu_box if on_gpu else cpu_box)(**memory, disk_read_bytes_per_s=draw(st.sampled_from([3e9, 3e10])))
    prompts = draw(st.lists(st.integers(1, 900), min_size=1, max_size=3))
    outputs = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    workload = Workload(draw(st.integers(1, 2000)), Lengths(tuple(prompts)), Lengths(tuple(outputs)), max(outputs))
    if draw(st.booleans()):
        workload = replace(workload, output_len=Lengths((1,)), max_output_len=1, scored_len=workload.prompt_len.mean)
    classes = draw(
        st.sampled_from(
            [("gpu", "cpu", "streamed", "disk"), ("gpu", "streamed", "disk"), ("gpu", "cpu", "disk"), ("disk",)]
        )
    )
    return problem(
        hardware,
        model,
        workload,
        weight_formats=(draw(st.sampled_from(["float16", "int4"])),),
        kv_formats=(draw(st.sampled_from(["float16", "int5"])),),
        allowed=Allowed(kv_placements=classes),
        max_num_seqs=draw(st.integers(1, 600)),
        num_gpu_batches=draw(st.sampled_from([None, 1, 2, 3])),
        process_bytes=draw(st.integers(0, GIB // 2)),
        longest_tokens=draw(st.sampled_from([None, 1800])),
        kv_block_size=draw(st.sampled_from([16, 7])),
    )


@settings(max_examples=quick_or(50, 100), deadline=None)
@given(problems())
def test_what_is_planned_fits_the_memory_that_the_runtime_takes(p):
    """`plan_memory` splits the same budgets for the same policy, and finds room for every sequence planned."""
    p = replace(p, max_model_len=2048)
    try:
        best = search(p)
    except InputError as error:
        assert "no plan fits" in str(error) or "no single budget" in str(error)
        return
    check_memory(p, best)
    if best.inputs.on_gpu and best.inputs.num_gpu_batches == 1 and best.inputs.admission == "continuous":
        beside = with_deferred_attention(replace(p, max_num_seqs=None), best)
        if beside is not None:
            assert beside.counts.kv_seqs["deferred"] == beside.inputs.deferred_seqs > 0
            check_placement(beside)
            check_memory(p, beside)


def check_memory(p, best):
    plan = make_plan(replace(p, model_name="m", share_prefixes=True), best, startup_s=0.0)
    longest = p.longest_tokens or p.workload.prompt_len.max + p.workload.max_output_len
    memory = plan_memory(
        p.model,
        plan.policy,
        Demand(p.workload.prompt_len.values[0] + 1, longest, task=p.workload.task),
        dtype=p.compute_format,
        budgets=p.budgets,
        process_bytes=p.process_bytes,
    )
    s, at = best.inputs, best.counts.placement(best.inputs)
    for tier, blocks in plan.policy.kv_blocks.items():
        assert memory.kv_blocks[tier] >= blocks, tier
        if memory.window is not None and tier != "disk":
            assert memory.window_blocks[tier] >= blocks // s.seq_blocks * s.held_blocks(s.seq_blocks), tier
    peaks, kv = peak_bytes(s, at), kv_bytes(s, at)
    for tier, parts in memory.parts.items():
        taken = sum(parts.values()) - parts.get("KV", 0)
        planned = peaks[tier] - kv[tier]
        # What the planner adds is no waste either.
        assert taken <= planned + 1 <= taken + (64 << 20), tier


def test_input_embeddings_are_on_the_gpu_where_the_plan_leaves_room():
    """They make no plan slower, and are charged. Plans made before they had a place still open."""
    model = llama_8b()
    size = model.embedding_params * 2
    fitting = problem(gpu_box(gpu_memory_bytes=40 * GIB), model, Workload.uniform(50, 100, 20), max_num_seqs=50)
    best = search(fitting)
    inputs = best.inputs
    assert best.counts.embeddings_on_gpu == 1
    off = replace(best.counts, embeddings_on_gpu=0)
    on_gpu, on_host = (peak_bytes(inputs, counts.placement(inputs)) for counts in (best.counts, off))
    assert on_gpu["gpu"] - on_host["gpu"] == on_host["cpu"] - on_gpu["cpu"] == size
    short = replace(fitting, budgets=fitting.budgets | {"gpu": int(on_gpu["gpu"])})  # less than the solver's tolerance
    without = search(short)
    assert without.counts.embeddings_on_gpu == 0 and without.counts.head_on_gpu == 1
    assert without.seconds == pytest.approx(best.seconds)
    plan = make_plan(replace(fitting, model_name="m", max_model_len=2048, share_prefixes=True), best, startup_s=0.0)
    assert plan.policy.embedding_tier == "gpu"
    written = plan.to_json()
    del written["policy"]["embedding_tier"]
    assert Plan.from_json(json.loads(json.dumps(written))).policy == replace(plan.policy, embedding_tier="cpu")


def random_counts(s, draw):
    """Any placement: most draws stick to a few tiers, as sensible people would."""

    def parts(total, choices):
        names = draw.sample(choices, draw.randint(1, len(choices)))
        cuts = sorted(draw.randint(0, total) for _ in names[1:])
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        found = dict.fromkeys(choices, 0)
        return found | dict(zip(names, sizes, strict=True))

    layers = s.model.num_layers
    weights = {t: tuple(parts(layers, [0, 1, 2]).values()) for t in s.model.layer_tensors}
    batches = s.num_gpu_batches
    on_gpu = draw.randint(0, batches)
    kv = parts(s.max_num_seqs, ["gpu", "cpu", "streamed", "disk"])
    return Counts(weights, kv, (on_gpu, batches - on_gpu), draw.randint(0, 1))


def test_no_random_placement_beats_the_lp():
    draw, most = random.Random(5), quick_or(150, 1000)
    feasible = closest = 0
    choices = [(s, phases) for s, phases in search_space(replace(CASES["streamed weights"], max_num_seqs=48))]
    choices += [(s, phases) for s, phases in search_space(replace(CASES["FlexGen's runtime"], max_num_seqs=48))]
    for s, phases in draw.sample(choices, 6):
        optimum = solve(s, phases, Allowed(), integer=False)
        whole = solve(s, phases, Allowed(), integer=True)
        assert (optimum is None) == (whole is None)
        if optimum is None:
            continue
        done = 0
        while done < most:
            counts = random_counts(s, draw)
            at = counts.placement(s)
            if any(peak > s.budgets[tier] for tier, peak in peak_bytes(s, at).items()):
                done += most / 50_000  # mostly infeasible settings end, too
                continue
            done += 1
            feasible += 1
            seconds = job_seconds(s, phases, at)
            assert seconds >= optimum.seconds * (1 - 1e-6)
            assert seconds >= whole.seconds * (1 - 2e-4)
            closest = max(closest, optimum.seconds / seconds)
    assert feasible > most and closest > 0.5


@pytest.mark.parametrize("name", CASES)
def test_the_bound_that_orders_the_search_is_one(name):
    """No LP is faster than what the search assumes without solving it, or it could end too early."""
    draw = random.Random(7)
    enumerated = list(search_space(CASES[name]))
    solved = 0
    for s, phases in draw.sample(enumerated, min(quick_or(30, 60), len(enumerated))):
        optimum = solve(s, phases, CASES[name].allowed, integer=False)
        if optimum is not None:
            solved += 1
            assert lower_bound_s(s, phases) <= optimum.seconds * (1 + 1e-6)
    assert solved > 5


SCALABLE = (
    "gpu_memory_bytes", "cpu_memory_bytes", "disk_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "disk_read_bytes_per_s",
    "disk_write_bytes_per_s", "dram_bytes_per_s", "gemm", "decode_attention", "cpu_decode_attention",
    "prefill_attention",
    "elementwise", "sampling_logits_per_s",
)  # fmt: skip


@settings(max_examples=quick_or(2, 25), deadline=None)
@given(
    st.sampled_from(SCALABLE),
    st.floats(1.02, 4.0),
    st.sampled_from([OPT_13B, llama_8b(), opt(9216, 64, 72)]),
    st.integers(1, 300),
    st.integers(16, 600),
    st.integers(1, 200),
)
def test_more_hardware_is_never_slower(name, factor, model, rows, prompt, output):
    workload = Workload.uniform(rows, prompt, output)
    before = search(problem(model=model, workload=workload)).seconds
    after = search(problem(gpu_box().scaled(**{name: factor}), model=model, workload=workload)).seconds
    assert after <= before * (1 + 5e-4)


@settings(max_examples=quick_or(4, 30), deadline=None)
@given(
    st.sampled_from(["gpu", "cpu", "disk", *SCALABLE]),
    st.floats(1.02, 4.0),
    st.sampled_from([OPT_13B, llama_8b()]),
    st.sampled_from([8, 16, 24, 40]),
    st.sampled_from([20, 40, 200]),
    st.integers(1, 300),
    st.integers(1, 100),
)
def test_more_of_anything_never_makes_a_job_slower_that_may_have_to_write_a_store(
    name, factor, model, memory_gib, disk_gib, rows, output
):
    """The store takes time and disk, so with more of either a plan may use one; but only where that is faster."""
    size = model.weight_bytes(2)
    loading = {"float16": Loading(read_s=size / 2e9, store_bytes=size)}
    box = gpu_box(cpu_memory_bytes=memory_gib * GIB, disk_bytes=disk_gib * GIB, disk_write_bytes_per_s=1e9)
    workload = Workload.uniform(rows, 128, output)
    before = problem(box, model, workload, loading=loading, max_num_seqs=min(rows, 64))
    if name in before.budgets:
        larger = replace(
            box, **{{"gpu": "gpu_memory_bytes", "cpu": "cpu_memory_bytes", "disk": "disk_bytes"}[name]: 1 << 50}
        )
        after = replace(before, hardware=larger, budgets={**before.budgets, name: int(before.budgets[name] * factor)})
    else:
        after = replace(before, hardware=box.scaled(**{name: factor}))
    try:
        before_s = search(before).job_s
    except InputError:
        return
    assert search(after).job_s <= before_s * (1 + 5e-4)


def test_a_store_is_written_only_where_that_takes_less_time_than_it_saves():
    """A short job keeps its weights in memory; one of many rows pays for the store, and leaves room for KV."""
    model, gib = OPT_13B, 30
    loading = {"float16": Loading(read_s=10.0, store_bytes=model.weight_bytes(2))}
    box = gpu_box(cpu_memory_bytes=gib * GIB, disk_write_bytes_per_s=2e8)

    def on_disk(rows):
        best = search(problem(box, model, Workload.uniform(rows, 64, 64), loading=loading, max_num_seqs=min(rows, 256)))
        return best.counts.placement(best.inputs).w_disk, best.startup_s

    (short, short_s), (long, long_s) = on_disk(8), on_disk(4000)
    assert short == 0 and short_s == pytest.approx(10.0)
    assert long > 0 and long_s > 10 + model.weight_bytes(2) / 2e8


def test_a_store_that_does_not_fit_the_disk_is_not_written():
    model = OPT_13B
    loading = {"float16": Loading(store_bytes=model.weight_bytes(2))}
    box = gpu_box(cpu_memory_bytes=40 * GIB, disk_bytes=20 * GIB)
    best = search(problem(box, model, loading=loading))
    assert best.counts.placement(best.inputs).w_disk == 0
    small = problem(gpu_box(cpu_memory_bytes=8 * GIB, disk_bytes=20 * GIB), model, loading=loading)
    with pytest.raises(InputError, match=r"--disk-memory|free disk"):
        search(small)


def test_more_memory_is_never_slower_without_a_gpu():
    times = [
        search(problem(cpu_box(cpu_memory_bytes=gib * GIB), model=llama_8b())).seconds
        for gib in (6, 8, 12, 17, 20, 32, 64)
    ]
    assert all(b <= a * (1 + 5e-4) for a, b in itertools.pairwise(times))
    assert times[0] > times[-1]


def test_lanes_agree_with_the_paper_in_its_own_setting():
    """FlexGen A.3 by hand: fp16 OPT, everything on the CPU, one block."""
    p = problem(admissions=("static",), max_num_seqs=8, num_gpu_batches=2, max_num_batched_tokens=8 * 256)
    p = replace(p, workload=Workload.uniform(8, 256, 32), kv_block_size=1)
    (s, phases), *_ = search_space(p)
    layers = OPT_13B.num_layers
    counts = Counts(dict.fromkeys(OPT_13B.layer_tensors, (0, layers, 0)), {"streamed": 8}, (0, 2), 0)
    prefill, decode = phases
    at = counts.placement(s)
    h, weights = 5120, OPT_13B.params_per_layer * 2
    assert layer_lanes(s, prefill, at)["h2d"] * 1.2e10 == pytest.approx(weights + 2 * 8 * 256 * h)
    stored = 2 * 8 * 256 * h * (layers - 1) / layers  # what the last layer makes stays for the head
    assert layer_lanes(s, prefill, at)["d2h"] * 1.2e10 == pytest.approx(4 * 8 * 256 * h + stored)
    context = decode.context
    assert context == pytest.approx(256 + 16, abs=0.6)
    assert layer_lanes(s, decode, at)["h2d"] * 1.2e10 == pytest.approx(
        weights + 4 * 8 * (context - 1) * h + 2 * 8 * h  # a token's own keys and values are there already
    )
    memory = peak_bytes(s, at)
    assert memory["disk"] == 0
    kv_and_weights = 4 * 8 * (256 + 32) * h * layers + weights * layers
    assert memory["cpu"] == pytest.approx(kv_and_weights, rel=0.03)  # and embeddings, activations


def test_grouped_queries_shrink_kv_and_the_head_counts():
    s, phases = next(iter(search_space(problem(model=llama_8b()))))
    assert s.kv_token_bytes == 2 * 8 * 128 * 2
    at = search(problem(model=llama_8b())).counts.placement(s)
    head = head_lanes(s, phases[0], at)["compute"]
    assert head >= 2 * 128256 * 4096 * phases[0].sampled / 4e13


def test_prices_are_what_a_little_more_saves():
    best = search(CASES["streamed weights"])
    s, phases, relaxed = best.inputs, best.phases, best.relaxed
    lane, saved = max(relaxed.lane_price_s.items(), key=lambda item: item[1])
    field = {"h2d": "h2d_bytes_per_s", "cpu_attention": "cpu_decode_attention", "dram": "dram_bytes_per_s"}
    if lane in field:
        faster = replace(s, hardware=s.hardware.scaled(**{field[lane]: 1.1}))
        real = relaxed.seconds - solve(faster, phases, Allowed(), integer=False).seconds
        assert 0.3 * saved <= real <= 1.2 * saved
    more = replace(s, budgets=s.budgets | {"gpu": s.budgets["gpu"] + GIB // 8})
    real = relaxed.seconds - solve(more, phases, Allowed(), integer=False).seconds
    # Time is convex in memory: each further byte saves no more than the first.
    assert 0.5 * relaxed.memory_price_s["gpu"] / 8 <= real <= 1.01 * relaxed.memory_price_s["gpu"] / 8


def test_a_latency_bound_is_kept_and_trades_throughput():
    workload = Workload.uniform(quick_or(160, 512), 256, 64)
    free = search(problem(workload=workload))
    bound = block_latency_s(free) / 1.5
    kept = search(problem(workload=workload, max_block_latency_s=bound))
    assert block_latency_s(kept) <= bound and kept.seconds > free.seconds
    few = Workload.uniform(quick_or(8, ROWS), 256, 64)
    with pytest.raises(InputError, match=r"shortest possible is .* s, give --max-block-latency at least"):
        search(problem(workload=few, max_block_latency_s=0.01))


@pytest.mark.thorough
def test_the_frontier_rises():
    points = frontier(problem(workload=Workload.uniform(64, 128, 16)))
    assert len(points) >= 4
    assert all(a[0] <= b[0] and a[1] < b[1] for a, b in itertools.pairwise(points))


@pytest.mark.thorough
def test_what_cannot_fit_is_told_with_the_smallest_change():
    """Weights are streamed from disk, so that it is a place for KV that is short."""
    small = gpu_box(gpu_memory_bytes=int(1.6 * GIB), cpu_memory_bytes=2 * GIB)
    with pytest.raises(InputError) as caught:
        search(problem(small, budgets=budgets(small) | {"disk": GIB // 32}))
    text = str(caught.value)
    assert "no plan fits" in text and "--weights int4" in text and "\n" not in text
    # The change it names is enough, and half of it is not.
    least = parse_bytes(text.split("--disk-memory ")[1].split(" (")[0])
    search(problem(replace(small, disk_bytes=int(least * 1.01))))
    with pytest.raises(InputError):
        search(problem(replace(small, disk_bytes=int(least * 0.98))))


def test_what_no_budget_of_the_machine_can_hold_takes_another_machine():
    in_memory = {"model": llama_8b(), "allowed": Allowed(("gpu", "cpu")), "workload": Workload.uniform(1, 256, 64)}
    small = gpu_box(gpu_memory_bytes=4 * GIB, cpu_memory_bytes=8 * GIB, disk_bytes=GIB)
    with pytest.raises(InputError) as caught:
        search(problem(small, **in_memory))
    text = str(caught.value)
    assert "it takes a machine with at least" in text and "--gpu-memory" not in text and "--cpu-memory" not in text
    # A machine of that size is enough.
    least = parse_bytes(re.search(r"([\d.]+ GiB) of memory", text)[1])
    larger = gpu_box(gpu_memory_bytes=4 * GIB, cpu_memory_bytes=int(least * 1.01), disk_bytes=GIB)
    search(problem(larger, **in_memory))


def test_impossible_budgets_are_refused():
    p = problem()
    with pytest.raises(InputError, match=r"--cpu-memory 100.0 GiB is more than gpu box has \(48.0 GiB\)"):
        search(replace(p, budgets=p.budgets | {"cpu": 100 * GIB}))


def test_equally_fast_plans_leave_the_disk_alone():
    """Compute binds, and memory is plentiful: nothing is gained from the disk."""
    roomy = gpu_box(cpu_memory_bytes=400 * GIB)
    best = search(problem(roomy, workload=Workload.uniform(ROWS, 512, 32)))
    at = best.counts.placement(best.inputs)
    assert at.w_disk == at.kv_disk == 0


def test_only_allowed_formats_and_tiers_are_used():
    best = search(CASES["packing allowed"])
    assert best.inputs.weight_format == "int4"
    assert best.seconds < search(CASES["streamed weights"]).seconds
    resident = Allowed(("cpu",), ("cpu",))
    in_memory = search(problem(cpu_box(), model=llama_8b(), allowed=resident))
    assert in_memory.counts.placement(in_memory.inputs).w_disk == 0
    with pytest.raises(InputError, match="no rates for the formats"):
        search(problem(gpu_box(gpu=replace(gpu_box().gpu, expand_bytes_per_s=None)), weight_formats=("int4",)))


@given(st.lists(st.integers(0, 60), min_size=3, max_size=3).filter(any))
def test_layers_are_spread_evenly(counts):
    tiers = list(spread_layers(tuple(counts)))
    assert [tiers.count(t) for t in ("gpu", "cpu", "disk")] == counts
    total = sum(counts)
    for tier, count in zip(("gpu", "cpu", "disk"), counts, strict=True):
        for upto in range(total + 1):
            assert abs(tiers[:upto].count(tier) - count * upto / total) < 2


@pytest.mark.parametrize("sharing", [1, 2, 4])
def test_advice_is_in_what_the_user_gives_to_all_processes_and_suffices(sharing):
    """A budget of one process is its part of what the user gave.

    What is asked for is the whole, and with it every part suffices.
    """
    box = cpu_box(cpu_memory_bytes=256 * GIB)
    small = problem(box, budgets={"cpu": GIB / sharing, "disk": 0.0}, sharing=sharing)
    with pytest.raises(InputError) as refused:
        search(small)
    needed = parse_bytes(re.search(r"--cpu-memory ([0-9.]+ ?[KMGT]?i?B)", str(refused.value))[1].replace(" ", ""))
    assert needed > GIB
    check_placement(search(replace(small, budgets={"cpu": needed / sharing, "disk": 0.0})))


def test_four_bits_are_advised_where_they_can_be_asked_for():
    box = cpu_box(cpu_memory_bytes=16 * GIB)
    small = problem(box, budgets={"cpu": GIB, "disk": GIB})
    for offers in (True, False):
        with pytest.raises(InputError) as refused:
            search(replace(small, offers_int4=offers))
        assert ("--weights int4" in str(refused.value)) == offers


@pytest.mark.parametrize("vocab_size", [50_272, 1_000_000])
def test_what_four_bits_would_need_is_told_and_suffices_also_where_tables_are_most_of_a_model(vocab_size):
    box = cpu_box(cpu_memory_bytes=64 * GIB)
    model = replace(OPT_13B, vocab_size=vocab_size)
    small = problem(box, model=model, budgets={"cpu": GIB / 4, "disk": 64 * GIB})
    with pytest.raises(InputError) as refused:
        search(small)
    text, least = str(refused.value), r"--cpu-memory ([0-9.]+ [KMGT]iB)"
    weights, needed, packed = (
        parse_bytes(re.search(pattern, text)[1].replace(" ", ""))
        for pattern in (r"weights take ([0-9.]+ [KMGT]iB)", least, f"with --weights int4, give at least {least}")
    )
    assert weights == pytest.approx(2 * model.held_params, rel=0.01)
    assert GIB / 4 < packed < needed
    in_4_bits = replace(small, weight_formats=(INT4,))
    check_placement(search(replace(in_4_bits, budgets=small.budgets | {"cpu": packed})))
    with pytest.raises(InputError, match="no plan fits") as refused:
        search(replace(in_4_bits, budgets=small.budgets | {"cpu": packed * 0.8}))
    weights = parse_bytes(re.search(r"weights take ([0-9.]+ [KMGT]iB)", str(refused.value))[1].replace(" ", ""))
    tables = 1 if model.tied_embeddings else 2
    assert weights > tables * 2 * model.vocab_size * model.hidden_size


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_output_matrix_go_to_disk_where_memory_does_not_hold_them(tied):
    """There is a plan within a budget that is smaller than they are, and more memory makes no plan slower."""
    model = replace(llama_8b(), vocab_size=262144, tied_embeddings=tied)
    tables = (1 if tied else 2) * model.vocab_size * model.embed_size * 2
    hardware, on_disk, seconds = cpu_box(), [], []
    for memory in (0.9 * tables, 1.2 * tables, 2 * tables, 4 * tables, 30 * GIB):
        best = search(
            problem(
                hardware, model, Workload.uniform(16, 64, 32), budgets={"cpu": memory, "disk": 400.0 * GIB},
                max_num_seqs=16,
            )
        )  # fmt: skip
        check_placement(best)
        on_disk.append((best.counts.head_on_disk, best.counts.embeddings_on_disk))
        seconds.append(best.seconds)
    assert on_disk[0] == (1, 0 if tied else 1) and on_disk[-1] == (0, 0)
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(seconds)), seconds


@pytest.mark.parametrize("part", ["hidden states", "first stage"])
def test_embeddings_go_to_disk_where_nothing_is_multiplied_by_them(part):
    """There is a plan in less memory than they take, also where they are the output matrix of another stage."""
    whole = replace(llama_8b(), vocab_size=1 << 19, tied_embeddings=True)
    model = whole.without_logits() if part == "hidden states" else whole.stage(0, 16)
    table = model.vocab_size * model.embed_size * 2
    hardware, on_disk = cpu_box(), []
    for memory in (0.6 * table, 30 * GIB):
        best = search(
            problem(
                hardware, model, Workload.uniform(16, 64, 1), budgets={"cpu": memory, "disk": 400.0 * GIB},
                max_num_seqs=16,
            )
        )  # fmt: skip
        check_placement(best)
        on_disk.append(best.counts.head_on_disk)
    assert on_disk == [1, 0]
