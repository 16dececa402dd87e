"""Gemma 3 as it is published, with a vision tower: the text model alone is read, and gives the tokens of the whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiered import CPU, make_parts, make_policy
from tiny_models import randomize
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_for_planning, resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Most keys of the text model are left out, as in the published files.
TEXT = {
    "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "sliding_window": 12, "head_dim": 32, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
WHOLE = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": TEXT,
    "vision_config": VISION,
    "mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502,
    "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
}  # fmt: skip
# What names of the text model's tensors begin with: of transformers 5, of version 4, and of the files that are
# published.
PREFIXES = {"model.language_model.": "new", "language_model.model.": "published"}
PROMPTS = [[5 + i * 7 % 400 for i in range(length)] for length in (3, 20, 33)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """(a directory for each name in `PREFIXES`, tokens of transformers for `PROMPTS`)."""
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    first = tmp_path_factory.mktemp("gemma")
    config = Gemma3Config(**{name: value for name, value in WHOLE.items() if name != "torch_dtype"})
    torch.manual_seed(0)
    made = Gemma3ForConditionalGeneration(config)
    randomize(made, "gemma3")
    made.save_pretrained(first)
    make_tiny_tokenizer(first)
    (first / "config.json").write_text(json.dumps(WHOLE))
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).eval()
    assert type(model) is Gemma3ForConditionalGeneration
    with torch.inference_mode():
        wanted = [
            model.generate(torch.tensor([p]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(p) :].tolist()
            for p in PROMPTS
        ]
    weights, found = load_file(first / "model.safetensors"), {}
    for prefix, name in PREFIXES.items():
        found[name] = tmp_path_factory.mktemp(name)
        shutil.copytree(first, found[name], dirs_exist_ok=True)
        renamed = {
            each.replace(own, prefix): tensor for each, tensor in weights.items() for own in PREFIXES if own in each
        }
        vision = {each: tensor for each, tensor in weights.items() if not any(own in each for own in PREFIXES)}
        assert renamed and vision
        save_file({**renamed, **vision}, found[name] / "model.safetensors", {"format": "pt"})
    return found, wanted


def tokens_of(engine):
    with engine:
        done = {each.index: each for each in engine.generate([Request(prompt) for prompt in PROMPTS])}
    assert [done[i].error for i in range(len(PROMPTS))] == [None] * len(PROMPTS)
    return [list(done[i].samples[0].token_ids) for i in range(len(PROMPTS))]


SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("name", PREFIXES.values())
def test_tokens_are_those_of_the_whole_model(name, gemma, tmp_path):
    paths, wanted = gemma
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_model_len": 64, "sampling": SAMPLING}
    assert tokens_of(Engine(str(paths[name]), **options)) == wanted
    store = convert(resolve_model(str(paths[name])), tmp_path / "store", dtype="float32")
    assert tokens_of(Engine(str(store.path), **options)) == wanted


def test_weights_can_be_on_disk(gemma, tmp_path):
    paths, wanted = gemma
    policy = make_policy(paths["published"], CPU)
    on_disk = {group: (0, 0, sum(layers)) for group, layers in policy.weight_layers.items()}
    policy = make_policy(paths["published"], CPU, weight_layers=on_disk, kv_seqs={"cpu": 3}, gpu_batch_size=3)
    assert (
        tokens_of(Engine.from_parts(make_parts(paths["published"], CPU, policy, tmp_path), sampling=SAMPLING)) == wanted
    )


def test_an_output_matrix_of_its_own_is_found(gemma, tmp_path):
    """Untied, as some fine-tunes are: beside the text model in new files, in it in those of version 4."""
    paths, _ = gemma
    untied = WHOLE | {"tie_word_embeddings": False, "text_config": TEXT | {"tie_word_embeddings": False}}
    for name, head in (("new", "lm_head.weight"), ("published", "language_model.lm_head.weight")):
        folder = tmp_path / name
        shutil.copytree(paths[name], folder)
        (folder / "config.json").write_text(json.dumps(untied))
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, head: torch.randn(512, 64)}, folder / "model.safetensors", {"format": "pt"})
        with Engine(str(folder), dtype="float32", cpu_memory="4GiB", sampling=SAMPLING) as engine:
            assert [each.error for each in engine.generate([Request(PROMPTS[0])])] == [None]


def test_the_configuration_is_that_of_its_text(gemma):
    paths, _ = gemma
    config = read_config(resolve_model(str(paths["published"])))
    assert (config.num_heads, config.num_kv_heads, config.windows) == (8, 4, (12, 12, 12))
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((1, 106), 2, "bfloat16")
    assert (config.rope.kind, config.rope.theta, config.local_rope.theta) == ("linear", 1e6, 1e4)
    assert resolve_for_planning(str(paths["published"] / "config.json"))[1] == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings false contradicts"),
        ({"text_config": TEXT | {"tie_word_embeddings": False}}, "tie_word_embeddings true contradicts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling .* contradicts"),
        ({"sliding_window": 64}, "sliding_window 64 contradicts that of text_config, 12"),
        ({"text_config": TEXT | {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ({"text_config": TEXT | {"num_hidden_layers": "3"}}, "num_hidden_layers"),
        ({"text_config": []}, "text_config must be an object"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "llama"}, "model_type 'llama' contradicts .*GGUF"),
    ],
)
def test_what_contradicts_itself_is_refused_by_key(change, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WHOLE | change))
    with pytest.raises(InputError, match=named):
        resolve_for_planning(str(tmp_path / "config.json"))
