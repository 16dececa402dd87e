"""The simulator against hand-made cases, its rules tried out tick by tick, the lanes, the cost model and the engine."""

import itertools
import json
import random
import sys
import time
from array import array
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_plans import plan_problem
from planner_cases import budgets, cpu_box, gpu_box, opt
from simulated import SMALL_COPIES, Eager, one_byte_a_second, plan_of, prompt_in_order
from thorough import covering, some_draws
from tiered import BUDGETS, make_parts, make_policy
from timing import undisturbed

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.device import Device
from batchgen.core.dtypes import matmul_key
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import VOCABULARY_CHUNKS, Plan, Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.engine import Engine
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.batch_load import Attended, blocks_and_runs, load_of
from batchgen.planner.costs import head_lanes, layer_lanes, phase_matmul_s
from batchgen.planner.memory_requirements import most_kv_tokens
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.problem import problem_of
from batchgen.planner.simulation import simulate_job, simulated_rows, trace_plan
from batchgen.planner.step_costs import StepCosts, streams_of
from batchgen.planner.step_seconds import schedule_s
from batchgen.planner.step_simulator import Simulator, simulate
from batchgen.runtime.lanes import Lanes
from batchgen.schedule.extents import runs_of
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.step_graph import LANES, BatchFlow, Step, Streams
from batchgen.schedule.sweeps import Sweeps


def step(number, lane, *after, kind="work", sweep=0):
    return Step(number, kind, lane, sweep, 0, 0, None, None, after)


def run(steps, seconds, **options):
    """(timeline, {Step: (start, end)})."""
    times = {}
    timeline = simulate(
        steps, lambda s: seconds[s.id], on_step=lambda s, start, end: times.update({s.id: (start, end)}), **options
    )
    return timeline, times


def test_a_step_waits_for_what_it_needs_and_nothing_else():
    steps = [step(0, "h2d"), step(1, "h2d"), step(2, "compute", 0), step(3, "compute", 1), step(4, "d2h", 2)]
    timeline, times = run(steps, [3.0, 2.0, 1.0, 1.0, 4.0])
    assert times == {0: (0, 3), 1: (3, 5), 2: (3, 4), 3: (5, 6), 4: (6, 10)}, "a Step is issued behind a computation"
    assert timeline.total_s == 10
    assert timeline.busy_s == dict.fromkeys(LANES, 0.0) | {"h2d": 5, "compute": 2, "d2h": 4}
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 4}


def test_standing_still_counts_for_each_lane_in_turn():
    timeline, _ = run([step(0, "h2d"), step(1, "disk_read"), step(2, "compute", 0, 1)], [2.0, 5.0, 1.0])
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 2, "disk_read": 3}
    assert timeline.total_s == 6


def test_shared_cores_are_taken_in_turns():
    steps = [
        step(0, "compute"), step(1, "d2h", 0), step(2, "cpu_attention", 1), step(3, "compute", 0),
        step(4, "compute", 0), step(5, "h2d", 2), step(6, "compute", 5),
    ]  # fmt: skip
    seconds = [1.0, 1.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    timeline, times = run(steps, seconds)
    assert [times[i] for i in range(7)] == [(0, 1), (1, 2), (2, 6), (1, 4), (4, 6), (6, 7), (7, 8)]
    timeline, times = run(steps, seconds, shared_cores=True)
    # Attention asks at 2, while 3 runs; 4 comes after it, and has 5 issued late.
    assert [times[i] for i in range(7)] == [(0, 1), (1, 2), (4, 8), (1, 4), (8, 10), (10, 11), (11, 12)]
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"cpu_attention": 4, "h2d": 1}
    assert timeline.total_s == 12


def test_other_lanes_go_on_between_sweeps():
    simulator = Simulator()
    simulator.run([step(0, "compute"), step(1, "disk_write", 0), step(2, "h2d")], lambda s: 2.0)
    simulator.spend(1.0)
    simulator.run([step(3, "compute", 2, sweep=1), step(4, "compute", 1, sweep=1)], lambda s: 3.0)
    timeline = simulator.timeline()
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 1}
    assert (timeline.between_s, timeline.total_s) == (1, 10)


def test_alternating_loads_and_products_take_as_long_as_the_longer():
    """FlexGen's loop: with everything else free, weights that take longer than the products set the pace."""
    layers = 6
    steps = list(Sweeps(Streams(False, (True,) * layers, (True,) * layers)).steps([BatchFlow(), BatchFlow()]))
    own = [s for s in steps if not (s.kind == "read_weight" and s.id > steps[-1].id - 3)]
    for load_s, post_s in ((4.0, 1.0), (1.0, 4.0)):
        seconds = {"read_weight": load_s, "post": post_s}
        ends = {}
        simulate(steps, lambda s, t=seconds: t.get(s.kind, 0.0), on_step=lambda s, a, b, e=ends: e.update({s.id: b}))
        last = max(ends[s.id] for s in own if s.kind == "post")
        assert last == load_s + max((layers - 1) * load_s, (layers - 1) * 2 * post_s) + 2 * post_s


@st.composite
def timed_steps(draw):
    """Steps of two sweeps in any lanes, with waits for any earlier ones, and whole seconds."""
    count = draw(st.integers(1, 14))
    second = draw(st.integers(0, count))
    steps = [
        Step(
            i,
            "work",
            draw(st.sampled_from(LANES)),
            int(i >= second),
            0,
            0,
            None,
            None,
            tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
        )
        for i in range(count)
    ]
    return steps, draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), draw(st.integers(0, 3))


def tick_by_tick(steps, seconds, between_s, shared_cores):
    """The same by trying at every second what can start: {Step: (start, end)}."""
    sweeps = [deque(s for s in steps if s.sweep == i) for i in (0, 1)]
    queues = {lane: deque() for lane in LANES}
    running, times = {}, {}  # lane -> Step
    asking = {}  # for the cores: lane -> since when
    idle_until, sweep = 0, 0
    for now in range(1000):
        changed = True
        while changed:  # Steps of no seconds end when they start
            changed = False
            for lane, s in list(running.items()):
                if times[s.id][1] <= now:
                    del running[lane]
                    changed = True
            ended = {i for i, (_, end) in times.items() if end <= now} - {s.id for s in running.values()}
            # The compute lane issues Steps up to its next computation.
            if not queues["compute"] and "compute" not in running and now >= idle_until:
                if sweeps[sweep]:
                    while sweeps[sweep] and not queues["compute"]:
                        s = sweeps[sweep].popleft()
                        queues[s.lane].append(s)
                    changed = True
                elif sweep == 0:
                    sweep, idle_until, changed = 1, now + between_s, True
            heads = {
                lane: queue[0] for lane, queue in queues.items()
                if queue and lane not in running and set(queue[0].after) <= ended
            }  # fmt: skip
            if shared_cores:
                both = ("cpu_attention", "compute")
                # What ends as it begins comes first: CPU attention that waits for it asks for the cores in the same
                # second.
                heads = {lane: s for lane, s in heads.items() if lane not in both} or heads
                asking = {lane: asking.get(lane, now) for lane in both if lane in heads}
                first = None if any(lane in running for lane in both) else min(asking, key=asking.get, default=None)
                heads = {lane: s for lane, s in heads.items() if lane not in both or lane == first}
            for lane, s in heads.items():
                queues[lane].popleft()
                asking.pop(lane, None)
                running[lane] = s
                times[s.id] = (now, now + seconds[s.id])
                changed = True
        if len(times) == len(steps) and not running:
            return times
    raise AssertionError("never ends")


@settings(max_examples=some_draws(600), deadline=None)
@given(timed_steps(), st.booleans())
def test_the_simulator_gives_the_times_of_the_rules_tried_out_tick_by_tick(job, shared_cores):
    steps, seconds, between_s = job
    times = {}
    simulator = Simulator(shared_cores=shared_cores, on_step=lambda s, a, b: times.update({s.id: (a, b)}))
    simulator.run([s for s in steps if s.sweep == 0], lambda s: seconds[s.id])
    simulator.spend(between_s)
    simulator.run([s for s in steps if s.sweep == 1], lambda s: seconds[s.id])
    timeline = simulator.timeline()
    expected = tick_by_tick(steps, seconds, between_s, shared_cores)
    assert times == expected
    busy = {lane: sum(seconds[s.id] for s in steps if s.lane == lane) for lane in LANES}
    assert timeline.busy_s == busy
    assert timeline.total_s >= max(busy.values())
    assert timeline.total_s <= sum(busy.values()) + between_s, "one after the other takes no less"
    computed = max([times[s.id][1] for s in steps if s.lane == "compute" and s.sweep == 1], default=None)
    if computed is not None:
        assert busy["compute"] + sum(timeline.stalled_s.values()) + between_s == computed


def test_a_step_for_another_lane_takes_the_computing_thread_some_time():
    steps = [
        Step(0, "pre", "compute", 0, 0, 0, None, None, ()),
        Step(1, "send_qkv", "d2h", 0, 0, 0, None, None, (0,)),
        Step(2, "store_cache", "d2h", 0, 0, 0, None, None, (0,)),
        Step(3, "post", "compute", 0, 0, 0, None, None, ()),
    ]
    times = {}
    simulator = Simulator(issue_s=1.0, on_step=lambda s, a, b: times.update({s.id: (a, b)}))
    simulator.run(steps, lambda step: 10.0)
    assert times == {0: (0, 10), 1: (11, 21), 2: (21, 31), 3: (12, 22)}
    timeline = simulator.timeline()
    assert timeline.between_s == 2 and timeline.busy_s["compute"] == 20


@pytest.mark.parametrize(("batches", "seconds"), [(1, 1.1), (2, 1.35), (4, 1.85)])
def test_each_micro_batch_beyond_the_first_takes_time_between_sweeps(batches, seconds):
    hardware = replace(cpu_box(), sweep_overhead_s=1.0, batch_overhead_s=0.25, sequence_overhead_s=0.01)
    assert schedule_s(SimpleNamespace(hardware=hardware), 10, batches) == pytest.approx(seconds)


STREAMS = Streams(True, (True,) * 3, (True, False, True), vocabulary_chunks=2)
BATCHES = [
    BatchFlow(
        frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED}),
        history=True,
        stored=True,
        disk_read=True,
        disk_write=True,
    ),
    BatchFlow(frozenset({KVPlacement.DEVICE, KVPlacement.CPU}), hidden_on_host=True),
]


def test_many_simulated_sweeps_leave_no_state_behind():
    simulator, sweeps = Simulator(), Sweeps(STREAMS)
    rng = random.Random(0)
    for _ in range(300):
        simulator.run(sweeps.steps(BATCHES), lambda s: rng.random())
        simulator.spend(0.5)
    assert len(simulator._ended) < 50
    timeline = simulator.timeline()
    assert timeline.total_s >= max(timeline.busy_s.values())


@pytest.mark.parametrize("shared_cores", [False, True])
@undisturbed
def test_the_runtimes_lanes_take_as_long_as_simulated(shared_cores):
    """Real threads whose Steps sleep."""
    rng = random.Random(1)
    sweeps = Sweeps(STREAMS)
    steps = [list(sweeps.steps(BATCHES)) for _ in range(2)]
    seconds = {s.id: rng.choice((0.001, 0.004, 0.012)) for sweep in steps for s in sweep}
    lanes, simulator = (
        Lanes(lambda s: time.sleep(seconds[s.id]), shared_cores=shared_cores),
        Simulator(shared_cores=shared_cores),
    )
    started = time.perf_counter()
    for sweep in steps:
        lanes.execute(sweep)
        simulator.run(sweep, lambda s: seconds[s.id])
    lanes.drain()
    took = time.perf_counter() - started
    lanes.close()
    timeline = simulator.timeline()
    assert timeline.total_s * 0.99 <= took <= timeline.total_s * 1.35 + 0.1, "sleeps are never too short"
    assert sum(seconds.values()) > 1.3 * timeline.total_s, "there is something to overlap"


# A plan's job.

GPU_COUNTS = dict.fromkeys(("qkv", "out", "up", "down"), (24, 0, 0))


def gpu_policy(**changes) -> Policy:
    fields = {
        "admission": "continuous", "gpu_batch_size": 32, "num_gpu_batches": 1, "max_num_batched_tokens": 512,
        "max_model_len": 2048, "kv_block_size": 16, "kv_blocks": {}, "share_prefixes": True, "weight_format": "float16",
        "kv_format": "float16", "weight_layers": GPU_COUNTS, "head_tier": "gpu", "kv_seqs": {"gpu": 32},
        "activation_batches": (1, 0),
    }  # fmt: skip
    return Policy(**fields | changes)


def planned(hardware, model: ModelConfig, workload: Workload, **options) -> Plan:
    given = {"model_name": "model", "max_model_len": 2048, "process_bytes": 1 << 29} | options
    problem = problem_of(hardware, model, workload, dtype="float16", **given)
    longest = int(1.5 * (workload.prompt_len.max + workload.max_output_len)) + 16
    problem = replace(problem, longest_tokens=longest)
    return plan_problem(problem)


def decoding(kv_placement: str, count: int, context: int, kv_block_size: int = 16) -> list[ScheduledSequence]:
    """Sequences alike with one new token each, after `context` - 1 others; their blocks are neighbours."""
    made = []
    for i in range(count):
        sequence = Sequence(
            i, i, 0, [1] * context, SamplingParams(max_tokens=8), kv_placement=KVPlacement(kv_placement)
        )
        sequence.num_prompt = sequence.num_computed = context - 1
        used = -(-context // kv_block_size)
        sequence.block_table.extend(range(i * used, (i + 1) * used))
        made.append(ScheduledSequence(sequence, 1))
    return made


def spent(plan: Plan, model: ModelConfig, hardware, batch: list[ScheduledSequence], **options):
    """Seconds by lane of a sweep over one micro-batch: of layer 5, of the head's computation, and of all."""
    tier = "gpu" if "gpu" in plan.budgets else "cpu"
    load = load_of(batch, kv_block_size=16, compute_tier=tier, **options)
    seconds = StepCosts(plan, model, hardware).sweep([load])
    layer, total, head = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0), 0.0
    for s in Sweeps(streams_of(plan, model)).steps([load.flow]):
        took = seconds(s)
        lane = "h2d" if s.kind in SMALL_COPIES and tier == "gpu" else s.lane
        total[lane] += took
        head += took if s.kind == "head" else 0.0
        layer[lane] += took if s.layer == 5 and not s.kind.endswith("head") else 0.0
    return layer, head, total


def slept_box():
    """An accelerator that sleeps so as to be slow, and as the CPU multiplies streamed weights at half the rate."""
    box = gpu_box(shared_cores=False)
    products = box.gpu.gemm_flops_per_s
    streamed = {matmul_key("float16", "float16", as_stored=True): products["float16"].scaled(0.5)}
    gpu = replace(box.gpu, waking_overhead_s=3e-4, gemm_flops_per_s=products | streamed)
    return replace(box, gpu=gpu, cpu=replace(box.cpu, waking_overhead_s=2e-4), link_overhead_s=1e-4)


@pytest.mark.parametrize("box", [lambda: gpu_box(shared_cores=False), slept_box], ids=["a GPU", "emulated"])
@pytest.mark.parametrize("kv_placement", ["gpu", "cpu", "streamed", "disk"])
def test_the_steps_of_a_layer_are_what_the_planner_counts_for_it(kv_placement, box):
    model, hardware = opt(2048, 24, 32), box()
    counts = {"qkv": (24, 0, 0), "out": (0, 24, 0), "up": (24, 0, 0), "down": (0, 0, 24)}
    policy = gpu_policy(weight_layers=counts, kv_seqs={kv_placement: 32}, activation_batches=(0, 1), head_tier="cpu")
    plan = plan_of(policy, Workload.uniform(64, 400, 64), budgets(hardware))
    count, context = 32, 401  # no block is full, so that what is in whole blocks is easy to count
    layer, head, _ = spent(plan, model, hardware, decoding(kv_placement, count, context), hidden_on_host=True)
    inputs = StepCosts(plan, model, hardware).inputs
    at = Counts(counts, {kv_placement: 32}, (0, 1), 0).placement(replace(inputs, max_num_seqs=32))
    phase = Phase(1, 0, 0, count, context)
    expected = layer_lanes(inputs, phase, at)
    resident = layer_lanes(inputs, phase, replace(at, w_gpu=1, w_cpu=0, w_disk=0))["compute"]
    assert (expected["compute"] > 1.05 * resident) == (box is slept_box)
    assert layer["compute"] == pytest.approx(expected["compute"])
    assert layer["cpu_attention"] == pytest.approx(expected["cpu_attention"])
    woken_s = VOCABULARY_CHUNKS * hardware.gpu.waking_overhead_s  # the head is a computation for each
    assert head == pytest.approx(head_lanes(inputs, phase, at)["compute"] + woken_s)
    for lane in ("h2d", "d2h", "disk_read", "disk_write"):
        assert layer[lane] == pytest.approx(expected[lane], rel=0.05, abs=1e-6), lane


@pytest.mark.parametrize(("kv_placement", "sent", "brought"), [("gpu", 0, 0), ("cpu", 3, 1), ("streamed", 1, 1)])
def test_each_copy_over_a_link_takes_longer_than_its_bytes(kv_placement, sent, brought):
    """Queries, keys and values are sent one by one, results brought by compute; streamed KV moves in one copy each."""
    model, overhead_s = opt(2048, 24, 32), 0.25
    policy = gpu_policy(weight_layers=GPU_COUNTS, kv_seqs={kv_placement: 32})
    batch = decoding(kv_placement, 32, 401)
    found = []
    for hardware in (gpu_box(shared_cores=False), gpu_box(shared_cores=False, link_overhead_s=overhead_s)):
        plan = plan_of(policy, Workload.uniform(64, 400, 64), budgets(hardware))
        found.append(spent(plan, model, hardware, batch)[0])
    plain, slower = found
    assert slower["d2h"] - plain["d2h"] == pytest.approx(sent * overhead_s)
    assert slower["h2d"] - plain["h2d"] == pytest.approx(brought * overhead_s)


def test_matmuls_with_streamed_weights_take_as_long_as_with_weights_as_they_are_stored():
    """On a CPU those of the layers on disk; where the profile does not say how long, as long as all others.

    The output matrix is in memory, in the order of products, though it is the embeddings too.
    """
    model, workload = opt(2048, 24, 32), Workload.uniform(64, 400, 64)
    plain = cpu_box(dram_bytes_per_s=1e18)  # for which it does not matter what the disk brings
    products = plain.cpu.gemm_flops_per_s
    known = {matmul_key("float16", "float16", as_stored=True): products["float16"].scaled(0.5)}
    told = replace(plain, cpu=replace(plain.cpu, gemm_flops_per_s=products | known))
    batch = decoding("cpu", 32, 401)
    found = {}
    for on_disk in (0, 24):
        weights = dict.fromkeys(GPU_COUNTS, (0, 24 - on_disk, on_disk))
        plan = plan_of(
            gpu_policy(weight_layers=weights, kv_seqs={"cpu": 32}, head_tier="cpu"), workload, budgets(plain)
        )
        (found[on_disk], head) = zip(*(spent(plan, model, box, batch)[:2] for box in (plain, told)), strict=True)
        assert model.tied_embeddings and head[0] == head[1]
    found = {on_disk: [layer["compute"] for layer in layers] for on_disk, layers in found.items()}
    inputs = StepCosts(plan, model, plain).inputs
    assert found[0][0] == found[0][1] == pytest.approx(found[24][0])
    assert found[24][1] - found[24][0] == pytest.approx(phase_matmul_s(inputs, Phase(1, 0, 0, 32, 401)))


def test_copies_of_an_emulated_accelerator_take_time_of_its_cores():
    model = opt(2048, 24, 32)
    policy = gpu_policy(weight_layers=GPU_COUNTS | {"down": (0, 24, 0)})
    workload, box = Workload.uniform(64, 400, 64), gpu_box()
    emulated = replace(box, shared_cores=True, copy_bytes_per_s=2e9)
    plan, batch = plan_of(policy, workload, budgets(box)), decoding("gpu", 32, 401)
    _, _, alone = spent(plan, model, box, batch)
    _, _, shared = spent(plan, model, emulated, batch)
    assert alone["h2d"] == shared["h2d"] > 0
    # The input embeddings are the output matrix too, which is on the GPU: nothing is copied before the layers.
    copied_s = alone["h2d"] * box.h2d_bytes_per_s / 2e9
    assert shared["compute"] - alone["compute"] == pytest.approx(copied_s)


def test_embeddings_are_copied_from_where_they_are():
    """To the GPU, by compute itself, unless they are there as the output matrix."""
    model, workload, box = opt(2048, 24, 32), Workload.uniform(64, 400, 64), gpu_box()
    batch, embedded_s = decoding("gpu", 32, 401), 32 * 2048 * 2 / box.h2d_bytes_per_s
    there_plan = plan_of(gpu_policy(head_tier="gpu"), workload, budgets(box))
    there = spent(there_plan, model, box, batch)[2]["h2d"]
    waiting = spent(there_plan, model, box, batch, hidden_on_host=True)[2]["h2d"]
    elsewhere = spent(plan_of(gpu_policy(head_tier="cpu"), workload, budgets(box)), model, box, batch)[2]["h2d"]
    head_s = model.vocab_size * model.hidden_size * 2 / box.h2d_bytes_per_s  # comes over in each sweep
    assert there == 0
    assert waiting == pytest.approx(embedded_s * (1 + model.num_layers)), "to the host, and fetched for each layer"
    assert elsewhere == pytest.approx(head_s + embedded_s)


def test_prompts_cost_what_their_tokens_attend_to():
    """In chunks as at once, but for the rates; a prefix that many share is attended to for all of them."""
    hardware = cpu_box()
    model, workload = opt(1024, 4, 16), Workload.uniform(64, 400, 64)
    policy = gpu_policy(weight_layers=dict.fromkeys(GPU_COUNTS, (0, 4, 0)), kv_seqs={"cpu": 32}, head_tier="cpu")
    costs = StepCosts(plan_of(policy, workload, budgets(hardware)), model, hardware)

    def attention_s(*chunks, matched=0):
        batch = []
        for i, (new, before) in enumerate(chunks):
            sequence = Sequence(
                i, i, 0, [1] * (new + before), SamplingParams(max_tokens=8), kv_placement=KVPlacement.CPU
            )
            sequence.num_computed, sequence.num_matched_blocks = before, matched
            own = range(100 * (i + 1), 100 * (i + 1) + -(-(new + before) // 16) - matched)
            sequence.block_table.extend([*range(matched), *own])
            batch.append(ScheduledSequence(sequence, new))
        load = load_of(batch, kv_block_size=16, compute_tier="cpu")
        return costs.attention_s(load.attended[KVPlacement.DEVICE], costs.kinds[0], hardware.cpu), load.attended[
            KVPlacement.DEVICE
        ]

    whole, _ = attention_s((256, 0))
    parts = sum(attention_s((64, before))[0] for before in range(0, 256, 64))
    assert parts == pytest.approx(whole)
    flops = 4 * 1024 * (256 * 256 / 2)
    assert whole == pytest.approx(flops / 2e11)
    shared_s, attended = attention_s(*[(32, 128)] * 8, matched=8)
    assert attended.shared == ((256, 128),)
    assert attended.chunks == ((32, 0),) * 8
    assert shared_s == pytest.approx(attention_s(*[(32, 128)] * 8)[0])


def test_a_shared_prefix_is_left_out_of_decoding_once():
    """Contexts of a load are what sequences read by themselves, whatever the workload says that they share."""
    hardware, model = cpu_box(), opt(1024, 4, 16)
    policy = gpu_policy(weight_layers=dict.fromkeys(GPU_COUNTS, (0, 4, 0)), kv_seqs={"cpu": 64}, head_tier="cpu")
    own, shared = (
        StepCosts(plan_of(policy, Workload.uniform(64, 400, 64, prefix), budgets(hardware)), model, hardware)
        for prefix in (0, 320)
    )
    attended = Attended(contexts=(90,) * 64)
    seconds = own.attention_s(attended, own.kinds[0], hardware.cpu)
    assert shared.attention_s(attended, own.kinds[0], hardware.cpu) == seconds > 0


def test_simulated_rows_have_the_workloads_lengths():
    workload = Workload(100, Lengths((3, 5, 10, 22)), Lengths((1, 2, 6)), 8)
    rows = list(simulated_rows(workload))
    assert len(rows) == 100
    assert sum(p for p, _ in rows) == 100 * workload.prompt_len.mean
    assert sum(o for _, o in rows[:99]) == 99 * workload.output_len.mean
    assert len(set(rows)) == 12, "in all combinations"
    assert rows == list(simulated_rows(workload))
    assert rows != list(simulated_rows(workload, seed=1))


WORKLOAD = Workload(240, Lengths(tuple(range(50, 300, 10))), Lengths(tuple(range(4, 65, 4))), 64)


def test_a_job_in_memory_takes_as_long_as_the_planner_says():
    hardware, model = cpu_box(), opt(2048, 24, 32)
    for admission in ("continuous", "static"):
        plan = planned(hardware, model, WORKLOAD, admission=admission)
        run = simulate_job(plan, model, hardware)
        assert run.total_s == pytest.approx(plan.prediction.total_s, rel=0.08), admission
        assert run.sweeps == pytest.approx(plan.prediction.sweeps, rel=0.08)
        assert run.tokens == run.job_tokens == sum(prompt + output - 1 for prompt, output in simulated_rows(WORKLOAD))
        assert run.busy_s["compute"] + run.timeline.between_s == pytest.approx(run.total_s)


def test_a_job_over_the_tiers_is_no_faster_than_perfect_overlap():
    hardware, model = gpu_box(gpu_memory_bytes=2 << 30), opt(2048, 24, 32)
    plan = planned(hardware, model, WORKLOAD, max_num_seqs=64)
    run = simulate_job(plan, model, hardware)
    lanes = {lane: seconds for lane, seconds in run.busy_s.items() if seconds}
    assert len(lanes) >= 3, "not all of it fits the GPU"
    assert plan.prediction.total_s * 0.9 < run.total_s < 2 * plan.prediction.total_s
    serial_s = sum(lanes.values()) + run.timeline.between_s
    assert max(lanes.values()) < run.total_s < serial_s
    assert run.timeline.total_s == pytest.approx(
        lanes["compute"] + sum(run.stalled_s.values()) + run.timeline.between_s, rel=0.02
    )


@pytest.mark.parametrize("hardware", [cpu_box(), *(gpu_box(gpu_memory_bytes=gib << 30) for gib in (12, 2, 1))])
def test_planner_and_simulator_give_the_same_time(hardware):
    """With one micro-batch nothing waits for its turn.

    With several, a lane serves its Steps in order, which the cost model leaves out: it may be up to 1.8 times as fast.
    """
    model, workload = opt(2048, 24, 32), Workload.uniform(64, 100, 32)
    for num_batches in (1, 2, 4, 8) if hardware.gpu else (1,):
        plan = planned(
            hardware, model, workload, admission="static", max_num_seqs=64, num_gpu_batches=num_batches,
            max_num_batched_tokens=6400,
        )  # fmt: skip
        run = simulate_job(plan, model, hardware)
        assert run.sweeps == plan.prediction.sweeps
        assert 0.95 < run.total_s / plan.prediction.total_s < (1.1 if num_batches == 1 else 1.8)


def test_a_long_job_goes_on_as_it_began():
    hardware, model = cpu_box(), opt(1024, 12, 16)
    plan = planned(hardware, model, replace(WORKLOAD, num_seqs=1500), max_num_seqs=64, admission="continuous")
    whole = simulate_job(plan, model, hardware)
    begun = simulate_job(plan, model, hardware, max_sweeps=200)
    assert begun.sweeps == 200 < whole.sweeps / 2
    assert begun.total_s == pytest.approx(whole.total_s, rel=0.05)
    assert begun.busy_s["compute"] == pytest.approx(whole.busy_s["compute"], rel=0.05)


def test_a_plans_trace_has_the_lanes_of_a_run(tmp_path):
    hardware, model = gpu_box(gpu_memory_bytes=2 << 30), opt(2048, 24, 32)
    plan = planned(hardware, model, WORKLOAD, max_num_seqs=64)
    run = trace_plan(plan, model, hardware, tmp_path / "plan.json", max_sweeps=3)
    events = json.loads((tmp_path / "plan.json").read_text())
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(LANES)
    assert events[0]["args"]["name"] == "model: plan"
    found = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["sweep"] for e in found} == {0, 1, 2}
    assert {"pre", "attention", "post", "head"} <= {e["name"] for e in found}
    assert max(e["ts"] + e["dur"] for e in found) == pytest.approx(run.timeline.total_s * 1e6)


def test_no_torch_is_needed():
    import subprocess

    code = "import sys, batchgen.planner.simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Against the engine.


# With attention in all layers, with states in most, and with KV of two sizes that layers share.
FAMILIES = ("llama", "qwen3_next", "gemma4_unified", "gemma4")
CASES = {
    "all tiers, two batches": dict(
        gpu_batch_size=4,
        num_gpu_batches=2,
        kv_seqs={"gpu": 2, "cpu": 2, "streamed": 2, "disk": 2},
        weight_layers={"qkv": (2, 1, 0), "out": (1, 2, 0), "up": (3, 0, 0), "down": (1, 2, 0)},
        activation_batches=(1, 1),
        head_tier="cpu",
    ),
    "neo": dict(
        gpu_batch_size=4,
        num_gpu_batches=2,
        kv_seqs={"gpu": 4, "cpu": 4},
        batch_order="neo",
        activation_batches=(2, 0),
        max_num_batched_tokens=24,
    ),
    "unequal batches": dict(
        gpu_batch_size=4,
        num_gpu_batches=2,
        kv_seqs={"gpu": 2, "cpu": 6},
        batch_order="neo",
        balance_tokens=12,
        activation_batches=(1, 1),
        max_num_batched_tokens=48,
    ),
    "deferred": dict(kv_seqs={"gpu": 3, "deferred": 5}, activation_batches=(1, 0)),
    "streamed layers": dict(kv_seqs={"streamed": 8}, gpu_batch_size=4, num_gpu_batches=2, kv_layers=1),
    "static": dict(admission="static", kv_seqs={"streamed": 4, "disk": 4}, activation_batches=(0, 1)),
    "chosen pages": dict(
        gpu_batch_size=4,
        num_gpu_batches=2,
        kv_seqs={"gpu": 2, "streamed": 3, "disk": 3},
        attention_budget="10%",
        kv_block_size=8,
    ),
    "chosen pages of streamed layers": dict(kv_seqs={"streamed": 8}, kv_layers=1, attention_budget="10%"),
}


@pytest.mark.parametrize(("case", "family"), covering(itertools.product(CASES, FAMILIES), 16, "bytes and flows"))
def test_bytes_and_flows_are_those_of_the_engine(case, family, tiny_models, tmp_path, monkeypatch):
    model_path, _ = tiny_models(family)
    device = Device("emulated", BUDGETS["gpu"])
    policy = make_policy(model_path, device, **CASES[case])
    config = read_config(resolve_model(str(model_path)))
    workload = Workload(14, Lengths((5, 18, 40, 61)), Lengths((1, 4, 9)), 12)
    plan = plan_of(policy, workload, BUDGETS, "float32")
    parts = make_parts(
        model_path, device, policy, tmp_path, min_output_len=workload.max_output_len,
        longest_tokens=plan.workload.max_seq_len, most_kv_tokens=most_kv_tokens(plan),
        serial=case == "deferred",
    )  # fmt: skip
    packed = []

    def pack_and_compare(batch):
        packed.append(parts.pack(batch))
        chooses = any(config.choosing_layers(policy.attention_budget))
        budget = AttentionBudget.of(policy.attention_budget) if chooses else None
        load = load_of(batch, kv_block_size=policy.kv_block_size, compute_tier="gpu", budget=budget)
        assert load.flow == packed[-1].flow()
        return packed[-1]

    monkeypatch.setattr("batchgen.engine.engine.Prefetch", Eager)
    draw = random.Random(0)
    requests = [
        Request(prompt_in_order(draw, number, prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for number, (prompt, output) in enumerate(simulated_rows(workload))
    ]
    with Engine.from_parts(replace(parts, pack=pack_and_compare)) as engine:
        assert all(c.error is None for c in engine.generate(requests))
        parts.executor.lanes.drain()
        moved, sweeps = parts.executor.bytes_moved, engine.stats.sweeps
        busy = parts.executor.lanes.busy_s
    rates, links = one_byte_a_second()
    # With deferred attention it would matter that copies are late: there, and in an engine that is serial, none is.
    speed = 1e13 if case == "deferred" else 1.0
    hardware = gpu_box(gpu=rates, cpu=rates, **{name: speed * rate for name, rate in links.items()})
    small: list[float] = []

    def note(step, start_s, end_s):
        small.extend([end_s - start_s] * (step.kind in SMALL_COPIES))

    run = simulate_job(plan, config, hardware, on_step=note)
    assert run.sweeps == sweeps
    assert run.tokens == sum(batch.num_tokens for batch in packed)
    moved["h2d"] -= speed * sum(small)
    simulated = {lane: speed * run.busy_s[lane] for lane in moved}
    if config.tied_embeddings and policy.head_tier == "gpu":  # small copies of embedded rows go both ways
        for bytes_of in (moved, simulated):
            bytes_of["h2d"] += bytes_of.pop("d2h")
    assert simulated == pytest.approx(moved)
    assert {lane for lane, seconds in run.busy_s.items() if seconds} == {lane for lane, s in busy.items() if s}


def test_prefixes_are_shared_on_disk_too_and_with_no_block_of_host_memory():
    def scheduled(number, placement):
        sequence = Sequence(number, number, 0, [1] * 200, SamplingParams(max_tokens=8), kv_placement=placement)
        sequence.num_computed, sequence.num_matched_blocks = 160, 8
        sequence.block_table.extend([*range(8), *range(100 * (number + 1), 100 * (number + 1) + 5)])
        return ScheduledSequence(sequence, 40)

    for placements, groups in (
        ([KVPlacement.DISK] * 4, ((160, 128),)),
        ([KVPlacement.DISK, KVPlacement.STREAMED] * 4, ((160, 128), (160, 128))),
    ):
        batch = [scheduled(number, placement) for number, placement in enumerate(placements)]
        load = load_of(batch, kv_block_size=16, compute_tier="gpu")
        assert load.attended[KVPlacement.STREAMED].shared == groups


def test_blocks_and_runs_of_block_tables_are_those_of_each_table():
    draw = random.Random(0)
    for _ in range(200):
        tables = [
            array("i", itertools.accumulate([draw.choice((1, 1, 1, 2, 9)) for _ in range(draw.randrange(9))]))
            for _ in range(draw.randrange(5))
        ]
        runs = [run for table in tables for run in runs_of(table)]
        assert blocks_and_runs(tables) == (sum(count for _, count in runs), len(runs)), tables
