"""Weights as `open_checkpoint` gives them against the state dict they were saved from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_tables import DELTA_NETS, FAMILIES, GGUF_FAMILIES, GGUF_MODELS, MODELS, SHORT_CONVS
from quantized_checkpoints import in_mxfp4
from safetensors.torch import load_file, save_file
from thorough import covering
from tiny_gguf import round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.models.checkpoint import dummy_checkpoint, open_checkpoint
from batchgen.models.families import ARCHITECTURES
from batchgen.models.files import read_config, resolve_model
from batchgen.models.formats.gguf.fields import GGUF_ARCHITECTURES, config_of_gguf
from batchgen.models.formats.gguf.header import read_gguf_header
from batchgen.models.hf.config import config_of_hf
from batchgen.models.shard import shard_of
from batchgen.models.state_layers import DeltaNet
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.ops import cpp

VARIANTS = [
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),  # as OPT-350m
    ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("qwen2_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    *(model for model in MODELS.values() if model[0] == "gemma4" and model[1]),
]


def expected_tensors(model) -> tuple[dict, list[dict], dict]:
    """Embeddings, layers and head, put together by hand from a transformers model."""
    family = model.config.model_type.removesuffix("_text")
    opt = family == "opt"
    decoder = model.model.decoder if opt else model.model

    def params(module, name):
        one = name.endswith("norm") and family.startswith(
            ("gemma2", "gemma3", *DELTA_NETS)
        )  # which multiply with 1 + w
        return {f"{name}.{kind}": value.detach() + one for kind, value in module.named_parameters()}

    def fused(name, *modules):
        parts = [params(module, name) for module in modules]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    embeddings = params(decoder.embed_tokens, "embed")
    head = {}
    layers = [expected_layer(model, layer, family, params, fused) for layer in decoder.layers]
    if opt:
        embeddings |= params(decoder.embed_positions, "positions")
        if decoder.project_in is not None:
            embeddings |= params(decoder.project_in, "embed_proj")
            head |= params(decoder.project_out, "head_proj")
        if decoder.final_layer_norm is not None:
            head |= params(decoder.final_layer_norm, "final_norm")
    else:
        if hasattr(decoder, "per_layer_model_projection"):
            embeddings |= params(decoder.per_layer_model_projection, "per_layer_proj")
            embeddings |= params(decoder.per_layer_projection_norm, "per_layer_proj_norm")
        head |= params(decoder.embedding_norm if family in SHORT_CONVS else decoder.norm, "final_norm")
        if family == "gpt_oss":
            head["sinks.weight"] = torch.cat([layer.self_attn.sinks.detach() for layer in decoder.layers])
    if not model.config.tie_word_embeddings:
        head |= params(model.lm_head, "lm_head")
    return embeddings, layers, head


def expected_layer(model, layer, family: str, params, fused) -> dict:
    """The tensors of one layer."""
    if family in SHORT_CONVS:
        return expected_short_conv(layer, params, fused)
    if family in DELTA_NETS:
        return expected_delta_net(model.config, layer, params, fused)
    attention = layer.self_attn
    if family == "phi3":
        tensors = params(attention.qkv_proj, "qkv")
    else:
        projections = (getattr(attention, f"{part}_proj", None) for part in ("q", "k", "v"))
        tensors = fused("qkv", *filter(None, projections))
    if family == "opt":
        tensors |= params(layer.self_attn_layer_norm, "input_norm")
        tensors |= params(layer.final_layer_norm, "post_norm")
        tensors |= params(attention.out_proj, "out")
        tensors |= params(layer.fc1, "up") | params(layer.fc2, "down")
    else:
        for name, module in norms_of(layer, family):
            tensors |= params(module, name)
        tensors |= params(attention.o_proj, "out")
        tensors |= expected_mlp(layer, family, params, fused)
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            tensors |= params(getattr(attention, name), name)
    return tensors | expected_gemma4_tensors(layer, params)


def expected_short_conv(layer, params, fused) -> dict:
    """A layer of a model with short convolutions."""
    mlp = layer.feed_forward
    tensors = params(layer.operator_norm, "input_norm") | params(layer.ffn_norm, "post_norm")
    if hasattr(layer, "conv"):
        conv = layer.conv
        tensors |= params(conv.in_proj, "qkv") | params(conv.out_proj, "out")
        tensors["conv.weight"] = conv.conv.weight.detach()[:, 0]
    else:
        attention = layer.self_attn
        tensors |= fused("qkv", attention.q_proj, attention.k_proj, attention.v_proj)
        tensors |= params(attention.out_proj, "out")
        tensors |= params(attention.q_layernorm, "q_norm") | params(attention.k_layernorm, "k_norm")
    if hasattr(mlp, "w1"):
        return tensors | fused("gate_up", mlp.w1, mlp.w3) | params(mlp.w2, "down")
    tensors |= params(mlp.gate, "router") | {"expert_bias": mlp.expert_bias}
    tensors |= {"gate_up.weight": mlp.experts.gate_up_proj.detach().flatten(0, 1)}
    return tensors | {"down.weight": mlp.experts.down_proj.detach().flatten(0, 1)}


def expected_delta_net(config, layer, params, fused) -> dict:
    """A layer of a model with Gated DeltaNets."""
    family = config.model_type.removesuffix("_text")
    mixer = expected_states(config, layer) if hasattr(layer, "linear_attn") else expected_gated(config, layer, params)
    norms = {key: value for name, module in norms_of(layer, family) for key, value in params(module, name).items()}
    return mixer | norms | expected_mlp(layer, family, params, fused)


def expected_gated(config, layer, params) -> dict:
    """The tensors of attention with an output gate and heads that are rotated in part."""
    heads, dim = config.num_attention_heads, config.head_dim
    attention, half = layer.self_attn, int(dim * config.rope_parameters["partial_rotary_factor"]) // 2
    others = (dim - 2 * half) // 2
    order = torch.cat([x.split((half, half, others, others))[i] for i in (0, 2, 1, 3) for x in [torch.arange(dim)]])
    found = params(attention.o_proj, "out")
    for kind, _ in attention.q_proj.named_parameters():
        q, k, v = (getattr(getattr(attention, f"{part}_proj"), kind).detach() for part in "qkv")
        queries, gates = q.unflatten(0, (heads, 2, dim)).unbind(1)
        parts = gates.flatten(0, 1), queries[:, order].flatten(0, 1), k.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
        found[f"qkv.{kind}"] = torch.cat((*parts, v))
    for name in ("q_norm", "k_norm"):
        found |= {key: norm[order] for key, norm in params(getattr(attention, name), name).items()}
    return found


def expected_states(config, layer) -> dict:
    """The tensors of a Gated DeltaNet."""
    net = layer.linear_attn
    found = {
        "conv.weight": net.conv1d.weight.squeeze(1), "a_log": net.A_log, "dt_bias": net.dt_bias,
        "state_norm.weight": net.norm.weight, "out.weight": net.out_proj.weight,
    }  # fmt: skip
    if hasattr(net, "in_proj_qkv"):
        found["qkv.weight"] = torch.cat([net.in_proj_qkv.weight, net.in_proj_z.weight])
        found["ba.weight"] = torch.cat([net.in_proj_b.weight, net.in_proj_a.weight])
    else:  # of each key head its query, key, values and gates
        group = config.linear_num_value_heads // config.linear_num_key_heads
        values = group * config.linear_value_head_dim
        for name, module, sizes in (
            ("qkv", net.in_proj_qkvz, [config.linear_key_head_dim] * 2 + [values] * 2),
            ("ba", net.in_proj_ba, [group] * 2),
        ):
            by_head = module.weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
            found[f"{name}.weight"] = torch.cat([part.flatten(0, 1) for part in by_head])
    return {name: tensor.detach() for name, tensor in found.items()}


def expected_mlp(layer, family: str, params, fused) -> dict:
    """The MLP or the experts of a layer, without OPT's."""
    if family.startswith("granitemoe"):
        return expected_granite_mlp(layer)
    if hasattr(layer.mlp, "experts"):
        return expected_experts(layer.mlp)
    if hasattr(layer, "experts"):
        return expected_gemma4_experts(layer)
    if family == "phi3":
        return params(layer.mlp.gate_up_proj, "gate_up") | params(layer.mlp.down_proj, "down")
    return fused("gate_up", layer.mlp.gate_proj, layer.mlp.up_proj) | params(layer.mlp.down_proj, "down")


def norms_of(layer, family: str):
    """The norms of a layer without OPT's, by their names here."""
    if family.startswith("gemma"):
        yield from (("out_norm", layer.post_attention_layernorm), ("post_norm", layer.pre_feedforward_layernorm))
        yield from (("input_norm", layer.input_layernorm), ("down_norm", layer.post_feedforward_layernorm))
    elif family in ("olmo2", "olmo3"):
        yield from (("out_norm", layer.post_attention_layernorm), ("down_norm", layer.post_feedforward_layernorm))
    else:
        yield from (("input_norm", layer.input_layernorm), ("post_norm", layer.post_attention_layernorm))


def expected_experts(mlp) -> dict:
    """Of a mixture: the experts' rows one after the other, and those of the expert that all tokens share."""
    if hasattr(mlp.experts, "gate_up_proj_bias"):
        return expected_gpt_oss_experts(mlp)
    found = {
        "router.weight": (mlp.router if hasattr(mlp, "router") else mlp.gate).weight,
        "gate_up.weight": mlp.experts.gate_up_proj.flatten(0, 1),
        "down.weight": mlp.experts.down_proj.flatten(0, 1),
    }
    if hasattr(mlp, "shared_expert"):
        shared = mlp.shared_expert
        found["shared_gate.weight"] = mlp.shared_expert_gate.weight
        found["shared_gate_up.weight"] = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        found["shared_down.weight"] = shared.down_proj.weight
    return {name: tensor.detach() for name, tensor in found.items()}


def expected_gemma4_tensors(layer, params) -> dict:
    """The tensors that layers of Gemma 4 have beside attention and MLP."""
    found = {"layer_scale.weight": layer.layer_scalar.detach()} if hasattr(layer, "layer_scalar") else {}
    if hasattr(layer, "per_layer_input_gate"):
        found |= params(layer.per_layer_input_gate, "per_layer_up")
        found |= params(layer.per_layer_projection, "per_layer_down")
        found |= params(layer.post_per_layer_input_norm, "per_layer_norm")
    return found


def expected_gemma4_experts(layer) -> dict:
    """Experts, the MLP beside them as a shared expert, and what the router and both have before and behind them."""
    mlp, router = layer.mlp, layer.router
    found = {
        "router.weight": router.proj.weight,
        "router_norm.weight": router.scale,
        "expert_scale.weight": router.per_expert_scale,
        "gate_up.weight": layer.experts.gate_up_proj.flatten(0, 1),
        "down.weight": layer.experts.down_proj.flatten(0, 1),
        "shared_gate_up.weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "shared_down.weight": mlp.down_proj.weight,
        "experts_norm.weight": layer.pre_feedforward_layernorm_2.weight,
        "experts_out_norm.weight": layer.post_feedforward_layernorm_2.weight,
        "shared_out_norm.weight": layer.post_feedforward_layernorm_1.weight,
    }
    return {name: tensor.detach() for name, tensor in found.items()}


def expected_granite_mlp(layer) -> dict:
    """The tensors of a Granite mixture: experts, and an MLP that all tokens share, or that is the only one."""
    found, moe, shared = {}, layer.block_sparse_moe, getattr(layer, "shared_mlp", None)
    if moe is not None:
        found = {"router.weight": moe.router.weight, "gate_up.weight": moe.experts.gate_up_proj.flatten(0, 1)}
        found["down.weight"] = moe.experts.down_proj.flatten(0, 1)
    if shared is not None:
        prefix = "" if moe is None else "shared_"
        found[f"{prefix}gate_up.weight"] = shared.input_linear.weight
        found[f"{prefix}down.weight"] = shared.output_linear.weight
    return {name: tensor.detach() for name, tensor in found.items()}


def expected_gpt_oss_experts(mlp) -> dict:
    """Rows of gate and up come in turns, and matrices are stored the other way round."""
    gate_up, gate_up_bias = mlp.experts.gate_up_proj.mT, mlp.experts.gate_up_proj_bias
    found = {
        "router.weight": mlp.router.weight,
        "router.bias": mlp.router.bias,
        "gate_up.weight": torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1).flatten(0, 1),
        "gate_up.bias": torch.cat([gate_up_bias[:, ::2], gate_up_bias[:, 1::2]], 1).flatten(),
        "down.weight": mlp.experts.down_proj.mT.flatten(0, 1),
        "down.bias": mlp.experts.down_proj_bias.flatten(),
    }
    return {name: tensor.detach() for name, tensor in found.items()}


def assert_same(tensors: dict, expected: dict, dtype: torch.dtype) -> None:
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype, name
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize, name
        torch.testing.assert_close(tensor, expected[name].to(dtype), rtol=0, atol=0, msg=name)


def assert_loads(path, model, dtype=torch.float32) -> None:
    checkpoint = open_checkpoint(resolve_model(str(path)))
    embeddings, layers, head = expected_tensors(model)
    assert_same(checkpoint.load_embeddings(dtype), embeddings, dtype)
    assert checkpoint.config.num_layers == len(layers)
    for j, layer in enumerate(layers):
        assert_same(checkpoint.load_layer(j, dtype), layer, dtype)
    assert_same(checkpoint.load_head(dtype), head, dtype)


def message_of(path) -> str:
    """What opening the model fails with; one line."""
    with pytest.raises(InputError) as caught:
        checkpoint = open_checkpoint(resolve_model(str(path)))
        for j in range(checkpoint.config.num_layers):
            checkpoint.load_layer(j, torch.float32)
        checkpoint.load_embeddings(torch.float32)
        checkpoint.load_head(torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SAVED = [*((family, {}) for family in FAMILIES), *VARIANTS]


@pytest.mark.parametrize(
    ("family", "overrides", "max_shard_size"),
    [(*SAVED[i], size) for i, size in covering(itertools.product(range(len(SAVED)), ("1GB", "60KB")), 0, "saved")],
)
def test_tensors_are_those_saved(tmp_path, family, overrides, max_shard_size):
    model = make_tiny_model(family, tmp_path, max_shard_size=max_shard_size, **overrides)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "60KB")
    assert_loads(tmp_path, model)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(tmp_path, monkeypatch, stored, wanted):
    # pieces much smaller than a tensor, and no divisor of its size
    monkeypatch.setattr("batchgen.models.tensor_files.reading.CHUNK_VALUES", 1000)
    model = make_tiny_model("llama", tmp_path, dtype=stored)
    assert f"torch.{read_config(resolve_model(str(tmp_path))).dtype}" == str(stored)
    assert_loads(tmp_path, model, wanted)


def test_tensors_do_not_depend_on_the_file_any_more(tmp_path):
    model = make_tiny_model("qwen2", tmp_path)
    layer = open_checkpoint(resolve_model(str(tmp_path))).load_layer(1, torch.float32)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)
    assert_same(layer, expected_tensors(model)[1][1], torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_the_outer_prefix(tmp_path, family):
    model = make_tiny_model(family, tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): value for name, value in load_file(weights).items()}
    save_file(tensors, weights)
    assert_loads(tmp_path, model)


def test_memory_is_about_one_layer(tmp_path):
    """Five layers of 10 MB, let go one after another, in a process whose peak is watched."""
    wide = {"hidden_size": 768, "intermediate_size": 240, "num_attention_heads": 16, "num_hidden_layers": 5}
    make_tiny_model("llama", tmp_path, vocab_size=256, num_key_value_heads=16, **wide)
    code = f"""
import resource, torch
from batchgen.models.files import resolve_model
from batchgen.models.checkpoint import open_checkpoint
checkpoint = open_checkpoint(resolve_model({str(tmp_path)!r}))
checkpoint.load_layer(0, torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for j in range(5):
    checkpoint.load_layer(j, torch.float32)
layer_bytes = checkpoint.config.params_per_layer * 4
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert 10e6 < layer_bytes < 15e6, layer_bytes
assert grown < 2 * layer_bytes, (grown, layer_bytes)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_truncated_weights_are_named(tmp_path):
    make_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 4, 0):
        weights.write_bytes(data[:size])
        assert str(weights) in message_of(tmp_path)


def test_corrupt_headers_are_named(tmp_path):
    make_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for header in (b"{" * length, b"[]", b'{"x": {"dtype": "F32"}}', b"\xff" * length):
        weights.write_bytes(data[:8] + header.ljust(length) + data[8 + length :])
        assert str(weights) in message_of(tmp_path)
    weights.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    assert str(weights) in message_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["model.layers.1.mlp.up_proj.weight"]),
        (lambda t: t.pop("model.embed_tokens.weight"), ["model.embed_tokens.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight"]),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            ["model.norm.weight", "model.safetensors", "[63]", "[64]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            ["model.norm.weight", "model.safetensors", "I8", "BF16"],
        ),
    ],
)
def test_missing_and_misshapen_tensors_are_named(tmp_path, change, named):
    make_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    message = message_of(tmp_path)
    for word in named:
        assert word in message


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_named(tmp_path):
    make_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "F16"
    text = json.dumps(header, separators=(",", ":")).encode()
    weights.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])
    assert "model.norm.weight" in message_of(tmp_path)


def test_broken_shards_are_named(tmp_path):
    make_tiny_model("llama", tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].unlink()
    assert str(shards[1]) in message_of(tmp_path)
    shards[1].write_bytes(content[: len(content) // 2])
    assert str(shards[1]) in message_of(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}"):
        index.write_text(text)
        assert str(index) in message_of(tmp_path)


def test_an_unused_output_matrix_must_equal_the_embedding(tmp_path):
    model = make_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights)
    assert_loads(tmp_path, model)
    tensors["lm_head.weight"][-1] += 1.0
    save_file(tensors, weights)
    assert "tie_word_embeddings" in message_of(tmp_path)


# GGUF


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "model.layers.3.input_layernorm.weight", torch.ones(64)),  # of a deeper model
        ("llama", "model.layers.1.self_attn.q_proj.bias", torch.full((64,), 0.1)),
        ("llama", "model.layers.1.self_attn.q_norm.weight", torch.ones(16)),
        ("llama", "lm_head.bias", torch.full((512,), 0.1)),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias", torch.full((64,), 0.1)),
        ("qwen3_moe", "model.layers.0.mlp.gate.bias", torch.full((8,), 0.1)),
        ("opt", "model.decoder.layers.3.fc1.weight", torch.ones(96, 64)),
    ],
)  # fmt: skip
def test_weights_that_the_config_does_not_speak_of_are_refused(tmp_path, family, name, value):
    make_tiny_model(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: value}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert name in message_of(tmp_path) and "take the config.json of these weights" in message_of(tmp_path)


def test_unused_tensors_that_change_nothing_may_be_there(tmp_path):
    """Zero biases as GPTQ's files have, frequencies of rotary positions, heads for other tasks."""
    model = make_tiny_model("llama", tmp_path)
    more = {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64), "score.weight": torch.ones(2, 64)}
    more |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(
        load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert_loads(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "tensor_type"),
    covering(itertools.product(GGUF_MODELS, ("F32", "F16", "BF16", "Q8_0", "Q4_1")), 0, "tensors"),
)
def test_gguf_tensors_are_those_written(tmp_path, monkeypatch, name, tensor_type):
    monkeypatch.setattr("batchgen.models.tensor_files.reading.CHUNK_VALUES", 5000)
    family, overrides = GGUF_MODELS[name]
    model = make_tiny_model(family, tmp_path, **overrides)
    path = tmp_path / "model.gguf"
    write_tiny_gguf(model, path, tensor_type=tensor_type)
    model = round_as_gguf(model, tensor_type)
    rope = read_config(resolve_model(str(path))).rope
    if rope.rotated is None:
        return assert_loads(path, model)
    # Rows of heads are put in order as those of the model's safetensors.
    model.save_pretrained(tmp_path)
    ours, theirs = (open_checkpoint(resolve_model(str(p))) for p in (path, tmp_path))
    for layer in range(ours.config.num_layers):
        expected = theirs.load_layer(layer, torch.float32)
        found = ours.load_layer(layer, torch.float32)
        if ours.config.has_state(layer):
            torch.testing.assert_close(found.pop("a_log"), expected.pop("a_log"), atol=1e-6, rtol=1e-6)  # by way of exp
            if (state := ours.config.state).out_by_member:  # columns stay as they are in the file
                shape = state.key_heads, -1, state.value_dim
                expected["out.weight"] = expected["out.weight"].unflatten(1, shape).transpose(1, 2).flatten(1)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize("name", ["gemma3", "phi3", "phi3, part of each head"])
def test_ranks_have_the_same_parts_of_a_gguf(tmp_path, name):
    """Of matrices that are fused in both files, and of packed rows those of the whole."""
    family, overrides = GGUF_MODELS[name]
    model = make_tiny_model(family, tmp_path / "hf", intermediate_size=128, **overrides)
    files = [resolve_model(str(write_tiny_gguf(model, tmp_path / f"{t}.gguf", tensor_type=t))) for t in ("F32", "Q8_0")]
    for rank in range(2):
        shard = shard_of(read_config(files[0]), rank, 2)
        ours, theirs = (open_checkpoint(f, shard=shard) for f in (files[0], resolve_model(str(tmp_path / "hf"))))
        for layer in range(ours.config.num_layers):
            found, expected = ours.load_layer(layer, torch.float32), theirs.load_layer(layer, torch.float32)
            assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())
        packed = open_checkpoint(files[1], shard=shard_of(read_config(files[1]), rank, 2))
        numbers = packed.load_layer(0, torch.float32)
        for n, rows in packed.load_packed("layer", 0, torch.float32, "q8_0").items():
            found = cpp.unpack_blocks("Q8_0", rows, torch.empty_like(numbers[n])) if rows.dtype == torch.uint8 else rows
            assert torch.equal(found, numbers[n])


@pytest.mark.parametrize(("family", "arch"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")])
def test_a_gguf_of_a_model_that_takes_images_is_that_of_its_text(tmp_path, family, arch):
    model = make_tiny_model(family, tmp_path)
    plain, named = tmp_path / "plain.gguf", tmp_path / "named.gguf"
    write_tiny_gguf(model, plain)
    write_tiny_gguf(model, named, arch=arch)
    first, second = (open_checkpoint(resolve_model(str(path))) for path in (plain, named))
    assert first.config == second.config
    for layer in range(first.config.num_layers):
        assert_same(second.load_layer(layer, torch.float32), first.load_layer(layer, torch.float32), torch.float32)


def test_every_architecture_of_ggufs_has_a_family_here():
    shared = {"mixtral", "olmo3", "granitemoeshared"}  # that have the architecture of another
    assert {ARCHITECTURES[name] for name in GGUF_ARCHITECTURES.values()} | shared == set(GGUF_FAMILIES)


def test_every_family_of_ggufs_is_in_the_table():
    assert {family for family, _ in GGUF_MODELS.values()} == set(GGUF_FAMILIES) <= GGUF_MODELS.keys()


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_gguf_config_is_that_of_the_model(tmp_path, name):
    family, overrides = GGUF_MODELS[name]
    model = make_tiny_model(family, tmp_path, **overrides)
    hf = read_config(resolve_model(str(tmp_path)))
    path = tmp_path / "model.gguf"
    write_tiny_gguf(model, path, tensor_type="F16")
    config = read_config(resolve_model(str(path)))
    # No tokenizer was written.
    other = ("rope", "norm_eps", "query_scale", "query_growth", "dtype", "bos_token_id", "eos_token_ids", "state")
    same = [name for name in hf.__dataclass_fields__ if name not in other]
    assert {name: getattr(config, name) for name in same} == {name: getattr(hf, name) for name in same}
    is_delta_net = isinstance(config.state, DeltaNet)
    assert hf.state == (dataclasses.replace(config.state, out_by_member=False) if is_delta_net else config.state)
    assert config.norm_eps == pytest.approx(hf.norm_eps)
    assert config.query_growth == pytest.approx(hf.query_growth)
    assert config.query_scale == pytest.approx(hf.query_scale)
    for context in (64, 512):
        assert config.rope.inv_freq(config.head_dim, context) == hf.rope.inv_freq(hf.head_dim, context)
    assert config.rope.rotated == hf.rope.rotated
    assert config.rope.attention_scaling() == pytest.approx(hf.rope.attention_scaling())
    assert config.dtype == "float16"


# Of published models, by the configurations that are published with them.
GEMMA_SIZES = {
    "gemma2 2B": ("gemma2", 26, 2304, 8, 256, 256),
    "gemma2 9B": ("gemma2", 42, 3584, 16, 256, 256),
    "gemma2 27B": ("gemma2", 46, 4608, 32, 128, 144),
    "gemma3 270M": ("gemma3", 18, 640, 4, 256, 256),
    "gemma3 1B": ("gemma3", 26, 1152, 4, 256, 256),
    "gemma3 4B": ("gemma3", 34, 2560, 8, 256, 256),
    "gemma3 12B": ("gemma3", 48, 3840, 16, 256, 256),
    "gemma3 27B": ("gemma3", 62, 5376, 32, 128, 168),
}


def gguf_config(arch, layers, hidden, heads, head_dim, *, names=(), known=None, **fields):
    """The configuration of a GGUF by what it says, without a file."""
    info = TensorInfo(Path("x.gguf"), "F32", (1000, hidden), 0, 4000 * hidden)
    tensors = {name: info for name in ["token_embd.weight", *(f"blk.{j}.attn_q.weight" for j in range(layers)), *names]}
    stated = {
        "context_length": 4096, "block_count": layers, "embedding_length": hidden, "attention.head_count": heads,
        "attention.key_length": head_dim, "feed_forward_length": 64, **fields,
    }  # fmt: skip
    metadata = {f"{arch}.{key}": value for key, value in stated.items()}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.eos_token_id": 1}
    return config_of_gguf(metadata, tensors, "float32", known_tokens=known)


@pytest.mark.parametrize("size", GEMMA_SIZES)
def test_gemma_scales_queries_by_a_number_that_no_file_has(size):
    arch, layers, hidden, heads, head_dim, scalar = GEMMA_SIZES[size]
    config = gguf_config(arch, layers, hidden, heads, head_dim)
    assert config.attention_scale == scalar**-0.5
    stated = gguf_config(arch, layers, hidden, heads, head_dim, **{"attention.scale": 0.5})
    assert stated.attention_scale == 0.5


def test_what_gguf_files_leave_out():
    gemma2 = gguf_config("gemma2", 4, 64, 4, 16)
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.windows) == (50, 30, (4096, None) * 2)
    assert gemma2.local_rope is None
    gemma3 = gguf_config("gemma3", 7, 64, 4, 16, **{"attention.sliding_window": 512, "rope.freq_base": 1e6})
    assert gemma3.windows == (*(512,) * 5, None, 512) and (gemma3.attention_softcap, gemma3.logit_softcap) == (0, 0)
    assert (gemma3.rope.theta, gemma3.local_rope.theta) == (1e6, 1e4)
    assert gguf_config("gemma3", 7, 64, 4, 16).windows == (None,) * 7
    swa = {"attention.sliding_window": 512, "rope.freq_base_swa": 2e4, "attention.sliding_window_pattern": 2}
    local = gguf_config("gemma3", 4, 64, 4, 16, **swa)
    assert (local.local_rope.theta, local.windows) == (2e4, (512, None) * 2)
    phi3 = [gguf_config("phi3", 2, 64, 4, 16, context_length=n) for n in (4096, 8192)]
    assert [config.windows[0] for config in phi3] == [2047, None]
    assert gguf_config("phi3", 2, 64, 4, 16, **{"attention.sliding_window": 0}).windows == (None, None)


@pytest.mark.parametrize("arch", ["gemma2", "phi3", "llama", "qwen2"])
def test_texts_end_at_tokens_that_are_known_by_their_text(arch):
    """As in llama.cpp, of every family, whatever the file names; but for what goes on behind "<|end|>" in gpt-oss."""

    def ends(known, **stated):
        return set(gguf_config(arch, 2, 64, 4, 16, known=known, **stated).eos_token_ids)

    texts = [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
    ]
    for text in [
        *texts,
        "<｜end▁of▁sentence｜>",
        "<|end_of_text|>",
        "</s>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ]:
        assert ends({text: 7}) == {1, 7}, text
    for text in ["<|im_start|>", "<|fim_prefix|>", "<|channel|>"]:
        assert ends({text: 7}) == {1}, text
    assert ends({"<|return|>": 1, "<|call|>": 8, "<|end|>": 9, "<|channel|>": 5}) == {1, 8}
    assert ends({"<|end|>": 9, "<|call|>": 8}) == {1, 8, 9}


@pytest.mark.parametrize("count", [40, 3000])  # a long vocabulary is stepped over
def test_tokens_known_by_their_text_are_found_in_the_vocabulary(tmp_path, count):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "gemma3")
    writer.add_token_list([*(f"token {i}" for i in range(count)), "<end_of_turn>", "<end_of_turn"])
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_header(tmp_path / "x.gguf").known_tokens == {"<end_of_turn>": count}


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 1000])
@pytest.mark.parametrize("key", [b"tokenizer.ggml.tokens", b"general.tags"])
def test_strings_that_are_longer_than_the_file_are_told(tmp_path, key, length):
    path = tmp_path / "x.gguf"
    strings = struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", length) + b"ab"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + strings)
    with pytest.raises(InputError, match="is truncated or not a GGUF"):
        read_gguf_header(path)


def test_arrays_within_arrays_without_end_are_told(tmp_path):
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000 + struct.pack("<IQ", 4, 0)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + nested)
    with pytest.raises(InputError, match="is truncated or not a GGUF") as caught:
        read_gguf_header(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_norms_of_queries_that_a_family_has_not_are_refused(arch):
    """A llama's rows of queries are interleaved; whether weights of norms would be, nobody says."""
    for name in ("blk.1.attn_q_norm.weight", "blk.0.attn_k_norm.weight"):
        with pytest.raises(InputError, match=rf"'{arch}' with norms of queries and keys \({name}\)"):
            gguf_config(arch, 2, 64, 4, 16, names=[name])
    gguf_config("qwen3", 2, 64, 4, 16, names=[f"blk.{j}.attn_{part}_norm.weight" for j in range(2) for part in "qk"])


@pytest.mark.parametrize("name", ["blk.1.attn_qkv.bias", "blk.0.ffn_up.bias"])
def test_biases_that_phi_has_not_are_refused(name):
    """Queries, keys and values are one matrix there, whose bias nothing would read."""
    with pytest.raises(InputError, match=rf"'phi3' with biases \({name}\)"):
        gguf_config("phi3", 2, 64, 4, 16, names=[name])


def test_what_is_not_known_of_rotary_positions_is_refused():
    def refusal(arch, factors=None, **fields):
        metadata = {"general.architecture": arch, f"{arch}.context_length": 64, f"{arch}.block_count": 1}
        metadata |= {
            f"{arch}.embedding_length": 64,
            f"{arch}.attention.head_count": 4,
            f"{arch}.feed_forward_length": 64,
        }
        metadata |= {f"{arch}.{key}": value for key, value in fields.items()}
        tensors = {"token_embd.weight": TensorInfo(Path("x.gguf"), "F32", (1000, 64), 0, 0)}
        with pytest.raises(InputError) as caught:
            config_of_gguf(metadata, tensors, "float32", factors)
        return str(caught.value)

    short = {"rope_factors_short.weight": (1.0,) * 8}
    assert "supported of Phi-3 alone" in refusal("llama", short)
    assert "longrope" in refusal("phi3", short)  # the long ones are missing
    assert "rope type 'yarn' of Phi-3" in refusal("phi3", **{"rope.scaling.type": "yarn"})
    assert "'gemma3' that rotate part of each head" in refusal("gemma3", **{"rope.dimension_count": 8})
    pattern = {"attention.sliding_window": 4, "attention.sliding_window_pattern": (True, False)}
    assert "attention.sliding_window_pattern has 2 layers of 1" in refusal("gemma3", **pattern)
    assert "attention.sliding_window_pattern 0" in refusal("gemma2", **{"attention.sliding_window_pattern": 0})


def test_more_experts_than_any_model_has_are_refused_before_names_are_made_of_them():
    metadata = {"general.architecture": "qwen3moe"}
    fields = {"context_length": 64, "block_count": 1, "embedding_length": 64, "attention.head_count": 4}
    fields |= {"expert_feed_forward_length": 64, "expert_used_count": 2, "expert_count": 10**9}
    metadata |= {f"qwen3moe.{name}": value for name, value in fields.items()}
    tensors = {"token_embd.weight": TensorInfo(Path("x.gguf"), "F32", (1000, 64), 0, 0)}
    with pytest.raises(InputError, match="expert_count 1000000000 is more than any model has"):
        config_of_gguf(metadata, tensors, "float32")


def test_gguf_rope_factors_and_tokens(tmp_path):
    model = make_tiny_model("llama", tmp_path)
    path = tmp_path / "model.gguf"
    factors = (1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0)
    write_tiny_gguf(model, path, rope_freqs=factors, tokenizer=make_tiny_tokenizer(tmp_path))
    config = read_config(resolve_model(str(path)))
    assert config.rope.factors == factors
    assert (config.bos_token_id, config.eos_token_ids) == (0, (0, 2))  # <|endoftext|> and <|im_end|>
    write_tiny_gguf(model, path, rope_freqs=factors[:3])
    assert "3 rope frequency factors" in message_of(path)


def test_gguf_header_is_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "model.gguf"
    model = make_tiny_model("llama", tmp_path)
    write_tiny_gguf(model, path, tensor_type="Q8_0", tokenizer=make_tiny_tokenizer(tmp_path))
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for name, field in fields.items():
        value = field.contents()
        assert header.metadata[name] == (tuple(value) if isinstance(value, list) else value)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert (info.shape, info.dtype) == (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type.name)


def test_gguf_long_arrays_are_stepped_over(tmp_path):
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(5000)])
    writer.add_array("some.flags", [True, False])
    writer.add_uint32("after", 7)
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(path)
    assert header.metadata == {"general.architecture": "llama", "some.flags": (True, False), "after": 7}
    info = header.tensors["x"]
    assert np.fromfile(path, np.float32, 6, offset=info.offset).tolist() == [0, 1, 2, 3, 4, 5]


def test_broken_ggufs_are_named(tmp_path):
    model = make_tiny_model("llama", tmp_path)
    path = tmp_path / "model.gguf"
    write_tiny_gguf(model, path)
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 300, 20, 5):
        path.write_bytes(data[:size])
        assert str(path) in message_of(path)
    path.write_bytes(data[:4] + struct.pack("<I", 1) + data[8:])
    assert "version 1" in message_of(path)
    rng = np.random.default_rng(0)
    for _ in range(200):  # damage anywhere in the header: refused, or harmless, but nothing else
        damaged = bytearray(data)
        for place in rng.integers(4, 2000, 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(resolve_model(str(path)))
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_a_missing_expert_tensor_is_named(tmp_path, family):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(make_tiny_model(family, tmp_path), path)
    data = path.read_bytes()
    for part in ("ffn_gate_exps", "ffn_down_exps", "ffn_gate_inp"):
        name = f"blk.1.{part}.weight"
        other = name.replace("ffn", "xxx")
        path.write_bytes(data.replace(name.encode(), other.encode(), 1))
        assert f"no tensor {name}" in message_of(path)


def test_gguf_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    """They would be unpacked beyond their ends."""
    path = tmp_path / "model.gguf"
    write_tiny_gguf(make_tiny_model("llama", tmp_path), path, tensor_type="Q8_0")
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight")
    dims, columns, rows = struct.unpack_from("<IQQ", data, at)
    path.write_bytes(data[:at] + struct.pack("<IQQ", dims, columns - 16, rows) + data[at + 20 :])
    assert "blk.0.ffn_up.weight" in message_of(path) and "blocks of 32" in message_of(path)


def test_unsupported_ggufs_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"

    def write(arch, **fields):
        writer = gguf.GGUFWriter(str(path), arch)
        for name, value in fields.items():
            writer.add_uint32(f"{arch}.{name}" if name != "split" else "split.count", value)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("gemma")
    message = message_of(path)
    assert all(word in message for word in (str(path), "'gemma'", "llama", "qwen2", "gemma3"))
    write("qwen2", expert_count=8)
    assert "with 8 experts (expert_count) is not supported" in message_of(path)
    write("llama", split=3)
    assert "NAME-00001-of-00003.gguf" in message_of(path)
    write("llama")
    assert "embedding_length" in message_of(path)


# dummy weights


@pytest.mark.parametrize(("family", "overrides"), [("opt", {"word_embed_proj_dim": 32}), ("qwen3", {})])
def test_dummy_weights_have_the_real_shapes(tmp_path, family, overrides):
    make_tiny_model(family, tmp_path, **overrides)
    real = open_checkpoint(resolve_model(str(tmp_path)))
    dummy, again, other = (dummy_checkpoint(real.config, seed) for seed in (1, 1, 2))
    for load in (
        lambda c, dtype: c.load_embeddings(dtype),
        lambda c, dtype: c.load_layer(0, dtype),
        lambda c, dtype: c.load_layer(2, dtype),
        lambda c, dtype: c.load_head(dtype),
    ):
        tensors = load(dummy, torch.float32)
        shapes = {name: tensor.shape for name, tensor in load(real, torch.float32).items()}
        assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
        assert_same(load(again, torch.float32), tensors, torch.float32)
        assert_same(load(dummy, torch.bfloat16), tensors, torch.bfloat16)
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                assert (tensor == 1).all()
            elif tensor.numel() > 1000:
                assert tensor.std().item() == pytest.approx(0.02, rel=0.1)
                assert not torch.equal(tensor, load(other, torch.float32)[name])
    first, second = (dummy.load_layer(j, torch.float32)["out.weight"] for j in (0, 1))
    assert not torch.equal(first, second)


def test_dummy_rows_differ_in_a_tensor_larger_than_the_pool(monkeypatch):
    from dataclasses import replace

    from test_config import LLAMA_8B

    monkeypatch.setattr("batchgen.models.formats.dummy._VALUES", (1 << 12) + 3)
    config = replace(config_of_hf(LLAMA_8B), vocab_size=300, embed_size=64, hidden_size=64)
    embed = dummy_checkpoint(config).load_embeddings(torch.float32)["embed.weight"]
    assert len(torch.unique(embed, dim=0)) == 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_blocks_are_what_transformers_makes_of_them(tmp_path, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make_tiny_model("gpt_oss", tmp_path, dtype=torch.bfloat16)
    made = in_mxfp4(tmp_path)
    for name, (blocks, scales) in made.items():
        parent, leaf = name.rsplit(".", 1)
        expanded = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
        setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(expanded))
    assert_loads(tmp_path, model, dtype)


@pytest.mark.parametrize(
    ("family", "broken", "said"),
    [
        (
            "mixtral",
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
            "no tensor .*experts.2.w3.weight",
        ),
        (
            "qwen2_moe",
            lambda t: t.pop("model.layers.2.mlp.shared_expert_gate.weight"),
            "no tensor .*shared_expert_gate",
        ),
        (
            "qwen3_moe",
            lambda t: cut(t, "model.layers.0.mlp.gate.weight"),
            r"mlp.gate.weight in .* is \[7, 64\].*asks for \[8, 64\]",
        ),
        (
            "gpt_oss",
            lambda t: cut(t, "model.layers.1.mlp.experts.down_proj"),
            r"down_proj in .* is \[3, 96, 64\].*\[4, 96, 64\]",
        ),
        ("gpt_oss", lambda t: cut(t, "model.layers.1.mlp.router.bias"), r"router.bias in .* is \[3\].*asks for \[4\]"),
        ("gpt_oss", lambda t: t.pop("model.layers.2.self_attn.sinks"), "no tensor model.layers.2.self_attn.sinks"),
    ],
)
def test_wrong_mixtures_are_refused_by_name(tmp_path, family, broken, said):
    make_tiny_model(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    broken(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=said):
        open_checkpoint(resolve_model(str(tmp_path)))


def cut(tensors, name):
    """One row less."""
    tensors[name] = tensors[name][:-1].contiguous()


def test_mxfp4_without_scales_is_refused_by_name(tmp_path):
    make_tiny_model("gpt_oss", tmp_path)
    in_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"no tensor .*down_proj_scales"):
        open_checkpoint(resolve_model(str(tmp_path)))
