"""A model over the stages of a pipeline gives the tokens and scores of one engine."""

import random
from dataclasses import replace

import pytest
from model_tables import MODELS
from stages import make_pipeline
from thorough import quick_or, some_of
from tiered import CPU, EMULATED, make_parts, make_policy

from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.engine.pipeline import Stage
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.parallel import check_stages, split_layers

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES, MAX_TOKENS = 6, 6
DEVICES = {"cpu": CPU, "emulated": EMULATED}


def stages_of(path, device, stops, rng=None, **changes):
    """Stages that end at these layers. rng: weights and activations of each are anywhere; None: where it computes."""
    first, found = 0, []
    for stop in stops:
        policy = make_policy(path, device, **changes)
        home = 0 if device.accelerated else 1
        tiers = range(home, 3) if rng else [home]
        layers = {}
        for group in policy.weight_layers:
            residencies = [rng.choice(tiers) if rng else home for _ in range(first, stop)]
            layers[group] = tuple(residencies.count(tier) for tier in range(3))
        policy = replace(policy, weight_layers=layers)
        if rng:
            on_host = rng.randint(0, policy.num_gpu_batches) if device.accelerated else policy.num_gpu_batches
            policy = replace(
                policy,
                head_tier=rng.choice(["gpu", "cpu"] if device.accelerated else ["cpu", "disk"]),
                embedding_tier=rng.choice(["gpu", "cpu", "disk"] if device.accelerated else ["cpu", "disk"]),
                activation_batches=(policy.num_gpu_batches - on_host, on_host),
            )
        found.append(Stage(first, stop, policy))
        first = stop
    return found


def prompts_of(count=8, seed=11):
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 500) for _ in range(36)]
    lengths = (1, 3, 16, 17, 9, 30, 5, 2)
    return [prefix * (i % 2) + [rng.randrange(4, 500) for _ in range(lengths[i % 8])] for i in range(count)]


def samples_of(parts, prompts, **sampling):
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, **sampling})
    with Engine.from_parts(parts, sampling=params) as engine:
        done = {c.index: c for c in engine.generate([Request(prompt) for prompt in prompts])}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    assert [done[i].error for i in range(len(prompts))] == [None] * len(prompts)
    return [done[i].samples for i in range(len(prompts))]


def tokens_of(parts, prompts, **sampling):
    return [[sample.token_ids for sample in samples] for samples in samples_of(parts, prompts, **sampling)]


def memory_policy(path):
    return make_policy(path, CPU, gpu_batch_size=SEQUENCES, kv_seqs={"cpu": SEQUENCES})


def num_layers(path):
    return sum(next(iter(memory_policy(path).weight_layers.values())))


def in_memory(path, tmp_path, stops, **options):
    stages = stages_of(path, CPU, stops, gpu_batch_size=SEQUENCES, kv_seqs={"cpu": SEQUENCES})
    return make_pipeline(path, CPU, stages, tmp_path, **options)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def expected(tiny_models, stores):
    """name of a model -> (path, prompts, tokens of one engine in memory)."""
    made = {}

    def get(name):
        if name not in made:
            family, overrides = MODELS[name]
            path, _ = tiny_models(family, **overrides)
            made[name] = path, prompts_of(), tokens_of(make_parts(path, CPU, memory_policy(path), stores), prompts_of())
        return made[name]

    return get


def is_refused(path):
    """True if layers share KV or have embeddings of their own: no stage can have some of them, which is said."""
    config = read_config(resolve_model(str(path)))
    if not (config.shared_kv_layers or config.per_layer_size):
        check_stages(config, 2)
        return False
    with pytest.raises(InputError, match="--pipeline cannot cut a model whose layers"):
        check_stages(config, 2)
    return True


@pytest.mark.parametrize("name", some_of(MODELS, 14, "two stages"))
def test_stages_give_the_tokens_of_one_engine(name, expected, stores):
    path, prompts, wanted = expected(name)
    if is_refused(path):
        return
    last = num_layers(path)
    for stops in quick_or([(1, last)], [(1, last), (last - 1, last), tuple(range(1, last + 1))]):
        assert tokens_of(in_memory(path, stores, stops), prompts) == wanted, stops


PLACEMENTS = [placement for placement in KVPlacement if placement != "deferred"]
# Device, and the class of all sequences; None: of each a few.
_ANYWHERE = [("cpu", c) for c in ("cpu", "disk", None)]
_ANYWHERE += [("emulated", c) for c in (*PLACEMENTS, None)]


def stages_anywhere(path, device, kv_placement, rng):
    """Two stages with policies of their own.

    Weights, activations and ends are anywhere, KV in one class or (None) in every one, in several micro-batches.
    """
    num_batches = rng.randint(1, 3)
    classes = (
        [kv_placement] if kv_placement else ["cpu", "disk"] if device is CPU else ["gpu", "cpu", "streamed", "disk"]
    )
    members = [classes[i % len(classes)] for i in range(SEQUENCES + -SEQUENCES % num_batches)]
    return stages_of(
        path, device, (rng.randrange(1, num_layers(path)), num_layers(path)), rng,
        gpu_batch_size=len(members) // num_batches, num_gpu_batches=num_batches,
        kv_seqs={c: members.count(c) for c in classes}, activation_batches=(0, num_batches), max_num_batched_tokens=50,
        admission=rng.choice(["continuous", "static"]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "where"), some_of([(name, where) for name in MODELS for where in _ANYWHERE], 6, "stages")
)
def test_stages_with_policies_of_their_own(name, where, expected, stores):
    """Weights, activations and ends of each stage anywhere, KV in every class, several micro-batches."""
    path, prompts, wanted = expected(name)
    if is_refused(path):
        return
    device = DEVICES[where[0]]
    stages = stages_anywhere(path, device, where[1], random.Random(f"{name} {where}"))
    assert tokens_of(make_pipeline(path, device, stages, stores, longest_tokens=80), prompts) == wanted


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_p": 0.9, "n": 2, "seed": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": ((7, 2.0),)},
        {"logprobs": 3},
    ],
    ids=["draws", "penalties", "logprobs"],
)
def test_the_last_stage_chooses_as_one_engine_does(sampling, expected, stores):
    path, prompts, _ = expected("llama")
    one = samples_of(make_parts(path, CPU, memory_policy(path), stores), prompts, **sampling)
    stages = samples_of(in_memory(path, stores, (2, 3)), prompts, **sampling)
    assert [[(s.token_ids, s.text) for s in row] for row in stages] == [
        [(s.token_ids, s.text) for s in row] for row in one
    ]
    for row, other in zip(stages, one, strict=True):  # the same products of the same rows, to rounding in attention
        for sample, same in zip(row, other, strict=True):
            found = [p.chosen.logprob for p in sample.logprobs or ()]
            assert found == pytest.approx([p.chosen.logprob for p in same.logprobs or ()], abs=1e-4)


def test_grammars_are_followed_over_stages(expected, stores):
    pytest.importorskip("llguidance")
    path, prompts, _ = expected("llama")
    options = {"regex": "[a-c]{2,9}", "max_tokens": 12}
    one = tokens_of(make_parts(path, CPU, memory_policy(path), stores), prompts, **options)
    assert tokens_of(in_memory(path, stores, (1, 3)), prompts, **options) == one


def test_scores_are_those_of_one_engine(expected, stores):
    path, prompts, _ = expected("llama")
    requests = [ScoreRequest(prompt, ([5, 6, 7], [5, 9], prompt[:3])) for prompt in prompts]

    def scores(parts):
        with Engine.from_parts(parts) as engine:
            done = {s.index: s for s in engine.score(requests)}
        return [[c.logprob for c in done[i].scores] for i in range(len(requests))]

    one = scores(make_parts(path, CPU, memory_policy(path), stores))
    for found, same in zip(scores(in_memory(path, stores, (1, 2, 3))), one, strict=True):
        assert found == pytest.approx(same, abs=1e-4)


def test_every_stage_is_at_a_sweep(expected, stores):
    """No sequence is in two sweeps under way, and as many sweeps are as there are stages."""
    path, prompts, wanted = expected("llama")
    kinds, loaded = set(), []
    telling = {"on_step": lambda step, *_: kinds.add(step.kind), "on_load": lambda *done: loaded.append(done)}
    parts = in_memory(path, stores, (1, 3), **telling)
    run, waits, most = parts.executor.run, [], []

    def counted(batches, *rest, **options):
        wait = run(batches, *rest, **options)
        rows = {id(sequence) for batch in batches for sequence, _ in batch.logits_rows}
        assert all(rows.isdisjoint(others) for others in waits)
        waits.append(rows)
        most.append(len(waits))

        def wait_and_count():
            wait()
            waits.remove(rows)

        return wait_and_count

    parts.executor.run = counted
    assert tokens_of(parts, prompts) == wanted
    assert kinds == {"embed", "pre", "attention", "post", "send"} and loaded == [(1, 1)], "of rank 0's stage"
    assert max(most) == 2
    assert sum(count == 2 for count in most) > len(most) / 2


def test_sequences_are_preempted_in_a_pipeline(expected, stores):
    """Outputs grow to three blocks where one was expected, in a pool of four."""
    path, prompts, _ = expected("llama")
    prompts = [prompt[-5:] for prompt in prompts]
    options = {"max_tokens": 36, "ignore_eos": True}
    wanted = tokens_of(make_parts(path, CPU, memory_policy(path), stores), prompts, **options)
    stages = stages_of(
        path, CPU, (1, 3), gpu_batch_size=SEQUENCES, kv_seqs={"cpu": SEQUENCES}, share_prefixes=False, max_model_len=48
    )
    parts = make_pipeline(path, CPU, stages, stores, min_output_len=36, longest_tokens=48, most_kv_tokens=64)
    assert parts.memory.kv_blocks["cpu"] < SEQUENCES
    with Engine.from_parts(parts, expected_output_len=1, sampling=SamplingParams(**options)) as engine:
        done = {c.index: c for c in engine.generate([Request(prompt) for prompt in prompts])}
        assert engine.stats.preempted > 0
    assert [[s.token_ids for s in done[i].samples] for i in range(len(prompts))] == wanted


@pytest.mark.parametrize(("layers", "stages", "head", "wanted"), [
    (12, 2, 0, [(0, 6), (6, 12)]), (12, 2, 2, [(0, 7), (7, 12)]), (7, 3, 0, [(0, 3), (3, 5), (5, 7)]),
    (3, 3, 0, [(0, 1), (1, 2), (2, 3)]), (4, 2, 50, [(0, 3), (3, 4)]),
])  # fmt: skip
def test_layers_are_shared_out_by_what_they_multiply(layers, stages, head, wanted, tiny_models):
    config = read_config(resolve_model(str(tiny_models("llama")[0])))
    config = replace(config.first_layers(1), num_layers=layers, windows=(None,) * layers)
    config = replace(config, vocab_size=max(1, round(head * config.matmul_params_per_layer / config.embed_size)))
    assert split_layers(config, stages) == wanted


def test_a_stage_says_what_it_has(tiny_models):
    config = read_config(resolve_model(str(tiny_models("gemma2")[0])))
    whole, parts = config.num_layers, [config.stage(0, 1), config.stage(1, config.num_layers)]
    assert [(p.num_layers, p.embeds, p.has_head) for p in parts] == [(1, True, False), (whole - 1, False, True)]
    assert sum((p.windows for p in parts), ()) == config.windows
    assert [p.has_embeddings for p in parts] == [True, config.tied_embeddings]
    assert sum(p.layer_params for p in parts) == config.layer_params
    assert ModelConfig.from_json(parts[1].to_json()) == parts[1]
    assert "first_layer" not in config.to_json()


def test_stages_that_cannot_be_run_are_refused(tiny_models, stores):
    path, _ = tiny_models("llama")
    deferred = {"gpu_batch_size": 4, "kv_seqs": {"gpu": 2, "deferred": 2}}
    with pytest.raises(InputError, match="no sequences whose attention is deferred"):
        make_pipeline(path, EMULATED, stages_of(path, EMULATED, (1, 3), **deferred), stores)
