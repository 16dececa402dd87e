"""Every model that transformers or the gguf package names is supported, or refused in one line that names it."""

from __future__ import annotations

import json

import gguf
import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from batchgen.core.errors import InputError
from batchgen.models.families import ARCHITECTURES, ENCODERS
from batchgen.models.files import resolve_for_planning, resolve_model
from batchgen.models.formats.gguf.fields import GGUF_ARCHITECTURES, check_architecture
from batchgen.models.hf.fields import read_architecture
from batchgen.models.hf.rope import read_ropes
from batchgen.models.hf.wrappers import WRAPPERS
from batchgen.models.nearest import not_a_decoder


def names_of(mapping) -> list[str]:
    names = (name for value in mapping.values() for name in ([value] if isinstance(value, str) else value))
    return sorted(set(names))


CLASSES = sorted({*names_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *names_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)})


def test_every_class_of_transformers_is_supported_or_refused_by_its_name():
    assert len(CLASSES) > 200 and {*ARCHITECTURES, *WRAPPERS} & {*CLASSES} > {"LlamaForCausalLM"}
    for name in sorted({*CLASSES} - {*ARCHITECTURES, *WRAPPERS}):
        with pytest.raises(InputError) as caught:
            read_architecture({"architectures": [name]})
        message = str(caught.value)
        assert message.startswith(f"architecture {name} is not supported; ") and "\n" not in message
        assert message.split("the nearest that is: ")[1].split()[0] in ARCHITECTURES


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*ARCHITECTURES.values()})[:40])
def test_a_model_type_alone_is_refused_by_its_name(model_type):
    try:
        assert read_architecture({"model_type": model_type}) in {*ARCHITECTURES, *ENCODERS}
    except InputError as error:
        assert repr(model_type) in str(error)


def test_every_architecture_of_ggufs_is_supported_or_refused_by_its_name():
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert set(GGUF_ARCHITECTURES) <= names
    for name in sorted(names - set(GGUF_ARCHITECTURES)):
        with pytest.raises(InputError) as caught:
            check_architecture(name)
        message = str(caught.value)
        assert message.startswith(f"GGUF architecture '{name}' is not supported; ") and "\n" not in message
        assert message.split("the nearest that is: '")[1].split("'")[0] in GGUF_ARCHITECTURES


NEAREST = {
    "MambaForCausalLM": "qwen3_next",
    "GemmaForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma4",
    "Glm4vMoeForConditionalGeneration": "qwen3_moe",
    "GlmMoeDsaForCausalLM": "qwen3_moe",
    "KimiLinearForCausalLM": "qwen3_next",
    "LongcatFlashForCausalLM": "qwen3_moe",
    "Olmo3_5HybridForCausalLM": "qwen3_5",
    "PhiForCausalLM": "phi3",
    "OlmoForCausalLM": "olmo2",
    "DeepseekV3ForCausalLM": "qwen3_moe",
    "Llama4ForConditionalGeneration": "llama",
    "Ernie4_5_MoeForCausalLM": "qwen3_moe",
    "FalconForCausalLM": "llama",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_moe",
}


NEAREST_GGUF = {
    "deepseek2": "qwen3moe",
    "glm-dsa": "qwen3moe",
    "minimax-m2": "qwen3moe",
    "kimi-linear": "qwen3next",
    "gemma3n": "gemma4",
}


@pytest.mark.parametrize("name", NEAREST_GGUF)
def test_the_nearest_architecture_of_ggufs_is_named(name):
    with pytest.raises(InputError, match=f"the nearest that is: '{NEAREST_GGUF[name]}'"):
        check_architecture(name)


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_family_is_named(name):
    with pytest.raises(InputError, match=rf"\({NEAREST[name]}\)"):
        read_architecture({"architectures": [name]})


WHAT_IT_IS = {
    "ElectraModel": "is an encoder",
    "MPNetModel": r"is an encoder, .*\(encoders that give vectors: bert, .*modernbert",
    "JinaEmbeddingsV3Model": "is an encoder",
    "NewModel": "is an encoder",
    "CLIPModel": "is an encoder",
    "T5EncoderModel": "is an encoder",
    "T5ForConditionalGeneration": "has an encoder",
    "MBartForConditionalGeneration": "has an encoder",
    "WhisperForConditionalGeneration": "has an encoder",
}


@pytest.mark.parametrize("name", WHAT_IT_IS)
def test_encoders_are_called_so(name):
    with pytest.raises(InputError, match=f"{name} is not supported; it {WHAT_IT_IS[name]}"):
        read_architecture({"architectures": [name]})


def test_no_decoder_is_called_an_encoder():
    for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*ARCHITECTURES.values()}):
        encoder = any(part in name for part in ("bert", "electra", "xlnet", "bart", "pegasus", "marian", "prophet"))
        assert encoder or name in ("whisper", "blenderbot", "data2vec-text", "ernie", "xlm") or not not_a_decoder(name)


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None, "vocab_size": 3}])
def test_a_file_that_names_no_model_is_said_to_name_none(config):
    with pytest.raises(InputError, match="neither architectures nor model_type is stated"):
        read_architecture(config)


def test_a_text_model_is_called_supported_only_where_it_is():
    """An encoder with a decoder has no text model, and Llama 4's is of another family."""
    wrapper = {"architectures": ["SomeVLForConditionalGeneration"]}
    for text_type, nearest in {"qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}.items():
        with pytest.raises(InputError, match=rf"supported \({text_type}\): take a GGUF of it; the nearest .*{nearest}"):
            read_architecture({**wrapper, "text_config": {"model_type": text_type}})
    with pytest.raises(InputError, match=r"its text model is supported \(qwen2\)"):
        read_architecture({"architectures": ["InternVLChatModel"], "llm_config": {"model_type": "qwen2"}})
    for text in ({"text_config": {"model_type": "llama4_text"}}, {"text_config": {"model_type": []}}, {}):
        with pytest.raises(InputError) as caught:
            read_architecture({**wrapper, **text})
        assert "GGUF" not in str(caught.value)


def test_it_is_refused_before_any_weight_is_looked_for(tmp_path):
    """A directory with a config.json alone: nothing is said of weights that are missing."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    for resolve in (resolve_for_planning, resolve_model):
        with pytest.raises(InputError, match="MambaForCausalLM is not supported"):
            resolve(str(tmp_path))


def test_a_further_factor_of_yarn_multiplies_that_of_its_formula():
    """DeepSeek-R1-0528-Qwen3-8B states the reciprocal: its scores are not scaled."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    keys = {"rope_theta": 1e6, "max_position_embeddings": 131072}
    plain, _ = read_ropes({"rope_scaling": scaling}, keys, "qwen3", 128)
    factor = {"attn_factor": 0.8782488562869419}
    changed, _ = read_ropes({"rope_scaling": scaling | factor}, keys, "qwen3", 128)
    assert changed.attention_scaling() == pytest.approx(1.0)
    assert plain.attention_scaling() == pytest.approx(1 / 0.8782488562869419)
    assert changed.inv_freq(128) == plain.inv_freq(128)
