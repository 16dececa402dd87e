"""The whole engine against transformers, in fp32 with greedy decoding: the same tokens, however rows are batched."""

import functools
import itertools
import random
import sys
from collections import Counter

import pytest
import torch
from greedy_tokens import greedy_tokens
from model_tables import FAMILIES
from thorough import covering, quick_or, some_of

import batchgen
from batchgen.core.request import Request, Sample, SamplingParams
from batchgen.engine import loader
from batchgen.runtime.memory.kv_cache import KVCache
from batchgen.schedule.scheduler import Scheduler

MAX_TOKENS = 12
ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128},
}  # fmt: skip


def prompts(count=24, longest=150, seed=0):
    """Token ids of mixed lengths; half of them share a prefix of 70 tokens."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 500) for _ in range(70)]
    lengths = [1, 2, 15, 16, 17, 33] + [rng.randrange(1, longest) for _ in range(count - 6)]
    return [
        (prefix if i % 2 else []) + [rng.randrange(4, 500) for _ in range(length)] for i, length in enumerate(lengths)
    ]


def reference(model, ids, max_tokens=MAX_TOKENS):
    """Greedy tokens of transformers, up to and including end-of-text."""
    return list(_greedy(model, tuple(ids), max_tokens))


@functools.cache  # many tests ask for the same rows
def _greedy(model, ids, max_tokens):
    return greedy_tokens(model, [list(ids)], max_tokens)[0]


def generate(path, rows, **options):
    sampling = options.pop("sampling", SamplingParams(max_tokens=MAX_TOKENS))
    options = {"dtype": "float32", "cpu_memory": "4GiB", **options}
    engine = batchgen.Engine(str(path), sampling=sampling, **options)
    found = sorted(engine.generate(rows), key=lambda c: c.index)
    assert [c.index for c in found] == list(range(len(rows)))
    assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found, engine


@pytest.mark.parametrize("family", some_of(sorted(FAMILIES), 6, "chunks of tokens"))
def test_a_chunk_of_tokens_at_a_time_gives_the_same_tokens(tiny_models, family, monkeypatch):
    path, _ = tiny_models(family)
    rows = [Request(ids) for ids in prompts(12)]
    tokens = {}
    for count in (1 << 20, 7):
        monkeypatch.setattr("batchgen.engine.loader.chunk_tokens", lambda *_, count=count, **__: count)
        tokens[count] = [c.samples[0].token_ids for c in generate(path, rows)[0]]
    assert tokens[7] == tokens[1 << 20]


def check(tiny_models, family, overrides=None, rows=None, **options):
    path, model = tiny_models(family, **(overrides or {}))
    rows = rows or prompts()
    found, engine = generate(path, [Request(ids) for ids in rows], **options)
    for completion, ids in zip(found, rows, strict=True):
        assert completion.error is None
        assert list(completion.samples[0].token_ids) == reference(model, ids), f"{family}, row {completion.index}"
    return engine


@pytest.mark.parametrize(
    ("family", "admission"), covering(itertools.product(FAMILIES, ("continuous", "static")), 0, "tokens")
)
def test_tokens_equal_those_of_transformers(tiny_models, family, admission):
    check(tiny_models, family, rows=prompts(quick_or(9, 24)), admission=admission)


@pytest.mark.parametrize(
    ("family", "max_num_seqs", "max_num_batched_tokens"),
    covering(itertools.product(("llama", "opt"), (1, 3, 64), (1, 7, 64, 4096)), 10, "batches"),
)
def test_batch_size_and_chunking_change_no_token(tiny_models, family, max_num_seqs, max_num_batched_tokens):
    rows = prompts(10, longest=60)
    check(tiny_models, family, rows=rows, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


@pytest.mark.parametrize("family", some_of(FAMILIES, 6, "shared prefixes"))
def test_prefix_sharing_changes_no_token(tiny_models, family):
    # In several sweeps, so that later rows find what earlier ones computed.
    shared = check(tiny_models, family, max_num_batched_tokens=200)
    alone = check(tiny_models, family, max_num_batched_tokens=200, share_prefixes=False)
    assert alone.stats.cached_prompt_tokens == 0
    assert shared.stats.cached_prompt_tokens >= 10 * 64
    saved = alone.stats.computed_tokens - shared.stats.computed_tokens
    assert saved == shared.stats.cached_prompt_tokens


@pytest.mark.parametrize("admission", ["continuous", "static"])
def test_little_kv_changes_no_token(tiny_models, admission):
    """Rows wait for space; with optimistic admission some are preempted and run again."""
    path, model = tiny_models("llama")
    rows = prompts()
    engine = batchgen.Engine(
        str(path), dtype="float32", admission=admission, expected_output_len=1, max_model_len=256,
        sampling=SamplingParams(max_tokens=MAX_TOKENS), cpu_memory="4GiB",
    )  # fmt: skip
    from batchgen.schedule.block_manager import BlockManager

    engine._pools = {"cpu": BlockManager(20, 16)}
    for completion in engine.generate([Request(ids) for ids in rows]):
        assert list(completion.samples[0].token_ids) == reference(model, rows[completion.index])
    assert engine.used_kv_blocks == 0
    assert engine.stats.preempted > 0


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rope_parameters": ROPE["linear"]}),
        ("llama", {"rope_parameters": ROPE["llama3"]}),
        ("qwen2", {"rope_parameters": ROPE["yarn"]}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
        ("opt", {"enable_bias": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_family_switches(tiny_models, family, overrides):
    check(tiny_models, family, overrides, rows=prompts(12), max_num_batched_tokens=100)


def test_bf16_logits_within_tolerance(tiny_models):
    """Teacher-forced: log-probabilities of the fp32 reference's own tokens, within 0.35 on logits of std ~3."""
    path, model = tiny_models("llama")
    rows = prompts(8)
    forced = [ids + reference(model, ids) for ids in rows]
    for n in (1, 5, 11):
        cut = [ids[: len(ids) - n] for ids in forced]
        found, _ = generate(
            path, [Request(ids) for ids in cut], dtype="bfloat16", sampling=SamplingParams(max_tokens=1, logprobs=5)
        )
        for completion, ids in zip(found, cut, strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            position = completion.samples[0].logprobs[0]
            for token in (position.chosen, *position.top):
                assert abs(token.logprob - expected[token.token_id].item()) < 0.35


def test_logprobs_are_those_of_the_model(tiny_models):
    path, model = tiny_models("qwen2")
    rows = prompts(6)
    sampling = SamplingParams(max_tokens=4, logprobs=3, temperature=1.7, top_k=5, repetition_penalty=1.3)
    found, _ = generate(path, [Request(ids) for ids in rows], sampling=sampling)
    for completion, ids in zip(found, rows, strict=True):
        sample = completion.samples[0]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + list(sample.token_ids)])).logits[0]
        for step, position in enumerate(sample.logprobs):
            expected = logits[len(ids) - 1 + step].log_softmax(-1)
            assert position.chosen.token_id == sample.token_ids[step]
            assert position.chosen.logprob == pytest.approx(expected[position.chosen.token_id].item(), abs=1e-4)
            values, ids_of_top = expected.topk(3)
            assert [t.token_id for t in position.top] == ids_of_top.tolist()
            assert [t.logprob for t in position.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_sampled_text_belongs_to_the_row(tiny_models):
    """Whatever the order, batch size, sharing or admission: the same id gives the same samples."""
    path, _ = tiny_models("llama")
    rows = prompts(16)
    sampling = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, min_p=0.01, n=2, seed=7)
    requests = [Request(ids, id=f"row-{i}") for i, ids in enumerate(rows)]

    def texts(order, **options):
        found, _ = generate(path, [requests[i] for i in order], sampling=sampling, **options)
        return {c.id: [s.token_ids for s in c.samples] for c in found}

    forward = texts(range(16))
    backward = texts(reversed(range(16)), max_num_seqs=3, max_num_batched_tokens=50, share_prefixes=False)
    alone = {}
    for i in (3, 9):
        alone |= texts([i], admission="static")
    assert forward == backward
    assert all(forward[key] == alone[key] for key in alone)
    assert len({tokens for samples in forward.values() for tokens in samples}) > 28, "samples should differ"
    other_seed = SamplingParams(max_tokens=10, temperature=0.9, n=2, seed=8)
    assert {c.id: [s.token_ids for s in c.samples] for c in generate(path, requests, sampling=other_seed)[0]} != forward


def test_stops(tiny_models):
    path, model = tiny_models("llama")
    ids = prompts()[9]
    full = reference(model, ids, 20)
    base = SamplingParams(max_tokens=20, ignore_eos=True)
    (plain,), engine = generate(path, [Request(ids)], sampling=base)
    text, tokens = plain.samples[0].text, list(plain.samples[0].token_ids)
    assert tokens[: len(full)] == full and plain.samples[0].finish_reason == "length"

    stop_token = tokens[5]
    (by_token,), _ = generate(
        path, [Request(ids)], sampling=SamplingParams(max_tokens=20, stop_token_ids=(stop_token,))
    )
    sample = by_token.samples[0]
    assert list(sample.token_ids) == tokens[: tokens.index(stop_token) + 1]
    assert (sample.finish_reason, sample.stop) == ("stop", stop_token)
    assert sample.text == engine.parts.tokenizer.decode(tokens[: tokens.index(stop_token)])

    stop = text[7:10]  # likely across tokens
    (by_text,), _ = generate(path, [Request(ids)], sampling=SamplingParams(max_tokens=20, stop=(stop,)))
    sample = by_text.samples[0]
    assert (sample.finish_reason, sample.stop) == ("stop", stop)
    assert sample.text == text[: text.index(stop)]


def test_end_of_text_ends_a_sample(tiny_models):
    path, _ = tiny_models("llama")
    rows = prompts(60, seed=3)
    found, _ = generate(path, [Request(ids) for ids in rows], sampling=SamplingParams(max_tokens=100))
    ended = [c.samples[0] for c in found if c.samples[0].finish_reason == "stop"]
    assert ended, "no row of the test data reaches end-of-text"
    assert all(s.token_ids[-1] == 0 and "<|endoftext|>" not in s.text for s in ended)


def test_bad_rows_fail_alone(tiny_models):
    path, _ = tiny_models("llama")
    rows = [
        Request("The ferry left"),
        Request(""),
        Request([5, 100000]),
        Request(list(range(4, 400)) * 2),
        Request("x", error="the prompt is null"),
        Request([]),
        "A restaurant",
    ]
    found, _ = generate(path, rows)
    errors = [c.error for c in found]
    assert errors[0] is None and errors[6] is None
    assert errors[1] == errors[5] == "the prompt is empty"
    assert "vocabulary of 512" in errors[2] and "792 tokens, the context holds 512" in errors[3]
    assert errors[4] == "the prompt is null"
    assert all(not c.samples for c in found if c.error)


@pytest.mark.parametrize("side", ["left", "right"])
def test_overlong_prompts_may_be_truncated(tiny_models, side):
    path, model = tiny_models("llama")
    rng = random.Random(1)
    ids = [rng.randrange(4, 500) for _ in range(700)]
    found, _ = generate(path, [Request(ids)], on_overlong=f"truncate-{side}")
    kept = ids[-500:] if side == "left" else ids[:500]
    assert found[0].prompt_tokens == 500
    assert list(found[0].samples[0].token_ids) == reference(model, kept)


def test_output_is_capped_by_the_context(tiny_models):
    path, _ = tiny_models("llama")
    found, _ = generate(path, [Request([7] * 505)], sampling=SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(found[0].samples[0].token_ids) == 7 and found[0].samples[0].finish_reason == "length"


def test_an_error_in_the_input_reaches_the_caller(tiny_models):
    path, _ = tiny_models("llama")

    def rows():
        yield "The ferry"
        raise ValueError("the file ends here")

    engine = batchgen.Engine(str(path), dtype="float32", cpu_memory="4GiB", sampling=SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="the file ends here"):
        list(engine.generate(rows()))
    assert engine.used_kv_blocks == 0


def test_input_is_read_lazily(tiny_models):
    path, _ = tiny_models("llama")
    engine = batchgen.Engine(
        str(path), dtype="float32", cpu_memory="4GiB", max_num_seqs=4, sampling=SamplingParams(max_tokens=1)
    )
    read = 0

    def rows():
        nonlocal read
        for _ in range(100_000):
            read += 1
            yield "The ferry"

    completions = engine.generate(rows())
    for _ in range(10):
        next(completions)
    completions.close()
    assert read < 5000
    assert engine.used_kv_blocks == 0


@pytest.mark.parametrize("kv_format", ["int8", "int5", "int4"])
def test_kv_may_be_packed(tiny_models, kv_format):
    path, _ = tiny_models("llama")
    rows, sampling = [Request(ids) for ids in prompts(6)], SamplingParams(max_tokens=MAX_TOKENS, logprobs=1)
    packed, engine = generate(path, rows, sampling=sampling, kv_cache_dtype=kv_format)
    whole, plain = generate(path, rows, sampling=sampling)
    assert (engine.policy.kv_format, plain.policy.kv_format) == (kv_format, "float32")
    first, others = ([c.samples[0].logprobs for c in found] for found in (packed, whole))
    assert first != others, "nothing was rounded"
    if kv_format == "int8":  # with fewer bits the logits of random weights, all nearly alike, change places
        assert [c.samples[0].token_ids[0] for c in packed] == [c.samples[0].token_ids[0] for c in whole]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"admission": "eager"}, "admission 'eager'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' is not one of auto, int8, int5, int4"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_model_len": 100000}, "between 2 and the model's context of 512"),
        ({"cpu_memory": "200MiB"}, "too small for one row.*give at least"),
        ({"cpu_memory": "lots"}, "'lots' is not a size"),
        ({"on_overlong": "shrug"}, "on_overlong"),
        ({"expected_output_len": 0}, "expected_output_len"),
    ],
)
def test_bad_options_are_refused(tiny_models, options, message):
    path, _ = tiny_models("llama")
    with pytest.raises(batchgen.InputError, match=message):
        batchgen.Engine(str(path), **{"cpu_memory": "4GiB", **options})


@pytest.mark.parametrize(("cores", "are_provided"), [(2, False), (64, True)])
def test_pages_of_kv_are_provided_beside_loading_where_cores_are_idle(tiny_models, monkeypatch, cores, are_provided):
    began = []
    prefault, load_weights = KVCache.prefault, loader._load_weights
    monkeypatch.setattr(loader, "available_cores", lambda: cores)
    monkeypatch.setattr(KVCache, "prefault", lambda *args: began.append("pages") or prefault(*args))
    monkeypatch.setattr(loader, "_load_weights", lambda *args: began.append("weights") or load_weights(*args))
    with batchgen.Engine(str(tiny_models("llama")[0]), cpu_memory="3GiB"):
        assert began == (["pages", "weights"] if are_provided else ["weights"])


def test_few_more_sequences_wait_than_may_run_however_many_a_request_has(tiny_models, monkeypatch):
    path, _ = tiny_models("llama")
    waiting, add = [], Scheduler.add

    def counted(scheduler, sequence):
        add(scheduler, sequence)
        waiting.append(scheduler.num_waiting)

    monkeypatch.setattr(Scheduler, "add", counted)
    sampling = SamplingParams(max_tokens=2, temperature=1.0, n=16)
    with batchgen.Engine(str(path), dtype="float32", cpu_memory="4GiB", max_num_seqs=8) as engine:
        completions = list(engine.generate([batchgen.Request([5 + row], sampling) for row in range(40)]))
    assert len(completions) == 40 and len(waiting) == 40 * 16
    assert max(waiting) <= 8 + 16


@pytest.mark.parametrize("prompt", [[5] * 3, [5] * 40], ids=["within a block", "of several blocks"])
def test_samples_of_one_request_cost_in_proportion_to_their_number(tiny_models, prompt, monkeypatch):
    """Calls of functions and comparisons of samples, not seconds."""
    path, _ = tiny_models("llama")
    compared = Counter()
    monkeypatch.setattr(Sample, "__eq__", lambda self, other: compared.update(["__eq__"]) or self is other)

    def steps(count):
        sampling = SamplingParams(n=count, temperature=1.0, max_tokens=1)
        engine = batchgen.Engine(str(path), dtype="float32", cpu_memory="8GiB", max_num_seqs=8)
        compared.clear()
        sys.setprofile(lambda frame, event, argument: compared.update([event]))
        try:
            (completion,) = engine.generate([Request(prompt, sampling)])
        finally:
            sys.setprofile(None)
        assert len(completion.samples) == count and completion.error is None
        return compared.total()

    few, many = steps(50), steps(400)
    assert many <= 8 * few, "eight times as many samples"
