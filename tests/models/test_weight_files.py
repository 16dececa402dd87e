"""The files of a directory that are read for weights, the file of each tensor, and directories of other kinds."""

from __future__ import annotations

import json
import re

import pytest
import torch
from quantized_checkpoints import awq, compressed, gptq, pack_quantized, requantize, state
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model, stated_scheme
from batchgen.models.formats.schemes import read_scheme
from batchgen.models.identity import model_identity

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def load(path):
    checkpoint = open_checkpoint(resolve_model(str(path)))
    return checkpoint.load_head(torch.float32) | checkpoint.load_layer(1, torch.float32)


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    """A tiny Llama in several files, and the path of each by its number."""
    make_tiny_model("llama", tmp_path, max_shard_size="60KB")
    return tmp_path, sorted(tmp_path.glob("model-*.safetensors"))


def change_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_a_tensor_is_read_from_the_file_that_the_index_names(sharded):
    """Another file has one of the same name, before or behind the right one."""
    path, shards = sharded
    expected = load(path)["final_norm.weight"]
    owner = json.loads((path / INDEX).read_text())["weight_map"][NORM]
    others = [shard for shard in shards if shard.name != owner]
    for shard in (others[0], others[-1]):
        tensors = load_file(shard)
        save_file(tensors | {NORM: torch.full_like(expected, 7.0)}, shard, {"format": "pt"})
    assert torch.equal(load(path)["final_norm.weight"], expected)
    change_index(path, lambda weight_map: weight_map.update({NORM: others[0].name}))
    assert load(path)["final_norm.weight"].eq(7).all()


def test_a_tensor_that_its_file_lacks_is_told_with_the_index(sharded):
    path, shards = sharded
    change_index(path, lambda weight_map: weight_map.update({NORM: shards[0].name}))
    said = refusal(path)
    assert f"{INDEX} says that {shards[0].name} has tensor {NORM}, and it has not" in said


def test_a_tied_output_matrix_may_be_named_by_the_index_alone(tmp_path):
    """Converters drop what is shared, and leave the index as it was."""
    make_tiny_model("llama", tmp_path, max_shard_size="60KB", tie_word_embeddings=True)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    change_index(tmp_path, lambda weight_map: weight_map.update({"lm_head.weight": shards[0].name}))
    load(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(sharded):
    path, _ = sharded
    expected = load(path)
    (path / "a-backup.safetensors").write_bytes(b"not safetensors")
    (path / "zz.safetensors").write_bytes(b"")
    found = load(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tensor_in_two_files_that_the_index_does_not_name_is_refused(sharded):
    path, shards = sharded
    tensor = load_file(shards[0])
    change_index(path, lambda weight_map: weight_map.pop(NORM))
    load(path)  # one file alone has it
    save_file(tensor | {NORM: torch.zeros(64)}, shards[0], {"format": "pt"})
    said = refusal(path)
    assert f"tensor {NORM} is in" in said and "names neither" in said


@pytest.mark.parametrize(
    "file", [[], ["a"], {}, None, 3, True, "", ".", "..", "../model.safetensors", "/etc/passwd", "a/b", "a\0b"]
)
def test_what_is_no_file_in_a_weight_map_is_told(sharded, file):
    path, _ = sharded
    change_index(path, lambda weight_map: weight_map.update({NORM: file}))
    said = refusal(path)
    assert INDEX in said and (NORM in said or "is missing" in said)


@pytest.mark.parametrize("name", ["gptq_model-4bit-32g.safetensors", "output.safetensors", "model.fp16.safetensors"])
def test_the_only_safetensors_file_may_have_any_name(tmp_path, name):
    make_tiny_model("llama", tmp_path)
    expected = load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"what is beside it is not the model")
    found = load(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_only_index_may_have_any_name(sharded):
    path, _ = sharded
    expected = load(path)
    (path / INDEX).rename(path / "gptq_model-4bit-32g.safetensors.index.json")
    found = load(path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_several_files_without_an_index_are_refused(sharded):
    path, shards = sharded
    (path / INDEX).unlink()
    said = refusal(path)
    assert "several files of weights" in said and shards[0].name in said and INDEX in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("consolidated.safetensors", "Mistral's or Meta's own code"),
        ("consolidated.00.pth", "Mistral's or Meta's own code"),
        ("adapter_model.safetensors", "LoRA adapter"),
        ("adapter_model.bin", "LoRA adapter"),
        ("small-Q4_K_M.gguf", "pass the file itself"),
        ("pytorch_model.bin", "convert them to safetensors"),
        ("pytorch_model-00001-of-00002.bin", "convert them to safetensors"),
        ("model.onnx", "ONNX"),
        ("tf_model.h5", "another framework"),
        ("flax_model.msgpack", "another framework"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_weights_of_other_kinds_are_refused_by_name(tmp_path, name, said, has_config):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "README.md").write_text("")
    if has_config:
        make_tiny_model("llama", tmp_path)
        (tmp_path / "model.safetensors").unlink()
    message = refusal(tmp_path)
    assert said in message and name in message


@pytest.mark.parametrize(
    ("suffix", "said"),
    [
        ("qweight", "GPTQ or AWQ"), ("q_weight", "EXL2"), ("trellis", "EXL3"), ("biases", "MLX"), ("W_q", "HQQ"),
        ("codebooks", "AQLM"), ("weight_packed", "compressed-tensors"),
    ],
)  # fmt: skip
def test_tensors_of_a_quantization_that_nothing_states_are_named(tmp_path, suffix, said):
    make_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.0.mlp.up_proj"
    tensors[f"{stem}.{suffix}"] = tensors.pop(f"{stem}.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    message = refusal(tmp_path)
    assert f"tensors of {said}" in message and stem in message


# How a checkpoint states that it is quantized.

BESIDE = {
    "AutoGPTQ": ("quantize_config.json", gptq(32), {}),
    "AutoGPTQ, version 2": ("quantize_config.json", gptq(32, version=2), {}),
    "AutoGPTQ, act-order": ("quantize_config.json", gptq(32, act_order=True), {}),
    "AutoGPTQ, a scale for each row": ("quantize_config.json", gptq(None, symmetric=True), {}),
    "AutoAWQ": ("quant_config.json", awq(32), {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_config_json_states_the_quantization(tmp_path, name):
    file, (config, pack), stated = BESIDE[name]
    make_tiny_model("llama", tmp_path, hidden_size=64, intermediate_size=128)
    unquantized = (tmp_path / "config.json").read_text()
    requantize(tmp_path, (config, pack))
    expected, identity = load(tmp_path), model_identity(resolve_model(str(tmp_path)))
    (tmp_path / "config.json").write_text(unquantized)
    assert "GPTQ or AWQ, which neither" in refusal(tmp_path)
    (tmp_path / file).write_text(
        json.dumps(stated or {key: value for key, value in config.items() if key != "quant_method"})
    )
    found = load(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    files = resolve_model(str(tmp_path))
    assert stated_scheme(files) == read_scheme(config)
    if not stated:
        assert model_identity(files) == identity
    (tmp_path / file).write_text(json.dumps({"bits": 3, "w_bit": 3, "group_size": 32, "q_group_size": 32}))
    assert "of 3 bits are not supported" in refusal(tmp_path)
    (tmp_path / file).write_text("[]")
    assert f"{file} is not a JSON object" in refusal(tmp_path)


def test_what_config_json_states_goes_before_what_lies_beside(tmp_path):
    make_tiny_model("llama", tmp_path, hidden_size=64, intermediate_size=128)
    requantize(tmp_path, gptq(32))
    expected = load(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64}))
    found = load(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_compression_config_is_the_older_name_of_quantization_config(tmp_path):
    make_tiny_model("llama", tmp_path, hidden_size=64, intermediate_size=128)
    requantize(tmp_path, pack_quantized(32, symmetric=True))
    expected = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX has quantized"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
          "quantization_config": {"group_size": 64, "bits": 4}}, "MLX has quantized"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, "'exl2'"),
        ({"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, "'exl3'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
        ({"quantization_config": {"load_in_8bit": True}}, "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm'"),
    ],
)  # fmt: skip
def test_quantizations_that_are_not_read_are_refused_by_name(tmp_path, stated, said):
    make_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    message = refusal(tmp_path)
    assert said in message and str(tmp_path / "config.json") in message and "GGUF" in message


def test_what_modelopt_states_in_a_file_of_its_own_is_refused_by_name(tmp_path):
    make_tiny_model("llama", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "'modelopt'" in refusal(tmp_path)


@pytest.mark.parametrize("scheme", [gptq(32, act_order=True), pack_quantized(32, symmetric=True, act_order=True)])
def test_act_order_without_the_group_of_each_column_is_refused(tmp_path, scheme):
    """Else columns would be taken to be in groups one after the other, which are other numbers."""
    make_tiny_model("llama", tmp_path, hidden_size=64, intermediate_size=128)
    requantize(tmp_path, scheme)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "g_idx" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    assert re.search("no tensor .*g_idx beside", refusal(tmp_path))


def test_an_unknown_statement_beside_a_stated_one_changes_nothing(tmp_path):
    make_tiny_model("llama", tmp_path)
    state(tmp_path, compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert read_config(resolve_model(str(tmp_path))).num_layers == 3
