"""Tiny GGUFs with the tensors and fields that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from model_tables import DELTA_NETS, NORMS_LESS_ONE, SHORT_CONVS

_GGUF_MIXTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_GGUF_MIXTURES |= {"qwen3_next": "qwen3next", "qwen3_5_moe": "qwen35moe", "olmoe": "olmoe"}
_GGUF_MIXTURES |= {"phimoe": "phimoe", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe"}
_GGUF_MIXTURES |= {"lfm2_moe": "lfm2moe"}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn_sinks",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn": "ssm_a",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_LFM_GGUF_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}
_OUTPUT_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA4_GGUF_NAMES = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_GEMMA4_GGUF_TENSORS = {
    ".layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_GEMMA_GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def as_q4_k_m(num_layers: int) -> Callable[[str], str]:
    """The type of each matrix of a GGUF as llama.cpp's quantizer chooses them for Q4_K_M."""

    def kind(name: str) -> str:
        if name == "output.weight":
            return "Q6_K"
        if name.startswith("blk.") and any(part in name for part in ("attn_v", "ffn_down")):
            layer, eighth = int(name.split(".")[1]), num_layers // 8
            more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
            return "Q6_K" if more else "Q4_K"
        return "Q4_K"

    return kind


def mixed_types(family: str) -> Callable[[str], str]:
    """The types of a GGUF's matrices: as of Q4_K_M, or mostly Q4_0 with others between.

    In some families parts of gate_up differ.
    """
    if family in ("llama", "mixtral", "gpt_oss"):
        return as_q4_k_m(2)
    kinds = {
        "output.weight": "Q6_K", "token_embd.weight": "Q8_0", "blk.1.attn_v.weight": "Q5_1",
        "blk.0.attn_output.weight": "F16",
    }  # fmt: skip
    if family in ("qwen2", "qwen3_moe"):
        kinds |= {"blk.0.ffn_gate.weight": "Q8_0", "blk.1.ffn_gate_exps.weight": "Q8_0", "blk.1.attn_k.weight": "BF16"}
    if family == "phi3":
        kinds |= {"blk.0.ffn_up.weight": "Q8_0", "blk.1.attn_qkv.weight": "Q5_0"}
    return lambda name: kinds.get(name, "Q4_0")


def write_tiny_gguf(  # a line for each key and each name of the format
    model,
    path: Path,
    *,
    tensor_type: str | Callable[[str], str] = "F32",
    tokenizer=None,
    rope_freqs=None,
    tensors_per_part: int = 0,
    pre_tokenizer: str = "gpt-2",
    add_bos: bool | None = False,
    arch: str | None = None,
) -> Path:
    """A model of `GGUF_FAMILIES` as llama.cpp's converter would write it; returns its first file.

    tensor_type: "F32", "F16", "BF16", "Q8_0" or another, for matrices, or what gives it for a name; one that the gguf
    package cannot quantize to has random numbers. Vectors and routers stay F32. tokenizer: to carry along; of a
    byte-level one the name of its pre-tokenizer, and whether it is said that a text begins with BOS, or nothing of it.
    arch: architecture that is named, if it is not that of the family.
    rope_freqs: values for `rope_freqs.weight`. tensors_per_part: of each file of a split one; 0: it is one file.
    """
    import gguf
    import numpy as np
    from gguf_blocks import random_rows

    config, family = model.config, model.config.model_type.removesuffix("_text")
    arch = arch or {**_GGUF_MIXTURES, "olmo3": "olmo2", "ministral3": "mistral3", "qwen3_5": "qwen35"}.get(
        family, family
    )
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=tensors_per_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if family in SHORT_CONVS else config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    head_dim = 0
    if family == "gemma4":
        rope_freqs = _write_gemma4(writer, config)
    else:
        head_dim = _write_sizes(writer, model, family)
    if family in _GGUF_MIXTURES:
        _write_mixture(writer, config, family)
    elif family in ("gemma2", "gemma3"):
        _write_gemma(writer, config, family)
    if family in ("phi3", "phimoe"):
        _write_phi3(writer, config, head_dim)
    elif family == "olmo3":
        _write_olmo3(writer, config)
    elif family == "ministral3":
        _write_yarn(writer, config.rope_parameters)
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if family.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in DELTA_NETS:
        _write_delta_net(writer, config, family)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, pre_tokenizer, add_bos)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, values in _gguf_tensors(model, family):
        if arch in ("llama", "granite", "granitemoe", "smollm3", "mistral3") and name.split(".")[-2] in (
            "attn_q",
            "attn_k",
        ):
            heads = values.shape[0] // head_dim
            halves = values.reshape(heads, 2, head_dim // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        own = tensor_type if isinstance(tensor_type, str) else tensor_type(name)
        unquantized = (".bias", "ssm_conv1d.weight", "shortconv.conv.weight")
        is_vector = values.ndim == 1 or name.endswith(unquantized) or "ffn_gate_inp" in name
        if is_vector or own == "F32":
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType[own]
        try:
            packed = gguf.quants.quantize(values, kind)
        except NotImplementedError:  # the package does not pack these
            rows = values.reshape(-1, values.shape[-1])
            packed = random_rows(own, *rows.shape, seed=sum(map(len, writer.tensors))).reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0]


def _write_mixture(writer, config, family: str) -> None:
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "lfm2_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        _write_yarn(writer, config.rope_parameters)


def _write_delta_net(writer, config, family: str) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(int(config.head_dim * 0.25))
    if family != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _as_delta_net_gguf(config, name: str, values):
    """The tensors that llama.cpp's converter makes of one: names in transformers with their suffix, and values."""
    import numpy as np

    heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, group = heads * key_dim, value_heads // heads

    def tiled(x, size: int):  # rows of value heads, from groups of a key head to the n-th of each group
        return x.reshape(heads, group, size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    stem, suffix = name.rsplit(".", 1)
    part = stem.removeprefix("linear_attn.")
    if config.model_type != "qwen3_next" and group > 1:
        if part in ("in_proj_qkv", "conv1d"):
            values = np.concatenate([values[: 2 * keys], tiled(values[2 * keys :], value_dim)])
        elif part in ("in_proj_z", "in_proj_a", "in_proj_b") or suffix in ("A_log", "dt_bias"):
            values = tiled(values, value_dim if part == "in_proj_z" else 1)
        elif part == "out_proj":
            values = np.ascontiguousarray(tiled(values.T, value_dim).T)
    if suffix == "A_log":
        return [("ssm_a", -np.exp(values))]
    if suffix == "dt_bias":
        return [("ssm_dt.bias", values)]
    if part == "conv1d":
        values = values.squeeze(1)
    if part == "in_proj_qkvz":
        sizes = np.cumsum([key_dim, key_dim, group * value_dim])
        q, k, v, z = np.split(values.reshape(heads, -1, values.shape[1]), sizes, axis=1)
        q, k, v, z = (x.reshape(-1, values.shape[1]) for x in (q, k, v, z))
        return [("attn_qkv.weight", np.concatenate([q, k, v])), ("attn_gate.weight", z)]
    return [(f"{_GGUF_NAMES[stem]}.{suffix}", values)]


def _write_gemma(writer, config, family: str) -> None:
    import gguf

    writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping or 0.0)
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    elif config.rope_parameters["full_attention"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    period = 2 if family == "gemma2" else 6
    if has_window != [(layer + 1) % period > 0 for layer in range(config.num_hidden_layers)]:
        writer.add_sliding_window_pattern(has_window)
    if config.query_pre_attn_scalar != config.head_dim:  # which llama.cpp knows of the models of 27B alone
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)


def _write_sizes(writer, model, family: str) -> int:
    """Writes the sizes of MLPs and heads that all layers have; returns that of a head."""
    config = model.config
    if family in SHORT_CONVS:
        _write_short_convs(writer, model)
        return config.hidden_size // config.num_attention_heads
    if family != "qwen3_5_moe":
        writer.add_feed_forward_length(config.intermediate_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    return head_dim


def _write_short_convs(writer, model) -> None:
    import gguf

    config = model.config
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "lfm2":
        writer.add_feed_forward_length(len(model.model.layers[0].feed_forward.w1.weight))
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_gemma4(writer, config) -> list[float]:
    """Writes the keys of Gemma 4; returns the divisors of frequencies in layers without a window."""
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    by_layer = [config.per_layer_config[layer] for layer in range(len(has_window))]
    full, local = by_layer[-1], by_layer[has_window.index(True)] if True in has_window else by_layer[-1]
    wide = len(has_window) - (config.num_kv_shared_layers if config.use_double_wide_mlp else 0)
    lengths = [config.intermediate_size * (1 + (layer >= wide)) for layer in range(len(has_window))]
    heads = [layer.num_key_value_heads for layer in by_layer]
    writer.add_feed_forward_length(lengths if config.use_double_wide_mlp else config.intermediate_size)
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    for add, of_layers in (("", full), ("_swa", local)):
        getattr(writer, f"add_key_length{add}")(of_layers.head_dim)
        getattr(writer, f"add_value_length{add}")(of_layers.head_dim)
        getattr(writer, f"add_rope_dimension_count{add}")(of_layers.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(has_window)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    pairs = full.head_dim // 2
    rotated = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return [1.0] * rotated + [1e30] * (pairs - rotated)


def _write_olmo3(writer, config) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.rope_parameters["full_attention"]["rope_type"] == "yarn":
        _write_yarn(writer, config.rope_parameters["full_attention"])


def _write_yarn(writer, rope) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_phi3(writer, config, head_dim: int) -> None:
    import numpy as np

    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_sliding_window(config.sliding_window or 0)
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(original)
    if "long_factor" not in rope:
        return
    times = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(times) / math.log(original)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))


def _gguf_tensors(model, family: str):
    """Names in a GGUF, and values fp32; experts of a layer together."""
    import numpy as np

    has_other_name = family in ("gpt_oss", "seed_oss", *DELTA_NETS)
    names = _GGUF_NAMES | ({"post_attention_layernorm": "post_attention_norm"} if has_other_name else {})
    gemma = family.startswith("gemma")
    names |= _GEMMA4_GGUF_NAMES if family == "gemma4" else _LFM_GGUF_NAMES if family in SHORT_CONVS else {}
    names |= _GEMMA_GGUF_NAMES if gemma else _OUTPUT_NORM_NAMES if family in ("olmo2", "olmo3") else {}
    for full_name, tensor in model.state_dict().items():
        stem, suffix = full_name.rsplit(".", 1)
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        parts = stem.split(".")
        values = tensor.float().numpy()
        is_norm = stem.endswith("norm") and not stem.endswith("linear_attn.norm")
        values = values + 1 if is_norm and family in NORMS_LESS_ONE else values
        if parts[1:2] != ["layers"]:
            yield f"{names[stem]}.{suffix}", values
            continue
        layer, own = parts[2], ".".join(parts[3:])
        if suffix == "expert_bias":
            yield f"blk.{layer}.exp_probs_b.bias", values
            continue
        if own == "conv.conv" and suffix == "weight":  # [channels, 1, kernel]
            values = values[:, 0]
        if f"{own}.{suffix}" in _GEMMA4_GGUF_TENSORS:
            yield f"blk.{layer}.{_GEMMA4_GGUF_TENSORS[f'{own}.{suffix}']}", values
            continue
        if own == "shared_mlp.input_linear":
            for name, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield f"blk.{layer}.ffn_{name}_shexp.weight", half
            continue
        if parts[3] == "linear_attn":
            for name, changed in _as_delta_net_gguf(model.config, f"{own}.{suffix}", values):
                yield f"blk.{layer}.{name}", np.ascontiguousarray(changed)
            continue
        if parts[-1] != "experts":
            found = values[0] if own == "mlp.shared_expert_gate" else values  # which the converter squeezes
            yield f"blk.{layer}.{names[own]}.{'weight' if suffix == 'sinks' else suffix}", found
            continue
        kind = "bias" if suffix.endswith("_bias") else "weight"
        if family == "gpt_oss" and kind == "weight":  # [experts, in, out]
            values = values.swapaxes(1, 2)
        if "down" in suffix:
            yield f"blk.{layer}.ffn_down_exps.{kind}", np.ascontiguousarray(values)
            continue
        half = values.shape[1] // 2
        gate, up = (values[:, ::2], values[:, 1::2]) if family == "gpt_oss" else (values[:, :half], values[:, half:])
        yield f"blk.{layer}.ffn_gate_exps.{kind}", np.ascontiguousarray(gate)
        yield f"blk.{layer}.ffn_up_exps.{kind}", np.ascontiguousarray(up)


def round_as_gguf(model, tensor_type: str):
    """A model with its matrices rounded as `write_tiny_gguf` rounds them."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[tensor_type]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            routers = ("mlp.gate.", "feed_forward.gate.", ".router.", "shared_expert_gate.")
            kept = any(part in name for part in (*routers, "conv1d.", "conv.conv."))
            if weight.ndim < 2 or kept or name.endswith("bias"):
                continue
            if name.endswith("linear_attn.out_proj.weight") and model.config.model_type != "qwen3_next":
                shape = model.config.linear_num_key_heads, -1, model.config.linear_value_head_dim
                tiled = weight.unflatten(1, shape).transpose(1, 2)
                packed = gguf.quants.quantize(tiled.flatten(1).contiguous().numpy(), kind)
                rounded = torch.from_numpy(gguf.quants.dequantize(packed, kind))
                weight.copy_(rounded.view(tiled.shape).transpose(1, 2).flatten(1))
                continue
            transposed = weight.ndim == 3 and model.config.model_type == "gpt_oss"
            values = np.ascontiguousarray((weight.swapaxes(1, 2) if transposed else weight).numpy())
            rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))
            weight.copy_(rounded.swapaxes(1, 2) if transposed else rounded)
    return model


def _write_tokenizer(writer, hf, pre_tokenizer: str, add_bos: bool | None) -> None:
    spec = json.loads(hf.backend_tokenizer.to_str())
    tokens = sorted(hf.get_vocab(), key=hf.get_vocab().get)
    special = {token["content"] for token in spec["added_tokens"]}
    if spec["model"].get("byte_fallback"):
        _write_sentencepiece(writer, hf, tokens, spec)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
    writer.add_bos_token_id(hf.bos_token_id)
    writer.add_eos_token_id(hf.eos_token_id)
    if hf.chat_template:
        writer.add_chat_template(hf.chat_template)


def _write_sentencepiece(writer, hf, tokens: list[str], spec: dict) -> None:
    """Scores in the order of merges, which are left out; Gemma's tokens of several spaces are written as such."""
    from gguf import TokenType

    kinds = {
        token["content"]: TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        for token in spec["added_tokens"]
    }
    kinds |= {token: TokenType.BYTE for token in tokens if re.fullmatch("<0x..>", token)} | {"<unk>": TokenType.UNKNOWN}
    gemma = hf.bos_token == "<bos>"
    runs = {token for token in tokens if gemma and len(token) > 1 and not token.strip("▁")}
    kinds |= dict.fromkeys(runs, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([" " * len(token) if token in runs else token for token in tokens])
    writer.add_token_scores([0.0 if token in kinds else -float(i) for i, token in enumerate(tokens)])
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_unk_token_id(hf.unk_token_id)
    encode = hf.backend_tokenizer.encode
    around = encode("").ids
    writer.add_add_bos_token(hf.bos_token_id in around)
    writer.add_add_eos_token(hf.eos_token_id in around)
    writer.add_add_space_prefix(encode("a", add_special_tokens=False).tokens[0].startswith("▁"))
