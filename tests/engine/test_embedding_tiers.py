"""Vectors under any policy: those of transformers in fp32, and of the same format in memory, wherever weights are."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_token_identity import NUM_BATCHES, TIERS, policy_of, stores  # noqa: F401
from thorough import some_of
from tiered import make_parts
from tiny_encoders import make_encoder

from batchgen.core.request import Request
from batchgen.engine.engine import Engine
from batchgen.models.pooling import VectorSpec
from batchgen.runtime.pooler import VectorHead

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-4
# Their layers differ: in names and norms, in windows, in heads.
MODELS = ("BertModel", "ModernBertModel", "Gemma3TextModel")
PLACES = [name for name in TIERS if name not in ("memory", "experts on demand")]
CASES = [(tier, name) for tier in PLACES for name in MODELS]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """name of a class -> (path, token ids of texts, their vectors by transformers)."""
    made = {}

    def get(name):
        if name not in made:
            path, rng = tmp_path_factory.mktemp(name), random.Random(name)
            model = make_encoder(name, path)
            rows = [[rng.randrange(4, 200) for _ in range(rng.choice((1, 3, 17, 40)))] for _ in range(10)]
            with torch.inference_mode():
                states = [model(torch.tensor([row])).last_hidden_state[0].mean(0) for row in rows]
            made[name] = path, rows, torch.stack(states).numpy()
        return made[name]

    return get


def embed(path, rows, stores, tier, num_batches=1, weight_format="float32"):  # noqa: F811
    policy = policy_of(path, tier, "float32", "continuous", num_batches, weight_format)
    policy = replace(policy, max_num_batched_tokens=50 * policy.num_gpu_batches)  # a text is in one micro-batch
    parts = make_parts(path, TIERS[tier][0], policy, stores)
    with Engine.from_parts(parts) as engine:
        done = {each.index: each for each in engine.embed(map(Request, rows), VectorHead(VectorSpec("mean")))}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    assert [done[i].error for i in range(len(rows))] == [None] * len(rows)
    vectors = [done[i].vector for i in range(len(rows))]
    assert all(vector.base is None for vector in vectors), "a row that is kept would keep its whole sweep's vectors"
    return np.stack(vectors)


def normalized(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("tier", "name"), some_of(CASES, 12, "tiers of vectors"))
def test_vectors_do_not_depend_on_where_weights_and_kv_are(tier, name, encoders, stores):  # noqa: F811
    path, rows, wanted = encoders(name)
    num_batches = NUM_BATCHES[(PLACES.index(tier) + MODELS.index(name)) % 3]
    assert np.abs(embed(path, rows, stores, tier, num_batches) - normalized(wanted)).max() < CLOSE


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors_of_packed_weights_are_the_same_where_these_stream(name, weight_format, encoders, stores):  # noqa: F811
    path, rows, wanted = encoders(name)
    in_memory = embed(path, rows, stores, "memory", weight_format=weight_format)
    assert (in_memory * normalized(wanted)).sum(1).min() > {"int8": 0.98, "int4": 0.7}[weight_format]
    for tier in ("disk", "streamed"):
        assert np.abs(embed(path, rows, stores, tier, 2, weight_format) - in_memory).max() < CLOSE
