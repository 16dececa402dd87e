"""Checkpoints of compressed-tensors: W8A8 as it is stored, and what is refused by name.

test_quantized_checkpoints.py has the other schemes.
"""

import itertools
import json

import pytest
import torch
from model_tables import FAMILIES
from quantized_checkpoints import CODED_SUFFIXES
from safetensors.torch import load_file, save_file
from thorough import covering
from tiny_models import make_tiny_model

import batchgen
from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.families import MIXTURES
from batchgen.models.files import read_config, resolve_model, resolve_weights
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.store.weight_store import open_store
from batchgen.ops import int8

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None}
ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
    "group_size": None,
}


def scheme(weights=WEIGHTS, activations=ACTIVATIONS, **fields):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    stated = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }  # fmt: skip
    return stated | fields


# All values of a head are rotated, so that rows of a head keep their order.
WHOLE_HEADS = {
    "qwen3_5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
}


def make_quantized(family, path, scale_dtype=torch.float32, suffixes=CODED_SUFFIXES, **fields):
    """A tiny model as such a checkpoint; returns name -> (codes, scale) as they are in its file."""
    make_tiny_model(family, path, **WHOLE_HEADS.get(family, {}))
    tensors = load_file(path / "model.safetensors")
    made = {}
    for name in [n for n in tensors if n.endswith(suffixes)]:
        codes, scale = int8.to_codes(tensors[name])
        codes[0, 0] = -128  # such codes are allowed
        made[name] = codes, scale.to(scale_dtype)
        tensors[name], tensors[f"{name}_scale"] = made[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    state(path, scheme(**fields))
    return made


def state(path, weights):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": weights}))


DENSE = [family for family in FAMILIES if family not in (*MIXTURES, "lfm2")]


@pytest.mark.parametrize(
    ("family", "scale_dtype"), covering(itertools.product(DENSE, (torch.float32, torch.bfloat16)), 0, "scales")
)
def test_quantized_values_and_scales_are_those_of_the_file(tmp_path, family, scale_dtype):
    stored = make_quantized(family, tmp_path / "model", scale_dtype)
    files = resolve_model(str(tmp_path / "model"))
    checkpoint = open_checkpoint(files)
    inner = "fc1" if family == "opt" else "gate_proj"
    for layer in range(checkpoint.config.num_layers):
        parts = {"qkv": ["q_proj", "k_proj", "v_proj"], ("up" if family == "opt" else "gate_up"): [inner]}
        if family == "phi3":
            parts = {"qkv": ["qkv_proj"], "gate_up": ["gate_up_proj"]}
        packed, numbers = (load(layer, torch.float32) for load in (checkpoint.load_int8_layer, checkpoint.load_layer))
        if checkpoint.config.has_state(layer):
            parts["qkv"] = ["in_proj_qkv", "in_proj_z"]
        else:  # layers that reuse KV have only queries
            parts["qkv"] = parts["qkv"][:1] if checkpoint.config.kv_source(layer) != layer else parts["qkv"]
        for name, members in parts.items():
            pairs = [next(v for k, v in stored.items() if f"layers.{layer}." in k and m in k) for m in members]
            if checkpoint.config.output_gate and members[0] == "q_proj":  # head by head, a query and its gate
                heads = checkpoint.config.attention_of(layer).num_heads
                halves = [part.unflatten(0, (heads, 2, -1)) for part in pairs[0]]
                pairs[0] = tuple(torch.cat([h[:, 1].flatten(0, 1), h[:, 0].flatten(0, 1)]) for h in halves)
            codes, scale = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
            n, rows = codes.shape[1], len(codes)
            got = int8.split(packed[f"{name}.weight"], n)
            assert torch.equal(got[0][:rows], codes) and torch.equal(got[1][:rows], scale.float())
            assert torch.equal(numbers[f"{name}.weight"][:rows], codes * scale.float())
        first_norm = "out_norm" if family in ("olmo2", "olmo3") else "input_norm"
        assert packed[f"{first_norm}.weight"].dtype == torch.float32
    store = convert(files, tmp_path / "store", dtype="float32")
    assert store.weight_format == "int8"
    kept = open_checkpoint(resolve_model(str(store.path))).load_int8_layer(1, torch.float32)
    again = checkpoint.load_int8_layer(1, torch.float32)
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


def test_matrices_before_and_after_the_layers_are_read(tmp_path):
    """Gemma 4 has a projection of its per-layer embeddings, and quantizers may not leave out the output matrix."""
    ends = ("per_layer_model_projection.weight", "lm_head.weight")
    stored = {}
    for family in ("gemma4", "llama"):
        made = make_quantized(family, tmp_path / family, suffixes=(*CODED_SUFFIXES, *ends))
        stored |= {name: codes * scale for name, (codes, scale) in made.items() if name.endswith(ends)}
    assert len(stored) == 2
    gemma, llama = (open_checkpoint(resolve_model(str(tmp_path / family))) for family in ("gemma4", "llama"))
    projection = gemma.load_embeddings(torch.float32)["per_layer_proj.weight"]
    assert torch.equal(projection, stored["model.per_layer_model_projection.weight"])
    assert torch.equal(llama.load_head(torch.float32)["lm_head.weight"], stored["lm_head.weight"])


def test_a_table_in_8_bits_is_refused_by_name(tmp_path):
    make_quantized("gemma4", tmp_path, suffixes=(*CODED_SUFFIXES, "embed_tokens_per_layer.weight"))
    with pytest.raises(InputError, match=r"embed_tokens_per_layer.weight in .* is I8; supported"):
        open_checkpoint(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_refused(tmp_path, family):
    make_quantized(family, tmp_path / "model")
    with pytest.raises(InputError, match="checkpoints in compressed-tensors W8A8 are not supported"):
        open_checkpoint(resolve_model(str(tmp_path / "model")))


def test_a_checkpoint_in_8_bits_runs_in_8_bits_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    make_quantized("llama", tmp_path / "model")
    path = str(tmp_path / "model")
    files = resolve_model(path)
    assert [resolve_weights(files, q) for q in ("native", "int4", "int8")] == ["int8", "int4", "int8"]

    def tokens(model, weights="auto"):
        with batchgen.Engine(
            model, dtype="float32", weights=weights, sampling=batchgen.SamplingParams(max_tokens=8)
        ) as engine:
            return engine.policy.weight_format, [c.samples[0].token_ids for c in engine.generate(["The ferry", "Yes."])]

    own = tokens(path)
    assert own[0] == "int8" and own == tokens(path, "int8")
    store = find_or_convert(files, tmp_path / "stores", "float32", "int8")
    assert tokens(str(store.path), "int8") == own
    assert tokens(path, "int4")[0] == "int4"
    with pytest.raises(InputError, match="weights 'int3' is not one of auto, native, dequantized, int8, int4"):
        tokens(path, "int3")


def test_a_plain_model_in_8_bits_has_the_tokens_of_its_store(tiny_models, tmp_path):
    path = tiny_models("qwen3")[0]
    store = convert(resolve_model(str(path)), tmp_path / "store", dtype="float32", weights="int8")
    assert open_store(store.path).weight_format == "int8"
    found = []
    for model in (path, store.path):
        engine = batchgen.Engine(
            str(model), dtype="float32", weights="int8", sampling=batchgen.SamplingParams(max_tokens=8)
        )
        with engine:
            found.append([c.samples[0].token_ids for c in engine.generate(["The ferry left", "A restaurant"])])
    assert found[0] == found[1]


REFUSED = {
    "W4A4 (nvfp4-pack-quantized)": scheme(WEIGHTS | {"num_bits": 4}, {"num_bits": 4}, format="nvfp4-pack-quantized"),
    "W8A16 (pack-quantized, num_bits 8)": scheme(activations=None, format="pack-quantized"),
    "several schemes at once": scheme(
        config_groups={
            "group_0": scheme()["config_groups"]["group_0"],
            "group_1": scheme(WEIGHTS | {"type": "float"})["config_groups"]["group_0"] | {"format": "float-quantized"},
        }
    ),
    "W8A8 (int-quantized, strategy 'tensor')": scheme(WEIGHTS | {"strategy": "tensor"}),
    "W8A8 (int-quantized, symmetric False)": scheme(activations=ACTIVATIONS | {"symmetric": False}),
    "W8A8 (int-quantized, dynamic False)": scheme(activations=ACTIVATIONS | {"dynamic": False}),
    "W8A16 (int-quantized, nothing stated)": scheme(activations=None),
    "W16A16 (no format)": {"quant_method": "compressed-tensors"},
    "kv_cache_scheme": scheme(kv_cache_scheme={"num_bits": 8}),
    "transform_config": scheme(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
    "sparsity_config": scheme(sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
    "a sparsity_config": scheme(sparsity_config="sparse-bitmask"),
    "config_groups.group_0 must be a scheme, not None": scheme(config_groups={"group_0": None}),
    "config_groups.group_1 must be a scheme, not []": scheme(
        config_groups={"group_0": scheme()["config_groups"]["group_0"], "group_1": []}
    ),
    "quant_method 'quark'": {"quant_method": "quark"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_other_schemes_are_refused_by_name(tmp_path, named):
    make_tiny_model("llama", tmp_path / "model")
    state(tmp_path / "model", REFUSED[named])
    with pytest.raises(InputError) as caught:
        read_config(resolve_model(str(tmp_path / "model")))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_what_says_nothing_is_allowed(tmp_path):
    make_tiny_model("llama", tmp_path / "model")
    dense = {"format": "dense", "global_sparsity": 0.0, "sparsity_structure": "unstructured"}
    for sparsity in (None, {}, dense):
        state(tmp_path / "model", scheme(transform_config={}, sparsity_config=sparsity))
        read_config(resolve_model(str(tmp_path / "model")))


@pytest.mark.parametrize("scale", [-0.5, -0.0, float("nan"), float("inf")])
def test_scales_that_would_mean_something_else_are_named(tmp_path, scale):
    make_quantized("llama", tmp_path / "model")
    path, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight_scale"
    tensors = load_file(path)
    tensors[name][3] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(resolve_model(str(tmp_path / "model")))
    for load in (checkpoint.load_int8_layer, checkpoint.load_layer):
        load(0, torch.float32)
        with pytest.raises(InputError, match=f"{name} in .* has scales that are negative or no numbers"):
            load(1, torch.float32)


@pytest.mark.parametrize("broken", ["a float layer", "a scale for all", "no scale"])
def test_what_does_not_fit_the_scheme_is_named(tmp_path, broken):
    make_quantized("llama", tmp_path / "model")
    path, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    if broken == "a float layer":
        tensors[name] = tensors[name].float()
    elif broken == "a scale for all":
        tensors[f"{name}_scale"] = torch.ones(1)
    else:
        del tensors[f"{name}_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=name.replace(".", "[.]")):
        open_checkpoint(resolve_model(str(tmp_path / "model")))
