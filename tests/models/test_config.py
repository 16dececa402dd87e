"""ModelConfig against what transformers makes of the same config.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
import transformers
from model_tables import DELTA_NETS, FAMILIES, GEMMA4, MODELS
from tiny_models import classes_of, make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig, RopeConfig
from batchgen.models.files import ModelFiles, read_config
from batchgen.models.hf.config import config_of_hf
from batchgen.models.hf.keys import FIXED, IGNORED, KEYS, READ_APART
from batchgen.models.layers import rope_table

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
OPT_30B = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 7168,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
}
VARIANTS = [
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),  # as OPT-350m
    ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("qwen2_moe", {"mlp_only_layers": [1], "qkv_bias": False}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    ("qwen3_next", {"mlp_only_layers": [0], "attention_bias": True}),
    ("qwen3_next", {"decoder_sparse_step": 2, "full_attention_interval": 3}),
    ("qwen3_5", {"tie_word_embeddings": True, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 2}),
    ("qwen3_5", {"layer_types": ["full_attention"] * 4}),
    ("lfm2", {"conv_bias": True, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False}),
    ("lfm2_moe", {"conv_bias": True, "num_dense_layers": 0, "use_expert_bias": False}),
    *(model for model in MODELS.values() if model[0] in GEMMA4),
]


def hf_model(family: str, **overrides):
    """A tiny transformers model without memory behind its weights."""
    config_class, model_class = classes_of(family)
    fields = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields |= {"ffn_dim": 96} if family == "opt" else {"intermediate_size": 96, "num_key_value_heads": 2}
    fields |= {"num_hidden_layers": 4} if family in DELTA_NETS else {}  # the last one attends
    fields |= {"vocab_size_per_layer_input": 320} if family == "gemma4" else {}
    fields |= {"pad_token_id": 0} if family in ("phi3", "smollm3") else {}  # whose own is beyond this vocabulary
    fields |= what_must_be_stated(family, overrides.get("num_hidden_layers", 3))
    with torch.device("meta"):
        return model_class(config_class(**{**fields, **overrides}))


def what_must_be_stated(family: str, layers: int) -> dict:
    """The keys that a config must state, because batchgen refuses the default, or transformers cannot run it."""
    if family == "ministral":
        return {"head_dim": 16}
    if family == "lfm2_moe":
        return {"layer_types": ["conv"] * (layers - 1) + ["full_attention"]}
    return {"layer_types": ["full_attention"] * layers} if family == "granitemoehybrid" else {}


def config_of(model) -> ModelConfig:
    stated = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return config_of_hf(json.loads(json.dumps(stated, default=str)))


def weights_of(module):
    """Its parameters, and biases of experts, which are no parameters to transformers."""
    return [*module.parameters(), *(values for name, values in module.named_buffers() if name.endswith("expert_bias"))]


@pytest.mark.parametrize(("family", "overrides"), [*((family, {}) for family in FAMILIES), *VARIANTS])
def test_parameter_count_is_that_of_transformers(family, overrides):
    model = hf_model(family, **overrides)
    config = config_of(model)
    assert config.family == family
    scales = config.layer_scale * config.num_layers  # which transformers does not count among its parameters
    assert config.num_params == sum(map(torch.numel, weights_of(model))) + scales
    layers = model.model.decoder.layers if family == "opt" else model.model.layers
    sinks = config.sinks * config.num_heads  # which are loaded with the head
    sizes = [sum(map(torch.numel, weights_of(layer))) + config.layer_scale for layer in layers]
    if len(set(map(config.kind_of, range(config.num_layers)))) == 1:
        assert config.params_per_layer + sinks == sizes[0]
    else:  # the largest size of each group
        assert config.params_per_layer >= max(sizes)
    assert config.layer_params + len(sizes) * sinks == sum(sizes)
    assert config.weight_bytes(2) == 2 * config.num_params
    json.dumps(dataclasses.asdict(config))


def test_counts_of_published_models():
    llama, opt = config_of_hf(LLAMA_8B), config_of_hf(OPT_30B)
    assert llama.num_params == 8_030_261_248
    assert llama.kv_bytes_per_token(2) == 131_072
    assert (llama.dtype, llama.eos_token_ids) == ("bfloat16", (128001, 128008, 128009))
    assert 29.9e9 < opt.num_params < 30.1e9
    assert opt.kv_bytes_per_token(2) == 48 * 2 * 7168 * 2
    assert (opt.position_offset, opt.rope, opt.final_norm, opt.tied_embeddings) == (2, None, True, True)
    assert (opt.num_kv_heads, opt.head_dim, opt.dtype, opt.eos_token_ids) == (56, 128, "float16", (2,))


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_torch_counts(family, tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    model = make_tiny_model(family, tmp_path)
    model.set_attn_implementation("eager")
    config = config_of(model)
    if config.num_experts:
        model.set_experts_implementation("eager")  # the counter does not know the others
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([[8]]), past_key_values=cache)
    ropes = {config.rope_of(layer) for layer in range(config.num_layers)} - {None}
    rope_flops = config.head_dim * len(ropes)  # the reference makes angles by a product
    expected = config.flops_per_token(4)
    if config.state is not None:  # the update is no matrix product; the reference convolves the token before, too
        convolution = 2 * config.state.kernel * config.state.channels
        expected += len(config.state_layers) * (convolution - 7 * math.prod(config.state.matrix_shape))
    assert counter.get_total_flops() - expected in (0, rope_flops)


def test_flops_stop_growing_at_the_window():
    config = config_of(hf_model("mistral", sliding_window=16))
    assert config.flops_per_token(16) == config.flops_per_token(1000) > config.flops_per_token(15)


def test_old_and_new_spelling_mean_the_same():
    new = {k: v for k, v in LLAMA_8B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}, "dtype": "bfloat16"}
    old_type = {k: v for k, v in LLAMA_8B["rope_scaling"].items() if k != "rope_type"} | {"type": "llama3"}
    assert config_of_hf(new) == config_of_hf(LLAMA_8B)
    assert config_of_hf(LLAMA_8B | {"rope_scaling": old_type}) == config_of_hf(LLAMA_8B)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_states_only_shapes_takes_the_defaults_of_transformers(family):
    fields = {"architectures": [classes_of(family)[1].__name__], "hidden_size": 64, "num_hidden_layers": 3}
    fields |= {"num_attention_heads": 4, "vocab_size": 300}
    fields |= {"ffn_dim": 96} if family == "opt" else {"intermediate_size": 96, "num_key_value_heads": 2}
    fields |= what_must_be_stated(family, 3)
    fields |= {"num_hidden_layers": 4} if family in DELTA_NETS else {}
    fields |= {"vocab_size_per_layer_input": 300} if family == "gemma4" else {}
    assert config_of_hf(fields) == config_of(hf_model(family, **fields))


# What published files have beside the plain keys.
_GEMMA4_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
PUBLISHED = {
    "gemma4": {
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": _GEMMA4_ROPES,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified": {
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "rope_parameters": _GEMMA4_ROPES,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 0,
    },
    "opt": {
        "activation_dropout": 0.0,
        "prefix": "</s>",
        "layerdrop": 0.0,
        "_remove_final_layer_norm": False,
        "init_std": 0.02,
    },
    "llama": {
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "is_llama_config": True,
        "rope_theta": 100000,
        "unsloth_fixed": True,
        "activation": "swiglu",
        "num_labels": 2,
        "loss_type": "ForCausalLMLoss",
        "neftune_noise_alpha": 5,
        "tokenizer_padding_side": "right",
        "tokenizer_model_max_length": 2048,
    },
    "mistral": {"sliding_window": None, "head_dim": None, "rope_theta": 1000000.0, "attention_dropout": 0.0},
    "lfm2": {
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_dim": 2048,
        "conv_dim_out": 2048,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_heads": 32,
        "rope_theta": 1000000.0,
        "use_pos_enc": True,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16, "theta": 1000000.0, "use_pos_enc": True},
    "qwen2": {
        "use_mrope": False,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 21,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen3": {"attention_bias": False, "max_window_layers": 36, "rope_scaling": None, "sliding_window": None},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "query_pre_attn_scalar": 144},
    "gemma3": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "rope_scaling": None,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": 6,
    },
    "phi3": {
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "interpolate_factor": 1,
        "full_attn_mod": 1,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    },
    "granite": {
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
    },
    "smollm3": {
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "seed_oss": {
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "pretraining_tp": 1,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
    },
    "olmo2": {"rope_scaling": None, "rope_theta": 500000, "attention_dropout": 0.0},
    "olmo3": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
    },
    "ministral": {"sliding_window": 32768, "head_dim": 128, "rope_theta": 1e8, "rms_norm_eps": 1e-05},
    "ministral3": {
        "head_dim": 128,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
    },
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False, "rope_scaling": None, "router_aux_loss_coef": 0.01},
    "phimoe": {
        "attention_bias": True,
        "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"},
        "hidden_dropout": 0.0,
        "input_jitter_noise": 0.01,
        "lm_head_bias": True,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "long_factor": [1.5] * 64,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64,
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "sliding_window": 131072,
    },
    "granitemoe": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "output_router_logits": False},
    "granitemoeshared": {"shared_intermediate_size": 1024, "attention_multiplier": 0.015625, "rope_scaling": None},
    "granitemoehybrid": {
        "attention_multiplier": 0.015625,
        "init_method": "mup",
        "layer_types": ["attention"] * 32,
        "logits_scaling": 4,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_head": 32,
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 2048,
    },
    "mixtral": {"output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1e6},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 21, "sliding_window": 32768, "mlp_only_layers": []},
    "qwen3_moe": {
        "head_dim": 128,
        "max_window_layers": 28,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_scaling": None,
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    "gpt_oss": {
        "initial_context_length": 4096,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    "qwen3_next": {
        "attn_output_gate": True,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "use_sliding_window": False,
    },
    "qwen3_5": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "qwen3_5_moe": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"mrope_section": [11, 11, 10], "rope_theta": 10000000, "rope_type": "default"},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_published_files_state_is_not_refused(family):
    config_class, model_class = classes_of(family)
    stated = {
        "architectures": [model_class.__name__],
        "model_type": config_class.model_type,
        "auto_map": {"AutoConfig": "x.Y"},
    }
    stated |= {"_name_or_path": "x", "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
    assert config_of_hf(stated | PUBLISHED[family]).family == family


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "llama"])
def test_norms_of_queries_and_keys_are_refused_where_the_family_has_none(family):
    config_class, model_class = classes_of(family)
    stated = {"architectures": [model_class.__name__], "model_type": config_class.model_type, "use_qk_norm": True}
    if family == "llama":
        with pytest.raises(InputError, match="use_qk_norm true is not supported"):
            config_of_hf(stated)
    else:
        assert config_of_hf(stated).family == family


def test_end_tokens_of_both_files_are_united():
    base = {k: v for k, v in LLAMA_8B.items() if k != "eos_token_id"}
    assert config_of_hf(base | {"eos_token_id": 7}, {"eos_token_id": [9, 7]}).eos_token_ids == (9, 7)
    assert config_of_hf(base | {"eos_token_id": None}).eos_token_ids == ()


ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 20,
        "beta_slow": 2,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("parameters", ROPES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (1e6, 80), (100000.0, 8)])
def test_rope_is_that_of_transformers(parameters, theta, head_dim):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    reference = LlamaRotaryEmbedding(hf)
    rope = config_of_hf(hf.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    ours = np.array(rope.inv_freq(head_dim), dtype=np.float32)
    theirs = reference.inv_freq.numpy()
    # Every operation is the same, so equal powers give equal bits; torch's powers may be one unit in the last
    # place off, on which instruction set it runs decides where.
    plain = np.array(RopeConfig(theta).inv_freq(head_dim), np.float32)
    same_power = plain == (1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)).numpy()
    assert same_power.mean() > 0.9
    np.testing.assert_array_equal(ours[same_power], theirs[same_power])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert rope.attention_scaling() == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("part", [1.0, 0.75])
@pytest.mark.parametrize("context", [256, 1000])
def test_longrope_is_that_of_transformers(part, context):
    """Its factors go by the longest sequence that an engine has."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    count, rng = int(32 * part) // 2, np.random.default_rng(3)
    scaling = {name: rng.uniform(1, 9, count).tolist() for name in ("short_factor", "long_factor")}
    hf = transformers.Phi3Config(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=1024, original_max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": part, **scaling},
    )  # fmt: skip
    config = config_of_hf(hf.to_dict() | {"architectures": ["Phi3ForCausalLM"]})
    cos, sin = rope_table(config.rope, config.head_dim, context)
    wanted = Phi3RotaryEmbedding(hf)(torch.zeros(1), torch.arange(context)[None])
    for found, meant, rest in ((cos, wanted[0][0], 1.0), (sin, wanted[1][0], 0.0)):
        torch.testing.assert_close(found[:, :count], meant[:, :count], atol=1e-4, rtol=1e-4)
        assert (found[:, count:] == rest).all() and found.shape == (context, 16)


def test_rope_factors_divide_each_frequency():
    plain = np.array(RopeConfig(10000.0).inv_freq(8))
    divided = np.array(RopeConfig(10000.0, factors=(1.0, 2.0, 4.0, 8.0)).inv_freq(8))
    np.testing.assert_allclose(divided, plain / [1, 2, 4, 8], rtol=1e-7)


def test_yarn_lengthens_the_context():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_of_hf(LLAMA_8B | {"max_position_embeddings": 32768, "rope_scaling": rope})
    assert config.max_position == 131072


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("gemma2", {}),
        ("phi3", {"sliding_window": 16}),
        ("gemma3", {"num_hidden_layers": 7}),
        ("gemma3", {"sliding_window_pattern": 2}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
    ],
)
def test_windows_are_those_of_transformers(family, overrides):
    model = hf_model(family, **overrides)
    attentions = [layer.self_attn for layer in model.model.layers]
    if family in ("mistral", "phi3"):
        expected = tuple(model.config.sliding_window for _ in attentions)
    else:
        expected = tuple(attention.sliding_window for attention in attentions)
    assert config_of(model).windows == expected


MIXTRAL, QWEN_MOE = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Mixtral", "Qwen3Moe"))
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}
GEMMA, GEMMA_3 = ({"architectures": [f"Gemma{n}ForCausalLM"]} for n in (2, 3))
PHI = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": None}
REFUSED = [
    ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3NextForCausalLM"]),
    ({"architectures": ["Qwen3_5ForCausalLM"], "output_gate_type": "sigmoid"}, ["output_gate_type", "'swish'"]),
    ({"rope_gain": 2.0}, ["rope_gain", "2.0", "(llama)"]),
    ({"attention_sink_tokens": [4]}, ["attention_sink_tokens", "[4]"]),
    (GPT_OSS | {"swiglu_limit": 5.0}, ["swiglu_limit", "5.0", "7.0"]),
    (GPT_OSS | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}, ["gpt_oss", "AWQ"]),
    (MIXTRAL | {"num_experts_per_tok": 9}, ["9 of 8 experts"]),
    (QWEN_MOE | {"mlp_only_layers": "1"}, ["mlp_only_layers", "list"]),
    (QWEN_MOE | {"decoder_sparse_step": 0}, ["decoder_sparse_step", "at least 1"]),
    ({"architectures": [], "model_type": "gemma3n"}, ["gemma3n"]),
    ({"architectures": ["PaliGemmaForConditionalGeneration"]}, ["PaliGemmaForConditionalGeneration", "Gemma3"]),
    ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
    ({"model_type": "granite"}, ["model_type", "'granite'", "LlamaForCausalLM"]),
    ({"embedding_multiplier": 12.0}, ["embedding_multiplier", "12.0"]),
    ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, ["per_layer_config"]),
    ({"is_causal": False}, ["is_causal", "false"]),
    ({"is_encoder_decoder": True}, ["is_encoder_decoder", "true"]),
    (MIXTRAL | {"norm_topk_prob": False}, ["norm_topk_prob", "false"]),
    (MIXTRAL | {"num_experts": 8, "num_local_experts": 4}, ["num_experts 8", "num_local_experts 4"]),
    (GEMMA_3 | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
    (GEMMA_3 | {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 8.0}}, ["full_attention"]),
    ({"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 4, 4]}}, ["type", "mrope"]),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}}, ["mrope_section", "default"]),
    ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8192}}, ["factor 4.0", "default"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "high_freq_factor"]),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8192}}, ["yarn", "factor"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, ["factor"]),
    ({"rope_scaling": [4.0]}, ["rope_scaling", "object"]),
    ({"rope_theta": None}, ["rope_theta", "null"]),
    ({"sliding_window": 4096}, ["sliding_window", "4096"]),
    ({"layer_types": ["sliding_attention"] * 32}, ["layer_types"]),
    ({"vocab_size": 10**12}, ["vocab_size", "1000000000000"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
    ({"num_attention_heads": 10**10}, ["num_attention_heads"]),
    (MIXTRAL | {"num_local_experts": 10**9}, ["num_local_experts"]),
    ({"tie_word_embeddings": None}, ["tie_word_embeddings", "null"]),
    ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
    ({"eos_token_id": "2"}, ["eos_token_id", "'2'"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, ["GPTQ", "3 bits"]),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"hidden_act": "xielu"}, ["xielu", "silu"]),
    ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "silu"]),
    (GEMMA | {"query_pre_attn_scalar": -1}, ["query_pre_attn_scalar", "-1"]),
    (GEMMA | {"final_logit_softcapping": -1.0}, ["logit_softcap", "-1"]),
    (GEMMA | {"sliding_window": None}, ["sliding_window"]),
    (GEMMA | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    (PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["1 rope", "128"]),
    (PHI | {"rope_scaling": {"type": "longrope"}}, ["longrope", "short_factor"]),
    (PHI | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear", "longrope"]),
    (PHI | {"partial_rotary_factor": 0.995}, ["even", "127"]),
    ({"num_key_value_heads": 3}, ["32", "3"]),
    ({"hidden_size": 4100}, ["4100", "32"]),
    ({"hidden_size": None}, ["hidden_size"]),
    ({"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
    ({"head_dim": 33}, ["head_dim", "33"]),
    ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(change, named):
    with pytest.raises(InputError) as caught:
        config_of_hf(LLAMA_8B | change)
    message = str(caught.value)
    assert "\n" not in message
    for word in named:
        assert word in message


@pytest.mark.parametrize("family", DELTA_NETS)
def test_gated_delta_nets_have_one_activation(family):
    """It is that of the convolution before the recurrence, too."""
    stated = {"architectures": [classes_of(family)[1].__name__]}
    assert config_of_hf(stated | {"hidden_act": "swish"}).activation == "silu"
    with pytest.raises(InputError, match="hidden_act 'gelu_new' is not supported"):
        config_of_hf(stated | {"hidden_act": "gelu_new"})


def test_unknown_layer_types_are_refused():
    qwen = LLAMA_8B | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}
    with pytest.raises(InputError, match="linear_attention"):
        config_of_hf(qwen | {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(InputError, match="layer_types: 1 do not fit 2"):
        config_of_hf(qwen | {"layer_types": ["full_attention"]})


@pytest.mark.parametrize("kinds", ["ff", "sf", "ss"])
def test_mistral_with_layer_types_has_windows_where_these_say_so(kinds):
    """Transformers takes it for a Ministral then."""
    types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    mistral = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "rope_scaling": None}
    config = config_of_hf(mistral | {"sliding_window": 16, "layer_types": types})
    assert config.windows == tuple(16 if kind == "s" else None for kind in kinds)


@pytest.mark.parametrize("activation", ["silu", "swish", "quick_gelu"])
def test_activations_that_opt_cannot_have_are_refused_before_weights_are_read(activation):
    with pytest.raises(InputError, match=f"activation_function '{activation}'.*relu"):
        config_of_hf(OPT_30B | {"activation_function": activation})


class TestKeysAreThoseOfTransformers:
    """Every key of the installed configuration classes is known, and left out it means the same."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_key_is_read_or_of_no_matter_or_has_one_value(self, family):
        fields = {field.name: field.default for field in dataclasses.fields(classes_of(family)[0])}
        unknown = set(fields) - set(KEYS[family]) - set(FIXED[family]) - IGNORED - READ_APART
        assert not unknown, f"transformers has keys of {family} that batchgen does not know"
        for name, known in FIXED[family].items():
            assert fields.get(name) in known, name

    @pytest.mark.parametrize("family", FAMILIES)
    def test_what_is_left_out_has_their_defaults(self, family):
        config_class = classes_of(family)[0]
        fields = {field.name: field for field in dataclasses.fields(config_class)}
        apart = {"rope_theta", "rope_local_base_freq", "sliding_window_pattern", "head_dim", "layer_types"}
        apart |= {"full_attention_interval", "global_head_dim", "num_global_key_value_heads", "per_layer_config"}
        apart |= {"tie_embedding", "block_ff_dim"}
        for name, key in KEYS[family].items():
            if name not in fields:
                assert name in apart, name
                continue
            assert (key.default, type(key.default)) == (fields[name].default, type(fields[name].default)), name
            assert key.nullable == ("None" in str(fields[name].type)) or (family, name) in NULL_FAILS, name
        if family not in ("opt", "gpt_oss", "gemma3", *GEMMA4):
            assert KEYS[family]["rope_theta"].default == config_class.default_theta


# Null is allowed by their types, and stops their models.
NULL_FAILS = {
    ("qwen2_moe", "num_key_value_heads"),
    ("ministral", "sliding_window"),
    *itertools.product(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        (
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
            *("num_local_experts", "num_experts_per_tok"),
        ),
    ),
}


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_scaling.factor", "eos_token_id.1", "unknown.deep.0"])
@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"__float__": "NaN"}'])
def test_what_is_no_number_is_refused_by_its_key(name, text, tmp_path):
    value = "@"
    for part in reversed(name.split(".")[1:]):
        value = [*[7] * int(part), value] if part.isdigit() else {part: value}
    for file in ("config.json", "generation_config.json"):
        stated = {"config.json": LLAMA_8B, "generation_config.json": {}} | {file: {name.split(".")[0]: value}}
        for each, content in stated.items():
            content = LLAMA_8B | content if each == "config.json" else content
            (tmp_path / each).write_text(json.dumps(content).replace('"@"', text))
        with pytest.raises(InputError, match=f"{file} has a {name} that is no finite number"):
            read_config(ModelFiles(tmp_path, "hf", "any"))


ROPES_APART = ("opt", "phimoe", "ministral3", "gemma3", "olmo3", "phi3")
QWEN_CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*ROPES_APART, *GEMMA4)])
class TestScalingBesideRopeParameters:
    """Qwen's model cards advise it, in files of transformers 5, which then forgets the base that was in the others."""

    @pytest.mark.parametrize("card", [QWEN_CARD, {"type": "yarn", **{k: QWEN_CARD[k] for k in list(QWEN_CARD)[1:]}}])
    def test_it_is_refused_with_what_to_write_instead(self, family, card):
        stated = {"architectures": [classes_of(family)[1].__name__], "rope_scaling": card}
        stated |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
        with pytest.raises(InputError, match=r'rope_scaling beside rope_parameters.*"rope_theta": 5000000\.0'):
            config_of_hf(stated)

    def test_it_is_taken_where_both_ways_of_reading_it_are_one(self, family):
        stated = {"architectures": [classes_of(family)[1].__name__], "rope_scaling": QWEN_CARD | {"rope_theta": 5e6}}
        stated |= what_must_be_stated(family, 32)
        rope = config_of_hf(stated | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}).rope
        assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 5e6)


def test_absurd_sizes_are_refused_before_anything_is_made_of_them():
    tracemalloc.start()
    try:
        for key in ("num_hidden_layers", "num_local_experts", "num_attention_heads", "vocab_size", "head_dim"):
            with pytest.raises(InputError, match=key):
                config_of_hf(MIXTRAL | {key: 10**10})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_the_wrong_kind_are_input_errors(family, tmp_path):
    """Whatever stands in a config.json, it is a model or one line that names the place and the key."""
    path = tmp_path / "config.json"
    base = {"architectures": [classes_of(family)[1].__name__], "num_hidden_layers": 2, "dtype": "float32"}
    base |= what_must_be_stated(family, 2)
    base |= {"full_attention_interval": 2} if family in DELTA_NETS else {}
    for key in sorted({*KEYS[family], *FIXED[family], *READ_APART, "quantization_config", "model_type", "layer_types"}):
        for value in ("x", -1, 2.5, ["x"], {"a": {}}, True, None, 10**12):
            path.write_text(json.dumps(base | {key: value}))
            try:
                read_config(ModelFiles(tmp_path, "hf", "any"))
            except InputError as error:
                assert str(tmp_path) in str(error) and "\n" not in str(error)
                assert key in str(error) or isinstance(value, dict) or key in NAMED_OTHERWISE, (key, value, str(error))


# A model without num_key_value_heads has as many as heads; a format has a name; there is one architecture.
NAMED_OTHERWISE = (
    "block_ffn_dim_multiplier",
    "full_attention_interval",
    "num_attention_heads",
    "quantization_config",
    "architectures",
    "num_experts_per_tok",
    "dtype",
)


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys, batchgen.models.config, batchgen.models.files;"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestElementwiseBytes:
    # hidden 8, MLP 12, 4 heads and 2 KV heads of 2: q 8, k and v 4 each
    LLAMA = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
    }

    def test_llama(self):
        norms, rotary, kv_write, activation, adds = 2 * 16, 2 * (8 + 4), 2 * 8, 24 + 12, 2 * 24
        expected = norms + rotary + kv_write + activation + adds
        config = config_of_hf(self.LLAMA)
        assert config.elementwise_bytes_per_token(2) == 2 * expected
        assert config.elementwise_bytes_per_token(4) == 4 * expected

    def test_norms_of_queries_and_keys_count(self):
        plain = config_of_hf(self.LLAMA)
        normed = dataclasses.replace(plain, qk_norm=True)
        assert normed.elementwise_bytes_per_token(2) - plain.elementwise_bytes_per_token(2) == 2 * 2 * (8 + 4)

    def test_state_layers_count_by_their_share(self):
        shape = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "head_dim": 2}
        shape |= {"linear_value_head_dim": 5, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4}
        norms, activation, adds = 2 * 16, 24 + 12, 2 * 24
        attention = 2 * (8 + 4) + 2 * (8 + 4) + 2 * 8 + 3 * 8  # norms, rotary, KV and output gate
        state = 2 * (6 + 6 + 20) + 3 * 20
        expected = norms + activation + adds + (attention + 3 * state) // 4
        assert config_of_hf(self.LLAMA | shape).elementwise_bytes_per_token(2) == 2 * expected

    def test_opt(self):
        config = config_of_hf(
            {
                "architectures": ["OPTForCausalLM"],
                "hidden_size": 8,
                "ffn_dim": 12,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "vocab_size": 10,
            }
        )
        norms, scaling, kv_write, activation, adds = 2 * 16, 2 * 8, 2 * 16, 24, 2 * 24
        assert config.elementwise_bytes_per_token(1) == norms + scaling + kv_write + activation + adds
