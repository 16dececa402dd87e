"""A model over the stages of a pipeline gives the tokens and scores of one engine."""

import random

import pytest
import torch
from stages import make_pipeline
from tiered import CPU, make_parts, make_policy
from tiny_models import MODELS

from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.pipeline import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES, MAX_TOKENS = 6, 6


def stages_of(path, device, *stops, **changes):
    """Stages that end at these layers."""
    first, found = 0, []
    for stop in stops:
        policy = make_policy(path, device, **changes)
        layers = (stop - first, 0, 0) if device.accelerated else (0, stop - first, 0)
        found.append(Stage(first, stop, policy.__class__(**{**policy.__dict__, "weight_layers": dict.fromkeys(policy.weight_layers, layers)})))
        first = stop
    return found


def prompts_of(count=8, seed=11):
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 500) for _ in range(36)]
    lengths = (1, 3, 16, 17, 9, 30, 5, 2)
    return [prefix * (i % 2) + [rng.randrange(4, 500) for _ in range(lengths[i % 8])] for i in range(count)]


def tokens_of(parts, prompts, **sampling):
    with Engine.from_parts(parts, sampling=SamplingParams(max_tokens=MAX_TOKENS, **sampling)) as engine:
        done = {c.index: c for c in engine.generate([Request(prompt) for prompt in prompts])}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return [done[i].samples[0] for i in range(len(prompts))]


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_tokens_of_one_engine(name, tiny_models, tmp_path):
    family, overrides = MODELS[name]
    path, _ = tiny_models(family, **overrides)
    policy = make_policy(path, CPU, gpu_batch_size=SEQUENCES, kv_seqs={"cpu": SEQUENCES})
    num_layers = sum(next(iter(policy.weight_layers.values())))
    stages = stages_of(path, CPU, 1, num_layers, gpu_batch_size=SEQUENCES, kv_seqs={"cpu": SEQUENCES})
    wanted = tokens_of(make_parts(path, CPU, policy, tmp_path), prompts_of())
    assert tokens_of(make_pipeline(path, CPU, stages, tmp_path), prompts_of()) == wanted
