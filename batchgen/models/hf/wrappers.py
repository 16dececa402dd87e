"""Models that take images too, whose text model is of a supported family: the `config.json` of the text model alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.stated_numbers import shown


@dataclass(frozen=True)
class Wrapper:
    """A class of transformers around a text model.

    Attributes:
        model_type: The wrapper's `model_type`.
        texts: The text model's class by its `model_type`; a file without a `text_config` states the text model's keys
            beside those of the tower.
        usual: The text model's `model_type` where the file does not state it.
        defaults: Values of keys that the text model's own configuration class has other defaults for.
        fixed: Values that keys of the text model cannot change within the wrapper.
    """

    model_type: str
    texts: Mapping[str, str]
    usual: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)


_ANY_TEXT = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_MISTRAL_SMALL = {
    "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "head_dim": 128, "vocab_size": 131072, "sliding_window": None,
}  # fmt: skip
_QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "max_window_layers": 80, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QWEN3_VL_MOE = {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
    "num_experts": 60, "num_experts_per_tok": 4, "max_position_embeddings": 128000, "rope_theta": 5e5,
}  # fmt: skip
WRAPPERS = {
    "LlavaForConditionalGeneration": Wrapper("llava", _ANY_TEXT, "llama", {}),
    "LlavaNextForConditionalGeneration": Wrapper("llava_next", _ANY_TEXT, "llama", {}),
    "Mistral3ForConditionalGeneration": Wrapper("mistral3", _ANY_TEXT, "mistral", _MISTRAL_SMALL),
    "Qwen2VLForConditionalGeneration": Wrapper(
        "qwen2_vl", {"qwen2_vl_text": "Qwen2ForCausalLM"}, "qwen2_vl_text", _QWEN2_VL
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "qwen2_5_vl", {"qwen2_5_vl_text": "Qwen2ForCausalLM"}, "qwen2_5_vl_text", _QWEN2_VL
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        "qwen3_vl",
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "qwen3_vl_text",
        {"rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        "qwen3_vl_moe_text",
        _QWEN3_VL_MOE,
        {"norm_topk_prob": True},
    ),
    "Lfm2VlForConditionalGeneration": Wrapper(
        "lfm2_vl", {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}, "lfm2", {}
    ),
}
# Key of the text model -> its other name, under which a file may state it.
_OTHER_NAMES = {"num_experts": "num_local_experts"}
# Keys that a file with a text_config states outside of it; they are what transformers takes.
OUTER_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
# Keys of rotary positions for images: a text's positions are the same in all sections of a head.
OF_IMAGES = ("mrope_section", "mrope_interleaved")


def wrapper_of(config: Mapping[str, Any]) -> tuple[str, Wrapper] | None:
    """The class around the text model, by its name, that a `config.json` is of; None: it is of no wrapper.

    Args:
        config: Values of `config.json`.
    """
    stated = config.get("architectures") or []
    names = stated if isinstance(stated, list) else []
    if not names:
        names = [name for name, wrapper in WRAPPERS.items() if wrapper.model_type == config.get("model_type")]
    known = [name for name in names[:1] if name in WRAPPERS]
    return (known[0], WRAPPERS[known[0]]) if known else None


def unwrapped(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the text model's own `config.json`; for a file of no wrapper its own values.

    Args:
        config: Values of `config.json`.

    Raises:
        InputError: The text model is not supported.
    """
    known = wrapper_of(config)
    if known is None:
        return config
    name, wrapper = known
    if config.get("model_type") not in (None, wrapper.model_type):
        raise InputError(
            f"model_type {shown(config['model_type'])} contradicts architecture {name}, which is {wrapper.model_type!r}"
        )
    text = config.get("text_config")
    if text is None:
        text = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if not isinstance(text, Mapping):
        raise InputError(f"text_config must be an object, not {shown(text)}")
    text_type = text.get("model_type") or wrapper.usual
    if text_type not in wrapper.texts:
        raise InputError(
            f"architecture {name} with a text model of model_type {shown(text_type)} is not supported; supported: "
            f"{', '.join(wrapper.texts)}"
        )
    for key, value in wrapper.fixed.items():
        if text.get(key, value) != value:
            raise InputError(f"{key} {shown(text[key])} is not supported: within {name} it is {shown(value)}")
    outer = {key: config[key] for key in OUTER_KEYS if key in config}
    defaults = {key: value for key, value in wrapper.defaults.items() if _OTHER_NAMES.get(key) not in text}
    plain = {
        **defaults,
        **wrapper.fixed,
        **text,
        **outer,
        "architectures": [wrapper.texts[text_type]],
        "model_type": None,
    }
    if config.get("text_config") is not None and "eos_token_id" in config and "eos_token_id" in text:
        plain["eos_token_id"] = [*_ids(config["eos_token_id"]), *_ids(text["eos_token_id"])]
    return {**plain, **{key: _of_text(plain[key]) for key in ("rope_scaling", "rope_parameters") if key in plain}}


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _of_text(table: Any) -> Any:
    """Rotary parameters without what is of images alone."""
    if not isinstance(table, Mapping):
        return table
    kept = {key: value for key, value in table.items() if key not in OF_IMAGES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()
    }
