"""Logits that hold NaN or infinity: the row fails and names the dtype, and no other row is touched by it."""

import random
import shutil

import pytest
import torch
from rank_threads import make_parts_on_ranks
from safetensors.torch import load_file, save_file
from test_pipeline import in_memory as pipeline_of
from tiered import CPU, EMULATED, everything_moves, make_parts, make_policy

from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.finished_rows_proposer import FinishedRowsProposer

BAD = 7  # the token whose embedding is not finite
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "n": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {9: 100.0, 11: -100.0}},
    "logprobs": {"logprobs": 2},
    "one token": {"max_tokens": 1},
}
_rng = random.Random(11)
_PREFIX = [_rng.randrange(20, 500) for _ in range(40)]
GOOD = [[_rng.randrange(20, 500) for _ in range(n)] for n in (3, 40, 17)] + [[*_PREFIX, 30, 31], [*_PREFIX, 32]]
SPOILT = [[5, 6, BAD], [*_PREFIX, BAD, 33], [BAD, *GOOD[1]]]
ROWS = [*SPOILT, *GOOD, *SPOILT]  # some good ones have a prefix that a spoilt one has computed


@pytest.fixture(scope="module")
def spoilt(tiny_models, tmp_path_factory):
    """(name of a tensor, row, value) -> a model with that row of the tensor, or one number of it, so."""

    def make(tensor, at, value):
        path = tmp_path_factory.mktemp("spoilt") / "model"
        shutil.copytree(tiny_models("llama")[0], path)
        tensors = load_file(path / "model.safetensors")
        tensors[tensor][at] = value
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


@pytest.fixture(scope="module")
def one_bad_token(spoilt):
    return spoilt(EMBEDDINGS, BAD, float("nan"))


def in_memory(path, tmp_path):
    return make_parts(path, CPU, make_policy(path, CPU, kv_seqs={"cpu": 8}), tmp_path)


def staged(path, tmp_path):
    policy = everything_moves(path, weight_format="float32", weight_layers=make_policy(path, EMULATED).weight_layers)
    return make_parts(path, EMULATED, policy, tmp_path)


def pipeline(path, tmp_path):
    return pipeline_of(path, tmp_path, (1, 3))


def ranks(path, tmp_path):
    return make_parts_on_ranks(2, path, CPU, make_policy(path, CPU, kv_seqs={"cpu": 8}), tmp_path)[0]


WHERE = [in_memory, staged, pipeline, ranks]


def completions(parts, rows, **sampling):
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | sampling)
    with Engine.from_parts(parts, sampling=params) as engine:
        found = sorted(engine.generate([Request(row, id=str(row)) for row in rows]), key=lambda c: c.index)
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found


def scores(parts, rows):
    with Engine.from_parts(parts) as engine:
        found = sorted(engine.score([ScoreRequest(row, ([9, 10], [11])) for row in rows]), key=lambda s: s.index)
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return found


def assert_only_spoilt_rows_fail(found, healthy, answer):
    """found: of ROWS."""
    good, bad = found[len(SPOILT) : -len(SPOILT)], found[: len(SPOILT)] + found[-len(SPOILT) :]
    assert [answer(c) for c in good] == [answer(c) for c in healthy]
    assert all(c.error is not None and "logits are not finite in float32" in c.error for c in bad)
    assert not any(c.samples if hasattr(c, "samples") else c.scores for c in bad)


@pytest.mark.parametrize(
    ("parts_of", "sampling"),
    [(in_memory, sampling) for sampling in SAMPLINGS] + [(where, "penalties") for where in WHERE[1:]],
)
def test_rows_whose_logits_are_nan_fail_alone(parts_of, sampling, one_bad_token, tiny_models, tmp_path):
    def answer(completion):
        return completion.error, [sample.token_ids for sample in completion.samples]

    options = SAMPLINGS[sampling]
    healthy = completions(parts_of(tiny_models("llama")[0], tmp_path), GOOD, **options)
    assert_only_spoilt_rows_fail(completions(parts_of(one_bad_token, tmp_path), ROWS, **options), healthy, answer)


def test_what_a_row_with_nan_ended_with_is_never_drafted(one_bad_token, tmp_path):
    prompt, proposer = GOOD[0], FinishedRowsProposer()
    (alone,) = completions(in_memory(one_bad_token, tmp_path), [prompt])
    answer = list(alone.samples[0].token_ids)
    with Engine.from_parts(
        in_memory(one_bad_token, tmp_path),
        sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        drafts=lambda: Drafting([proposer], always=4),
    ) as engine:
        (spoilt,) = engine.generate([Request([BAD, *answer[:3]])])
        (found,) = engine.generate([Request(prompt, id=str(prompt))])
    assert spoilt.error is not None
    assert (found.error, list(found.samples[0].token_ids)) == (None, answer)


@pytest.mark.parametrize("parts_of", WHERE)
def test_scores_of_logits_that_are_nan_fail_alone(parts_of, one_bad_token, tiny_models, tmp_path):
    def answer(scored):
        return scored.error, [pytest.approx(score.logprob, abs=1e-4) for score in scored.scores]

    healthy = scores(parts_of(tiny_models("llama")[0], tmp_path), GOOD)
    assert_only_spoilt_rows_fail(scores(parts_of(one_bad_token, tmp_path), ROWS), healthy, answer)


@pytest.mark.parametrize("kv_format", ["float32", "int8", "int5", "int4"])
def test_blocks_that_held_nan_do_not_spoil_rows_that_use_them_later(kv_format, one_bad_token, tiny_models, tmp_path):
    """Rows whose prompts and outputs end within a block, of which there are few."""
    rows = [row for good, bad in zip(GOOD * 2, [*SPOILT * 3, SPOILT[0]], strict=True) for row in (bad, good)]

    def found(path, rows):
        policy = make_policy(path, CPU, gpu_batch_size=2, kv_seqs={"cpu": 2}, kv_format=kv_format, max_model_len=128)
        return completions(make_parts(path, CPU, policy, tmp_path, longest_tokens=64, most_kv_tokens=1), rows)

    spoilt, healthy = found(one_bad_token, rows), found(tiny_models("llama")[0], rows[1::2])
    assert [c.samples for c in spoilt[1::2]] == [c.samples for c in healthy] and all(c.samples for c in healthy)
    assert all("logits are not finite" in c.error for c in spoilt[::2])


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_packed_weights_do_not_hide_that_they_are_nan(weight_format, spoilt, tmp_path):
    path = spoilt("model.layers.1.mlp.down_proj.weight", (3, 5), float("nan"))
    parts = make_parts(path, CPU, make_policy(path, CPU, weight_format=weight_format, kv_seqs={"cpu": 8}), tmp_path)
    assert all("logits are not finite" in c.error for c in completions(parts, GOOD))


def test_a_grammar_does_not_hide_that_logits_are_nan(one_bad_token, tmp_path):
    pytest.importorskip("llguidance")
    found = completions(in_memory(one_bad_token, tmp_path), ROWS, regex="[a-c]{2,9}")
    assert [c.error is None for c in found] == [row in GOOD for row in ROWS]


def test_a_token_that_spoils_what_follows_it_fails_the_row_when_it_is_generated(one_bad_token, tmp_path):
    (found,) = completions(in_memory(one_bad_token, tmp_path), [GOOD[0]], logit_bias={BAD: 100.0})
    assert "logits are not finite" in found.error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_logit_that_is_not_finite_fails_the_row(value, spoilt, tmp_path):
    """However unlikely its token is: the largest of the others would be chosen without a word."""
    path = spoilt(HEAD, (100, 3), value)
    assert all("logits are not finite" in c.error for c in completions(in_memory(path, tmp_path), GOOD))
    assert all("logits are not finite" in s.error for s in scores(in_memory(path, tmp_path), GOOD))


def test_numbers_beyond_float16_name_it_and_the_dtypes_that_hold_them(spoilt, tmp_path):
    # The residual stream is as large as its embedding; what the layers add takes it past 65,504.
    path = spoilt(EMBEDDINGS, BAD, torch.where(torch.arange(64) % 2 == 0, 65_500.0, -65_500.0))
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] *= 1000
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    policy = make_policy(path, CPU, kv_seqs={"cpu": 8}, weight_format="float16", kv_format="float16")

    def half():
        return make_parts(path, CPU, policy, tmp_path, dtype="float16")

    for found in (*completions(half(), SPOILT[:1]), *scores(half(), SPOILT[:1])):
        assert found.error.startswith("logits are not finite in float16: run with --dtype bfloat16 or float32")
    assert completions(in_memory(path, tmp_path), SPOILT[:1])[0].error is None
