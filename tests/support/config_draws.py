"""Random configurations, drawn key by key, and what batchgen makes of each beside transformers.

Every key of transformers' configuration class of a family is drawn, and of those that its model reads besides: stated,
left out or null; rotary positions in their old spelling and in that of `rope_parameters`. Most keys get values that
models have. Half of the draws have one or two odd ones among them: null, another type's value, what is known to be of
other mathematics.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model_tables import DELTA_NETS, FAMILIES, GEMMA4, SHORT_CONVS
from tiny_models import classes_of, randomize

from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.families import ARCHITECTURES
from batchgen.models.files import resolve_for_planning
from batchgen.models.hf.keys import IGNORED, KEYS

MARGIN = 1e-3  # log-probabilities in fp32 may differ by so much
MODELS = (
    *FAMILIES,
    *(f"{family} with images" for family in ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")),
)
_PROMPT_LENGTHS = (23, 19)  # beyond short windows, and beyond the contexts that longrope is drawn with
_MAX_TOKENS = 5
_MOST_PARAMS = 12_000_000
_VOCAB = 512
_LEFT_OUT = object()
# Sizes of models, whose defaults are those of large ones: at most one of them is left out.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "head_dim", "top_k_experts"),
    *("vocab_size_per_layer_input", "hidden_size_per_layer_input"),
    *(
        "num_key_value_heads",
        "moe_intermediate_size",
        "shared_intermediate_size",
        "layer_types",
        "shared_expert_intermediate_size",
        "num_experts",
        "num_local_experts",
    ),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("num_experts_per_tok", "layer_types"),
)
# What models read beside the keys of their class, or once read, or what other models do.
_OTHER_KEYS = (
    *(
        "head_dim",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "torch_dtype",
    ),
    *("partial_rotary_factor", "original_max_position_embeddings", "sliding_window_pattern", "sliding_window"),
    *("num_experts", "num_local_experts", "attention_bias", "mlp_bias", "norm_topk_prob", "embedding_multiplier"),
    *("logits_scaling", "is_causal", "per_layer_config", "attn_logit_softcapping", "use_qk_norm", "model_type"),
)


@dataclasses.dataclass(frozen=True)
class Draw:
    """A configuration. stated: its config.json. odd: the keys that have a value which models do not."""

    model: str
    seed: int
    stated: dict[str, Any]
    odd: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a draw.

    kind: "equal", "refused", "wrong", or "too large" to be run. key: that was named, where it is refused. difference:
    the largest of log-probabilities. reason: batchgen's words, or what is wrong. by_transformers: who refuses it, too.
    """

    kind: str
    key: str = ""
    difference: float = 0.0
    reason: str = ""
    by_transformers: bool = False


def draws_of(model: str, first: int, count: int, folder: Path, tokenizer: Path) -> Iterator[tuple[Draw, Outcome]]:
    """The outcomes of so many configurations that can be run, from a seed on. folder: to be made and removed."""
    seeds = itertools.count(first)
    while count:
        given = draw(model, next(seeds))
        outcome = try_draw(given, folder, tokenizer)
        shutil.rmtree(folder)
        if outcome.kind != "too large":
            count -= 1
            yield given, outcome


def draw(model: str, seed: int) -> Draw:
    """The configuration of a seed, which is the same everywhere."""
    rng = random.Random(f"{model} {seed}")
    family = model.split()[0]
    stated = {name: value for name, value in _ordinary(family, rng).items() if value is not _LEFT_OUT}
    if model == "gemma3 with images":  # which transformers does not apply there
        stated.pop("final_logit_softcapping", None)
    odd = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        name, value = _odd_value(family, stated, rng)
        odd.append(name)
        if value is _LEFT_OUT:
            stated.pop(name, None)
        else:
            stated[name] = value
    if _needs_head_dim(family, stated) and stated.get("head_dim") is None:
        stated["head_dim"] = 16
    if "with images" in model:
        stated = _with_images(family, stated, rng)
    return Draw(model, seed, stated, tuple(odd))


def _needs_head_dim(family: str, stated: dict[str, Any]) -> bool:
    """Where it is left out, transformers' Mixtral cannot do YaRN, and its Mistral no layer types."""
    if family in ("mistral", "ministral"):
        return family == "ministral" or "layer_types" in stated
    tables = (stated.get(name) for name in ("rope_parameters", "rope_scaling"))
    return family == "mixtral" and any(isinstance(t, dict) and "yarn" in t.values() for t in tables)


def try_draw(given: Draw, folder: Path, tokenizer: Path) -> Outcome:
    """Runs batchgen and transformers on a model of this configuration with random weights.

    folder: to be made. tokenizer: a directory with one of `_VOCAB` tokens.
    """
    shutil.copytree(tokenizer, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(given.stated))
    try:
        resolve_for_planning(str(config))
    except InputError as error:
        return _refused(given, str(error), folder)
    try:
        model = _make_model(given, folder)
    except Exception as error:  # anything: batchgen should have refused it
        return Outcome("wrong", reason=f"transformers refuses it: {str(error)[:300]}")
    if model is None:
        return Outcome("too large")
    try:
        return _compare(given, folder, model)
    except InputError as error:
        return _refused(given, str(error), folder)
    except Exception as error:
        return Outcome("wrong", reason=f"{type(error).__name__}: {str(error)[:300]}")


def _refused(given: Draw, message: str, folder: Path) -> Outcome:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder)
        too = False
    except Exception:
        too = True
    named = [name for name in _all_names(given.stated) if name in message]
    if "\n" in message or not named:
        return Outcome("wrong", reason=f"refused without a key: {message}")
    if not given.odd:
        return Outcome("wrong", reason=f"ordinary, but refused: {message}")
    first = [name for name in given.odd if name in message]
    return Outcome("refused", max(first or named, key=len), reason=message, by_transformers=too)


def _all_names(stated: dict[str, Any]) -> list[str]:
    found = ["model_type", "dtype", *stated]
    for value in stated.values():
        if isinstance(value, dict):
            found += _all_names(value)
    return found


def _make_model(given: Draw, folder: Path):
    """A random model of the configuration, saved in its folder and loaded again by transformers; None if too large."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "config.json"
    text = path.read_text()
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception:  # also for what changes no logits, which is then left out
        path.write_text(json.dumps(without_ignored(given.model.split()[0], given.stated)))
        config = AutoConfig.from_pretrained(folder)
    if (config.get_text_config().pad_token_id or 0) >= _VOCAB:  # a default of large models, which changes no logits
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": None}))
        config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    if sum(p.numel() for p in shape.parameters()) > _MOST_PARAMS:
        return None
    torch.manual_seed(given.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hidden = config.get_text_config().hidden_size
    randomize(model, given.model.split()[0], std=0.2 * min(1.0, (64 / hidden) ** 0.5))
    loaded = path.read_text()
    model.save_pretrained(folder)
    path.write_text(loaded)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    path.write_text(text)
    model.config.return_dict = True  # the form of results, which parts of a model rely on
    return model


def without_ignored(family: str, stated: dict[str, Any]) -> dict[str, Any]:
    ignored = IGNORED - {"pad_token_id", *KEYS[family]}
    kept = {name: value for name, value in stated.items() if name not in ignored}
    return {n: without_ignored(family, value) if n == "text_config" else value for n, value in kept.items()}


# Transformers cannot collect what routers say where some layers have none.
_NO_MORE_OUTPUTS = {
    model: {"output_router_logits": False} for model in ("granitemoehybrid", "qwen2_moe", "qwen3_moe", "qwen3_next")
}


def _compare(given: Draw, folder: Path, model) -> Outcome:
    rng = random.Random(given.seed)
    prompts = [[rng.randrange(4, 300) for _ in range(length)] for length in _PROMPT_LENGTHS]
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=4)
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_model_len": 40, "max_num_seqs": 2}
    with Engine(str(folder), sampling=sampling, **options) as engine:
        done = {each.index: each for each in engine.generate([Request(prompt) for prompt in prompts])}
    worst = 0.0
    for index, prompt in enumerate(prompts):
        if done[index].error is not None:
            return Outcome("wrong", reason=done[index].error)
        sample = done[index].samples[0]
        with torch.inference_mode():
            tokens = torch.tensor([[*prompt, *sample.token_ids]])
            out = model(tokens, use_cache=False, **_NO_MORE_OUTPUTS.get(given.model, {}))
        wanted = out.logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for row, token, found in zip(wanted, sample.token_ids, sample.logprobs, strict=True):
            differences = [abs(row[top.token_id].item() - top.logprob) for top in found.top]
            worst = max(worst, *differences, row.max().item() - row[token].item())
    if not worst <= MARGIN:
        return Outcome("wrong", difference=worst, reason=f"log-probabilities differ by {worst:.3g}")
    return Outcome("equal", difference=worst)


# What is drawn.


def _ordinary(family: str, rng: random.Random) -> dict[str, Any]:
    """Values that models have, one for each key; or it is left out, where that is another such value."""
    config_class, model_class = classes_of(family)
    maybe = lambda *values: rng.choice((_LEFT_OUT, *values))  # noqa: E731
    heads = rng.choice((2, 4))
    hidden, layers = rng.choice((32, 64)), rng.choice((1, 2, 3))
    max_position = rng.choice((64, 100, 512))
    drawn: dict[str, Any] = {
        "architectures": maybe([model_class.__name__]),
        "model_type": config_class.model_type,
        "vocab_size": _VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": maybe(True, False),
        "bos_token_id": maybe(None, 1),
        "eos_token_id": maybe(None, 2, [2, 3]),
        "pad_token_id": rng.choice((None, 3)),
        rng.choice(("dtype", "torch_dtype")): maybe("float32", "bfloat16", None),
        **_of_no_matter(config_class, rng),
    }
    if family == "opt":
        drawn |= {"ffn_dim": rng.choice((40, 96)), "word_embed_proj_dim": maybe(None, hidden, 16)}
        drawn |= {"do_layer_norm_before": maybe(True, False), "_remove_final_layer_norm": maybe(True, False)}
        drawn |= {"activation_function": maybe("relu", "gelu", "gelu_new"), "enable_bias": maybe(True, False)}
        return drawn
    drawn |= {"intermediate_size": rng.choice((40, 96)), "rms_norm_eps": maybe(1e-5, 1e-3)}
    drawn |= {"num_key_value_heads": rng.choice((1, 2, heads)), "hidden_act": maybe("silu", "gelu_new")}
    drawn |= {
        "head_dim": rng.choice(
            (8, 16, 24) if family in ("qwen3", "gemma2", "gemma3", "gpt_oss") else (_LEFT_OUT, 8, 16)
        )
    }
    if "attention_bias" in _fields(config_class):
        drawn |= {"attention_bias": maybe(True, False)}
    if family in ("llama", "granite", "smollm3", "seed_oss"):
        drawn |= {"mlp_bias": maybe(True, False), "pretraining_tp": maybe(1, 2)}
    if family == "olmoe":
        drawn["head_dim"] = _LEFT_OUT
    if family == "granitemoehybrid":
        drawn |= {"layer_types": rng.choice((["attention"] * layers, ["full_attention"] * layers))}
        drawn |= {"position_embedding_type": maybe("rope", None), "mamba_d_conv": maybe(4, 3)}
        drawn |= {"hidden_size": 64}  # of which Mamba's default sizes are multiples
    if family.startswith("granite"):
        drawn |= {"embedding_multiplier": maybe(1.0, 12), "residual_multiplier": maybe(0.22, 1)}
        drawn |= {"logits_scaling": maybe(1.0, 6), "attention_multiplier": maybe(0.0625, 0.3)}
    if family == "smollm3":
        drawn |= {"no_rope_layer_interval": maybe(1, 2, 4), "no_rope_layers": maybe(None, [1, 0, 1], [0, 0, 1, 1])}
    if family == "seed_oss":
        drawn |= {"attention_out_bias": maybe(True, False)}
    if family in DELTA_NETS:
        drawn["hidden_act"] = maybe("silu", "swish")
    of_states = {**dict.fromkeys(DELTA_NETS, _states), **dict.fromkeys(SHORT_CONVS, _short_convs)}
    drawn |= of_states[family](layers, rng) if family in of_states else _windows(family, layers, rng)
    drawn |= _experts(family, layers, rng)
    drawn |= _gemma4(family, drawn, rng) if family in GEMMA4 else {}
    if family in SHORT_CONVS:  # which have keys of their own, or none
        del drawn["hidden_act"], drawn["rms_norm_eps"]
    if family.startswith("gemma"):
        drawn.pop("hidden_act")
        drawn |= {"hidden_activation": maybe("gelu_pytorch_tanh")}
        drawn |= {} if family in GEMMA4 else {"query_pre_attn_scalar": maybe(24, 32)}
        drawn |= {"final_logit_softcapping": maybe(None, 5.0)}
    if family == "gemma2":
        drawn |= {"attn_logit_softcapping": maybe(None, 3.0)}
    if family == "gpt_oss":
        drawn |= {"hidden_act": maybe("silu"), "swiglu_alpha": maybe(1.702), "swiglu_limit": maybe(7.0)}
    return drawn | _rope(family, drawn, rng)


def _gemma4(family: str, drawn: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Keys of Gemma 4: heads of two sizes, reused KV, per-layer embeddings, experts beside an MLP."""
    heads, layers = drawn["num_attention_heads"], drawn["num_hidden_layers"]
    shared = rng.choice((_LEFT_OUT, 0, 1)) if layers > 1 else _LEFT_OUT
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    if shared == 1:  # each layer that reuses KV needs one of its kind
        types[layers - 2] = "full_attention"
    made = {
        "head_dim": rng.choice((8, 16)), "global_head_dim": rng.choice((16, 24)),
        "sliding_window": rng.choice((_LEFT_OUT, 6, 20)),
        "layer_types": types, "num_kv_shared_layers": shared,
        "num_global_key_value_heads": rng.choice((_LEFT_OUT, None, 1, heads)),
        "attention_k_eq_v": rng.choice((_LEFT_OUT, True, False)),
        "use_double_wide_mlp": rng.choice((_LEFT_OUT, True, False)),
    }  # fmt: skip
    if family == "gemma4":
        size = rng.choice((8, 12) if shared == 1 else (0, 8, 12))  # without which transformers cannot reuse KV here
        made |= {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": _VOCAB}
        made |= {"enable_moe_block": rng.choice((_LEFT_OUT, True, False))}
        made |= {"num_experts": rng.choice((4, 8)), "top_k_experts": rng.choice((1, 3))}
        made |= {"moe_intermediate_size": rng.choice((24, 40))}
        if made["enable_moe_block"] is True:
            made["use_double_wide_mlp"] = False
    return made


def _of_no_matter(config_class: type, rng: random.Random) -> dict[str, Any]:
    """Keys that change no logits."""
    values: dict[str, tuple] = {
        "transformers_version": ("4.51.0", None), "output_hidden_states": (True, False), "return_dict": (True, False),
        "chunk_size_feed_forward": (0, 8), "use_cache": (True, False), "id2label": (None, {"0": "a", "1": "b"}),
        "problem_type": (None, "regression"), "initializer_range": (0.02, 0.5), "init_std": (0.02, 0.5),
        "dropout": (0.0, 0.3),
        "attention_dropout": (0.0, 0.3), "layerdrop": (0.0, 0.2), "resid_pdrop": (0.0, 0.1), "embd_pdrop": (0.0, 0.1),
        "output_router_logits": (True, False), "router_aux_loss_coef": (0.001, 0.1), "router_jitter_noise": (0.0, 0.2),
        "is_encoder_decoder": (False,), "layer_norm_elementwise_affine": (True,),
        "use_bidirectional_attention": (False,),
    }  # fmt: skip
    own = _fields(config_class)
    if config_class.model_type.startswith("gemma4"):
        values["use_bidirectional_attention"] = (None, "vision")
    drawn = {name: rng.choice((_LEFT_OUT, *choices)) for name, choices in values.items() if name in own}
    return drawn | {"unsloth_version": rng.choice((_LEFT_OUT, "2026.1"))}


def _fields(config_class: type) -> dict[str, Any]:
    """The keys of a configuration class and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(config_class)}


def _windows(family: str, layers: int, rng: random.Random) -> dict[str, Any]:
    window = rng.choice((_LEFT_OUT, 6, 20))
    types = rng.choice((_LEFT_OUT, None, [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]))
    if family == "ministral":
        return {"sliding_window": window, "layer_types": types}
    if family in ("mistral", "ministral3", "mixtral", "phi3", "phimoe"):
        drawn = {"sliding_window": rng.choice((window, None))}
        if family == "mistral" and drawn["sliding_window"] is not None:
            drawn["layer_types"] = types
        return drawn
    if family.startswith(("qwen", "smollm3")):
        used = rng.choice((_LEFT_OUT, True, False))
        if family == "smollm3" and window is _LEFT_OUT:  # of which layers with a window need one
            types = rng.choice((_LEFT_OUT, None, ["full_attention"] * layers))
        drawn = {"use_sliding_window": used, "sliding_window": window}
        if family not in ("smollm3", "qwen3_moe"):
            drawn["max_window_layers"] = rng.choice((_LEFT_OUT, 0, 1, 2))
        if family != "qwen3_moe":
            drawn["layer_types"] = types if used is True else rng.choice((_LEFT_OUT, None, ["full_attention"] * layers))
        return drawn
    if family in ("gemma2", "gemma3", "gpt_oss", "olmo3"):
        pattern = {"sliding_window_pattern": rng.choice((_LEFT_OUT, 1, 2))} if family == "gemma3" else {}
        return {"sliding_window": window, "layer_types": types, **pattern}
    return {}


def _states(layers: int, rng: random.Random) -> dict[str, Any]:
    """Shapes of Gated DeltaNet layers, and which layers they are; the last one attends."""
    heads = rng.choice((1, 2, 3))
    types = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers - 1)] + ["full_attention"]
    which = rng.choice(({"layer_types": types}, {"layer_types": None, "full_attention_interval": layers}))
    return which | {
        "linear_num_key_heads": heads, "linear_num_value_heads": heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((8, 16, 20)), "linear_value_head_dim": rng.choice((8, 12, 16)),
        "linear_conv_kernel_dim": rng.choice((_LEFT_OUT, 2, 3, 4)), "attn_output_gate": rng.choice((_LEFT_OUT, True)),
        "head_dim": rng.choice((8, 16, 32)),
    }  # fmt: skip


def _short_convs(layers: int, rng: random.Random) -> dict[str, Any]:
    """Kernels of short convolutions, and which layers they are; the last one attends."""
    return {
        "layer_types": [rng.choice(("conv", "full_attention")) for _ in range(layers - 1)] + ["full_attention"],
        "conv_L_cache": rng.choice((_LEFT_OUT, 2, 3, 5)), "conv_bias": rng.choice((_LEFT_OUT, True, False)),
        "norm_eps": rng.choice((_LEFT_OUT, 1e-5, 1e-3)),
    }  # fmt: skip


def _experts(family: str, layers: int, rng: random.Random) -> dict[str, Any]:
    if family in ("mixtral", "gpt_oss"):
        name = rng.choice(("num_local_experts", "num_experts"))
        return {name: rng.choice((4, 8)), "num_experts_per_tok": rng.choice((_LEFT_OUT, 1, 2))}
    if family == "lfm2":
        return {
            "block_multiple_of": rng.choice((_LEFT_OUT, 16, 32)),
            "block_ffn_dim_multiplier": rng.choice((_LEFT_OUT, 1.0, 1.3)),
            "block_auto_adjust_ff_dim": rng.choice((_LEFT_OUT, True, False)),
            "full_attn_idxs": rng.choice((_LEFT_OUT, None, [0])),
        }  # fmt: skip
    if family == "lfm2_moe":
        return {
            "num_experts": rng.choice((8, 16)), "num_experts_per_tok": rng.choice((_LEFT_OUT, 1, 3)),
            "moe_intermediate_size": rng.choice((24, 40)), "norm_topk_prob": rng.choice((_LEFT_OUT, True, False)),
            "num_dense_layers": rng.choice((_LEFT_OUT, 0, 1)),
            "routed_scaling_factor": rng.choice((_LEFT_OUT, 1.0, 2.5)),
            "use_expert_bias": rng.choice((_LEFT_OUT, True, False)),
        }  # fmt: skip
    if family.startswith("granitemoe"):
        shared = {"shared_intermediate_size": rng.choice((24, 72))} if family != "granitemoe" else {}
        count = rng.choice((4, 8, 0) if family == "granitemoehybrid" else (4, 8))
        return {"num_local_experts": count, "num_experts_per_tok": rng.choice((_LEFT_OUT, 1, 3)), **shared}
    if family == "phimoe":
        noise = {"router_jitter_noise": rng.choice((_LEFT_OUT, 0.3)), "num_experts_per_tok": rng.choice((_LEFT_OUT, 2))}
        return {"num_local_experts": rng.choice((4, 8)), "lm_head_bias": rng.choice((_LEFT_OUT, True, False)), **noise}
    if family == "olmoe":
        drawn = {"num_experts": rng.choice((8, 16)), "num_experts_per_tok": rng.choice((_LEFT_OUT, 1, 3))}
        return drawn | {"norm_topk_prob": rng.choice((_LEFT_OUT, True, False))}
    if family == "qwen3_5_moe":
        sizes = {"moe_intermediate_size": rng.choice((24, 40)), "shared_expert_intermediate_size": rng.choice((24, 72))}
        return {"num_experts": rng.choice((8, 16)), "num_experts_per_tok": rng.choice((1, 3)), **sizes}
    if family not in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        return {}
    name = rng.choice(("num_local_experts", "num_experts")) if family == "qwen3_moe" else "num_experts"
    some = (1, 3) if family == "qwen3_next" else (_LEFT_OUT, 1, 3)  # whose default is for many more experts
    drawn = {name: rng.choice((8, 16)), "num_experts_per_tok": rng.choice(some)}
    drawn |= {"moe_intermediate_size": rng.choice((24, 40)), "norm_topk_prob": rng.choice((_LEFT_OUT, True, False))}
    drawn |= {
        "decoder_sparse_step": rng.choice((_LEFT_OUT, 1, 2)),
        "mlp_only_layers": rng.choice((_LEFT_OUT, None, [], [0])),
    }
    if family in ("qwen2_moe", "qwen3_next"):
        drawn |= {"shared_expert_intermediate_size": rng.choice((24, 72))}
    if family == "qwen2_moe":
        drawn |= {"qkv_bias": rng.choice((_LEFT_OUT, True, False))}
    return drawn


def _rope(family: str, drawn: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Rotary positions, in one of the spellings."""
    if family in GEMMA4:
        return _gemma4_rope(rng)
    theta = rng.choice((_LEFT_OUT, 5000.0, 1e5))
    of_theta = {} if theta is _LEFT_OUT else {"rope_theta": theta}
    scaled = _phi3_scaling(drawn, rng) if family == "phi3" else _scaling(rng)
    if family == "phimoe":
        scaled = {"rope_type": "default"}
    if family == "ministral3":
        scaled |= {"llama_4_scaling_beta": rng.choice((0.1, 0.5)), "original_max_position_embeddings": 8}
    around = {}
    if family == "phi3":
        around = {"original_max_position_embeddings": 16 if "long_factor" in scaled else rng.choice((_LEFT_OUT, 64))}
    if family in DELTA_NETS:
        scaled |= {"partial_rotary_factor": part} if (part := rng.choice((None, 0.25, 0.5, 1.0))) else {}
        scaled |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True} if rng.random() < 0.3 else {}
    by_type = family in ("gemma3", "olmo3")
    if by_type:  # which transformers does not read there
        scaled.pop("truncate", None)
    name_of_type = rng.choice(("rope_type", "type")) if not by_type else "rope_type"
    scaled = {name_of_type if name == "rope_type" else name: value for name, value in scaled.items()}
    if rng.random() < 0.5:  # the old spelling
        local = {"rope_local_base_freq": rng.choice((_LEFT_OUT, 5000.0))} if family == "gemma3" else {}
        plain = rng.choice((_LEFT_OUT, None)) if len(scaled) == 1 else scaled
        return {"rope_theta": theta, "rope_scaling": plain, **local, **around}
    if by_type:
        local = {"rope_type": "default", "rope_theta": rng.choice((5000.0, 1e4))}
        both = {"full_attention": {**scaled, **of_theta}, "sliding_attention": local}
        return {"rope_parameters": rng.choice((both, both, None, {"full_attention": both["full_attention"]}))}
    return {"rope_parameters": rng.choice(({**scaled, **of_theta}, {**scaled, **of_theta}, None)), **around}


def _gemma4_rope(rng: random.Random) -> dict[str, Any]:
    """Rotary positions of both types of layers, of which those without a window rotate a part of each head."""
    part = rng.choice((0.25, 0.5, 1.0))
    full = {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": rng.choice((5000.0, 1e6))}
    full |= rng.choice(({}, {"factor": 2.0}))
    full = rng.choice((full, full, {"rope_type": "default", "rope_theta": 1e4}))
    local = {"rope_type": "default", "rope_theta": rng.choice((5000.0, 1e4))}
    both = {"full_attention": full, "sliding_attention": local}
    return {"rope_parameters": rng.choice((_LEFT_OUT, None, both, both, both))}


def _scaling(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn"))
    if kind == "default":
        return {"rope_type": kind}
    original = rng.choice(({}, {"original_max_position_embeddings": rng.choice((16, 64))}))
    drawn = {"rope_type": kind, "factor": rng.choice((2.0, 8, 1.5))}
    if kind == "llama3":
        drawn |= {"low_freq_factor": rng.choice((1.0, 2.0)), "high_freq_factor": 4.0, **original}
    if kind == "yarn":
        drawn |= original
        values = {"beta_fast": (20, 32.0, None, 0), "beta_slow": (2, None), "truncate": (True, False, None)}
        values |= {"mscale": (0.7, None), "mscale_all_dim": (1.3,), "attention_factor": (1.25, None), "factor": (None,)}
        drawn |= {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.3}
    return drawn


def _phi3_scaling(drawn: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    drawn["head_dim"] = _LEFT_OUT
    part = rng.choice((1.0, 0.5, 0.75))
    rotated = int(drawn["hidden_size"] // drawn["num_attention_heads"] * part)
    if rng.random() < 0.5 or rotated % 2:
        return {"rope_type": "default"}
    factors = {f"{name}_factor": [1.0 + rng.random() * 3 for _ in range(rotated // 2)] for name in ("short", "long")}
    more = {name: 1.5 for name in ("factor", "attention_factor") if rng.random() < 0.3}
    kind = rng.choice(("longrope", "su", "yarn"))
    more |= {"original_max_position_embeddings": 16} if kind == "su" else {}
    return {"rope_type": kind, "partial_rotary_factor": part, **factors, **more}


def _odd_value(family: str, stated: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    """A key and a value of it that models do not have; of a size also that it is left out."""
    config_class, _ = classes_of(family)
    own = _fields(config_class)
    if rng.random() < 0.2 and family != "opt":
        return _odd_rope(stated, rng)
    name = rng.choice(sorted({*own, *_OTHER_KEYS} - {"architectures"}))
    if rng.random() < 0.35 and name != "model_type":  # without which transformers knows no model
        return name, None
    if name in (
        "id2label",
        "label2id",
        "pad_token_id",
        "residual_dropout",
        "initializer_range",
    ):  # what else these say is of no matter, unless it breaks transformers
        return name, _LEFT_OUT
    if name in _SIZES and rng.random() < 0.5:
        return name, _LEFT_OUT
    if name == "model_type":
        return name, rng.choice(("granite", "cohere", "llama", "qwen2"))
    if name == "layer_types":
        return name, [rng.choice(("full_attention", "sliding_attention", "linear_attention"))] * rng.choice((1, 2, 3))
    if isinstance(own.get(name), bool):
        return name, not own[name]
    if name == "head_dim" and family == "olmoe":  # which has no such key, but transformers reads a 0
        return name, rng.choice((3, 1, 0.5, True, "gelu", 10**12))
    if isinstance(own.get(name), float) or name.endswith("softcapping"):  # transformers takes no whole number for one
        return name, rng.choice((0.0, -1.0, 0.5, 1e12, float("nan"), float("inf"), "gelu"))
    if name == "max_position_embeddings":  # at least as long as the prompts, whose lengths are refused otherwise
        return name, rng.choice((0, 0.5, True, "gelu", [1], 10**12))
    if name == "vocab_size":
        return name, rng.choice((0, 0.5, True, "gelu", 10**12))
    odd = (3, 0, 1, 0.5, True, "gelu", "silu", [1], {"0": {"num_attention_heads": 1}}, float("nan"), 10**12)
    return name, rng.choice(odd)


def _odd_rope(stated: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    """Rotary parameters with a key too many, too few or null; or both spellings at once."""
    name = "rope_parameters" if isinstance(stated.get("rope_parameters"), dict) else "rope_scaling"
    found = stated.get(name)
    table = dict(found) if found and isinstance(found, dict) else {"rope_type": "yarn", "factor": 4.0}
    if rng.random() < 0.4:
        other = {"rope_parameters": "rope_scaling", "rope_scaling": "rope_parameters"}[name]
        theta = rng.choice(({}, {"rope_theta": 1e6}))
        return other, rng.choice(({"rope_type": "yarn", "factor": 4.0, **theta}, {"rope_type": "default", **theta}, {}))
    key = rng.choice(sorted(table) or ["factor"])
    change = rng.random()
    if change < 0.3:
        table.pop(key, None)
    elif change < 0.6:
        table[key] = None
    elif change < 0.8:
        table[rng.choice(("factor", "mrope_section", "type", "beta_fast", "alpha", "partial_rotary_factor"))] = (
            rng.choice((2.0, "mrope"))
        )
    else:
        table["rope_type"] = rng.choice(("dynamic", "longrope", "proportional", "llama3", "mrope", "linear"))
    return name, table


_GEMMA_TOWER = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8, "model_type": "siglip_vision_model",
    },
    "mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502,
}  # fmt: skip
_QWEN_TOWER = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503,
}  # fmt: skip
_GEMMA4_TOWER = {
    "vision_config": None, "audio_config": None, "boi_token_id": 501, "eoi_token_id": 502, "boa_token_id": 505,
    # Beyond the vocabulary: transformers takes a padding token's embedding in place of one that is generated.
    "image_token_id": 600, "video_token_id": 603, "audio_token_id": 604, "eoa_token_index": 506,
}  # fmt: skip
# Family -> its class with a vision tower, and that tower's keys.
_WITH_IMAGES = {
    "gemma3": ("Gemma3ForConditionalGeneration", _GEMMA_TOWER),
    "gemma4": ("Gemma4ForConditionalGeneration", _GEMMA4_TOWER),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", _GEMMA4_TOWER),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _QWEN_TOWER),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", _QWEN_TOWER),
}


def _with_images(family: str, stated: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """As published: the text model's keys in `text_config`, beside those of the vision tower."""
    text = {name: value for name, value in stated.items() if name != "architectures"}
    architecture, tower = _WITH_IMAGES[family]
    if family in GEMMA4 and text.get("pad_token_id") is None:  # which transformers puts in the place of images
        text["pad_token_id"] = 3
    outer: dict[str, Any] = {"model_type": family, "text_config": text, **tower}
    if rng.random() < 0.7:
        outer["architectures"] = [architecture]
    if "tie_word_embeddings" in text:
        outer["tie_word_embeddings"] = text["tie_word_embeddings"]
    if rng.random() < 0.5:
        outer["eos_token_id"] = [2, 3]
    return outer


assert set(ARCHITECTURES.values()) == set(FAMILIES)
