"""Ranks with a CUDA device each: sums by NCCL, and stages of a pipeline; without a card, the ranks' warm-up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from model_tables import FAMILIES, GEMMA4
from tiered import CPU, GIB, make_policy, make_request

from batchgen import Engine, Request, SamplingParams
from batchgen.core.device import Device
from batchgen.distributed.group import lead
from batchgen.engine import loader
from batchgen.engine import tensor_parallel as ranks
from batchgen.engine.messages import WORK
from batchgen.engine.pipeline import Stage, load_pipeline
from batchgen.models.files import read_config, resolve_model
from batchgen.models.shard import shard_of
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.planner.parallel import split_layers, stage_policy

NUM_CARDS = torch.cuda.device_count()
on_cards = pytest.mark.skipif(
    not (NUM_CARDS and torch.distributed.is_nccl_available()), reason="no CUDA device, or no NCCL"
)


def tokens_of(parts):
    with Engine.from_parts(parts, sampling=SamplingParams(max_tokens=12, ignore_eos=True)) as engine:
        done = {c.index: c for c in engine.generate([Request([5, 6, k] * (k - 6)) for k in range(7, 15)])}
    return [done[k].samples[0].token_ids for k in range(8)]


def on_host(path):
    """Weights of all layers in host memory."""
    config = read_config(resolve_model(str(path)))
    return {"weight_layers": dict.fromkeys(config.layer_tensors, (0, config.num_layers, 0))}


# Fields of a policy.
PLACES = {
    "all on the card": lambda path: {},
    "weights and KV stream": lambda path: {"kv_seqs": {"streamed": 8}, **on_host(path)},
    "CPU attention": lambda path: {"kv_seqs": {"cpu": 5, "gpu": 3}, "activation_batches": (0, 1)},
    "two batches": lambda path: {
        "gpu_batch_size": 4, "num_gpu_batches": 2, "kv_seqs": {"cpu": 3, "streamed": 3, "gpu": 2}, **on_host(path),
        "activation_batches": (1, 1), "head_tier": "cpu",
    },
}  # fmt: skip
# Each family with a card in one of the places; one rank is what a machine with a single card can show.
CELLS = [(1, "llama", "all on the card"), (1, "qwen3_moe", "two batches")] + [
    (2, family, list(PLACES)[i % len(PLACES)]) for i, family in enumerate(FAMILIES)
]


STAGED = [(family, list(PLACES)[i % len(PLACES)]) for i, family in enumerate(FAMILIES) if family not in GEMMA4]


@pytest.mark.gpu
@on_cards
@pytest.mark.parametrize(("size", "family", "place"), CELLS)
def test_tokens_of_ranks_with_a_card_each_are_those_of_the_cpu(size, family, place, tiny_models, tmp_path):
    if size > NUM_CARDS:
        pytest.skip(f"{size} ranks need as many cards")
    path, _ = tiny_models(family)
    files, device = resolve_model(str(path)), Device("cuda")
    wanted = tokens_of(
        loader.load_parts(make_request(path, CPU, make_policy(path, CPU), tmp_path), lambda: load_tokenizer(files))
    )
    request = make_request(
        path,
        device,
        make_policy(path, device, **PLACES[place](path)),
        tmp_path,
        shard=shard_of(read_config(files), 0, size),
        budgets={"gpu": GIB, "cpu": 4 * GIB, "disk": 0},
    )
    assert tokens_of(ranks.load_on_ranks(request, lambda: load_tokenizer(files))) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(NUM_CARDS < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize(("family", "place"), STAGED)
def test_tokens_of_stages_with_a_card_each_are_those_of_the_cpu(family, place, tiny_models, tmp_path):
    path, _ = tiny_models(family)
    files, device = resolve_model(str(path)), Device("cuda")
    wanted = tokens_of(
        loader.load_parts(make_request(path, CPU, make_policy(path, CPU), tmp_path), lambda: load_tokenizer(files))
    )
    policy = make_policy(path, device, **PLACES[place](path))
    request = make_request(path, device, policy, tmp_path, budgets={"gpu": GIB, "cpu": 4 * GIB, "disk": 0})
    stages = [
        Stage(first, stop, stage_policy(policy, stop - first)) for first, stop in split_layers(read_config(files), 2)
    ]
    group = lead(2, work=WORK)
    try:
        assert tokens_of(load_pipeline(request, stages, group, lambda: load_tokenizer(files))) == wanted
    finally:
        group.close(done=False)


def test_every_rank_warms_its_device_up(tiny_models, tmp_path, monkeypatch):
    """With the same sweeps: each has sums that wait for the other ranks."""
    path, _ = tiny_models("llama")
    warmed, shard = [], shard_of(read_config(resolve_model(str(path))), 0, 2)
    monkeypatch.setattr(loader, "warm_up", lambda executor, *rest: warmed.append(executor.config))
    make = loader._make_executor

    def with_driver(request, memory, tiers, *rest):
        executor = make(request, memory, tiers, *rest)
        object.__setattr__(tiers, "driver", SimpleNamespace(close=lambda: None))
        return executor

    monkeypatch.setattr(loader, "_make_executor", with_driver)
    request = make_request(path, CPU, make_policy(path, CPU), tmp_path, shard=shard)
    for rank in range(2):
        own = replace(request, shard=replace(shard, rank=rank), reduce=lambda tensor: None)
        executor, _ = loader.load_executor(own, loader.plan_load(own))
        executor.close()
    assert warmed == [shard.config] * 2
