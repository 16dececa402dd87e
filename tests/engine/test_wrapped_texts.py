"""The text model within models that take images too: it alone is read, and gives the tokens of the whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import randomize
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.files import read_config, resolve_for_planning, resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 16,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "head_dim": 8,
}  # fmt: skip
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
QWEN2_5_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}  # fmt: skip
QWEN3_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
LFM_VISION = {
    "model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_patches": 16, "patch_size": 8,
}  # fmt: skip
LFM = {
    **{key: TEXT[key] for key in TEXT if key != "intermediate_size"}, "model_type": "lfm2", "block_ff_dim": 96,
    "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
EXPERTS = {
    "head_dim": 16, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.4,
}  # fmt: skip
# name -> (prefix of the classes in transformers, keys of the text model, of the tower, and outside of both)
WRAPPED = {
    "llava, llama": ("Llava", TEXT | {"model_type": "llama"}, CLIP, {}),
    "llava, qwen2": ("Llava", TEXT | {"model_type": "qwen2"}, CLIP, {}),
    "llava_next, mistral": ("LlavaNext", TEXT | {"model_type": "mistral", "sliding_window": None}, CLIP, {}),
    "mistral3, mistral": ("Mistral3", TEXT | {"model_type": "mistral"}, PIXTRAL, {"tie_word_embeddings": False}),
    "mistral3, ministral3": (
        "Mistral3", TEXT | {"model_type": "ministral3", "rope_parameters": GROWING}, PIXTRAL,
        {"tie_word_embeddings": True},
    ),
    "qwen2_vl": ("Qwen2VL", TEXT | {"rope_parameters": MROPE}, QWEN2_VISION, {}),
    "qwen2_5_vl": ("Qwen2_5_VL", TEXT | {"rope_parameters": MROPE}, QWEN2_5_VISION, {"tie_word_embeddings": True}),
    "qwen3_vl": ("Qwen3VL", TEXT | {"rope_parameters": MROPE, "head_dim": 16}, QWEN3_VISION, {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", TEXT | {"rope_parameters": MROPE} | EXPERTS, QWEN3_VISION, {}),
    "qwen3_vl_moe, as published": ("Qwen3VLMoe", TEXT | {"rope_parameters": MROPE} | EXPERTS, QWEN3_VISION, {}),
    "lfm2_vl": ("Lfm2Vl", LFM, LFM_VISION, {}),
}  # fmt: skip
PROMPTS = [[5 + i * 7 % 400 for i in range(length)] for length in (3, 20, 33)]
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("name", WRAPPED)
def test_tokens_are_those_of_the_whole_model(name, tmp_path):
    import transformers

    prefix, text, vision, outside = WRAPPED[name]
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, **outside)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    randomize(model, "llama")
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    if name == "qwen3_vl_moe, as published":  # which has the columns of experts first
        weights = load_file(tmp_path / "model.safetensors")
        turned = {key: each.transpose(1, 2).contiguous() for key, each in weights.items() if ".experts." in key}
        assert turned
        save_file({**weights, **turned}, tmp_path / "model.safetensors", {"format": "pt"})
    if prefix == "Qwen2_5_VL":  # as published: the keys of the text model beside those of the tower
        rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
        flat = {**text, "rope_scaling": rope, "rope_theta": 1e5}
        flat = {key: value for key, value in flat.items() if key != "rope_parameters"}
        kept = {
            key: stated[key] for key in ("architectures", "model_type", "vision_config", "tie_word_embeddings", "dtype")
        }
        path.write_text(json.dumps(kept | flat))
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration").from_pretrained(tmp_path, dtype=torch.float32)
    whole.eval()
    with torch.inference_mode():
        wanted = [
            whole.generate(torch.tensor([p]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(p) :].tolist()
            for p in PROMPTS
        ]
    assert resolve_for_planning(str(path))[1] == read_config(resolve_model(str(tmp_path)))
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_model_len": 64, "sampling": SAMPLING}
    with Engine(str(tmp_path), **options) as engine:
        done = {each.index: each for each in engine.generate([Request(prompt) for prompt in PROMPTS])}
    assert [list(done[i].samples[0].token_ids) for i in range(len(PROMPTS))] == wanted


def in_fp8(folder, *, turned: bool) -> None:
    """Put the text model's layers into FP8, with a scale for each block of 32 x 32; a router stays as it is.

    Args:
        folder: Directory of a model of Qwen3-VL's mixtures. One in fp32 with the same weights is made beside it.
        turned: Whether columns of experts come before rows, as published.
    """
    weights = load_file(folder / "model.safetensors")
    rounded, stored = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(1)
    for name, matrix in weights.items():
        if "language_model.layers." not in name or matrix.ndim < 2 or name.endswith("mlp.gate.weight"):
            continue
        turns = turned and ".experts." in name
        numbers = (matrix.transpose(1, 2) if turns else matrix).contiguous()
        scales = torch.rand(*numbers.shape[:-2], *(n // 32 for n in numbers.shape[-2:]), generator=generator)
        scales = scales * 1e-2 + 1e-3
        each = scales.repeat_interleave(32, -2).repeat_interleave(32, -1)
        codes = (numbers / each).clamp(-400, 400).to(torch.float8_e4m3fn)
        numbers = codes.float() * each
        rounded[name] = (numbers.transpose(1, 2) if turns else numbers).contiguous()
        stored |= {name: codes, f"{name}_scale_inv": scales}
    beside = folder.parent / "rounded"
    shutil.copytree(folder, beside)
    save_file(rounded, beside / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("turned", [True, False], ids=["as published", "rows first"])
@pytest.mark.parametrize("weights", ["native", "dequantized"])
def test_stacked_experts_of_qwen3_vl_in_fp8_are_read(weights, turned, tmp_path):
    import transformers

    prefix, text, vision, _ = WRAPPED["qwen3_vl_moe"]
    sizes = {"moe_intermediate_size": 96}  # of whole blocks, and no matrix is square
    config = getattr(transformers, f"{prefix}Config")(text_config=text | sizes, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    randomize(model, "llama")
    folder = tmp_path / "fp8"
    model.save_pretrained(folder)
    make_tiny_tokenizer(folder)
    in_fp8(folder, turned=turned)
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_model_len": 64, "sampling": SAMPLING}
    answers = []
    for path, asked in ((folder, weights), (tmp_path / "rounded", "auto")):
        with Engine(str(path), weights=asked, **options) as engine:
            done = {each.index: each for each in engine.generate([Request(prompt) for prompt in PROMPTS])}
        answers.append([done[i].samples[0].token_ids for i in range(len(PROMPTS))])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"text_config": TEXT | {"model_type": "cohere2"}},
            "LlavaForConditionalGeneration with a text model.*'cohere2'",
        ),
        (
            {
                "architectures": ["Qwen3VLMoeForConditionalGeneration"],
                "text_config": {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False},
            },
            "norm_topk_prob false is not supported: within Qwen3VLMoe.* it is true",
        ),
        ({"text_config": 3}, "text_config must be an object, not 3"),
        ({"model_type": "llama"}, "model_type 'llama' contradicts architecture LlavaForConditionalGeneration"),
        ({"architectures": ["MllamaForConditionalGeneration"]}, "MllamaForConditionalGeneration is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, named, tmp_path):
    stated = {"architectures": ["LlavaForConditionalGeneration"], "text_config": TEXT | {"tie_word_embeddings": False}}
    (tmp_path / "config.json").write_text(json.dumps(stated | change))
    with pytest.raises(InputError, match=named):
        resolve_for_planning(str(tmp_path / "config.json"))
