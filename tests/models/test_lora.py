"""LoRA adapters that PEFT has saved: tokens equal those of the model that PEFT merges them into, on every tier."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lora_adapters import save_adapter
from model_tables import MODELS
from quantized_checkpoints import awq, gptq, in_mxfp4, requantize
from safetensors.torch import load_file, save_file
from thorough import covering, quick_or
from tiered import CPU, EMULATED, everything_moves, generate, make_parts, make_policy
from tiny_gguf import round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model, stored_weights
from batchgen.models.identity import model_identity

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5 + i * 7 % 400 for i in range(length)] for length in (3, 20, 33)]
OUTPUT_LEN = 6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# name -> (family, fields of its configuration, fields of the adapter)
ADAPTERS = {
    "llama": ("llama", {}, {"target_modules": "all-linear"}),
    "llama, rsLoRA, ranks and alphas by pattern": (
        "llama",
        {},
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"down_proj": 2, r"model.layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
    "llama, output matrix and norms": (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["lm_head", "v_proj"], "modules_to_save": ["norm", "input_layernorm"]},
    ),
    "opt": ("opt", {}, {"target_modules": "all-linear"}),
    "gemma3, norms": (
        "gemma3",
        {"tie_word_embeddings": False},
        {"target_modules": ATTENTION, "modules_to_save": ["pre_feedforward_layernorm"]},
    ),
    "phi3": ("phi3", {}, {"target_modules": "all-linear"}),
    "qwen3_5": ("qwen3_5", {}, {"target_modules": "all-linear"}),
    "qwen3_next": (
        "qwen3_next", {}, {"target_modules": [*ATTENTION, "in_proj_qkvz", "out_proj", "shared_expert_gate"]}
    ),
    "lfm2": ("lfm2", {}, {"target_modules": "all-linear"}),
    "gpt_oss": ("gpt_oss", {}, {"target_modules": ATTENTION}),
}  # fmt: skip


@dataclass(frozen=True)
class Adapted:
    """A model, an adapter, and what PEFT makes of both."""

    base: Path
    lora: Path
    merged: torch.nn.Module

    def tokens(self) -> list[tuple[int, ...]]:
        found = []
        with torch.inference_mode():
            for prompt in PROMPTS:
                ids = list(prompt)
                for _ in range(OUTPUT_LEN):
                    ids.append(int(self.merged(torch.tensor([ids])).logits[0, -1].argmax()))
                found.append(tuple(ids[len(prompt) :]))
        return found


def adapt(base: Path, model: torch.nn.Module, folder: Path, seed: int = 0, **fields) -> Adapted:
    """Save a random adapter of the model to `folder` and merge it into the model."""
    adapted = save_adapter(model, folder, seed, **fields)
    return Adapted(base, folder, adapted.merge_and_unload().eval())


@pytest.fixture
def llama(tiny_models, tmp_path):
    path, model = tiny_models("llama")
    return adapt(path, model, tmp_path / "lora", target_modules=ATTENTION)


def engine_tokens(model: Path, lora: Path | None, **options) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
    with Engine(str(model), lora=lora and str(lora), dtype="float32", **options) as engine:
        done = sorted(engine.generate([Request(prompt, sampling) for prompt in PROMPTS]), key=lambda c: c.index)
    return [tuple(completion.samples[0].token_ids) for completion in done]


@functools.cache  # several adapters are of the same model
def plain_tokens(model: Path) -> list[tuple[int, ...]]:
    return engine_tokens(model, None)


@pytest.mark.parametrize("name", ADAPTERS)
def test_tokens_are_those_of_the_model_that_peft_merges(tiny_models, tmp_path, name):
    family, fields, adapter = ADAPTERS[name]
    path, model = tiny_models(family, **fields)
    adapted = adapt(path, model, tmp_path / "lora", **adapter)
    wanted = adapted.tokens()
    assert engine_tokens(path, adapted.lora) == wanted
    assert plain_tokens(path) != wanted


# family -> fields of its configuration, module of its experts, parameter of its router; None: it is a linear layer
EXPERTS = {
    "mixtral": ({}, "mlp.experts", "mlp.gate.weight"),
    "phimoe": ({}, "mlp.experts", "mlp.router.weight"),
    "qwen2_moe": ({}, "mlp.experts", "mlp.gate.weight"),
    "qwen3_moe": ({}, "mlp.experts", "mlp.gate.weight"),
    "olmoe": ({}, "mlp.experts", "mlp.gate.weight"),
    "gpt_oss": ({}, "mlp.experts", "mlp.router.weight"),
    "qwen3_next": ({}, "mlp.experts", "mlp.gate.weight"),
    "qwen3_5_moe": ({}, "mlp.experts", "mlp.gate.weight"),
    "lfm2_moe": ({}, "feed_forward.experts", "feed_forward.gate.weight"),
    "granitemoe": ({}, "block_sparse_moe.experts", "block_sparse_moe.router.weight"),
    "gemma4": (MODELS["gemma4, experts, keys are values"][1], "experts", None),
}


def of_experts(family: str, parameters=("gate_up_proj", "down_proj"), **fields) -> dict:
    """Fields of an adapter of the experts of a family, and of its router and attention."""
    _, module, router = EXPERTS[family]
    targets = [f"{module}.{parameter}" for parameter in parameters] + ([router] if router else [])
    return {"target_modules": ["q_proj", "v_proj"], "target_parameters": targets, **fields}


@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_of_all_experts_of_a_layer_are_merged_as_peft_merges_them(tiny_models, tmp_path, family):
    path, model = tiny_models(family, **EXPERTS[family][0])
    adapted = adapt(path, model, tmp_path / "lora", **of_experts(family))
    wanted = adapted.tokens()
    assert engine_tokens(path, adapted.lora) == wanted
    assert plain_tokens(path) != wanted


SOME_PARAMETERS = [
    {"parameters": ["gate_up_proj"]},
    {"parameters": ["down_proj"], "use_rslora": True},
    {"parameters": ["down_proj", "gate_up_proj"], "rank_pattern": {"experts.down_proj": 2}},
    {"parameters": ["gate_up_proj", "down_proj"], "alpha_pattern": {r".*layers\.1\.mlp\.experts\.gate_up_proj": 3}},
]


@pytest.mark.parametrize(
    ("family", "which"),
    covering(itertools.product(("qwen3_moe", "gpt_oss"), range(len(SOME_PARAMETERS))), 0, "parameters"),
)
def test_adapters_of_some_parameters_of_experts_are_merged_as_peft_merges_them(tiny_models, tmp_path, family, which):
    path, model = tiny_models(family)
    adapted = adapt(path, model, tmp_path / "lora", **of_experts(family, **SOME_PARAMETERS[which]))
    assert engine_tokens(path, adapted.lora) == adapted.tokens()


def test_an_adapter_of_experts_in_the_form_of_an_older_peft_is_merged(tiny_models, tmp_path):
    """Until PEFT 0.18 the product was that of the transposed matrices."""
    path, model = tiny_models("qwen3_moe")
    adapted = save_adapter(model, tmp_path / "lora", **of_experts("qwen3_moe", ["down_proj"]))
    wanted = Adapted(path, tmp_path / "lora", adapted.merge_and_unload().eval()).tokens()
    file, experts = tmp_path / "lora" / "adapter_model.safetensors", model.config.num_experts
    tensors = load_file(file)
    for name in [name for name in tensors if "experts.lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        a = a.reshape(experts, -1, a.shape[-1])  # [experts, rank, columns]
        b = b.reshape(b.shape[0], -1, experts).permute(2, 1, 0)  # [experts, rank, rows]
        tensors[name] = b.flatten(0, 1).contiguous()
        tensors[other] = a.permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, file)
    assert engine_tokens(path, tmp_path / "lora") == wanted


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", {"moe_intermediate_size": 64}), ("gpt_oss", {})])
def test_an_adapter_of_experts_is_merged_into_a_gguf(tiny_models, tmp_path, family, fields):
    path, model = tiny_models(family, **fields)
    rounded = round_as_gguf(copy.deepcopy(model), "Q8_0")
    file = write_tiny_gguf(rounded, tmp_path / "model.gguf", tensor_type="Q8_0", tokenizer=make_tiny_tokenizer(path))
    adapted = adapt(file, rounded, tmp_path / "lora", **of_experts(family))
    assert engine_tokens(file, adapted.lora) == adapted.tokens()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_parameters": ["mlp.experts.down_proj"]}, "other matrices of .*experts than the target_parameters"),
        ({"target_parameters": None}, "other matrices of .*experts than the target_parameters"),
        (
            {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.down_proj_bias"]},
            "LoRA of down_proj_bias, the biases of experts",
        ),
    ],
)
def test_an_adapter_whose_experts_cannot_be_told_is_refused(tiny_models, tmp_path, change, message):
    path, model = tiny_models("gpt_oss")
    adapted = adapt(path, model, tmp_path / "lora", **of_experts("gpt_oss"))
    edited(adapted.lora, **change)
    with pytest.raises(InputError, match=message):
        engine_tokens(path, adapted.lora)


def test_an_adapter_of_experts_of_another_model_is_refused(tiny_models, tmp_path, llama):
    path, model = tiny_models("qwen3_moe")
    adapted = adapt(path, model, tmp_path / "lora_of_experts", **of_experts("qwen3_moe"))
    with pytest.raises(InputError, match="changes experts of layer 0, counted from 0, and this model has none there"):
        engine_tokens(llama.base, adapted.lora)
    other, _ = tiny_models("qwen3_moe", num_experts=5)
    with pytest.raises(InputError, match="experts"):
        engine_tokens(other, adapted.lora)


def drawn_adapter(rng):
    """Fields of a random adapter, of those that PEFT's users set: ranks, alphas, and the modules of some layers."""
    modules = rng.choice(
        ("all-linear", ATTENTION, ["q_proj", "v_proj"], r".*\.(up|down)_proj", ["gate_proj", "o_proj"])
    )
    drawn = {"r": rng.choice((1, 3, 8)), "lora_alpha": rng.choice((1, 7, 16)), "target_modules": modules}
    drawn |= {"use_rslora": rng.random() < 0.5, "lora_dropout": rng.choice((0.0, 0.1))}
    if isinstance(modules, list) and rng.random() < 0.5:
        drawn |= {"layers_to_transform": rng.choice((0, [1], [0, 1])), "layers_pattern": "layers"}
    elif not isinstance(modules, str) and rng.random() < 0.5:
        drawn["exclude_modules"] = [modules[0]]
    patterns = {modules[-1]: 2} if isinstance(modules, list) else {"down_proj": 2, r".*layers\.1\..*up_proj": 5}
    drawn |= {name: patterns for name in ("rank_pattern", "alpha_pattern") if rng.random() < 0.5}
    drawn["init_lora_weights"] = rng.choice((True, "gaussian", False))
    return drawn


@pytest.mark.parametrize("seed", quick_or(range(3), range(30)))
def test_drawn_adapters_are_merged_as_peft_merges_them(tiny_models, tmp_path, seed):
    rng = random.Random(seed)
    path, model = tiny_models(rng.choice(("llama", "qwen3", "gemma3")))
    adapted = adapt(path, model, tmp_path / "lora", seed, **drawn_adapter(rng))
    assert engine_tokens(path, adapted.lora) == adapted.tokens()


# Files have rows of queries and keys interleaved, and queries with their gate.
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_an_adapter_is_merged_into_a_gguf(tiny_models, tmp_path, family):
    path, model = tiny_models(family)
    rounded = round_as_gguf(copy.deepcopy(model), "Q8_0")
    file = write_tiny_gguf(rounded, tmp_path / "model.gguf", tensor_type="Q8_0", tokenizer=make_tiny_tokenizer(path))
    adapted = adapt(file, rounded, tmp_path / "lora", target_modules=[*ATTENTION, "gate_proj", "down_proj"])
    assert stored_weights(resolve_model(str(file))) is not None
    assert stored_weights(resolve_model(str(file), str(adapted.lora))) is None
    assert engine_tokens(file, adapted.lora) == adapted.tokens()


@pytest.mark.parametrize("family", ["phi3", "qwen3_5"])
def test_an_adapter_of_matrices_that_ggufs_have_otherwise_is_refused_for_a_gguf(tiny_models, tmp_path, family):
    path, model = tiny_models(family)
    file = write_tiny_gguf(model, tmp_path / "model.gguf", tokenizer=make_tiny_tokenizer(path))
    adapted = adapt(file, model, tmp_path / "lora", target_modules="all-linear")
    with pytest.raises(InputError, match="take its safetensors in place of the GGUF"):
        Engine(str(file), lora=str(adapted.lora), dtype="float32")


def packed_base(tiny_models, folder: Path, kind: str) -> tuple[Path, torch.nn.Module]:
    """A model with packed weights, and the same model in transformers."""
    from transformers import AutoModelForCausalLM

    if kind in ("gptq", "awq"):
        make_tiny_model("llama", folder / "base")
        requantize(folder / "base", {"gptq": gptq, "awq": awq}[kind](32), numbers=folder / "numbers")
        return folder / "base", AutoModelForCausalLM.from_pretrained(folder / "numbers").eval()
    if kind == "mxfp4":
        model = make_tiny_model("gpt_oss", folder / "base")
        with torch.no_grad():
            for name, (blocks, scales) in in_mxfp4(folder / "base").items():
                model.get_parameter(name).copy_(mxfp4_numbers(blocks, scales))
        return folder / "base", model
    family, tensor_type = kind.split()
    path, model = tiny_models(family, **GGUF_SIZES[family])
    model = round_as_gguf(copy.deepcopy(model), tensor_type)
    tokenizer = make_tiny_tokenizer(path)
    return write_tiny_gguf(model, folder / "model.gguf", tensor_type=tensor_type, tokenizer=tokenizer), model


GGUF_SIZES = {"llama": {}, "qwen3_moe": {"moe_intermediate_size": 64}}


def mxfp4_numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of experts in MXFP4, [experts, columns, rows] as transformers has them."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    numbers = values[codes] * torch.exp2(scales.float() - 127)[..., None]
    return numbers.flatten(-2).transpose(1, 2)


@pytest.mark.parametrize("kind", ["llama Q8_0", "qwen3_moe Q8_0", "gptq", "awq", "mxfp4"])
def test_packed_models_with_an_adapter_are_the_merged_model_whatever_tier_they_come_from(tiny_models, tmp_path, kind):
    path, model = packed_base(tiny_models, tmp_path, kind)
    family = model.config.model_type
    fields = of_experts(family) if family in EXPERTS else {"target_modules": [*ATTENTION, "up_proj", "down_proj"]}
    adapted = adapt(path, model, tmp_path / "lora", **fields)
    wanted = adapted.tokens()
    assert engine_tokens(path, adapted.lora) == wanted
    config = make_policy(path, CPU)
    on_disk = {group: (0, 1, layers - 1) for group, (_, layers, _) in config.weight_layers.items()}
    for device, policy in {
        CPU: make_policy(path, CPU, weight_layers=on_disk, kv_seqs={"cpu": 2, "disk": 6}),
        EMULATED: everything_moves(path, weight_format="float32"),
    }.items():
        parts = make_parts(path, device, policy, tmp_path / device.kind, lora=str(adapted.lora))
        assert generate(parts, PROMPTS, [OUTPUT_LEN] * len(PROMPTS)) == wanted


def test_tensor_parallel_ranks_merge_their_part_of_an_adapter(llama):
    assert engine_tokens(llama.base, llama.lora, tensor_parallel=2) == llama.tokens()


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
def test_a_store_of_an_adapted_model_is_that_of_the_merged_model(llama, tmp_path, weights):
    llama.merged.save_pretrained(tmp_path / "merged")
    shutil.copy(llama.base / "tokenizer.json", tmp_path / "merged")
    stores = {}
    for name, files in {
        "adapted": resolve_model(str(llama.base), str(llama.lora)),
        "merged": resolve_model(str(tmp_path / "merged")),
    }.items():
        stores[name] = convert(files, tmp_path / name / "store", dtype="float32", weights=weights)
    assert engine_tokens(stores["adapted"].path, None) == engine_tokens(stores["merged"].path, None)
    with pytest.raises(InputError, match="give --lora with its model"):
        resolve_model(str(stores["adapted"].path), str(llama.lora))


def test_models_with_different_adapters_are_different_models(llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(llama.lora, other)
    tensors = load_file(other / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * 2}, other / "adapter_model.safetensors")
    identities = [
        json.dumps(model_identity(resolve_model(str(llama.base), lora)), sort_keys=True)
        for lora in (None, str(llama.lora), str(other))
    ]
    assert len(set(identities)) == 3


def edited(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "only LORA is merged"),
        ({"bias": "all"}, "trained biases"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"lora_alpha": "many"}, "lora_alpha 'many'"),
        ({"r": 8}, "states rank 8"),
        ({"a_key_of_next_year": 3}, "a_key_of_next_year, which is not known"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
    ],
)
def test_adapters_that_are_more_than_a_sum_are_refused_by_name(llama, changes, message):
    edited(llama.lora, **changes)
    with pytest.raises(InputError, match=message):
        resolve_model(str(llama.base), str(llama.lora))


def test_an_adapter_of_another_model_is_refused(llama, tiny_models):
    with pytest.raises(InputError, match="trained on"):
        Engine(str(tiny_models("opt")[0]), lora=str(llama.lora), dtype="float32")
    wider = tiny_models("llama", hidden_size=128)[0]
    with pytest.raises(InputError, match=r"adapter_model\.safetensors is .*its config asks for"):
        Engine(str(wider), lora=str(llama.lora), dtype="float32")


def test_an_adapter_with_a_weight_that_is_no_number_is_refused(llama):
    tensors = load_file(llama.lora / "adapter_model.safetensors")
    tensors[next(iter(tensors))][0, 0] = float("nan")
    save_file(tensors, llama.lora / "adapter_model.safetensors")
    with pytest.raises(InputError, match="NaN"):
        engine_tokens(llama.base, llama.lora)


def test_an_adapter_that_is_not_there_is_refused(llama, tmp_path):
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        resolve_model(str(llama.base), str(tmp_path / "absent"))


def test_an_adapter_beside_a_model_is_merged_only_if_it_is_asked_for(llama, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(llama.base, both)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(llama.lora / name, both)
    with pytest.raises(InputError, match="give the directory as --lora too, or move the adapter"):
        resolve_model(str(both))
    assert engine_tokens(both, both) == llama.tokens()


def test_an_adapter_given_as_the_model_is_refused_with_the_way_to_give_it(llama):
    with pytest.raises(InputError, match="--lora"):
        resolve_model(str(llama.lora))


def job_texts(llama: Adapted, folder: Path, **options) -> list[str]:
    pq.write_table(pa.table({"prompt": ["one", "two words", "three words here"]}), folder / "rows.parquet")
    how = {"lora": str(llama.lora), "max_tokens": OUTPUT_LEN, "dtype": "float32", "hardware": "zen4", **options}
    batchgen.run(str(llama.base), str(folder / "rows.parquet"), str(folder / "out.parquet"), **how)
    return pq.read_table(folder / "out.parquet")["text"].to_pylist()


def test_a_job_with_an_adapter_gives_the_texts_of_the_merged_model_and_keeps_to_its_adapter(llama, tmp_path):
    llama.merged.save_pretrained(tmp_path / "merged")
    for file in llama.base.iterdir():
        if not (tmp_path / "merged" / file.name).exists():
            shutil.copy(file, tmp_path / "merged")
    wanted = job_texts(replace(llama, base=tmp_path / "merged"), tmp_path, lora=None)
    assert job_texts(llama, tmp_path, overwrite=True) == wanted
    assert job_texts(llama, tmp_path, overwrite=True, device="emulated:gpu-memory=2GiB") == wanted
    with pytest.raises(InputError, match="lora"):
        job_texts(llama, tmp_path, lora=None)


def test_two_names_of_one_matrix_are_refused(llama):
    tensors = load_file(llama.lora / "adapter_model.safetensors")
    name = next(name for name in tensors if ".lora_A." in name)
    twins = {which: name.replace(".lora_A.", f".lora_{which}.") for which in "AB"}
    other = {twin.replace("model.model.model.", "model.model.", 1): tensors[twin].clone() for twin in twins.values()}
    save_file(tensors | other, llama.lora / "adapter_model.safetensors")
    with pytest.raises(InputError, match="twice"):
        resolve_model(str(llama.base), str(llama.lora))


def test_two_names_of_one_whole_tensor_are_refused(llama):
    tensors = load_file(llama.lora / "adapter_model.safetensors")
    norm = torch.ones(64)
    both = {f"base_model.model.{prefix}norm.weight": norm.clone() for prefix in ("", "model.")}
    save_file(tensors | both, llama.lora / "adapter_model.safetensors")
    with pytest.raises(InputError, match="twice"):
        resolve_model(str(llama.base), str(llama.lora))


def test_an_adapter_in_a_pickle_is_refused_with_the_way_to_save_it_anew(llama):
    (llama.lora / "adapter_model.safetensors").unlink()
    (llama.lora / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle"):
        resolve_model(str(llama.base), str(llama.lora))


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": 10**400}, {"lora_alpha": -(10**400), "use_rslora": True}, {"r": 10**400}]
)
def test_an_adapter_of_a_factor_that_is_no_number_is_refused(llama, changes):
    edited(llama.lora, **changes)
    with pytest.raises(InputError, match=r"lora_alpha|rank"):
        resolve_model(str(llama.base), str(llama.lora))


def test_a_configuration_of_an_older_peft_is_read(llama):
    path = llama.lora / "adapter_config.json"
    config = json.loads(path.read_text())
    older = {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout", "peft_type",
        "r", "target_modules", "task_type",
    }  # fmt: skip
    added = {
        "bias": None, "enable_lora": None, "fan_in_fan_out": False, "init_lora_weights": True, "layers_pattern": None,
        "layers_to_transform": None, "megatron_config": None, "megatron_core": "megatron.core", "merge_weights": False,
        "modules_to_save": None, "revision": None,
    }  # fmt: skip
    path.write_text(json.dumps({key: config[key] for key in older} | added))
    assert engine_tokens(llama.base, llama.lora) == llama.tokens()


def test_whole_tensors_of_an_adapter_are_refused_for_a_gguf(tiny_models, tmp_path):
    path, model = tiny_models("gemma3")  # whose GGUFs have other numbers in their norms
    file = write_tiny_gguf(model, tmp_path / "model.gguf", tokenizer=make_tiny_tokenizer(path))
    adapted = adapt(file, model, tmp_path / "lora", target_modules=["v_proj"], modules_to_save=["input_layernorm"])
    with pytest.raises(InputError, match="possible in safetensors alone"):
        Engine(str(file), lora=str(adapted.lora), dtype="float32")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_adapters_of_other_dtypes_are_merged(llama, dtype):
    tensors = load_file(llama.lora / "adapter_model.safetensors")
    rounded = {name: values.to(torch.float16).to(torch.bfloat16) for name, values in tensors.items()}
    save_file(rounded, llama.lora / "adapter_model.safetensors")
    wanted = engine_tokens(llama.base, llama.lora)
    save_file({name: values.to(dtype) for name, values in rounded.items()}, llama.lora / "adapter_model.safetensors")
    assert engine_tokens(llama.base, llama.lora) == wanted


def test_an_adapter_of_whole_numbers_is_refused(llama):
    tensors = load_file(llama.lora / "adapter_model.safetensors")
    tensors = {name: (values * 9).to(torch.int8) for name, values in tensors.items()}
    save_file(tensors, llama.lora / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is I8; supported"):
        engine_tokens(llama.base, llama.lora)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_an_adapter_of_single_experts_is_refused_where_they_are_fused(llama, tiny_models, family):
    tensors = {}
    for which, shape in {"A": (4, 64), "B": (64, 4)}.items():
        tensors[f"base_model.model.model.layers.0.mlp.experts.0.down_proj.lora_{which}.weight"] = torch.ones(shape)
    save_file(tensors, llama.lora / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"no such matrix of its own|its config asks for"):
        Engine(str(tiny_models(family)[0]), lora=str(llama.lora), dtype="float32")
