"""All that an engine does on a CUDA card, without one: every tensor is where it must be, host memory is pinned as long as it is
there and no longer."""

import gc
import random

import pytest
import torch
from fake_cuda import fake_card
from tiered import everything_moves, make_parts, make_policy, make_requests
from tiny_models import FAMILIES

from batchgen.device import Device
from batchgen.engine import Engine
from batchgen.errors import BatchgenError
from batchgen.runtime import cuda, executor, graphs

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = Device("cuda")
LAYERS = {"num_hidden_layers": 2}
_random = random.Random(3)
PROMPTS = [[_random.randrange(4, 500) for _ in range(n)] for n in (5, 20, 17, 1)]
LENGTHS = [2, 2, 2, 2]


@pytest.fixture
def card():
    with fake_card() as card:
        yield card


def policies(path):
    spread = {"qkv": (1, 1, 0), "out": (0, 1, 1), "up": (0, 0, 2), "down": (1, 1, 0)}
    return {
        "resident": make_policy(path, CUDA),
        "everything moves": everything_moves(path, weight_layers=spread, weight_format="float32", max_num_batched_tokens=40),
        "4 bits": everything_moves(
            path, weight_layers=spread, kv_format="int4", head_tier="gpu", activation_batches=(1, 1),
        ),
    }  # fmt: skip


def engine_on_card(path, folder, kind, **options):
    return Engine.from_parts(make_parts(path, CUDA, policies(path)[kind], folder, longest_tokens=64, **options))


def run(engine):
    done = list(engine.generate(make_requests(PROMPTS, LENGTHS)))
    assert [c.error for c in done] == [None] * len(PROMPTS)


# Each family with its embeddings tied and not, in each kind of policy with one of both.
CASES = [
    (family, tied, kind)
    for i, family in enumerate(FAMILIES)
    for tied in (False, True)
    for kind in ("resident", "4 bits" if (i + tied) % 2 else "everything moves")
]


@pytest.mark.parametrize(("family", "tied", "kind"), CASES)
def test_every_operation_finds_its_tensors_on_one_device(tiny_models, tmp_path, monkeypatch, card, family, tied, kind):
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    monkeypatch.setattr(executor.Executor, "warm_up", lambda self, *_: None)
    path = tiny_models(family, tie_word_embeddings=tied, **LAYERS)[0]
    with engine_on_card(path, tmp_path, kind) as engine:
        run(engine)
        if kind == "resident":
            assert engine.parts.executor._graphs._frames
    assert {"_attend", "_norm", "_rotary_store"} <= set(card.launched)
