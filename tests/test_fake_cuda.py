"""All that the executor does on a CUDA card, without one: every tensor is where it must be, and host memory is pinned as long as it
is there and no longer."""

import random
from dataclasses import replace

import pytest
from fake_cuda import fake_card
from tiered import everything_moves, make_parts, make_policy, make_requests
from tiny_models import FAMILIES

from batchgen.device import Device
from batchgen.engine import Engine
from batchgen.runtime.sampler import SampledToken

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = Device("cuda")
_random = random.Random(3)
PROMPTS = [[_random.randrange(4, 500) for _ in range(n)] for n in (5, 30, 17, 1, 16, 40)]
LENGTHS = [3, 6, 4, 5, 2, 6]


@pytest.fixture
def card():
    with fake_card() as card:
        yield card


def on_card(model, folder, policy, **options):
    """Parts whose logits have no contents: the same token is always chosen."""
    parts = make_parts(model, CUDA, policy, folder, **options)

    def sample(logits, sequences):
        assert logits.device.type == "cuda" and logits.shape == (len(sequences), parts.config.vocab_size)
        return [SampledToken(7)] * len(sequences)

    return replace(parts, sample=sample)


def policies(path):
    return {
        "resident": make_policy(path, CUDA),
        "everything moves": everything_moves(path),
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["resident", "everything moves"])
def test_x(tiny_models, tmp_path, card, family, tied, kind):
    path = tiny_models(family, tie_word_embeddings=tied)[0]
    parts = on_card(path, tmp_path, policies(path)[kind])
    with Engine.from_parts(parts) as engine:
        done = list(engine.generate(make_requests(PROMPTS, LENGTHS)))
    assert [c.error for c in done] == [None] * 6
