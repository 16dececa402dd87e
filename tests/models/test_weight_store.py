"""The files of a weight store: what lies where, and what is said when it does not."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch
import xxhash
from model_tables import FAMILIES
from safetensors.torch import load_file
from test_checkpoint import VARIANTS, expected_tensors
from thorough import covering
from tiny_models import make_tiny_model

from batchgen.core.direct_io import DirectFile, aligned_buffer
from batchgen.core.errors import BatchgenError, InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.importance import ChannelImportance, random_tokens
from batchgen.models.layouts import is_quantized
from batchgen.models.store.weight_store import load_extent, open_store, read_extent, verify, views
from batchgen.ops import int8
from batchgen.ops.quant import dequantize, quantize

GROUPS = {
    "qkv": {
        "qkv.weight",
        "qkv.bias",
        "input_norm.weight",
        "input_norm.bias",
        "post_norm.weight",
        "post_norm.bias",
        "q_norm.weight",
        "k_norm.weight",
        "out_norm.weight",
        "down_norm.weight",
        *("layer_scale.weight", "per_layer_norm.weight"),
        *("ba.weight", "conv.weight", "conv.bias", "a_log", "dt_bias", "state_norm.weight"),
    },
    "out": {"out.weight", "out.bias"},
    "up": {
        "up.weight",
        "up.bias",
        "gate_up.weight",
        "gate_up.bias",
        "router.weight",
        "router.bias",
        "expert_bias",
        "shared_gate.weight",
        "shared_gate_up.weight",
        *("per_layer_up.weight", "router_norm.weight", "expert_scale.weight"),
        *("experts_norm.weight", "experts_out_norm.weight", "shared_out_norm.weight"),
    },
    "down": {"down.weight", "down.bias", "shared_down.weight", "per_layer_down.weight"},
}
ALL = [*((family, {}) for family in FAMILIES), *VARIANTS]


@pytest.fixture(scope="module")
def store_path(tiny_models, tmp_path_factory):
    """Weights -> the path of a store of a tiny qwen3 (all norms) in bfloat16; not to be changed."""
    made = {}

    def get(weights="auto"):
        if weights not in made:
            made[weights] = tmp_path_factory.mktemp(weights) / "store"
            files = resolve_model(str(tiny_models("qwen3", attention_bias=True)[0]))
            convert(files, made[weights], dtype="bfloat16", weights=weights)
        return made[weights]

    return get


@pytest.mark.parametrize(
    ("family", "overrides", "weights"),
    [(*ALL[i], w) for i, w in covering(itertools.product(range(len(ALL)), ("native", "int4", "int8")), 0, "stores")],
)
def test_what_is_stored_is_what_was_loaded(tmp_path, family, overrides, weights):
    model = make_tiny_model(family, tmp_path / "model", **overrides)
    files = resolve_model(str(tmp_path / "model"))
    store = convert(files, tmp_path / "store", dtype="float32", weights=weights)
    embeddings, layers, head = expected_tensors(model)
    assert store == open_store(tmp_path / "store")
    tokens, per_layer = random_tokens(store.config), open_checkpoint(files).open_per_layer()
    measured = ChannelImportance(store.config, embeddings, tokens, head.get("sinks.weight"), per_layer=per_layer)
    importances = [{}, {}, *(measured.next_layer(layer) for layer in layers)]
    assert store.config == read_config(files) == read_config(resolve_model(str(store.path)))
    assert len(store.layers) == len(layers)
    parts = [(store.embeddings, embeddings), (store.head, head), *zip(store.layers, layers, strict=True)]
    for (file, expected), importance in zip(parts, importances, strict=True):
        in_layer = "qkv" in file.extents
        packed = {name for name, tensor in expected.items() if in_layer and is_quantized(name, tuple(tensor.shape))}
        by_safetensors = load_file(file.path)  # the package reads what we wrote
        seen = {}
        for extent in file.extents.values():
            for name, tensor in read_extent(file, extent).items():
                assert torch.equal(tensor, by_safetensors.pop(name))
                if weights == "int4" and name in packed:
                    assert torch.equal(tensor, quantize(expected[name], importance=importance[name]))
                    tensor = dequantize(tensor, expected[name].shape[1])
                    unfitted = dequantize(quantize(expected[name]), expected[name].shape[1])
                    error = (importance[name] * (tensor - expected[name]).square()).mean()
                    assert 0 < error < (importance[name] * (unfitted - expected[name]).square()).mean()
                elif weights == "int8" and name in packed:
                    assert torch.equal(tensor, int8.quantize(expected[name]))
                    tensor = int8.dequantize(tensor, expected[name].shape[1], torch.empty_like(expected[name]))
                else:
                    assert torch.equal(tensor, expected[name])
                seen[name] = tensor
        assert set(seen) == set(expected)
        assert all(name.startswith("_pad.") and not pad.any() for name, pad in by_safetensors.items())
        loaded = {k: v for e in file.extents.values() for k, v in load_extent(file, e, torch.float32).items()}
        assert loaded.keys() == seen.keys()
        assert all(torch.equal(tensor.double(), seen[name].double()) for name, tensor in loaded.items())
        if in_layer:
            for name, extent in file.extents.items():
                assert {tensor.name for tensor in extent.tensors} == GROUPS[name] & set(expected)
    assert store.num_bytes == sum(path.stat().st_size for path in store.path.glob("*.safetensors"))


def test_a_group_counts_the_parameters_the_planner_counts(store_path):
    store = open_store(store_path())
    for file in store.layers:
        counts = {name: sum(torch.Size(t.shape).numel() for t in e.tensors) for name, e in file.extents.items()}
        assert counts == store.config.layer_tensors and list(counts) == list(store.config.layer_tensors)


@pytest.mark.parametrize("weights", ["native", "int4", "int8"])
def test_places(store_path, weights):
    """Groups on whole blocks, one right behind the other to the end of the file; tensors on multiples of 64."""
    store = open_store(store_path(weights))
    for file in store.files:
        data = file.path.read_bytes()
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        place = 8 + header_bytes
        assert place % 4096 == 0
        for extent in file.extents.values():
            assert extent.offset == place and extent.num_bytes % 4096 == 0
            place += extent.num_bytes
            assert xxhash.xxh3_128_hexdigest(data[extent.offset : place]) == extent.checksum
            for tensor in extent.tensors:
                assert tensor.offset % 64 == 0
                assert extent.offset <= tensor.offset <= tensor.offset + tensor.num_bytes <= place
                begin, end = header[tensor.name]["data_offsets"]
                assert (begin + 8 + header_bytes, end - begin) == (tensor.offset, tensor.num_bytes)
                assert tuple(header[tensor.name]["shape"]) == tensor.stored_shape
        assert place == len(data) == file.num_bytes


def test_several_groups_in_one_request(store_path):
    store = open_store(store_path("int4"))
    file = store.layers[1]
    up, down = file.extents["up"], file.extents["down"]
    memory = aligned_buffer(up.num_bytes + down.num_bytes)
    direct = DirectFile(file.path)
    assert direct.read([(up.offset, memoryview(memory))]) == up.num_bytes + down.num_bytes
    direct.close()
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    for extent, part in ((up, buffer), (down, buffer[up.num_bytes :])):
        verify(file, extent, part)
        found = views(extent, part)
        for name, tensor in read_extent(file, extent).items():
            assert torch.equal(found[name], tensor)
            assert found[name].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()  # no copy
    with pytest.raises(BatchgenError, match="group down"):
        verify(file, down, buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["native", "int4", "int8"])
def test_loading_in_small_pieces(store_path, monkeypatch, weights, dtype):
    store = open_store(store_path(weights))
    monkeypatch.setattr("batchgen.models.store.weight_store._PIECE_BYTES", 1000)
    for file in store.files:
        for extent in file.extents.values():
            stored = read_extent(file, extent)
            loaded = load_extent(file, extent, dtype)
            assert list(loaded) == list(stored)
            for tensor in extent.tensors:
                expected = stored[tensor.name]
                if tensor.dtype == "int4":
                    expected = dequantize(expected, tensor.shape[1])
                if tensor.dtype == "int8":
                    expected = int8.dequantize(expected, tensor.shape[1], torch.empty(tensor.shape))
                assert torch.equal(loaded[tensor.name], expected.to(dtype))
                assert loaded[tensor.name].untyped_storage().nbytes() == expected.numel() * dtype.itemsize


def test_a_flipped_bit_anywhere_in_a_group_is_found_and_named(store_path, tmp_path):
    shutil.copytree(store_path(), tmp_path / "store")
    store = open_store(tmp_path / "store")
    checkpoint = open_checkpoint(resolve_model(str(store.path)))
    for which, file in (("embeddings", store.embeddings), ("layer", store.layers[2]), ("head", store.head)):
        data = file.path.read_bytes()
        for name, extent in file.extents.items():
            tensor = extent.tensors[-1]
            for place in (extent.offset, tensor.offset + tensor.num_bytes - 1, extent.offset + extent.num_bytes - 1):
                damaged = bytearray(data)
                damaged[place] ^= 1 << (place % 8)
                file.path.write_bytes(damaged)
                for read in (
                    lambda file=file, extent=extent: read_extent(file, extent),
                    lambda which=which: checkpoint.load(which, 2, torch.float32),
                ):
                    with pytest.raises(
                        BatchgenError, match=f"{file.path} is damaged: group {name} .*convert"
                    ) as caught:
                        read()
                    assert "\n" not in str(caught.value)
        file.path.write_bytes(data)
        for extent in file.extents.values():
            read_extent(file, extent)


def test_missing_and_truncated_files_are_named(store_path, tmp_path):
    shutil.copytree(store_path(), tmp_path / "store")
    store = open_store(tmp_path / "store")
    for file in store.files:
        data = file.path.read_bytes()
        file.path.write_bytes(data[:-1])
        with pytest.raises(InputError, match=f"{file.path} has .* made the store again"):
            open_store(store.path)
        file.path.unlink()
        with pytest.raises(InputError, match=f"cannot read {file.path}: No such file.* made the store again"):
            open_checkpoint(resolve_model(str(store.path)))
        file.path.write_bytes(data)
    # cut short after it was opened
    last = store.layers[0].extents["down"]
    store.layers[0].path.write_bytes(store.layers[0].path.read_bytes()[: last.offset + 100])
    for read in (read_extent, lambda file, extent: load_extent(file, extent, torch.float32)):
        with pytest.raises(BatchgenError, match=r"layer-00000\.safetensors ends within group down"):
            read(store.layers[0], last)
        with pytest.raises(BatchgenError, match="layer-00009"):
            read(type(store.head)(store.path / "layer-00009.safetensors", 0, {}), last)


def test_a_damaged_manifest_is_refused(store_path, tmp_path):
    shutil.copytree(store_path(), tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    data = manifest.read_bytes()
    places = torch.randint(0, len(data), (100,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1
        manifest.write_bytes(damaged)
        try:
            files = resolve_model(str(tmp_path / "store"))
            found = read_config(files), open_store(files.path)
        except InputError as error:
            assert "\n" not in str(error)
            continue
        manifest.write_bytes(data)  # only blanks may change unnoticed
        assert found == (read_config(files), open_store(files.path))
    manifest.write_bytes(data[:1000])
    with pytest.raises(InputError, match=r"manifest\.json is damaged: convert the model again with --overwrite"):
        open_store(tmp_path / "store")
    manifest.write_bytes(data.replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(InputError, match=r"manifest\.json is of format version 9, this batchgen reads 1: convert"):
        open_store(tmp_path / "store")


def test_a_configuration_travels_as_json(tiny_models):
    for family, overrides in [*ALL, ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128}})]:  # fmt: skip
        config = read_config(resolve_model(str(tiny_models(family, **overrides)[0])))
        assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    from dataclasses import replace

    config = replace(
        config, rope=replace(config.rope, factors=(1.0, 0.3) * 4), eos_token_ids=(3, 4), windows=(None, 5, 7)
    )
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
