"""The configuration of a model that a `config.json` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.models.config import ModelConfig
from batchgen.models.families import HEAD_NORMS, LAYER_NORMS, LEARNED_POSITIONS, PROJECTION_NORMS
from batchgen.models.hf.fields import (
    family_of,
    has_layers_alone,
    read_activation,
    read_architecture,
    read_biases,
    read_config_keys,
    read_encoder,
    read_gemma4,
    read_heads,
    read_learned_positions,
    read_mlps,
    read_norm_place,
    read_query_scale,
    read_scales,
    read_states,
    read_ties,
    read_unrotated_layers,
    read_windows,
    stated_dtype,
    token_ids,
)
from batchgen.models.hf.rope import read_query_growth, read_ropes
from batchgen.models.hf.wrappers import unwrapped


def config_of_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration of a model from the values of its `config.json`, in the spelling of transformers 4 or 5.

    Args:
        config: Values of `config.json`.
        generation_config: Values of `generation_config.json`; or None.

    Raises:
        InputError: An architecture, RoPE kind or quantization is not supported.
    """
    config = stated = unwrapped(config)
    architecture = read_architecture(config)
    family = family_of(architecture)
    dtype = stated_dtype(config) or "float32"
    config, keys = read_config_keys(config, architecture)
    learned, gpt_oss = family in LEARNED_POSITIONS, family == "gpt_oss"
    hidden, layers = keys["hidden_size"], keys["num_hidden_layers"]
    heads, kv_heads, head_dim = read_heads(keys, family)
    max_position = keys["max_position_embeddings"]
    rope, local_rope = (None, None) if learned else read_ropes(config, keys, family, head_dim)
    position_offset, max_position = read_learned_positions(keys, family) if learned else (0, max_position)
    if rope is not None and rope.kind == "yarn" and rope.original_max_position:
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    windows, norm_place = read_windows(config, keys, family, layers), read_norm_place(keys, family)
    parsed = ModelConfig(
        architecture=architecture,
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        **read_mlps(keys, family, layers),
        **read_biases(keys, family),
        router_bias=gpt_oss,
        sinks=gpt_oss,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys["vocab_size"],
        max_position=max_position,
        norm="layer" if family in LAYER_NORMS else "rms",
        head_bias=keys.get("lm_head_bias", False),
        **read_scales(keys, family),
        activation=read_activation(keys, family),
        gated_mlp=not learned,
        qk_norm=family in HEAD_NORMS,
        projection_norms=family in PROJECTION_NORMS,
        tied_embeddings=read_ties(keys),
        rope=rope,
        windows=windows,
        **read_states(keys, family, layers),
        embed_size=keys.get("word_embed_proj_dim") or hidden,
        position_offset=position_offset,
        norm_place=norm_place,
        final_norm=norm_place != "sums" and not keys.get("_remove_final_layer_norm", False),
        bos_token_id=keys["bos_token_id"],
        eos_token_ids=token_ids((generation_config or {}).get("eos_token_id"), keys["eos_token_id"]),
        dtype=dtype,
        local_rope=local_rope,
        unrotated_layers=read_unrotated_layers(keys, layers),
        query_scale=read_query_scale(keys, family),
        **read_query_growth(config, family),
        attention_softcap=float(keys.get("attn_logit_softcapping") or 0),
        logit_softcap=float(keys.get("final_logit_softcapping") or 0),
        **read_gemma4(keys, family, windows),
        **read_encoder(keys, family),
    )
    return parsed.without_logits() if not parsed.causal or has_layers_alone(stated) else parsed
