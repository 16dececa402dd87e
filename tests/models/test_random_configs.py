"""Random configurations (support/config_draws.py), a few of every family.

`python benchmarks/random_configs.py` tries hundreds.
"""

from __future__ import annotations

import dataclasses

import pytest
from config_draws import MODELS, draw, draws_of, try_draw
from model_tables import FAMILIES, GEMMA4
from thorough import SEED, quick_or
from tiny_models import classes_of
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.models.hf import config as model_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_each_is_refused_by_key_or_equal_to_transformers(model, tokenizer, tmp_path):
    for given, outcome in draws_of(model, SEED * 1000, quick_or(2, 40), tmp_path / "model", tokenizer):
        assert outcome.kind in ("equal", "refused"), (given.seed, given.odd, outcome.reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_drawn_stated_left_out_and_null(family):
    """Otherwise the keys that are not would pass for the wrong reason."""
    keys = {field.name for field in dataclasses.fields(classes_of(family)[0])} - {"architectures"}
    needed = {"head_dim"} if family == "ministral" else set()  # without which transformers cannot run it
    draws, stated, left_out, null = [], set(), set(), set()
    for seed in range(4000):
        draws.append(given := draw(family, seed))
        stated |= keys & given.stated.keys()
        left_out |= keys - given.stated.keys()
        null |= {name for name in keys if given.stated.get(name, "") is None}
        if seed >= 1000 and stated == keys and left_out == null == keys - needed:
            break
    assert stated == keys and left_out == keys - needed and null == keys - needed
    assert 0.4 < sum(not given.odd for given in draws) / len(draws) < 0.6
    if family not in ("opt", *GEMMA4):
        for spelling in ("rope_parameters", "rope_scaling", "rope_theta"):
            assert sum(spelling in given.stated for given in draws) > 0.1 * len(draws)


# What transformers fails at in a forward pass.
BROKEN_ROPES = {
    "ministral3": ({"rope_parameters": {}}, "rope_parameters"),
    "qwen3_5_moe": ({"rope_scaling": {"type": "default", "mrope_section": 2.0}}, "mrope_section must be a list"),
}


@pytest.mark.parametrize("family", BROKEN_ROPES)
def test_rotary_parameters_without_a_meaning_are_refused(family):
    ordinary = next(given.stated for seed in range(100) if not (given := draw(family, seed)).odd)
    change, named = BROKEN_ROPES[family]
    stated = {key: value for key, value in ordinary.items() if not key.startswith("rope_")} | change
    with pytest.raises(InputError, match=named):
        model_config.config_of_hf(stated)


# What is refused for a value that a file may leave out, or that is of no type.
NAMED = {
    "no layer attends": ("qwen3_5", {"num_hidden_layers": 3}, "num_hidden_layers"),
    "heads of one value": ("llama", {"hidden_size": 64, "num_attention_heads": 64}, "num_attention_heads"),
    "a gate of per-layer embeddings that no kernel has": (
        "gemma4", {"hidden_activation": "silu"}, "hidden_activation 'silu'",
    ),
    "no sizes of heads, whatever other keys say": ("gemma4", {"per_layer_config": None}, "per_layer_config must be an"),
    "a base whose powers are all the same": ("seed_oss", {"rope_theta": 1.0}, "rope_theta 1.0"),
    "an object as a token": ("gemma4", {"eos_token_id": {"0": 2}}, "eos_token_id"),
    "an object as a token of the text part": ("qwen3_5", {"text_config": {"eos_token_id": {}}}, "eos_token_id"),
    "a list of objects as tokens": ("qwen3_5", {"text_config": {}, "eos_token_id": [{"0": 2}]}, "eos_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_a_refusal_names_a_key_of_the_file(case):
    family, stated, named = NAMED[case]
    config_class, model_class = classes_of(family)
    if "text_config" in stated:
        names = {"architectures": [model_class.__name__.replace("CausalLM", "ConditionalGeneration")]}
    else:
        names = {"architectures": [model_class.__name__], "model_type": config_class.model_type}
    with pytest.raises(InputError, match=named):
        model_config.config_of_hf(names | stated)


@pytest.mark.parametrize("eos", [{"0": 2}, [[2]], "2"])
def test_ends_of_a_generation_config_are_refused_by_key(eos):
    with pytest.raises(InputError, match="eos_token_id must be a token id"):
        model_config.config_of_hf({"architectures": ["LlamaForCausalLM"]}, {"eos_token_id": eos})


def test_a_wrong_answer_is_noticed(tokenizer, tmp_path, monkeypatch):
    seed = next(seed for seed in range(100) if not draw("qwen3", seed).odd)
    read = model_config.read_config_keys

    def with_another_eps(config, architecture):
        config, keys = read(config, architecture)
        return config, keys | {"rms_norm_eps": 0.1}

    monkeypatch.setattr(model_config, "read_config_keys", with_another_eps)
    outcome = try_draw(draw("qwen3", seed), tmp_path / "model", tokenizer)
    assert outcome.kind == "wrong" and "log-probabilities differ" in outcome.reason
