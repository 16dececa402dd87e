"""Under any policy the same tokens as with everything in memory: fp32, greedy, random policies and the hard cases."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from fake_device import FIRST_USES, ORDERS, FakeDevice, as_on_a_device, run_on
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_tables import FAMILIES, MIXTURES, MODELS
from thorough import covering, quick_or, some_of
from tiered import (
    BUDGETS,
    CPU,
    EMULATED,
    before_each_step,
    everything_moves,
    give_dedicated_cores,
    make_parts,
    make_policy,
    make_request,
    make_uneven,
    run,
    shuffle_steps,
)
from tiny_models import make_tiny_model

from batchgen.core.attention_budget import DENSE_LAYERS
from batchgen.core.device import Device
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import LaneCosts
from batchgen.core.plan import kv_on_device
from batchgen.core.request import Request, SamplingParams
from batchgen.engine import engine
from batchgen.engine import loader as loading
from batchgen.engine.engine import Engine
from batchgen.engine.loader import plan_load
from batchgen.runtime.executor import Executor
from batchgen.schedule.adaptation import Adaptation
from batchgen.schedule.deferral_choice import DeferralChoice
from batchgen.schedule.micro_batches import ORDERS as BATCH_ORDERS
from batchgen.schedule.step_graph import KINDS
from batchgen.schedule.sweep_choice import SweepChoice

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PROMPTS, OUTPUT_LEN, CONTEXT = 24, 12, 80
PAGE = 8  # tokens of a KV block where pages are chosen
FP32, INT4, INT5, INT8 = "float32", "int4", "int5", "int8"
# Of weights, of KV.
FORMATS = [
    (FP32, FP32), (INT4, FP32), (FP32, INT5), (INT4, INT5), (INT8, FP32), (INT8, INT5), (FP32, INT8), (INT4, INT8),
    (INT8, INT8), (FP32, INT4),
]  # fmt: skip
# Rows end before the reference comes upon two tokens this close to each other: rounding decides which of them wins.
# With packed KV the last bit of a number may move it by a whole code, and log-probabilities by up to 0.08 with 4 bits,
# as seen here; codes of 5 bits are twice, of 8 bits 17 times as fine. Products with weights of 8 bits round activations
# to codes too.
NEAR_TIE = {FP32: 1e-3, INT4: 0.15, INT5: 0.15, INT8: 0.01}
NEAR_TIE_OF_WEIGHTS = {INT8: 0.03}
# Of what could be kept, at least this much is.
KEPT_FRAC = {FP32: 0.9, INT4: 0.4, INT5: 0.4, INT8: 0.8}
# Prompts, of which those are kept that come upon a tie last: that is rare in fp32.
NUM_CANDIDATES = {True: 40, False: quick_or(80, 120)}
VARIANTS = [
    *MODELS.values(),
    ("opt", {"num_attention_heads": 2, "num_hidden_layers": 1}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "num_hidden_layers": 2}),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@dataclass(frozen=True)
class Reference:
    """Prompts, and what the plain in-memory engine makes of them, as far as it is beyond doubt."""

    prompts: list[list[int]]
    tokens: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def reference(tiny_models, stores):
    """(family, overrides, formats of weights and KV, attention budget) -> (model's path, Reference)."""
    made = {}

    def get(family, overrides, weight_format=FP32, kv_format=FP32, budget="all"):
        path = tiny_models(family, **overrides)[0]
        key = (path, weight_format, kv_format, budget)
        if key not in made:
            made[key] = make_reference(path, stores, weight_format, kv_format, budget)
        return path, made[key]

    return get


def make_reference(path, stores, weight_format, kv_format, budget):
    rng = random.Random(7)
    num_candidates = NUM_CANDIDATES[weight_format == kv_format == FP32]
    prefix = [rng.randrange(4, 500) for _ in range(40)]
    lengths = itertools.chain([1, 2, 8, 16, 17], iter(lambda: rng.randrange(1, 28), None))
    prompts = [
        prefix[: 40 if i % 3 else 20] * (i % 2) + [rng.randrange(4, 500) for _ in range(length)]
        for i, length in zip(range(num_candidates), lengths, strict=False)
    ]
    policy = make_policy(
        path, CPU, gpu_batch_size=num_candidates, kv_seqs={"cpu": num_candidates}, max_num_batched_tokens=4096,
        share_prefixes=False, weight_format=weight_format, kv_format=kv_format, attention_budget=budget,
        kv_block_size=16 if budget == "all" else PAGE,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=2)
    with Engine.from_parts(make_parts(path, CPU, policy, stores), sampling=sampling) as engine:
        done = sorted(engine.generate([Request(prompt) for prompt in prompts]), key=lambda c: c.index)
    tokens = []
    for completion in done:
        sample = completion.samples[0]
        near = max(NEAR_TIE[kv_format], NEAR_TIE_OF_WEIGHTS.get(weight_format, 0))
        close = [p.top[0].logprob - p.top[1].logprob < near for p in sample.logprobs]
        tokens.append(sample.token_ids[: close.index(True) if True in close else OUTPUT_LEN])
    kept = sorted(sorted(range(num_candidates), key=lambda i: -len(tokens[i]))[:NUM_PROMPTS])
    assert sum(len(tokens[i]) for i in kept) > NUM_PROMPTS * OUTPUT_LEN * KEPT_FRAC[kv_format]
    return Reference([prompts[i] for i in kept], [tokens[i] for i in kept])


@dataclass(frozen=True)
class Case:
    """A random policy, and rows that run under it.

    Attributes:
        policy: fields that are set apart from the model's.
        tight: pools are so small that sequences are preempted.
        rows: (prompt's number, tokens to generate).
        mode: how Steps are run.
        pipelines: whether a draw decides which sweeps are pipelined, and which deferred tokens begin in them.
        lane_costs: planned seconds, by which sweeps go without sequences that the CPU is too late for; None: the engine
            does not adapt.
    """

    family: str
    overrides: dict
    accelerated: bool
    policy: dict
    tight: bool
    rows: list[tuple[int, int]]
    mode: str
    seed: int
    pipelines: bool = False
    lane_costs: LaneCosts | None = None


def random_case(rng, variants):
    family, overrides = rng.choice(variants)
    num_layers = overrides.get("num_hidden_layers", 3)
    accelerated = rng.random() < 0.75
    layers = {}
    for group in ("qkv", "out", "up", "down"):
        residencies = rng.choices([0, 1, 2] if accelerated else [1, 2], k=num_layers)
        layers[group] = tuple(residencies.count(tier) for tier in range(3))
    num_batches, batch_size = rng.randint(1, 4), rng.randint(1, 4)
    unequal = num_batches == 2 and rng.random() < 0.5
    classes = list(KVPlacement) if accelerated else ["cpu", "disk"]
    kv_layers = rng.randrange(num_layers) if accelerated and rng.random() < 0.2 else 0
    some = ["streamed"] if kv_layers else rng.sample(classes, rng.randint(1, len(classes)))
    members = rng.choices(some, k=num_batches * batch_size)
    on_host = rng.randint(0, num_batches) if accelerated else num_batches
    weight_format, kv_format = rng.choice([FORMATS[0]] * 2 + FORMATS)
    policy = {
        "admission": rng.choice(["continuous", "static"]),
        "gpu_batch_size": batch_size,
        "num_gpu_batches": num_batches,
        "max_num_batched_tokens": rng.choice([3, 16, 64, 300]),
        "max_model_len": CONTEXT,
        "kv_block_size": rng.choice([8, 16]),
        "share_prefixes": rng.random() < 0.5,
        "weight_format": weight_format,
        "kv_format": kv_format,
        "weight_layers": layers,
        "head_tier": rng.choice(["gpu", "cpu"] if accelerated else ["cpu", "disk"]),
        "embedding_tier": rng.choice(["gpu", "cpu", "disk"] if accelerated else ["cpu", "disk"]),
        "kv_seqs": {c: members.count(c) for c in classes if c in members},
        "kv_layers": kv_layers,
        "activation_batches": (num_batches - on_host, on_host),
        "batch_order": "neo" if unequal else rng.choice(BATCH_ORDERS),
        "on_demand_tokens": rng.choice([0, 5, 300]),
        "packed_tokens": 300,  # what only a card's kernels can multiply is dequantized
        "balance_tokens": rng.choice([0, 10, 1000]) if unequal else None,
    }
    rows = [(rng.randrange(NUM_PROMPTS), rng.randint(1, OUTPUT_LEN)) for _ in range(rng.randint(1, 14))]
    mode = rng.choice(["serial", "overlapped", "uneven", "dedicated cores", "shuffled", "shuffled"])
    # What is planned is far from what sweeps take here, so the CPU is never late, at times, or always.
    costs = LaneCosts(batch_s=1e-3, token_s=1e-4, cpu_seq_s=10.0 ** rng.randint(-6, 1), cpu_key_s=1e-7)
    adapts = costs if rng.random() < 0.5 else None
    tight, seed, pipelines = rng.random() < 0.5, rng.randrange(10**6), rng.random() < 0.5
    if rng.random() < 0.3 and kv_format == FP32 and weight_format != INT8 and num_layers > DENSE_LAYERS:
        policy |= {"attention_budget": rng.choice(["10%", "40"]), "kv_block_size": PAGE}
        tight, adapts = False, None  # KV that is computed again is that of a prompt, which attends to all pages
    return Case(family, overrides, accelerated, policy, tight, rows, mode, seed, pipelines, adapts)


def pipeline_at_random(patch, rng):
    """Have a draw decide, and neither times nor what a policy has to be for that."""

    def choice(policy, costs, num_layers):
        can = policy.num_gpu_batches == 1 and policy.weight_format != INT4
        return DeferralChoice(costs, num_layers) if can else None

    def pipelined(self, load, begins):
        return rng.choice([None, rng.randint(0, len(begins))]) if load.tokens else None

    patch.setattr(engine, "deferral_choice", choice)
    patch.setattr(DeferralChoice, "_pipelined", pipelined)


def check(case, reference, stores, device=None, prepare=lambda parts: parts):
    """prepare: what is done to the engine's parts before they run."""
    formats, budget = (
        (case.policy["weight_format"], case.policy["kv_format"]),
        case.policy.get("attention_budget", "all"),
    )
    path, expected = reference(case.family, case.overrides, *formats, budget)
    device = device or (EMULATED if case.accelerated else CPU)
    policy = make_policy(path, device, **case.policy)
    parts = make_parts(
        path, device, policy, stores, serial=case.mode == "serial", longest_tokens=CONTEXT,
        most_kv_tokens=1 if case.tight else 4096,
    )  # fmt: skip
    if case.mode == "shuffled":
        shuffle_steps(parts, case.seed)
    elif case.mode in ("uneven", "dedicated cores"):
        make_uneven(parts, case.seed)
    if case.mode == "dedicated cores":
        give_dedicated_cores(parts)
    prepare(parts)
    prompts = [expected.prompts[i] for i, _ in case.rows]
    wanted = [expected.tokens[i][:count] for i, count in case.rows]
    with pytest.MonkeyPatch.context() as patch:
        if case.pipelines:
            pipeline_at_random(patch, random.Random(case.seed))
        found, stats = run(
            parts,
            prompts,
            [len(tokens) for tokens in wanted],
            expected_output_len=1 if case.tight else None,
            planned_output_len=OUTPUT_LEN if case.lane_costs else None,
            lane_costs=case.lane_costs,
        )
    assert found == wanted, case
    return stats


# A seed for each example, rather than a choice for each field: no two examples are alike.
any_policy = settings(
    max_examples=quick_or(60, 104), database=None, deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip


@pytest.mark.slow
@settings(any_policy, max_examples=quick_or(1, 30))
@given(rng=st.randoms(use_true_random=True))
@pytest.mark.parametrize("family", some_of(FAMILIES, 12, "any policy"))
def test_any_policy_gives_the_tokens_of_the_in_memory_engine(family, rng, reference, stores):
    check(random_case(rng, [variant for variant in VARIANTS if variant[0] == family]), reference, stores)


def random_accelerated_case(rng, variants):
    """A case on an accelerator; in `make test` of few rows and sweeps, as a played device takes its time for each."""
    while not (case := random_case(rng, variants)).accelerated:
        pass
    tokens = max(quick_or(16, 0), case.policy["max_num_batched_tokens"])
    policy = case.policy | {"max_num_batched_tokens": tokens}
    rows = [(prompt, min(count, quick_or(3, OUTPUT_LEN))) for prompt, count in case.rows[: quick_or(4, None)]]
    return replace(case, mode="overlapped", policy=policy, rows=rows)


def launches_much(case):
    """True for experts of int8, each of whose products is a hundred operations of torch."""
    has_experts = case.family in MIXTURES or case.overrides.get("enable_moe_block", False)
    return has_experts and case.policy["weight_format"] == INT8


@pytest.mark.slow
@settings(any_policy, max_examples=quick_or(1, 8))
@given(rng=st.randoms(use_true_random=True))
def test_any_policy_on_a_device_with_streams(rng, reference, stores):
    case = random_accelerated_case(rng, VARIANTS)
    while quick_or(launches_much(case), False):
        case = random_accelerated_case(rng, VARIANTS)
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_device(patch)
        device = FakeDevice(*ORDERS[case.seed % len(ORDERS)], warm=FIRST_USES)

        def prepare(parts):
            run_on(parts, device, patch)
            loading.warm_up(
                parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams()
            )

        check(case, reference, stores, prepare=prepare)


@pytest.mark.parametrize("on_streams", [False, True])
def test_warming_up_leaves_nothing_behind(tiny_models, stores, monkeypatch, on_streams):
    """Neither in KV, nor in buffers, nor in what is counted."""
    path = tiny_models("mistral", sliding_window=20)[0]
    policy, prompts = everything_moves(path, weight_format=FP32), [list(range(5, 5 + n)) for n in (20, 3, 17, 30, 9)]
    found = []
    for warm in (False, True):
        with monkeypatch.context() as patch:
            as_on_a_device(patch)
            parts = make_parts(path, EMULATED, policy, stores, longest_tokens=CONTEXT)
            if on_streams and warm:
                run_on(parts, FakeDevice(*ORDERS[0]), patch)
            if warm:
                loading.warm_up(parts.executor, policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
                executor = parts.executor
                counted = (*executor.bytes_moved.values(), *executor.busy_s.values(), *executor.stalled_s.values())
                assert not any(counted)
                assert not any(pool.any() for pools in executor.kv_cache.pools.values() for pool in pools.values())
            found.append(run(parts, prompts, [3] * 5))
    assert found[0][0] == found[1][0]
    assert found[0][1].sweeps == found[1][1].sweeps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", range(40))
def test_any_policy_on_a_cuda_card(seed, reference, stores, monkeypatch):
    from first_launches import noted_in_jobs  # needs Triton

    noted = noted_in_jobs(monkeypatch)
    check(random_accelerated_case(random.Random(seed), VARIANTS), reference, stores, Device("cuda"))
    assert noted == []


def all_rows(expected, count=None):
    """Prompts and numbers of tokens of all rows, or of the first ones."""
    return expected.prompts[:count], [len(tokens) for tokens in expected.tokens[:count]]


CUTS = [*((order, count, None) for order in BATCH_ORDERS for count in (2, 3, 4)), ("neo", 2, 10)]


@pytest.mark.parametrize(("family", "cut"), covering(itertools.product(("opt", "llama"), CUTS), 0, "cuts"))
def test_cpu_attention_of_several_gpu_batches_beside_compute(family, cut, reference, stores):
    """Where FlexGen's own code goes wrong: its batches share one workspace. Here attention of one batch and products of
    another really run at the same time."""
    order, num_batches, balance_tokens = cut
    path, expected = reference(family, {})
    policy = make_policy(
        path, EMULATED, gpu_batch_size=6, num_gpu_batches=num_batches, kv_seqs={"cpu": 6 * num_batches - 4, "gpu": 4},
        activation_batches=(num_batches, 0), batch_order=order, max_num_batched_tokens=150,
        balance_tokens=balance_tokens,
    )  # fmt: skip
    spans = {"compute": [], "cpu_attention": []}

    def note(step, start, end):
        if step.lane in spans:
            spans[step.lane].append((start, end))

    parts = make_parts(path, EMULATED, policy, stores, on_step=note)
    give_dedicated_cores(parts)
    make_uneven(parts, seed=num_batches)
    assert run(parts, *all_rows(expected))[0] == expected.tokens
    both = sum(a < d and c < b for a, b in spans["compute"] for c, d in spans["cpu_attention"])
    assert both > len(spans["cpu_attention"]) / 10, "they took turns"


@pytest.mark.parametrize(
    ("family", "mode"), some_of(itertools.product(FAMILIES, ("serial", "overlapped", "shuffled")), 6, "every kind")
)
def test_every_kind_of_step(family, mode, reference, stores):
    path, expected = reference(family, {}, INT4, INT5)
    kinds = set()
    policy = everything_moves(path, kv_format=INT5)
    parts = make_parts(path, EMULATED, policy, stores, serial=mode == "serial")
    if mode == "shuffled":
        shuffle_steps(parts, seed=1)
    before_each_step(parts, lambda step: kinds.add(step.kind))
    count = quick_or(12, None)
    assert run(parts, *all_rows(expected, count))[0] == expected.tokens[:count]
    # Captured sweeps are a CUDA device's; experts and the output matrix are read where the host computes; stages are
    # in test_pipeline.py.
    # Nobody is late, so nothing is swapped; pages are chosen in test_attention_budget.py.
    others = {"layers", "read_dense", "route", "read_experts", "read_head", "receive", "send", "swap_in", "swap_out"}
    others.add("choose_pages")
    assert kinds == KINDS.keys() - others
    moved = parts.executor.bytes_moved
    assert all(moved[lane] > 0 for lane in ("h2d", "d2h", "disk_read", "disk_write"))


# KV placements, and layers in which KV of placement "streamed" stays on the device.
PLACEMENTS = [*((kv_placement, 0) for kv_placement in KVPlacement), ("streamed", 1), ("streamed", 2)]


@pytest.mark.parametrize(("kv_placement", "kv_layers"), PLACEMENTS)
def test_sequences_are_preempted_in_every_tier(kv_placement, kv_layers, reference, stores):
    path, expected = reference("llama", {})
    policy = make_policy(
        path, EMULATED, num_gpu_batches=2, gpu_batch_size=3, kv_seqs={kv_placement: 6}, max_model_len=CONTEXT,
        activation_batches=(1, 1), kv_layers=kv_layers,
    )  # fmt: skip
    parts = make_parts(path, EMULATED, policy, stores, longest_tokens=CONTEXT, most_kv_tokens=1)
    count = quick_or(12, None)
    found, stats = run(parts, *all_rows(expected, count), expected_output_len=1)
    assert found == expected.tokens[:count]
    assert stats.preempted > 0


@pytest.mark.parametrize(("kv_placement", "kv_layers"), PLACEMENTS)
def test_shared_prefixes_in_every_tier(kv_placement, kv_layers, reference, stores):
    path, expected = reference("opt", {})
    policy = make_policy(
        path, EMULATED, num_gpu_batches=2, gpu_batch_size=4, kv_seqs={kv_placement: 8}, activation_batches=(2, 0),
        kv_layers=kv_layers,
    )  # fmt: skip
    found, stats = run(make_parts(path, EMULATED, policy, stores), *all_rows(expected))
    assert found == expected.tokens
    assert stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("kv_layers", [0, 1, 2])
def test_what_is_new_goes_to_the_host_once_and_nothing_goes_back(kv_layers, reference, stores):
    """Copies in host memory are appended to (Pie).

    Of layers whose KV streams each token's goes out once, of others none.
    """
    path, expected = reference("llama", {})
    policy = make_policy(path, EMULATED, kv_seqs={"streamed": 8}, kv_layers=kv_layers, share_prefixes=False)
    loaded, kinds = set(), {"load_cache", "store_cache"}
    parts = make_parts(path, EMULATED, policy, stores)
    before_each_step(parts, lambda step: loaded.add((step.kind, step.layer)) if step.kind in kinds else None)
    prompts, output_lens = all_rows(expected)
    close = parts.executor.close
    parts.executor.close = lambda: (parts.executor.lanes.drain(), close())  # what the last sweep stores is counted too
    found, stats = run(parts, prompts, output_lens)
    assert found == expected.tokens and not stats.preempted
    streamed = [j for j, stays in enumerate(kv_on_device(3, kv_layers)) if not stays]
    assert loaded == {(kind, j) for kind in kinds for j in streamed}
    tokens = sum(len(prompt) + n - 1 for prompt, n in zip(prompts, output_lens, strict=True))
    row_bytes = 2 * parts.config.num_kv_heads * parts.config.head_dim * 4
    assert parts.executor.bytes_moved["d2h"] == tokens * row_bytes * len(streamed)
    pools = parts.executor.kv_cache.pools
    arenas = parts.executor.weights.arenas
    assert set(pools) == {"cpu"} and arenas["gpu"].allocated_bytes == sum(
        size for what, size in parts.memory.parts["gpu"].items()
    )


def change_layers(patch, rng):
    """Have engines that adapt put another number of layers' KV on the device after random sweeps.

    Returns:
        The list of changes, which grows.
    """
    recuts = []

    def after_sweep(self, measured):
        expansion = self._scheduler.expansion
        others = [n for n in expansion.choices if n != expansion.num_on_device] if expansion else []
        if others and rng.random() < 0.5 and not self.wants_recut:
            self._want_layers(rng.choice(others), "a test")

    def recut(self, recut):
        recuts.append(recut)
        carry_out(self, recut)

    carry_out = Executor.recut
    patch.setattr(Adaptation, "after_sweep", after_sweep)
    patch.setattr(Executor, "recut", recut)
    return recuts


def parts_with_scarce_memory(path, policy, stores, spare_frac, **options):
    """An engine's parts whose device has memory for a part of the KV of layers that the plan streams."""
    memory = plan_load(make_request(path, EMULATED, policy, stores, **options))
    expansion, parts = memory.expansion, sum(memory.parts["gpu"].values())
    if expansion is None:
        return make_parts(path, EMULATED, policy, stores, **options)
    planned = sum(expansion.block_bytes[layer] for layer in expansion.order[: expansion.least_on_device])
    spare = expansion.device_bytes - expansion.most_blocks * planned
    budgets = BUDGETS | {"gpu": parts - round((1 - spare_frac) * spare)}
    return make_parts(path, EMULATED, policy, stores, budgets=budgets, **options)


# KV by layer, and KV of placements "streamed" and "cpu", of which no layer is on the device to begin with.
EXPANDED = {"by layer": ({"streamed": 8}, 1), "all stream": ({"streamed": 5, "cpu": 2, "gpu": 1}, 0)}
CHANGED = [(name, kind, False) for kind in EXPANDED for name in MODELS]
ALWAYS_CHANGED = [("llama", "by layer", False), ("llama", "by layer", True), ("gemma3", "all stream", True)]


@pytest.mark.parametrize(("name", "kind", "on_streams"), [*some_of(CHANGED, 4, "expansion"), *ALWAYS_CHANGED])
def test_the_layers_whose_kv_streams_change_in_the_middle(name, kind, on_streams, reference, stores, monkeypatch):
    """Pie's adaptive expansion, at random sweeps, with prefixes that rows share and rows that are preempted."""
    path, expected = reference(*MODELS[name])
    kv_seqs, kv_layers = EXPANDED[kind]
    policy = make_policy(
        path, EMULATED, num_gpu_batches=2, gpu_batch_size=4, kv_seqs=kv_seqs, activation_batches=(1, 1),
        kv_layers=kv_layers, max_model_len=CONTEXT, kv_block_size=8,
    )  # fmt: skip
    if on_streams:
        as_on_a_device(monkeypatch)
    parts = parts_with_scarce_memory(path, policy, stores, 0.1, longest_tokens=CONTEXT, most_kv_tokens=240)
    if on_streams:
        run_on(parts, FakeDevice(*ORDERS[0], warm=FIRST_USES), monkeypatch)
        loading.warm_up(parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    recuts = change_layers(monkeypatch, random.Random(name))
    count = quick_or(9, None) if on_streams else None  # a played device takes its time
    costs = LaneCosts(batch_s=1e-3, token_s=1e-4, streamed_key_s=1e-6)
    found, _ = run(parts, *all_rows(expected, count), planned_output_len=OUTPUT_LEN, lane_costs=costs)
    assert found == expected.tokens[:count]
    if (expansion := parts.memory.expansion) is None:
        assert kind == "all stream" and any(window is not None for window in parts.config.windows)
    elif len(expansion.choices) > 1:
        assert any(recut.coming for recut in recuts) and any(recut.leaving for recut in recuts)
    if name == "llama":
        assert any(recut.moved for recut in recuts)


@pytest.mark.parametrize("admission", ["continuous", "static"])
def test_draws_are_the_same_in_any_tier(admission, reference, stores):
    """Samples of several per row, with a temperature: what is drawn belongs to the row, not to where it was run."""
    path, expected = reference("llama", {})
    sampling = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, n=3, seed=5)

    def texts(device, policy):
        with Engine.from_parts(make_parts(path, device, policy, stores), sampling=sampling) as engine:
            done = sorted(engine.generate([Request(p) for p in expected.prompts[:8]]), key=lambda c: c.index)
        return [sample.token_ids for completion in done for sample in completion.samples]

    plain = texts(CPU, make_policy(path, CPU, gpu_batch_size=24, kv_seqs={"cpu": 24}))
    tiered = texts(EMULATED, everything_moves(path, weight_format=FP32, admission=admission))
    assert tiered == plain and len(set(plain)) > 12


@pytest.mark.parametrize(
    ("name", "again", "on_streams"),
    [("llama", True, False), ("llama", False, False), ("llama", False, True), ("qwen3", False, False)],
)
def test_what_a_late_cpu_is_left_out_of_runs_later_or_on_the_device(
    name, again, on_streams, reference, stores, monkeypatch
):
    """Here the CPU is late by the plan, whatever it takes. KV comes to the device, or is computed again there."""
    monkeypatch.setattr(SweepChoice, "measured", lambda self, seconds, busy_s: None)
    path, expected = reference(name, {})
    policy = make_policy(
        path, EMULATED, gpu_batch_size=6, num_gpu_batches=2, kv_seqs={"gpu": 4, "cpu": 8}, batch_order="neo",
        balance_tokens=10,
    )  # fmt: skip
    late = LaneCosts(batch_s=1e-3, token_s=1e-4, cpu_seq_s=1.0, streamed_key_s=2e-4 if again else 5e-5)
    if on_streams:
        as_on_a_device(monkeypatch)
    parts, swapped = make_parts(path, EMULATED, policy, stores), []
    if on_streams:
        run_on(parts, FakeDevice(*ORDERS[0], warm=FIRST_USES), monkeypatch)
        loading.warm_up(parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    else:
        before_each_step(parts, lambda step: swapped.append(step.layer) if step.kind == "swap_in" else None)
    count = quick_or(14, None) if on_streams else None
    tokens, stats = run(parts, *all_rows(expected, count), planned_output_len=12, lane_costs=late)
    assert tokens == expected.tokens[:count] and stats.left_out > 10 and stats.moved > 0 and stats.preempted == 0
    if not on_streams:
        assert set(swapped) == (set() if again else set(range(3)))


@pytest.mark.parametrize(
    ("name", "kv_placement", "mode"),
    [
        ("llama", "cpu", "shuffled"),
        ("qwen3", "cpu", "shuffled"),
        ("llama", "deferred", "shuffled"),
        ("llama", "cpu", "streams"),
        ("opt", "cpu", "overlapped"),
    ],
)
def test_who_outgrows_the_device_moves_to_the_host(name, kv_placement, mode, reference, stores, monkeypatch):
    """KV of rows that decode goes to the host's pool, layer by layer; nothing is computed again."""
    path, expected = reference(name, {})
    policy = make_policy(
        path, EMULATED, gpu_batch_size=14, kv_seqs={"gpu": 8, kv_placement: 6}, share_prefixes=name == "opt"
    )  # fmt: skip
    if mode == "streams":
        as_on_a_device(monkeypatch)
    parts, swapped = make_parts(path, EMULATED, policy, stores), set()
    parts = replace(parts, memory=replace(parts.memory, kv_blocks={"gpu": 16, "cpu": 40}))
    if mode == "streams":
        run_on(parts, FakeDevice(*ORDERS[0], warm=FIRST_USES), monkeypatch)
        loading.warm_up(parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    elif mode == "shuffled":
        shuffle_steps(parts, seed=3)
    before_each_step(parts, lambda step: swapped.add((step.kind, step.layer)))
    count = quick_or(14, None) if mode == "streams" else None
    tokens, stats = run(parts, *all_rows(expected, count), planned_output_len=12, expected_output_len=1)
    assert tokens == expected.tokens[:count] and stats.swapped_out > 0
    assert {layer for kind, layer in swapped if kind == "swap_out"} == set(range(parts.executor.config.num_layers))


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", "shuffled"), ("gemma3", "shuffled"), ("qwen3_5", "shuffled"), ("llama", "streams")]
)
def test_deferred_tokens_go_through_any_number_of_layers_in_a_sweep(name, mode, reference, stores, monkeypatch):
    path, expected = reference(name, {})
    policy = make_policy(path, EMULATED, gpu_batch_size=12, kv_seqs={"gpu": 4, "deferred": 8})
    pipeline_at_random(monkeypatch, random.Random(5))
    if mode == "streams":
        as_on_a_device(monkeypatch)
    parts, joined = make_parts(path, EMULATED, policy, stores), Counter()
    if mode == "streams":
        run_on(parts, FakeDevice(*ORDERS[0], warm=FIRST_USES), monkeypatch)
        loading.warm_up(parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    else:
        shuffle_steps(parts, seed=3)

    def count(step):
        if step.kind == "join_deferred":
            joined[step.sweep, step.deferred_batch] += 1

    before_each_step(parts, count)
    most = quick_or(12, None) if mode == "streams" else None
    tokens, _ = run(parts, *all_rows(expected, most), planned_output_len=12)
    assert tokens == expected.tokens[:most]
    assert set(joined.values()) == set(range(1, parts.executor.config.num_layers + 1))


def test_summaries_of_pages_move_to_the_device_with_their_kv(reference, stores, monkeypatch):
    monkeypatch.setattr(SweepChoice, "measured", lambda self, seconds, busy_s: None)
    path, expected = reference("llama", {}, budget="10%")
    policy = make_policy(
        path, EMULATED, gpu_batch_size=6, num_gpu_batches=2, kv_seqs={"gpu": 4, "cpu": 8}, batch_order="neo",
        balance_tokens=10, attention_budget="10%", kv_block_size=PAGE,
    )  # fmt: skip
    late = LaneCosts(batch_s=1e-3, token_s=1e-4, cpu_seq_s=1.0, streamed_key_s=5e-5)
    parts = make_parts(path, EMULATED, policy, stores)
    tokens, stats = run(parts, *all_rows(expected), planned_output_len=12, lane_costs=late)
    assert stats.moved > 0 and stats.preempted == 0
    assert tokens == expected.tokens


def test_rows_that_pass_through_staging_must_fit_it(reference, stores):
    """A row too long for the buffers its KV passes through fails alone, and says so."""
    path, expected = reference("opt", {})
    policy = make_policy(path, EMULATED, kv_seqs={"disk": 8})
    parts = make_parts(path, EMULATED, policy, stores, longest_tokens=32)
    long, short = Request([5] * 300), Request(expected.prompts[0][:8], SamplingParams(max_tokens=4))
    with Engine.from_parts(parts) as engine:
        done = {c.index: c for c in engine.generate([long, short])}
    assert "more KV than" in done[0].error and done[1].error is None


@pytest.mark.parametrize("device", [CPU, EMULATED], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("num_tokens", [33, 99])
def test_a_vocabulary_so_small_that_its_last_chunks_are_empty(tmp_path, device, num_tokens):
    path, rows = tmp_path / "model", ([[4, 5, 6], [7, 8], [9] * 20], [6, 6, 6])
    make_tiny_model("llama", path, vocab_size=num_tokens)
    ends = {"head_tier": "cpu" if device.accelerated else "disk", "embedding_tier": "disk"}
    tokens = [
        run(make_parts(path, device, make_policy(path, device, **of_ends), tmp_path), *rows)[0]
        for of_ends in ({}, ends)
    ]
    assert tokens[0] == tokens[1]
