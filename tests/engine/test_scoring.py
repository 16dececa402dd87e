"""`Engine.score` against transformers, in fp32: log-probabilities within 1e-4, greedy flags equal, under any policy."""

import functools
import itertools
import random
import shutil
from dataclasses import replace

import pytest
import torch
from model_tables import FAMILIES
from thorough import covering
from tiny_tokenizers import TEXT, make_tiny_sentencepiece_tokenizer
from transformers import AutoTokenizer

import batchgen
from batchgen.core.request import ScoreRequest

CONTEXT = 512  # of the tiny models
CLOSE = 1e-4
# Of the most likely tokens of a model with states: one position magnifies rounding, where transformers' fp32 differs
# from its own fp64 by 1.2e-4, and batchgen's from that by 1.3e-4. Of the rows' own tokens both are within 4e-5.
CLOSE_OF_STATES = 2.5e-4


def tokens(rng, count):
    return tuple(rng.randrange(4, 500) for _ in range(count))


def requests(seed=0, count=12):
    """Contexts of mixed lengths, half of which begin alike, with continuations that share tokens or are single ones."""
    rng = random.Random(seed)
    prefix = tokens(rng, 70)
    rows = []
    for i in range(count):
        context = (prefix if i % 2 else ()) + tokens(rng, rng.choice((1, 2, 15, 16, 17, 33, 90)))
        start = tokens(rng, 5)
        continuations = [
            [tokens(rng, 1) for _ in range(4)],
            [start, start[:3], (*start[:4], 7), (*start[:2], 9, 9), tokens(rng, 20), start],
            [tokens(rng, 40), tokens(rng, 1)],
        ][i % 3]
        rows.append(ScoreRequest(context, tuple(continuations), id=f"row-{i}", logprobs=(None, 0, 3)[i % 3]))
    return rows


def reference(model, context, continuation):
    """Log-probabilities of the continuation's tokens, and the logits, [tokens, vocab]."""
    return _scores(model, tuple(context), tuple(continuation))


@functools.lru_cache(maxsize=256)  # many tests ask for the same rows
def _scores(model, context, continuation):
    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist(), logits


def check(model, rows, found):
    has_states = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    top_close = CLOSE_OF_STATES if has_states else CLOSE
    found = sorted(found, key=lambda scored: scored.index)
    assert [s.index for s in found] == list(range(len(rows)))
    for scored, request in zip(found, rows, strict=True):
        assert scored.error is None, scored.error
        assert scored.id == request.id and scored.context_tokens == len(request.context)
        assert len(scored.scores) == len(request.continuations)
        for score, continuation in zip(scored.scores, request.continuations, strict=True):
            expected, logits = reference(model, request.context, continuation)
            assert score.token_ids == tuple(continuation)
            assert [t.chosen.token_id for t in score.tokens] == list(continuation)
            assert [t.chosen.logprob for t in score.tokens] == pytest.approx(expected, abs=CLOSE)
            assert score.logprob == pytest.approx(sum(expected), abs=CLOSE * len(expected))
            assert score.is_greedy == (logits.argmax(-1).tolist() == list(continuation))
            for position, row in zip(score.tokens, logits.log_softmax(-1), strict=True):
                values = row.topk(request.logprobs or 0).values
                # Of two as likely as each other either may come first.
                assert [row[t.token_id] for t in position.top] == pytest.approx(values.tolist(), abs=top_close)
                assert len({t.token_id for t in position.top}) == len(values)
                assert [t.logprob for t in position.top] == pytest.approx(values.tolist(), abs=top_close)


def engine_of(path, **options):
    return batchgen.Engine(str(path), **{"dtype": "float32", "cpu_memory": "4GiB", **options})


def score(path, rows, **options):
    engine = engine_of(path, **options)
    found = list(engine.score(rows))
    assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found, engine


@pytest.mark.parametrize(
    ("family", "admission"), covering(itertools.product(FAMILIES, ("continuous", "static")), 0, "scores")
)
def test_scores_equal_those_of_transformers(tiny_models, family, admission):
    path, model = tiny_models(family)
    rows = requests(count=6)
    check(model, rows, score(path, rows, admission=admission)[0])


@pytest.mark.parametrize(
    ("sizes", "share_prefixes"),
    covering(itertools.product(((1, 7), (3, 64), (64, 33), (64, 1), (2, 4096)), (True, False)), 0, "batches"),
)
def test_batch_size_and_chunking_change_no_score(tiny_models, sizes, share_prefixes):
    path, model = tiny_models("llama")
    max_num_seqs, max_num_batched_tokens = sizes
    rows = requests(1, count=4 if max_num_batched_tokens == 1 else 12)
    found, _ = score(
        path, rows, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        share_prefixes=share_prefixes,
    )  # fmt: skip
    check(model, rows, found)


def test_greedy_continuations_are_greedy(tiny_models):
    """What the model itself would say, in part: flags that are true, up to the token that is not."""
    path, model = tiny_models("qwen3")
    rng = random.Random(2)
    rows = []
    for _ in range(6):
        context = tokens(rng, 20)
        greedy = []
        for _ in range(5):
            with torch.inference_mode():
                greedy.append(model(torch.tensor([[*context, *greedy]])).logits[0, -1].argmax().item())
        rows.append(ScoreRequest(context, (greedy, greedy[:1], [*greedy[:3], (greedy[3] + 1) % 500]), id=len(rows)))
    found, _ = score(path, rows)
    check(model, rows, found)
    assert all([s.is_greedy for s in scored.scores] == [True, True, False] for scored in found)


def test_a_prefix_that_another_row_has_computed_is_still_scored(tiny_models):
    """The same text again: its KV is there, its logits are not."""
    path, model = tiny_models("llama")
    rng = random.Random(3)
    text = tokens(rng, 100)
    rows = [
        ScoreRequest(text[:start], (text[start:],), id=i) for i, start in enumerate((99, 50, 1, 50, 17, 16, 15, 33))
    ]
    engine = engine_of(path, max_num_batched_tokens=128)
    check(model, rows, engine.score(rows))
    assert engine.stats.cached_prompt_tokens > 0


def test_single_tokens_are_read_off_the_context(tiny_models):
    path, model = tiny_models("llama")
    rng = random.Random(4)
    rows = [ScoreRequest(tokens(rng, 50), tuple(tokens(rng, 1) for _ in range(20)), id=i) for i in range(5)]
    found, engine = score(path, rows)
    check(model, rows, found)
    assert engine.stats.computed_tokens == 5 * 50


def test_continuations_of_a_context_cost_little_more_than_their_tokens(tiny_models):
    path, model = tiny_models("llama")
    rng = random.Random(5)
    context = tokens(rng, 327)
    rows = [ScoreRequest(context, tuple(tokens(rng, 9) for _ in range(8)), id=0)]
    found, engine = score(path, rows)
    check(model, rows, found)
    # Each but the first runs what the context has in its last block again.
    assert engine.stats.computed_tokens == 327 + 8 * 8 + 7 * 7


def test_bad_requests_fail_alone(tiny_models):
    path, _ = tiny_models("llama")
    rows = [
        ScoreRequest("The ferry", (" left",)),
        ScoreRequest("The ferry", ()),
        ScoreRequest("The ferry", (" left", "")),
        ScoreRequest("The ferry", (" left", [5])),
        ScoreRequest([5, 100000], ([5],)),
        ScoreRequest([5], ([5], [100000])),
        ScoreRequest([5] * 512, ([6], [6, 7])),
        ScoreRequest([5], ([6] * 600,)),
        ScoreRequest("x", (" y",), error="the row is null"),
        ScoreRequest([5] * 512, ([6],)),  # whose last token is not run
        ScoreRequest("", ([6] * 600,)),
        ScoreRequest("", ("",)),
    ]
    found, _ = score(path, rows)
    errors = [s.error for s in sorted(found, key=lambda s: s.index)]
    words = {
        1: "no continuations", 2: "continuation 2 has no tokens", 3: "all texts or all token ids",
        4: "vocabulary of 512",
        5: "vocabulary of 512", 6: "512 tokens and the longest continuation 2, the model's context holds 512",
        7: "1 tokens and the longest continuation 600", 8: "the row is null", 11: "continuation 1 has no tokens",
    }  # fmt: skip
    for i, error in enumerate(errors):
        assert words[i] in error if i in words else error is None, (i, error)
    assert all(bool(s.scores) == (s.error is None) for s in found)


def test_requests_that_no_row_could_mean():
    with pytest.raises(batchgen.InputError, match="not one text"):
        ScoreRequest("The ferry", " left")
    with pytest.raises(batchgen.InputError, match="logprobs must be between 0 and 100"):
        ScoreRequest("The ferry", (" left",), logprobs=101)


def test_kv_that_is_too_small_for_a_text(tiny_models):
    from batchgen.core.plan import MemoryPlan

    path, _ = tiny_models("llama")
    engine = engine_of(path)
    memory = engine.parts.memory
    small = MemoryPlan(memory.budgets, memory.parts, {"cpu": 4}, 0, memory.batch_tokens)
    engine = batchgen.Engine.from_parts(replace(engine.parts, memory=small))
    rows = [ScoreRequest([5], ([6] * 64,)), ScoreRequest([5], ([6] * 65,)), ScoreRequest("", ([6] * 600,))]
    found = sorted(engine.score(rows), key=lambda s: s.index)
    assert [s.error and s.error.split(" that fit")[0] for s in found] == [
        None, "65 tokens need more KV than the 64 tokens", "512 tokens need more KV than the 64 tokens",
    ]  # fmt: skip


def test_texts_are_tokenized_with_their_context(tiny_models, tmp_path):
    """Spaces at the context's end belong to the continuation, as in lm_eval.

    Its tokens are those that the whole has beyond the context's, with a vocabulary that begins every text with a token
    of its own, and one that does not.
    """
    path, _ = tiny_models("llama")
    beginning = tmp_path / "beginning"
    shutil.copytree(path, beginning)
    make_tiny_sentencepiece_tokenizer(beginning)
    pairs = [
        ("The ferry", " left"), ("The ferry ", "left"), ("The ferry \n", "left"), ("The fer", "ry left"),
        ("", "The ferry"),
        ("  ", "The ferry"), ("A", "\n"),
    ]  # fmt: skip
    for folder in (path, beginning):
        engine = engine_of(folder)
        hf = AutoTokenizer.from_pretrained(folder)
        begin = hf.bos_token_id
        found = sorted(engine.score(ScoreRequest(c, (t,)) for c, t in pairs), key=lambda s: s.index)
        for scored, (context, text) in zip(found, pairs, strict=True):
            stripped = context.rstrip()
            whole = hf.encode(stripped + context[len(stripped) :] + text)
            own = hf.encode(stripped) if stripped else whole[: whole[0] == begin]
            assert scored.scores[0].token_ids == tuple(whole[len(own) :]), (folder, context, text)
            assert scored.context_tokens == (len(own) if stripped else 0)
        ids = list(engine.score([ScoreRequest("The ferry ", ([5, 6],)), ScoreRequest([7, 8], (" left",))]))
        ids.sort(key=lambda s: s.index)
        assert (ids[0].context_tokens, ids[0].scores[0].token_ids) == (len(hf.encode("The ferry ")), (5, 6))
        assert ids[1].scores[0].token_ids == tuple(hf.encode(" left", add_special_tokens=False))


def test_a_text_that_begins_with_the_first_token_itself_has_no_second_one(tiny_models):
    path, _ = tiny_models("llama")
    found = sorted(
        score(path, [ScoreRequest("", ("<|endoftext|>The ferry",)), ScoreRequest("", ("The ferry",))])[0],
        key=lambda s: s.index,
    )
    assert found[0].scores[0].token_ids == found[1].scores[0].token_ids
    assert found[0].scores[0].logprob == found[1].scores[0].logprob


def test_input_is_read_lazily_and_may_be_stopped(tiny_models):
    path, _ = tiny_models("llama")
    engine = engine_of(path, max_num_seqs=4)
    read = sweeps = 0

    def rows():
        nonlocal read
        for _ in range(100_000):
            read += 1
            yield ScoreRequest("The ferry", (" left", " came"))

    def count(stats):
        nonlocal sweeps
        sweeps = stats.sweeps

    found = list(engine.score(rows(), should_stop=lambda: sweeps >= 3, on_sweep=count))
    assert 0 < len(found) < 50 and read < 5000
    assert engine.used_kv_blocks == 0
    begun = engine.score(rows())
    next(begun)
    begun.close()
    assert engine.used_kv_blocks == 0


def test_one_engine_generates_and_scores(tiny_models):
    """What it has generated is its argmax, and takes over what was computed."""
    path, _ = tiny_models("llama")
    engine = engine_of(path, sampling=batchgen.SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
    prompts = [list(tokens(random.Random(i), 40)) for i in range(4)]
    done = {c.index: c.samples[0] for c in engine.generate(batchgen.Request(p) for p in prompts)}
    found = list(engine.score(ScoreRequest(p, (done[i].token_ids,)) for i, p in enumerate(prompts)))
    for scored in found:
        assert scored.scores[0].is_greedy and scored.cached_tokens == 32
        expected = sum(p.chosen.logprob for p in done[scored.index].logprobs)
        assert scored.scores[0].logprob == pytest.approx(expected, abs=CLOSE)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_demo_model():
    """Real texts in fp32 against transformers on the same file: contexts with choices, and a text in windows."""
    from transformers import AutoModelForCausalLM

    from batchgen.models.files import resolve_model

    files = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(
        str(files.path.parent), gguf_file=files.path.name, dtype=torch.float32
    ).eval()
    engine = batchgen.Engine("demo", dtype="float32", cpu_memory="6GiB", max_model_len=64)
    encode = engine.parts.tokenizer.encode_batch
    shots = "Q: Is a ferry a ship? A: yes\nQ: Is an onion a ship? A: no\n"
    rows = []
    for thing in ("lemon", "tanker", "timetable", "canoe"):
        context, *whole = encode(
            [f"{shots}Q: Is a {thing} a ship? A:"]
            + [f"{shots}Q: Is a {thing} a ship? A:{a}" for a in (" yes", " no", " nobody knows")]
        )
        rows.append(ScoreRequest(context, tuple(w[len(context) :] for w in whole), id=thing, logprobs=2))
    check(model, rows, engine.score(rows))
    (text,) = encode([TEXT[:900]])
    (scored,) = engine.score([ScoreRequest("", (text,))])
    before, expected = [engine.parts.tokenizer.begin_token_id, *text], []
    for start in range(0, len(text), 64):
        stop = min(start + 64, len(text))
        expected += reference(model, before[max(0, stop - 64) : start + 1], text[start:stop])[0]
    assert len(text) > 3 * 64
    assert [t.chosen.logprob for t in scored.scores[0].tokens] == pytest.approx(expected, abs=CLOSE)
