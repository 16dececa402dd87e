"""Models with gated short convolutions, run by their layer functions, against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from model_tables import SHORT_CONVS
from plain_model import PlainModel
from test_delta_net import assert_same_logits
from tiny_gguf import round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.hf.config import config_of_hf
from batchgen.models.shard import shard_of
from batchgen.ops import dispatch as ops

VARIANTS = [
    ("lfm2", {}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}),
    ("lfm2", {"conv_L_cache": 2, "num_hidden_layers": 4, "layer_types": None, "full_attn_idxs": [1, 3]}),
    ("lfm2_moe", {}),
    ("lfm2_moe", {"norm_topk_prob": False, "routed_scaling_factor": 1.75, "num_dense_layers": 0}),
    ("lfm2_moe", {"use_expert_bias": False, "conv_bias": True, "num_experts_per_tok": 1, "num_dense_layers": 2}),
]
_CONFIG = {
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_prompts_and_single_tokens_equal_transformers(family, overrides, tmp_path):
    model = make_tiny_model(family, tmp_path, **overrides)
    model.set_attn_implementation("eager")
    checkpoint = open_checkpoint(resolve_model(str(tmp_path)))
    assert checkpoint.config.state is not None
    assert_same_logits(model, PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_ggufs_equal_transformers(family, overrides, tmp_path):
    # What no file states, and what llama.cpp does not have.
    unknown = ("norm_topk_prob", "routed_scaling_factor", "conv_bias")
    model = make_tiny_model(family, tmp_path, **{k: value for k, value in overrides.items() if k not in unknown})
    path = write_tiny_gguf(model, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(resolve_model(str(path)))
    wanted = open_checkpoint(resolve_model(str(tmp_path))).config
    for name in ("state", "state_layers", "num_kv_heads", "intermediate_size", "dense_layers", "num_params"):
        assert getattr(checkpoint.config, name) == getattr(wanted, name), name
    assert_same_logits(model, PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.mark.parametrize("family", SHORT_CONVS)
def test_packed_ggufs_equal_their_dequantized_model(family, tmp_path):
    widths = {"moe_intermediate_size": 64} if family == "lfm2_moe" else {"block_multiple_of": 32}
    model = make_tiny_model(family, tmp_path, **widths)
    path = write_tiny_gguf(model, tmp_path / "model.gguf", tensor_type="Q8_0")
    checkpoint = open_checkpoint(resolve_model(str(path)))
    assert_same_logits(round_as_gguf(model, "Q8_0"), PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.mark.parametrize("kind", ["safetensors", "store"])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
@torch.inference_mode()
def test_results_of_ranks_add_up(family, overrides, kind, tmp_path):
    """Each tensor-parallel rank has some channels of a convolution, and the columns of the projection after it."""
    make_tiny_model(family, tmp_path / "hf", **overrides)
    files = resolve_model(str(tmp_path / "hf"))
    if kind == "store":
        convert(files, tmp_path / "store", dtype="float32")
        files = resolve_model(str(tmp_path / "store"))
    config = read_config(files)
    whole = PlainModel(open_checkpoint(files), 2)
    ranks = [PlainModel(open_checkpoint(files, shard=shard_of(config, rank, 2)), 2) for rank in range(2)]
    hidden = torch.randn(80, config.hidden_size, generator=torch.Generator().manual_seed(2))
    for layer in range(config.num_layers):
        expected, *parts = (
            ops.linear(
                each.mix(layer, hidden, [0, 1], [70, 10]),
                each.layers[layer]["out.weight"],
                each.layers[layer].get("out.bias"),
            )
            for each in (whole, *ranks)
        )
        torch.testing.assert_close(sum(parts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 120, "block_multiple_of": 16}, 80),
        ({"intermediate_size": 120, "block_multiple_of": 64}, 128),
        ({"intermediate_size": 120, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.7}, 192),
        ({"intermediate_size": 120, "block_auto_adjust_ff_dim": False}, 120),
        ({"intermediate_size": 999, "block_ff_dim": 120, "block_auto_adjust_ff_dim": False}, 120),
    ],
)
def test_the_width_of_an_mlp_is_that_of_transformers(keys, width, tmp_path):
    model = make_tiny_model("lfm2", tmp_path, **keys)
    assert len(model.model.layers[0].feed_forward.w1.weight) == width
    assert config_of_hf({**_CONFIG, **keys}).intermediate_size == width
    assert read_config(resolve_model(str(tmp_path))).num_params == sum(p.numel() for p in model.parameters())


def test_older_files_of_lfm2_have_keys_of_their_own():
    config = config_of_hf({**_CONFIG, "full_attn_idxs": [1], "tie_embedding": False, "block_ff_dim": 96})
    assert (config.state_layers, config.tied_embeddings) == ((0,), False)
    assert config_of_hf(_CONFIG).state is None, "without a list all layers attend"
    for keys, named in (
        ({"layer_types": ["conv", "conv"]}, "at least one of 2 layers"),
        ({"layer_types": ["conv", "mamba"]}, "'mamba'"),
        ({"architectures": ["Lfm2MoeForCausalLM"]}, "layer_types"),
        ({"tie_embedding": None}, "tie_embedding"),
    ):
        with pytest.raises(InputError, match=named):
            config_of_hf(json.loads(json.dumps({**_CONFIG, **keys})))
