"""States of sequences: many in flight, forks of prompts, preemption, and what is left when a job ends.

test_token_identity.py and test_tiers.py have models with state layers in all tiers under all policies.
"""

import itertools
import random

import pytest
from thorough import covering
from tiered import CPU, EMULATED, make_parts, make_policy, make_requests, once_all_rows_are_there, run, shuffle_steps

from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, OUTPUT_LEN, BLOCK = 64, 6, 16
# Rows end before two tokens that are as close to each other as this: rounding decides which of them wins.
NEAR_TIE = 1e-3
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
# name -> (device, KV placements, further fields of the policy)
PLACES = {
    "memory": (CPU, {"cpu": ROWS}, {}),
    "disk": (CPU, {"disk": ROWS}, {}),
    "device": (EMULATED, {"gpu": ROWS}, {}),
    "streamed": (EMULATED, {"streamed": ROWS}, {"num_gpu_batches": 2}),
    "delegated": (EMULATED, {"cpu": ROWS}, {"num_gpu_batches": 2, "batch_order": "neo"}),
    "deferred": (EMULATED, {"gpu": ROWS // 2, "deferred": ROWS // 2}, {}),
    "by layer": (EMULATED, {"streamed": ROWS}, {"kv_layers": 2}),
    "all": (EMULATED, {"gpu": 16, "cpu": 16, "streamed": 12, "disk": 10, "deferred": 10}, {"num_gpu_batches": 2}),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2"])
def model(request, tiny_models):
    """A model whose states are matrices and the inputs of a convolution, and one with such inputs alone."""
    kinds = LAYERS if request.param == "qwen3_5" else [kind.replace("linear_attention", "conv") for kind in LAYERS]
    return tiny_models(request.param, num_hidden_layers=len(LAYERS), layer_types=kinds)[0]


@pytest.fixture(scope="module")
def alone(model, stores):
    """(prompts, what each gives by itself in an engine in memory, as far as that is clear)."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(4, 500) for _ in range(n)] for n in (0, 0, 20, 52, 90)]
    prefixes.append(prefixes[3][:35] + prefixes[4][:40])  # which leaves another one in the middle
    prompts = [
        rng.choice(prefixes) + [rng.randrange(4, 500) for _ in range(rng.choice([1, 2, 3, 5, 16, 17, 33, 80]))]
        for _ in range(ROWS)
    ]
    policy = make_policy(model, CPU, gpu_batch_size=1, kv_seqs={"cpu": 1}, share_prefixes=False)
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=2)
    with Engine.from_parts(make_parts(model, CPU, policy, stores), sampling=sampling) as engine:
        done = sorted(engine.generate([Request(prompt) for prompt in prompts]), key=lambda c: c.index)
    samples = [completion.samples[0] for completion in done]
    close = [[p.top[0].logprob - p.top[1].logprob < NEAR_TIE for p in sample.logprobs] + [True] for sample in samples]
    tokens = [sample.token_ids[: flags.index(True)] for sample, flags in zip(samples, close, strict=True)]
    assert sum(map(len, tokens)) > 0.9 * ROWS * OUTPUT_LEN
    return prompts, tokens


def policy_at(model, place, **changes):
    device, kv_seqs, fields = PLACES[place]
    num_batches = fields.get("num_gpu_batches", 1)
    on_host = 0 if device is EMULATED else num_batches
    return make_policy(
        model, device, kv_seqs=kv_seqs, gpu_batch_size=ROWS // num_batches, max_model_len=256,
        activation_batches=(num_batches - on_host, on_host), **{"max_num_batched_tokens": 300} | fields | changes,
    )  # fmt: skip


def parts_at(model, place, stores, *, most_kv_tokens=1 << 14, **changes):
    policy = policy_at(model, place, **changes)
    return make_parts(model, PLACES[place][0], policy, stores, longest_tokens=200, most_kv_tokens=most_kv_tokens)


def run_rows(parts, alone, **options):
    """The statistics of a run in which each row gives what it gives alone."""
    prompts, wanted = alone
    found, stats = run(parts, prompts, [max(1, len(tokens)) for tokens in wanted], **options)
    assert [tokens[: len(own)] for tokens, own in zip(found, wanted, strict=True)] == wanted
    return stats


@pytest.mark.parametrize("place", PLACES)
def test_every_row_of_64_in_flight_gives_its_own_tokens(place, model, alone, stores):
    run_rows(parts_at(model, place, stores), alone)


@pytest.mark.parametrize(
    ("place", "schedule"),
    covering(itertools.product(("memory", "all"), (("continuous", 7), ("static", 64), ("static", 1000))), 0, "chunks"),
    ids=str,
)
def test_chunks_and_admissions_give_the_same_tokens(place, schedule, model, alone, stores):
    admission, max_tokens = schedule
    run_rows(parts_at(model, place, stores, admission=admission, max_num_batched_tokens=max_tokens), alone)


@pytest.mark.parametrize("place", ["streamed", "delegated", "all"])
def test_steps_in_any_order_give_the_same_tokens(place, model, alone, stores):
    parts = parts_at(model, place, stores)
    shuffle_steps(parts, seed=3)
    run_rows(parts, alone)


@pytest.mark.parametrize("place", ["memory", "device", "streamed", "delegated", "disk"])
def test_preempted_rows_give_the_same_tokens(place, model, alone, stores):
    stats = run_rows(parts_at(model, place, stores, most_kv_tokens=1), alone, expected_output_len=1)
    assert stats.preempted > 0


def snapshots(engine):
    return sum(len(pool.states._block_of) for pool in engine._pools.values())


@pytest.mark.parametrize("place", ["memory", "device", "streamed", "delegated", "deferred"])
def test_samples_of_a_prompt_take_over_its_state(place, model, alone, stores):
    """The prompt is computed once, but for the tokens after its last whole block."""
    prompt, n = alone[0][0] * 3, 5
    prompt = (prompt * 40)[: 2 * BLOCK + 5]
    sampling = SamplingParams(max_tokens=4, n=n, temperature=0.9, seed=1, ignore_eos=True)
    with Engine.from_parts(parts_at(model, place, stores), sampling=sampling) as engine:
        (done,) = engine.generate([Request(prompt)])
        assert engine.stats.prefilled_tokens == len(prompt) + (n - 1) * (len(prompt) - 2 * BLOCK)
        assert engine.used_state_slots == 0
    with Engine.from_parts(parts_at(model, "memory", stores, share_prefixes=False), sampling=sampling) as engine:
        (by_itself,) = engine.generate([Request(prompt)])
    assert [s.token_ids for s in done.samples] == [s.token_ids for s in by_itself.samples]


def test_the_third_row_takes_over_what_the_second_left_at_the_fork(model, alone, stores):
    prefix = (alone[0][0] * 99)[: 5 * BLOCK + 3]
    prompts = [prefix + [7 + i] * (20 + i) for i in range(4)]
    with Engine.from_parts(parts_at(model, "memory", stores), sampling=SamplingParams(max_tokens=2)) as engine:
        cached = []
        for prompt in prompts:
            list(engine.generate([Request(prompt)]))
            cached.append(engine.stats.cached_prompt_tokens)
        assert cached == [0, 0, 5 * BLOCK, 10 * BLOCK]
        assert snapshots(engine) == 1 and engine.used_state_slots == 0


@pytest.mark.parametrize("place", ["memory", "streamed", "delegated"])
@pytest.mark.parametrize("max_tokens", [30, 300])
def test_a_prefix_of_rows_that_follow_each_other_is_computed_once(place, max_tokens, model, alone, stores):
    prefix = (alone[0][0] * 99)[: 6 * BLOCK]
    prompts = [[*prefix, 9 + i, 11, 12] for i in range(9)]
    requests, sampling = [Request(p) for p in prompts], SamplingParams(max_tokens=3, ignore_eos=True)
    parts = parts_at(model, place, stores, max_num_batched_tokens=max_tokens)
    with Engine.from_parts(parts, sampling=sampling) as engine:
        done = {c.index: c.samples[0].token_ids for c in engine.generate(requests, should_stop=once_all_rows_are_there)}
        assert engine.stats.prefilled_tokens == len(prefix) + 3 * len(prompts)
        found = [next(iter(engine.generate([Request(prompt)]))).samples[0].token_ids for prompt in prompts[:3]]
    assert [done[i] for i in range(3)] == found
    with Engine.from_parts(parts_at(model, "memory", stores, share_prefixes=False), sampling=sampling) as engine:
        assert found == [next(iter(engine.generate([Request(prompt)]))).samples[0].token_ids for prompt in prompts[:3]]


def test_snapshots_go_when_sequences_need_their_slots(model, alone, stores):
    policy = policy_at(model, "memory")
    parts = make_parts(model, CPU, policy, stores, longest_tokens=200)
    with Engine.from_parts(parts, sampling=SamplingParams(max_tokens=2, ignore_eos=True)) as engine:
        slots = engine._pools["cpu"].states.num_blocks
        rng = random.Random(2)
        for _ in range(slots // 8 + 2):  # each leaves eight snapshots
            prefixes = [[rng.randrange(4, 500) for _ in range(70)] for _ in range(8)]
            prompts = [[*prefix, 9, i] for prefix in prefixes for i in range(2)]
            for prompt in prompts:
                list(engine.generate([Request(prompt)]))
        assert 0 < snapshots(engine) <= slots
        prompts, wanted = alone
        done = {c.index: c for c in engine.generate(make_requests(prompts, [OUTPUT_LEN] * ROWS))}
    found = [done[i].samples[0].token_ids for i in range(ROWS)]
    assert [tokens[: len(own)] for tokens, own in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize("place", ["memory", "all"])
def test_choices_of_a_score_request_share_their_context(place, model, alone, stores):
    rng = random.Random(4)
    context = [rng.randrange(4, 500) for _ in range(2 * BLOCK + 3)]
    choices = tuple(tuple(rng.randrange(4, 500) for _ in range(n)) for n in (1, 2, 3, 5, 3))
    requests = [ScoreRequest(context, choices), ScoreRequest(context[:20], choices[:2])]

    def scores(parts):
        with Engine.from_parts(parts) as engine:
            done = sorted(engine.score(requests), key=lambda scored: scored.index)
            assert engine.used_state_slots == 0 and engine.used_kv_blocks == 0
            computed = engine.stats.prefilled_tokens
        return [[t.chosen.logprob for t in s.tokens] for scored in done for s in scored.scores], computed

    plain, all_tokens = scores(parts_at(model, "memory", stores, share_prefixes=False))
    found, computed = scores(parts_at(model, place, stores))
    assert [pytest.approx(row, abs=1e-4) for row in plain] == found
    assert computed < all_tokens


@pytest.mark.parametrize("place", ["memory", "all"])
def test_a_job_that_is_stopped_leaves_no_slot_taken(place, model, alone, stores):
    prompts, wanted = alone
    with Engine.from_parts(parts_at(model, place, stores)) as engine:
        sweeps = iter(range(6))
        requests = make_requests(prompts, [OUTPUT_LEN] * ROWS)
        list(engine.generate(requests, should_stop=lambda: next(sweeps, None) is None))
        assert engine.used_state_slots == 0 and engine.used_kv_blocks == 0
        done = {c.index: c for c in engine.generate(make_requests(prompts, [OUTPUT_LEN] * ROWS))}
    found = [done[i].samples[0].token_ids for i in range(ROWS)]
    assert [tokens[: len(own)] for tokens, own in zip(found, wanted, strict=True)] == wanted


def test_a_state_that_is_not_finite_is_not_taken_over(model, alone, stores):
    """Rows after one whose logits are not finite compute its prefix themselves, though a snapshot of it is there."""
    prefix = (alone[0][0] * 99)[: 4 * BLOCK]
    prompts = [[*prefix, 9 + i, 11] for i in range(4)]
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)

    def tokens(engine, prompt):
        (completion,) = engine.generate([Request(prompt)])
        return completion.samples[0].token_ids if completion.error is None else completion.error

    with Engine.from_parts(parts_at(model, "memory", stores), sampling=sampling) as engine:
        wanted = [tokens(engine, prompt) for prompt in prompts]
        assert snapshots(engine) == 1
        for pools in engine.parts.executor.states.pools.values():
            for pool in pools.values():
                pool.fill_(255)  # NaN, in fp32
        assert tokens(engine, prompts[0]) == wanted[0], "it has run again by itself"
        assert snapshots(engine) == 0
        assert [tokens(engine, prompt) for prompt in prompts] == wanted


@pytest.mark.parametrize("place", ["memory", "all"])
def test_resumed_rows_go_on_to_the_same_tokens(place, model, alone, stores):
    prompts, wanted = alone
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
    with Engine.from_parts(parts_at(model, place, stores), sampling=sampling) as engine:
        sweeps = iter(range(9))
        requests = [Request(prompt, row=i) for i, prompt in enumerate(prompts)]
        done = {c.index: c for c in engine.generate(requests, should_stop=lambda: next(sweeps, None) is None)}
        partials = {partial.row: partial for partial in engine.partials() if partial.row not in done}
    assert partials, "the job was stopped too late"
    with Engine.from_parts(parts_at(model, place, stores), sampling=sampling) as engine:
        rest = [i for i in range(ROWS) if i not in done]
        requests = [Request(prompts[i], row=i, partial=partials.get(i)) for i in rest]
        done |= {rest[c.index]: c for c in engine.generate(requests)}
    found = [done[i].samples[0].token_ids for i in range(ROWS)]
    assert [tokens[: len(own)] for tokens, own in zip(found, wanted, strict=True)] == wanted


def test_log_probabilities_of_prompts_are_those_without_sharing(model, alone, stores):
    sampling = SamplingParams(max_tokens=3, n=2, temperature=0.5, prompt_logprobs=1, ignore_eos=True)

    def logprobs(parts):
        with Engine.from_parts(parts, sampling=sampling) as engine:
            done = sorted(engine.generate([Request(prompt) for prompt in alone[0][:12]]), key=lambda c: c.index)
            assert engine.used_state_slots == 0
        return [[p.chosen.logprob for p in c.prompts[0].logprobs[1:]] for c in done]

    plain = logprobs(parts_at(model, "memory", stores, share_prefixes=False))
    assert logprobs(parts_at(model, "all", stores)) == [pytest.approx(row, abs=1e-4) for row in plain]


def test_an_engine_has_no_more_sequences_in_flight_than_memory_holds_states_of(tiny_models):
    heads = {"linear_num_value_heads": 64, "linear_num_key_heads": 2, "linear_key_head_dim": 64}
    path = tiny_models("qwen3_5", num_hidden_layers=4, layer_types=LAYERS, linear_value_head_dim=64, **heads)[0]
    with Engine(str(path), dtype="float32", max_num_seqs=8, max_model_len=64) as engine:
        parts = engine.parts.memory.parts["cpu"]
        seq_state_bytes = parts["state"] // engine.parts.memory.state_slots["cpu"]
    spare = 100 * seq_state_bytes  # bytes for states and KV, some of which what the process has grown by takes
    budget = sum(parts.values()) - parts["state"] - parts["KV"] + spare
    with pytest.raises(InputError, match=r"state .*give at least .*, or a smaller --max-num-seqs"):
        Engine(str(path), dtype="float32", cpu_memory=budget, max_model_len=64, max_num_seqs=1000)
    with Engine(str(path), dtype="float32", cpu_memory=budget, max_model_len=64) as engine:
        assert 4 <= engine.policy.max_num_seqs <= 100
        assert engine.parts.memory.parts["cpu"]["KV"] + engine.parts.memory.parts["cpu"]["state"] <= spare
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(list(engine.generate([Request([5, 6, 7 + n], sampling) for n in range(40)]))) == 40
