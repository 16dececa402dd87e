"""Experts on disk that are read once it is known which ones the tokens are routed to: tokens and bytes."""

import itertools
import os

import pytest
import torch
from model_tables import MODELS
from tiered import CPU, generate, make_parts, make_policy

from batchgen.core.direct_io import ALIGNMENT
from batchgen.core.errors import BatchgenError
from batchgen.models import experts
from batchgen.models.files import resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.runtime.memory.expert_forecast import ExpertForecast
from batchgen.runtime.memory.weights import Weights

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 30, 11, 200], [5], [9, 9, 40]]


def policy_of(path, **changes):
    layers = make_policy(path, CPU).weight_layers
    on_disk = {group: (0, 0, sum(counts)) for group, counts in layers.items()}
    return make_policy(path, CPU, **{"weight_layers": on_disk, "kv_seqs": {"cpu": 8}, **changes})


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.mark.parametrize("weight_format", ["float32", "int4"])
@pytest.mark.parametrize("model", ["qwen3_moe, 8 of 128, shares as they are", "qwen2_moe, a dense layer, windows"])
def test_bytes_are_those_of_the_pages_of_what_is_touched(model, weight_format, tiny_models, stores, monkeypatch):
    """First come what all tokens need and likely experts, then with each micro-batch what has not been read."""
    family, fields = MODELS[model]
    path = tiny_models(family, **fields)[0]
    store = find_or_convert(
        resolve_model(str(path)), stores, "float32", "native" if weight_format == "float32" else weight_format
    )
    read = Weights.read_experts
    pages, calls = set(), []  # (reading of a layer, page of its file)

    def wanted(layer, tensors_of):
        for extent in store.layers[layer].extents.values():
            for tensor in extent.tensors:
                for first, size in tensors_of(tensor):
                    start = tensor.offset + first
                    for page in range(start // ALIGNMENT, (start + size - 1) // ALIGNMENT + 1):
                        pages.add((layer, calls[-1], page))

    def read_dense(weights, layer, slot, whole=Weights.read_dense):
        calls.append(len(calls))
        of_reading[slot] = calls[-1]
        all_bytes[0] += size_of(layer)
        wanted(layer, lambda t: [] if t.name in ("gate_up.weight", "down.weight") else [(0, t.num_bytes)])
        whole(weights, layer, slot)

    def want_experts(layer, experts):
        size = store.config.num_experts
        wanted(
            layer,
            lambda t: (
                [(e * t.num_bytes // size, t.num_bytes // size) for e in experts]
                if t.name in ("gate_up.weight", "down.weight")
                else []
            ),
        )

    def likely(forecast, layer, whole=ExpertForecast.likely):
        experts = whole(forecast, layer)
        want_experts(layer, experts)
        return experts

    def read_experts(weights, layer, slot, experts):
        calls.append(of_reading[slot])
        want_experts(layer, experts)
        read(weights, layer, slot, experts)

    whole_bytes, all_bytes = (
        [0],
        [0],
    )  # of layers that are read whole; of all layers that are read, had they been read so

    def size_of(layer):
        return sum(extent.num_bytes for extent in store.layers[layer].extents.values())

    def read_whole(weights, layer, slot, whole=Weights.read):
        whole_bytes[0] += size_of(layer)
        all_bytes[0] += size_of(layer)
        whole(weights, layer, slot)

    of_reading = {}
    for name, function in (("read", read_whole), ("read_dense", read_dense), ("read_experts", read_experts)):
        monkeypatch.setattr(Weights, name, function)
    monkeypatch.setattr(ExpertForecast, "likely", likely)
    options = {"weight_format": weight_format, "num_gpu_batches": 2, "gpu_batch_size": 4, "activation_batches": (0, 2)}
    found = {}
    for tokens in (0, 3):
        pages.clear()
        whole_bytes[0] = all_bytes[0] = 0
        parts = make_parts(path, CPU, policy_of(path, **options, on_demand_tokens=tokens), stores, store=store)
        found[tokens] = generate(parts, PROMPTS, [6, 6, 6]), parts.executor.bytes_moved["disk_read"]
        assert found[tokens][1] == whole_bytes[0] + ALIGNMENT * len(pages)
        assert bool(pages) == bool(tokens)
    assert found[0][0] == found[3][0]
    # Experts of int4 are smaller than a page here. How many sweeps a run has is a matter of time.
    assert weight_format == "int4" or found[3][1] < all_bytes[0]


@pytest.mark.parametrize("favourite", [0, 3])
def test_experts_without_a_token_are_not_read(favourite, tiny_models, stores, monkeypatch):
    path, _ = tiny_models("mixtral", num_experts_per_tok=1)
    route, seen = experts.route, []

    def to_one(config, weights, x):
        shares, chosen = route(config, weights, x)
        return torch.ones_like(shares), torch.full_like(chosen, favourite)

    monkeypatch.setattr("batchgen.models.experts.route", to_one)
    monkeypatch.setattr("batchgen.models.layers.route", to_one)
    read_dense, read_experts = Weights.read_dense, Weights.read_experts

    def into_nothing(weights, layer, slot):
        for name in ("gate_up.weight", "down.weight"):  # what is not read holds nothing that could be multiplied
            weights.disk.views(layer, slot)[name].fill_(float("nan"))
        read_dense(weights, layer, slot)

    def seeing(weights, layer, slot, chosen):
        seen.append(chosen)
        read_experts(weights, layer, slot, chosen)

    expected = generate(make_parts(path, CPU, policy_of(path), stores), PROMPTS, [5, 5, 5])
    monkeypatch.setattr(Weights, "read_dense", into_nothing)
    monkeypatch.setattr(Weights, "read_experts", seeing)
    policy = policy_of(path, on_demand_tokens=3)
    assert generate(make_parts(path, CPU, policy, stores), PROMPTS, [5, 5, 5]) == expected
    assert set(itertools.chain(*seen)) == {favourite}


def test_a_file_that_has_become_shorter_is_noticed(tiny_models, tmp_path):
    path, _ = tiny_models("mixtral")
    parts = make_parts(path, CPU, policy_of(path, on_demand_tokens=3), tmp_path)
    read = parts.executor.weights.read_experts

    def after_truncation(layer, slot, experts):
        file = parts.executor.weights.source.store.layers[layer].path
        file.write_bytes(file.read_bytes()[:ALIGNMENT])
        read(layer, slot, experts)

    parts.executor.weights.read_experts = after_truncation
    with pytest.raises(BatchgenError, match=r"is shorter than it was: .* made the store again"):
        generate(parts, PROMPTS, [5, 5, 5])


@pytest.mark.parametrize("changes", [True, False])
def test_a_file_that_has_changed_is_noticed_and_one_that_was_touched_is_read_on(changes, tiny_models, tmp_path):
    """Though experts that are read one by one have no checksums of their own."""
    path, _ = tiny_models("mixtral")
    expected = generate(make_parts(path, CPU, policy_of(path), tmp_path), PROMPTS, [5, 5, 5])
    parts = make_parts(path, CPU, policy_of(path, on_demand_tokens=3), tmp_path)
    weights, read = parts.executor.weights, parts.executor.weights.read_experts
    file = weights.source.store.layers[1]
    whole = file.path.read_bytes()

    def after_change(layer, slot, experts):
        if layer == 1:
            with file.path.open("r+b") as opened:
                opened.seek(file.extents["down"].offset)
                opened.write(b"\x01\x02" if changes else whole[opened.tell() : opened.tell() + 2])
            after_ns = file.path.stat().st_mtime_ns + 10**9
            os.utime(file.path, ns=(after_ns, after_ns))
        read(layer, slot, experts)

    weights.read_experts = after_change
    if not changes:
        assert generate(parts, PROMPTS, [5, 5, 5]) == expected
        return
    with pytest.raises(BatchgenError, match=r"was changed while the job ran: .* made the store again"):
        generate(parts, PROMPTS, [5, 5, 5])


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_of_4_bit_experts_those_touched_are_dequantized(tier, tiny_models, stores, monkeypatch):
    """Tokens are those of a run in which all are, as with two micro-batches."""
    path, _ = tiny_models("qwen3_moe", num_experts=16, num_experts_per_tok=2)
    layers = policy_of(path).weight_layers
    counts = {group: (0, sum(of) * (tier == "cpu"), sum(of) * (tier == "disk")) for group, of in layers.items()}
    seen, dequantize = [], Weights.dequantize_experts

    def dequantize_experts(weights, layer, slot, chosen):
        for name in ("gate_up.weight", "down.weight"):  # what is left of layers before must not be multiplied
            weights.dequantized.views(layer)[name].fill_(float("nan"))
        seen.append(len(chosen))
        dequantize(weights, layer, slot, chosen)

    monkeypatch.setattr(Weights, "dequantize_experts", dequantize_experts)
    options = {"weight_format": "int4", "weight_layers": counts}
    two = {"num_gpu_batches": 2, "gpu_batch_size": 4, "activation_batches": (0, 2)}
    whole = generate(make_parts(path, CPU, policy_of(path, **options, **two), stores), PROMPTS, [5, 5, 5])
    assert not seen
    assert generate(make_parts(path, CPU, policy_of(path, **options), stores), PROMPTS, [5, 5, 5]) == whole
    assert seen and min(seen) < 16
