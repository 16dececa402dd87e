"""Tiny random models on disk, small enough to make anew in each test."""

from __future__ import annotations

import copy
import math
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from model_tables import DELTA_NETS, FIELDS, GEMMA4, NORMS_LESS_ONE, SHORT_CONVS, VOCAB_SIZE
from tiny_tokenizers import make_tiny_tokenizer


def classes_of(family: str) -> tuple[type, type]:
    """The family's configuration and model in transformers."""
    import transformers

    prefix = {
        "opt": "OPT",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "gpt_oss": "GptOss",
        "smollm3": "SmolLM3",
        "seed_oss": "SeedOss",
        "gemma4_unified": "Gemma4Unified",
        "granitemoe": "GraniteMoe",
        "granitemoeshared": "GraniteMoeShared",
        "granitemoehybrid": "GraniteMoeHybrid",
        "qwen3_next": "Qwen3Next",
        "qwen3_5": "Qwen3_5",
        "qwen3_5_moe": "Qwen3_5Moe",
        "lfm2_moe": "Lfm2Moe",
    }.get(family, family.capitalize())
    text = "Text" if family in ("gemma3", *GEMMA4, "qwen3_5", "qwen3_5_moe") else ""
    return getattr(transformers, f"{prefix}{text}Config"), getattr(transformers, f"{prefix}ForCausalLM")


def _layer_types(family: str, layers: int) -> dict[str, list[str]]:
    """The types of layers of families whose own types need more than three layers, or cannot be run."""
    if family == "olmo3":
        return {"layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"]}
    if family == "granitemoehybrid":
        return {"layer_types": ["full_attention"] * layers}
    if family in GEMMA4:
        windows = ["sliding_attention"] if layers > 2 else []  # the last layer reuses the KV of one of its kind
        return {"layer_types": windows + ["full_attention"] * (layers - len(windows))}
    if family in DELTA_NETS:
        return {"layer_types": [("linear_attention", "full_attention")[i % 2] for i in range(layers)]}
    if family in SHORT_CONVS:
        return {"layer_types": [("conv", "full_attention")[i % 2] for i in range(layers)]}
    return {}


def make_tiny_model(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides):
    """A random model of the family, saved to `path` with a tokenizer; returns the transformers model in fp32.

    Every weight is random, biases and norms too. overrides: fields of the transformers config; a `dtype` only
    affects what is saved.
    """
    files, model, generator = _made(family, seed, max_shard_size, overrides)
    path.mkdir(parents=True, exist_ok=True)
    for stale in path.glob("model*.safetensors*"):
        stale.unlink()
    for name, content in files.items():
        (path / name).write_bytes(content)
    torch.set_rng_state(generator)
    return copy.deepcopy(model)


_KEPT_BYTES = 64 << 20
_kept: OrderedDict[str, tuple] = OrderedDict()  # the last models that were made, of so many bytes of files together


def _made(family: str, seed: int, max_shard_size: str, overrides: dict):
    """The files of a tiny model by name, the transformers model, and the state of torch's generator after all draws."""
    key = repr((family, seed, max_shard_size, sorted(overrides.items())))
    if key not in _kept:
        with tempfile.TemporaryDirectory() as folder:
            model = _make(family, Path(folder), seed, max_shard_size, copy.deepcopy(overrides))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        _kept[key] = files, model, torch.get_rng_state()
        while len(_kept) > 1 and sum(sum(map(len, files.values())) for files, *_ in _kept.values()) > _KEPT_BYTES:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def _make(family: str, path: Path, seed: int, max_shard_size: str, overrides: dict):
    stored_dtype = overrides.pop("dtype", torch.float32)
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 3,
    }
    if family == "opt":
        fields = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
    else:
        fields = {"intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.2}
    fields |= FIELDS.get(family, {})
    fields |= _layer_types(family, overrides.get("num_hidden_layers", common["num_hidden_layers"]))
    if family == "qwen3_5_moe":
        del fields["intermediate_size"]
    sizes = {**common, **fields, **overrides}
    if family == "phimoe" and sizes["rope_parameters"]["rope_type"] == "longrope":
        pairs = range(sizes["hidden_size"] // sizes["num_attention_heads"] // 2)
        sizes["rope_parameters"] |= {
            "short_factor": [1 + i / 8 for i in pairs],
            "long_factor": [2.0 + i for i in pairs],
        }
    config_class, model_class = classes_of(family)
    config = config_class(**sizes)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    randomize(model, family)
    model.to(stored_dtype).save_pretrained(path, max_shard_size=max_shard_size)
    make_tiny_tokenizer(path)
    return model.float()


def randomize(model, family: str, std: float = 0.2) -> None:
    """Makes every weight random, biases and norms too; matrices so wide that one token clearly wins."""
    with torch.no_grad():
        for name, weight in model.named_buffers():
            if name.endswith("layer_scalar"):
                weight.uniform_(0.6, 1.4)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # with `dt_bias` decays from 0.01 to 0.999
                weight.copy_(torch.empty_like(weight).uniform_(math.log(0.01), math.log(3.0)))
            elif name.endswith("dt_bias"):
                weight.normal_(std=1.0)
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                weight.normal_(std=0.5)
            elif family in GEMMA4 and weight.ndim == 1 and any(part in name for part in ("norm", "scale")):
                weight.normal_(mean=1.0, std=0.4)
            elif weight.ndim == 1:
                of_norm = name.endswith("norm.weight") and (
                    name.endswith("linear_attn.norm.weight") or family not in NORMS_LESS_ONE
                )
                weight.normal_(mean=1.0 if of_norm else 0.0, std=0.2)
            elif name.endswith("experts.gate_up_proj"):  # wide enough that its gates reach their bound
                weight.normal_(std=0.8 if family == "gpt_oss" else std)
            else:  # the embedding's padding row random like the rest
                weight.normal_(std=std)
        for name, values in model.named_buffers():
            if name.endswith("expert_bias"):
                values.normal_(std=std)
