"""Random models of the benchmarks: GGUFs are what llama.cpp's converter writes; some models count."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest

from batchgen import Engine, Request, SamplingParams
from batchgen.models.files import read_config, resolve_model
from batchgen.models.formats.gguf.split import read_gguf
from batchgen.models.formats.gguf.tensors import gguf_parts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_shapes

# Sizes of each shape, of rows of whole blocks.
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "moe_intermediate_size": 32, "intermediate_size": 64,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "top_k_experts": 2, "head_dim": 32, "global_head_dim": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(params=random_shapes.SHAPES)
def shape(request, monkeypatch):
    fields, weight_format = random_shapes.SHAPES[request.param]
    small = fields | {name: size for name, size in SMALL.items() if name in fields}
    monkeypatch.setitem(random_shapes.SHAPES, request.param, (small, weight_format))
    return request.param


def test_the_gguf_has_the_shape_and_the_tensors_of_its_architecture(shape, tmp_path):
    path = random_shapes.write_gguf(tmp_path / "model.gguf", shape, layers=6)
    stated, wanted = read_config(resolve_model(str(path))), random_shapes.config_of(shape, 6)[0]
    assert stated.num_params == wanted.num_params and stated.windows == wanted.windows
    assert (stated.num_experts, stated.experts_per_token) == (wanted.num_experts, wanted.experts_per_token)
    assert (stated.state_layers, stated.rope.theta) == (wanted.state_layers, wanted.rope.theta)
    assert stated.attention_of(5) == wanted.attention_of(5)
    header = read_gguf(path)
    assert gguf_parts(stated, header.tensors), "every part has its tensor, of its shape"
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.metadata["general.architecture"])
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    for name in header.tensors:
        plain = name if name.endswith("ssm_a") else name.rpartition(".")[0]
        assert ".".join("{bid}" if part.isdigit() else part for part in plain.split(".")) in known, name


def test_a_store_that_counts_has_each_token_followed_by_the_next(tmp_path, monkeypatch):
    fields, weight_format = random_shapes.SHAPES["gpt-oss-20b"]
    small = fields | {name: size for name, size in SMALL.items() if name in fields} | {"hidden_size": 1088}
    monkeypatch.setitem(random_shapes.SHAPES, "gpt-oss-20b", (small, weight_format))
    path = random_shapes.write_store(tmp_path / "store", "gpt-oss-20b", layers=2, counts=True)
    with Engine(path, dtype="bfloat16") as engine:
        (done,) = engine.generate([Request([7, 80, 31], SamplingParams(max_tokens=6, ignore_eos=True))])
    assert done.samples[0].token_ids == (32, 33, 34, 35, 36, 37)
