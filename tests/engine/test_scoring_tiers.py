"""Scores under any policy: those of transformers, in fp32, wherever weights, KV and the output matrix are."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from fake_device import ORDERS, FakeDevice, as_on_a_device, run_on
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scoring import CLOSE, check, tokens
from test_tiers import VARIANTS, any_policy, random_case
from thorough import SEED, covering, quick_or
from tiered import CPU, EMULATED, everything_moves, make_parts, make_policy, make_uneven, shuffle_steps

from batchgen.core.device import Device
from batchgen.core.plan import VOCABULARY_CHUNKS
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.schedule.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 80
FP32 = "float32"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def requests(rng, count):
    """Contexts of which half begin alike, with 1 to 5 continuations; a third of these are single tokens."""
    prefix = tokens(rng, 40)
    rows = []
    for i in range(count):
        context = prefix[: rng.choice((0, 0, 20, 40))] + tokens(rng, rng.choice((1, 2, 8, 16, 17, 25)))
        own = [tokens(rng, rng.choice((1, rng.randrange(1, CONTEXT - len(context))))) for _ in range(rng.randint(1, 4))]
        rows.append(ScoreRequest(context, (*own, (*own[0][:3], 5)), i, logprobs=rng.choice((None, 0, 2))))
    return rows


def score(parts, rows):
    with Engine.from_parts(parts) as engine:
        found = sorted(engine.score(rows), key=lambda scored: scored.index)
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found, engine.stats


def run_case(case, tiny_models, stores, monkeypatch, device=None, prepare=lambda parts: parts, few=False):
    """few: requests are few, and logits are made of several rows at once: a played device takes its time for each."""
    path, model = tiny_models(case.family, **case.overrides)
    rng = random.Random(case.seed)
    rows = max(rng.choice((1, 5, 300)), 5 if few else 1)
    monkeypatch.setattr("batchgen.planner.sizes.logit_rows", lambda *_: rows)
    device = device or (EMULATED if case.accelerated else CPU)
    parts = make_parts(
        path, device, make_policy(path, device, **case.policy), stores, serial=case.mode == "serial",
        longest_tokens=CONTEXT, most_kv_tokens=1 if case.tight else 4096,
    )  # fmt: skip
    if case.mode == "shuffled":
        shuffle_steps(parts, case.seed)
    elif case.mode in ("uneven", "dedicated cores"):
        make_uneven(parts, case.seed)
    prepare(parts)
    rows = requests(rng, min(rng.randint(1, 10), 3 if few else 10))
    check(model, rows, score(parts, rows)[0])


def in_fp32(case):
    return replace(case, policy=case.policy | {"weight_format": FP32, "kv_format": FP32})


@pytest.mark.slow
@settings(any_policy, max_examples=quick_or(4, 104))
@given(rng=st.randoms(use_true_random=True))
def test_any_policy_gives_the_scores_of_transformers(rng, tiny_models, stores):
    with pytest.MonkeyPatch.context() as patch:
        run_case(in_fp32(random_case(rng, VARIANTS)), tiny_models, stores, patch)


def accelerated_case(seed):
    rng = random.Random(repr(seed))
    while not (case := in_fp32(random_case(rng, VARIANTS))).accelerated:
        pass
    return replace(case, mode="overlapped")


@pytest.mark.parametrize("seed", range(quick_or(2, 3)))
def test_any_policy_on_a_device_with_streams(seed, tiny_models, stores, monkeypatch):
    as_on_a_device(monkeypatch)
    device = FakeDevice(*ORDERS[seed])
    case = accelerated_case((SEED, seed))
    on_streams = lambda parts: run_on(parts, device, monkeypatch)  # noqa: E731
    run_case(case, tiny_models, stores, monkeypatch, prepare=on_streams, few=quick_or(True, False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", range(20))
def test_any_policy_on_a_cuda_card(seed, tiny_models, stores, monkeypatch):
    run_case(accelerated_case(seed), tiny_models, stores, monkeypatch, Device("cuda"))


@pytest.mark.parametrize(
    ("admission", "logit_rows"), covering(itertools.product(("continuous", "static"), (1, 7, 1000)), 0, "pieces")
)
def test_the_output_matrix_in_pieces(tiny_models, stores, monkeypatch, admission, logit_rows):
    """Logits are looked at piece by piece: no more than `logit_rows` of a piece's are there at once."""
    monkeypatch.setattr("batchgen.planner.sizes.logit_rows", lambda *_: logit_rows)
    path, model = tiny_models("llama")
    policy = everything_moves(path, weight_format=FP32, admission=admission)
    parts = make_parts(path, EMULATED, policy, stores, task="score")
    sizes = []
    real = parts.executor.run

    def run(batches, on_logits, **options):
        def note(asked, logits, start):
            sizes.append(tuple(logits.shape))
            on_logits(asked, logits, start)

        real(batches, note, **options)

    parts.executor.run = run
    rows = requests(random.Random(0), 6)
    check(model, rows, score(parts, rows)[0])
    assert {columns for _, columns in sizes} == {512 // VOCABULARY_CHUNKS}
    assert max(count for count, _ in sizes) <= logit_rows


def test_four_bits_are_those_of_the_in_memory_engine(tiny_models, stores):
    path, _ = tiny_models("llama")
    rows = requests(random.Random(1), 8)
    plain = make_policy(path, CPU, weight_format="int4", share_prefixes=False, max_num_batched_tokens=512)
    expected, _ = score(make_parts(path, CPU, plain, stores), rows)
    found, _ = score(make_parts(path, EMULATED, everything_moves(path), stores), rows)
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a.scores, b.scores, strict=True):
            assert [t.chosen.logprob for t in x.tokens] == pytest.approx(
                [t.chosen.logprob for t in y.tokens], abs=CLOSE
            )


@pytest.mark.parametrize("kv_placement", ["gpu", "streamed", "disk"])
def test_sequences_that_are_preempted_are_scored_once(tiny_models, stores, monkeypatch, kv_placement):
    """Whatever is preempted between two sweeps: what it has found so far stays, and nothing is asked for twice."""
    path, model = tiny_models("llama")
    rng = random.Random(2)
    real, asked = Scheduler.schedule, []

    def schedule(self):
        if self.running and rng.random() < 0.5:
            self._preempt(rng.choice(list(self.running)))
        sweep = real(self)
        asked.extend((s.sequence, position) for s in sweep for position in s.logits_positions)
        return sweep

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    policy = make_policy(path, EMULATED, kv_seqs={kv_placement: 8}, max_num_batched_tokens=24, max_model_len=CONTEXT)
    rows = requests(random.Random(3), 10)
    found, stats = score(make_parts(path, EMULATED, policy, stores), rows)
    check(model, rows, found)
    assert stats.preempted > 3
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("kv_placement", ["gpu", "streamed", "cpu"])
@pytest.mark.parametrize("max_num_batched_tokens", [40, 4096])
def test_a_context_is_computed_once_in_every_tier(tiny_models, stores, kv_placement, max_num_batched_tokens):
    """Also where it takes several sweeps, and where KV can be taken over only when its sweep is done."""
    path, model = tiny_models("opt")
    rng = random.Random(4)
    policy = make_policy(
        path, EMULATED, kv_seqs={kv_placement: 8}, gpu_batch_size=4, num_gpu_batches=2, activation_batches=(2, 0),
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    rows = [ScoreRequest(tokens(rng, 64), tuple(tokens(rng, 6) for _ in range(4)), i) for i in range(6)]
    found, stats = score(make_parts(path, EMULATED, policy, stores), rows)
    check(model, rows, found)
    assert stats.computed_tokens == 6 * (64 + 4 * 5)


def test_samples_of_a_prompt_compute_it_once_in_every_tier(tiny_models, stores):
    path, _ = tiny_models("opt")
    prompt = list(tokens(random.Random(5), 65))
    sampling = SamplingParams(max_tokens=2, n=4, temperature=1.0, ignore_eos=True)
    policy = make_policy(path, EMULATED, kv_seqs={"streamed": 8}, max_num_batched_tokens=4096)
    with Engine.from_parts(make_parts(path, EMULATED, policy, stores)) as engine:
        list(engine.generate([Request(prompt, sampling)]))
    assert engine.stats.computed_tokens == 64 + 4 * 1 + 4 * 1
