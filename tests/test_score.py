"""`Engine.score` against transformers, in fp32: log-probabilities within 1e-4, greedy flags equal, under any policy."""

import random

import pytest
import torch
from tiny_models import FAMILIES

import batchgen
from batchgen.request import ScoreRequest

CONTEXT = 512  # of the tiny models
CLOSE = 1e-4


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
    """Log-probabilities of the continuation's tokens, and the likeliest ones, [tokens, vocab] on the side."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist(), logits


def check(model, rows, found):
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
                values, ids = row.topk(request.logprobs or 0)
                assert [t.token_id for t in position.top] == ids.tolist()
                assert [t.logprob for t in position.top] == pytest.approx(values.tolist(), abs=CLOSE)


def engine_of(path, **options):
    return batchgen.Engine(str(path), **{"dtype": "float32", "cpu_memory": "4GiB", **options})


def score(path, rows, **options):
    engine = engine_of(path, **options)
    found = list(engine.score(rows))
    assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found, engine


@pytest.mark.parametrize("admission", ["continuous", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_transformers(tiny_models, family, admission):
    path, model = tiny_models(family)
    rows = requests()
    check(model, rows, score(path, rows, admission=admission)[0])


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 7), (3, 64), (64, 33), (64, 1), (2, 4096)])
def test_batch_size_and_chunking_change_no_score(tiny_models, max_num_seqs, max_num_batched_tokens, share_prefixes):
    path, model = tiny_models("llama")
    rows = requests(1)
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
    assert (
        engine.stats.computed_tokens == 327 + 8 * 8 + 7 * 7
    )  # each but the first runs what the context has in its last block again
