"""Tiny random models and tokenizers on disk, small enough to make anew in each test."""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch

DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SHORT_CONVS = ("lfm2", "lfm2_moe")
FAMILIES = (
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "phi3",
    "granite",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "ministral",
    "ministral3",
    "mixtral",
    "olmoe",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    *DELTA_NETS,
    *SHORT_CONVS,
)
GEMMA4 = ("gemma4", "gemma4_unified")
GRANITE_MIXTURES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", *GRANITE_MIXTURES, "qwen3_next", "qwen3_5_moe",
    "lfm2_moe",
)  # fmt: skip
# What must hold for every model holds for each of these: families as they are, and with the switches that change what a
# layer reads. name -> (family, fields of the transformers config). A test keeps it complete (test_token_identity.py).
MODELS = {
    **{family: (family, {}) for family in FAMILIES},
    "opt, norm after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "num_hidden_layers": 2}),
    "llama, tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, head size 24": ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "mistral, windows": ("mistral", {"sliding_window": 20}),
    "qwen2, windows in some layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "gemma3, every second window, scaled rope": ("gemma3", {
        "sliding_window_pattern": 2, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "gemma4, six layers, windows that reuse KV": ("gemma4", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4, experts, keys are values": ("gemma4", {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40,
        "attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    }),
    "gemma4, keys are values, biases, a cap": ("gemma4", {
        "attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_kv_shared_layers": 0, "attention_bias": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "phi3, part of each head, windows": ("phi3", {"head_dim": 24, "sliding_window": 20, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "granite, plain factors": ("granite", {
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_multiplier": 0.25,
        "attention_bias": True, "mlp_bias": True,
    }),
    "smollm3, windows in layers without rope": ("smollm3", {
        "use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [1, 0, 0], "tie_word_embeddings": False,
    }),
    "seed_oss, a bias of the output": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "olmo2, one KV head, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3, scaled rope, one window": ("olmo3", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": {
            "full_attention": {
                "rope_theta": 5e5, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "ministral, windows in some layers": ("ministral", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "ministral3, windows": ("ministral3", {"sliding_window": 20}),
    "mixtral, one of 16, windows": ("mixtral", {
        "num_local_experts": 16, "num_experts_per_tok": 1, "sliding_window": 20, "num_hidden_layers": 2,
    }),
    "phimoe, windows, no biases, plain rope, near scores alone": ("phimoe", {
        "attention_bias": False, "lm_head_bias": False, "sliding_window": 20, "router_jitter_noise": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "olmoe, 3 of 16, shares of 1": ("olmoe", {
        "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 1,
    }),
    "granitemoehybrid, one MLP, no rope": ("granitemoehybrid", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": None, "tie_word_embeddings": True,
    }),
    "qwen3_moe, 8 of 128, shares as they are": ("qwen3_moe", {
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False, "num_hidden_layers": 2,
    }),
    "qwen2_moe, a dense layer, windows": ("qwen2_moe", {
        "mlp_only_layers": [1], "num_experts_per_tok": 3, "use_sliding_window": True, "sliding_window": 20,
        "qkv_bias": False,
    }),
    "qwen3_moe, every second layer dense": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "gpt_oss, 4 of 32, all windows, plain rope": ("gpt_oss", {
        "num_local_experts": 32, "num_experts_per_tok": 4, "layer_types": ["sliding_attention"] * 2,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": False,
    }),
    "qwen3_5, four value heads for each key head, all values rotated": ("qwen3_5", {
        "linear_num_value_heads": 8, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }),
    "qwen3_next, a dense layer, shares as they are": ("qwen3_next", {
        "mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 6, "num_hidden_layers": 4,
    }),
    "lfm2, biases, a kernel of 4, two convolutions first": ("lfm2", {
        "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False, "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }),
    "lfm2_moe, one of 8 in every layer, scaled": ("lfm2_moe", {
        "num_dense_layers": 0, "num_experts_per_tok": 1, "routed_scaling_factor": 1.75, "use_expert_bias": False,
        "norm_topk_prob": False, "num_hidden_layers": 2,
    }),
    "qwen3, tied, four layers": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
}  # fmt: skip
VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """\
The ferry left the harbour at half past six, an hour late, with forty-one passengers and a cargo of onions.
On the upper deck a schoolteacher was reading the timetable aloud to nobody in particular: "Monday, Wednesday,
Friday; in winter, only Fridays." The captain's dog slept beside the funnel. Question: which day has two
sailings? Answer: none of them. In 1987 the company had owned three ships; by 1994 it owned one, and the bank
owned most of that. Still, people came. They came for the islands, for the light, for the cheap hotels with
their blue shutters, and because there was no other way to get there.

A restaurant by the quay served grilled fish, bread, lemons and a white wine that tasted of stones. Name: The
Anchor; address: 12 Harbour Road; city: Port Ellen; phone: 310-246-1501; type: seafood. Are these two entries
the same? Yes. The cook had worked in Lyon, Osaka and Buenos Aires before the weather, as she put it, blew her
home. She wrote the menu every morning on a slate, and every evening she wiped it clean with a wet cloth.

def total(prices):
    return sum(price for price in prices if price is not None)

When the storm came the lights went out one street after another, first the school, then the post office, then
the long row of houses above the beach. Somebody rang the bell of the chapel. Children counted the seconds
between the flash and the thunder: one, two, three, four. Nobody slept much. By morning the sea was flat and
grey, the roofs were where they had always been, and the ferry, with its onions, was waiting outside the bar.
"""


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


_FACTORS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.375, "logits_scaling": 0.75, "attention_multiplier": 0.125,
}  # fmt: skip
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True}
# Heads of two sizes; the last layer reuses KV, and has a wider MLP.
_GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 20, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SHARED = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 72}
_DELTA_NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}  # fmt: skip
_GRANITE_EXPERTS = {**_FACTORS, "logits_scaling": 0.25, "num_local_experts": 8}
# Fields of tiny models, beside their sizes.
_FIELDS = {
    "qwen3": {"head_dim": 32},  # as in the real ones, not hidden_size / heads
    "seed_oss": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "olmo3": {"sliding_window": 20},
    "ministral": {"sliding_window": 20, "head_dim": 16},
    "ministral3": {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
    }},
    # Small caps, so that they change the tokens; only "eager" knows them.
    "gemma2": {
        **_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "attn_implementation": "eager",
    },
    "gemma3": _GEMMA,
    "gemma4": {**_GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4_unified": _GEMMA4,
    "granite": _FACTORS,
    "granitemoe": {**_GRANITE_EXPERTS},
    "granitemoeshared": {**_GRANITE_EXPERTS, "shared_intermediate_size": 72},
    "granitemoehybrid": {
        **_GRANITE_EXPERTS, "shared_intermediate_size": 72, "position_embedding_type": "rope",
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {
        "num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.0, "long_mscale": 1.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": _SHARED,
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "qwen3_next": {**_SHARED, **_DELTA_NET},
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": {**_SHARED, **_DELTA_NET},
    "lfm2": {"intermediate_size": 120, "block_multiple_of": 16},
    "lfm2_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 1,
    },
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 15e4, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
}  # fmt: skip


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
    files, model, generator = _made(family, seed, max_shard_size, _Fields(overrides))
    path.mkdir(parents=True, exist_ok=True)
    for stale in path.glob("model*.safetensors*"):
        stale.unlink()
    for name, content in files.items():
        (path / name).write_bytes(content)
    torch.set_rng_state(generator)
    return copy.deepcopy(model)


class _Fields(dict):
    """Fields of a configuration, which are equal where they are written alike."""

    def __hash__(self):
        return hash(repr(sorted(self.items())))

    def __eq__(self, other):
        return repr(sorted(self.items())) == repr(sorted(other.items()))


@lru_cache(maxsize=24)  # tests of the same model follow one another
def _made(family: str, seed: int, max_shard_size: str, overrides: _Fields):
    """The files of a tiny model by name, the transformers model, and the state of torch's generator after all draws."""
    with tempfile.TemporaryDirectory() as folder:
        model = _make(family, Path(folder), seed, max_shard_size, copy.deepcopy(dict(overrides)))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, model, torch.get_rng_state()


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
    fields |= _FIELDS.get(family, {})
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


NORMS_LESS_ONE = ("gemma2", "gemma3", *DELTA_NETS)  # which add 1 to the weights of norms themselves


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


def make_tiny_tokenizer(path: Path, *, chat_template: str | None = CHAT_TEMPLATE):
    """A byte-level BPE tokenizer of at most VOCAB_SIZE tokens, saved to `path`."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[3],
    )
    hf.chat_template = chat_template
    hf.save_pretrained(path)
    return hf


@cache
def _trained_tokenizer() -> str:
    """The tokenizer.json of TEXT."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def make_tiny_sentencepiece_tokenizer(path: Path):
    """A tokenizer as Llama 2's: "▁" for spaces, one before the first word, bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=240, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.save_pretrained(path)
    return hf


GGUF_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "granite",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "ministral3",
    "olmoe",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    *DELTA_NETS,
    *SHORT_CONVS,
)
# How SentencePiece tokenizers differ between families: where the space comes from that stands before the first word.
SENTENCEPIECE_STYLES = {"llama": "normalizer", "phi3": "normalizer", "gemma2": "none", "gemma3": "none"}


def make_sentencepiece_tokenizer(path: Path, style: str, *, bos: bool = True, eos: bool = False):
    """A tokenizer as transformers has them for models with a SentencePiece vocabulary: all merges that give a token.

    style: of `SENTENCEPIECE_STYLES`. bos, eos: whether these stand around a text. It has tokens for bytes, one special
    token more, "<|end|>", and two that are no special ones, "<tool>" and two line breaks.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=225, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    learned = dict.fromkeys("".join(pair) for pair in pairs)
    begin, end = ("<bos>", "<eos>") if style == "none" else ("<s>", "</s>")
    special = ["<pad>", end, begin, "<unk>", "<mask>"] if style == "none" else ["<unk>", begin, end]
    spaces = ["▁" * count for count in range(2, 5)] if style == "none" else []
    added = ["<|end|>", "<tool>", "\n\n"]
    characters = [token for token in model["vocab"] if len(token) == 1]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *added, *spaces, *learned, *characters]
    vocab = {token: i for i, token in enumerate(tokens)}
    merged = [*spaces, *learned]
    splits = [(token[:i], token[i:]) for token in merged for i in range(1, len(token))]
    merges = [(left, right) for left, right in splits if left in vocab and right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([*special, added[0]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added[1:]])
    first = [normalizers.Prepend("▁")] if style == "normalizer" else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if first else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    around = f"{begin} $A" if bos else "$A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{around} {end}" if eos else around,
        special_tokens=[(token, vocab[token]) for token in (begin, end)],
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, unk_token="<unk>")
    hf.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE.replace("<|im_start|>", "<tool>").replace(
        "<|im_end|>", "<|end|>"
    )
    hf.save_pretrained(path)
    return hf


# As `MODELS`, of what must hold for every model that is written as GGUF; rows are whole blocks of 32.
GGUF_MODELS = {
    **{family: (family, {}) for family in GGUF_FAMILIES},
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2_moe": ("qwen2_moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64, "decoder_sparse_step": 2}),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 96}),
    "lfm2": ("lfm2", {"block_multiple_of": 32}),
    "lfm2_moe": ("lfm2_moe", {"moe_intermediate_size": 64}),
    "qwen3_next": ("qwen3_next", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_5_moe": ("qwen3_5_moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_5, as many key heads as value heads": ("qwen3_5", {
        "linear_num_value_heads": 2, "linear_value_head_dim": 32, "tie_word_embeddings": True,
    }),
    "gemma2, queries by a head's size": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3, scaled rope, an output of its own": ("gemma3", {
        "num_hidden_layers": 7, "tie_word_embeddings": False, "query_pre_attn_scalar": 32, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "gemma4, windows that reuse KV": ("gemma4", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4, experts, keys are values": ("gemma4", {
        **MODELS["gemma4, experts, keys are values"][1], "moe_intermediate_size": 64,
    }),
    "gemma4, keys are values, an output of its own": ("gemma4", {
        **MODELS["gemma4, keys are values, biases, a cap"][1], "attention_bias": False,
    }),
    "gemma3, every second window": ("gemma3", {"sliding_window_pattern": 2}),
    "phi3, windows": ("phi3", {"sliding_window": 20}),
    "smollm3, a layer without rope": ("smollm3", {"num_hidden_layers": 4}),
    "olmo3, scaled rope": ("olmo3", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_theta": 5e5, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
        },
    }),
    "phi3, part of each head": ("phi3", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
    }}),
}  # fmt: skip
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


# Rows of whole blocks of any format in every family of `GGUF_FAMILIES`.
MIXED_SIZES = {
    "hidden_size_per_layer_input": 256,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "shared_intermediate_size": 256, "num_hidden_layers": 2,
    "linear_value_head_dim": 64, "block_auto_adjust_ff_dim": False,
}  # fmt: skip


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
    """The same model with its matrices rounded as `write_tiny_gguf` rounds them."""
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
