"""GGUFs whose matrices are in different formats: each keeps its own, in memory, in stores and in what is planned."""

import dataclasses
import json
import math

import gguf
import numpy as np
import pytest
import torch
from command_line import invoke
from model_tables import GGUF_FAMILIES, MIXED_SIZES, few_experts
from tiny_gguf import as_q4_k_m, mixed_types, write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.dtypes import BLOCK_FORMATS, GGUF_FORMATS, MIXED
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model, resolve_weights, weight_tensors
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.layouts import layer_sizes, main_format, stored_tensors
from batchgen.ops import cpp
from batchgen.planner.sizes import group_bytes, group_bytes_of_layers, slot_bytes, store_bytes


def make(directory, family, kinds=None):
    model = make_tiny_model(family, directory, **MIXED_SIZES, **few_experts(family))
    path = directory / "model.gguf"
    write_tiny_gguf(model, path, tensor_type=kinds or mixed_types(family), tokenizer=make_tiny_tokenizer(directory))
    return resolve_model(str(path))


def numbers_of(tensors, stored, expanded):
    """Tensors as they are stored, expanded, in one piece for each name of `expanded`."""
    found = {}
    for name, whole in expanded.items():
        stem = name.removesuffix("weight")
        own = [n for n in tensors if n == name or (n.startswith(stem) and n.endswith(".weight"))]
        parts = []
        for part in own:
            kind, rows = stored[part].dtype, tensors[part]
            if kind in BLOCK_FORMATS:
                rows = cpp.unpack_blocks(kind.upper(), rows, torch.empty(stored[part].shape))
            parts.append(rows)
        if len(parts) == 2 and len(whole) != len(torch.unique(whole, dim=0)):
            raise AssertionError("rows that are alike would hide a wrong order")
        found[name] = parts
    return found


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_each_matrix_keeps_its_format_and_numbers(tmp_path, family):
    """In the file and in a store of it; parts of a fused matrix may be in several."""
    files = make(tmp_path, family)
    config, of_file = read_config(files), weight_tensors(files)
    assert resolve_weights(files, "native") == MIXED
    store = convert(files, tmp_path / "store", dtype="float32")
    kept = resolve_model(str(store.path))
    assert (store.weight_format, resolve_weights(kept, "native")) == (MIXED, MIXED)
    assert store.config == dataclasses.replace(config, dtype="float32")
    kinds = {info.dtype.lower() for name, info in of_file.items()} & GGUF_FORMATS.keys()
    assert (
        len(kinds) > 1
        and kinds == {t.dtype for f in store.files for e in f.extents.values() for t in e.tensors} & GGUF_FORMATS.keys()
    )
    places = [("embeddings", 0), *(("layer", j) for j in range(config.num_layers)), ("head", 0)]
    for which, layer in places:
        expanded = open_checkpoint(files).load(which, layer, torch.float32)
        from_store = open_checkpoint(kept).load(which, layer, torch.float32)
        assert expanded.keys() == from_store.keys()
        assert all(torch.equal(from_store[name], numbers) for name, numbers in expanded.items())
        stored = stored_tensors(config, which, layer, "float32", MIXED)
        first, second = (open_checkpoint(f).load_packed(which, layer, torch.float32, MIXED) for f in (files, kept))
        assert first.keys() == second.keys() == stored.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]) and tensor.nbytes == stored[name].num_bytes
        for name, parts in numbers_of(first, stored, expanded).items():
            rows = torch.cat(parts)
            if len(parts) == 2 and config.has_experts(layer) and name == "gate_up.weight":  # of each expert in turn
                chunks = zip(*(part.chunk(config.num_experts) for part in parts), strict=True)
                rows = torch.cat([each for pair in chunks for each in pair])
            assert torch.equal(rows, expanded[name]), name
    again = convert(kept, tmp_path / "expanded", dtype="float32", weights="dequantized")
    assert again.weight_format == "float32"
    numbers = open_checkpoint(resolve_model(str(again.path))).load_layer(1, torch.float32)
    assert all(torch.equal(t, numbers[name]) for name, t in open_checkpoint(files).load_layer(1, torch.float32).items())


# Few rows, and a matrix before the layers, which are loaded as numbers.
AS_NUMBERS = ("ssm_alpha", "ssm_beta", "ssm_ba", "per_layer_model_proj")


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_bytes_are_those_of_the_file(tmp_path, monkeypatch, family):
    """Planned, stored and loaded, layer by layer."""
    monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", 0)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files = make(tmp_path, family, as_q4_k_m(2))
    config = read_config(files)
    of_file = {
        name: 4 * math.prod(info.shape) if any(part in name for part in AS_NUMBERS) else info.num_bytes
        for name, info in weight_tensors(files).items()
        if not name.startswith("rope_f")  # factors, which belong to the configuration
    }
    table = of_file.pop("per_layer_token_embd.weight", 0)  # stored, and read by row
    for layer, groups in enumerate(group_bytes_of_layers(config, "float32", MIXED)):
        assert sum(groups.values()) == sum(
            size for n, size in of_file.items() if n.startswith(f"blk.{layer}.") and "sinks" not in n
        )
    total = sum(of_file.values())
    assert store_bytes(config, "float32", MIXED) == total + table
    mean = sum(group_bytes(config, "float32", MIXED).values())
    layers = [sum(sizes.values()) for sizes in layer_sizes(config, "float32", MIXED)]
    assert len(set(layers)) == 2 and mean == pytest.approx(sum(layers) / 2, abs=4)
    assert max(layers) <= sum(slot_bytes(config, "float32", MIXED).values()) <= sum(layers)
    with batchgen.Engine(str(files.path), dtype="float32", weights="auto") as engine:
        assert engine.policy.weight_format == MIXED
        panel = 64 * config.hidden_size * 4  # which rows of gates are filled up to, and in 5 % those of routers
        assert total <= engine.parts.loaded_bytes <= 1.05 * total + len(config.state_layers) * panel
        assert engine.parts.memory.parts["cpu"]["weights"] == total


def test_a_plan_states_the_bytes_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", 0)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    files = make(tmp_path, "llama")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "The ferry"}\n{"prompt": "Yes."}\n')
    sizes = ["--dtype", "float32", "--cpu-memory", "4GiB", "--max-tokens", "4"]
    code, _, message = invoke("plan", "-m", files.path, "-i", "rows.jsonl", "-o", "plan.json", *sizes)
    assert code == 0, message
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["policy"]["weight_format"] == MIXED
    total = sum(info.num_bytes for info in weight_tensors(files).values())
    assert plan["placement_bytes"]["weights"]["cpu"] == pytest.approx(total, abs=16)
    report = batchgen.run(
        str(files.path), "rows.jsonl", "kept.jsonl", plan="plan.json", dtype="float32", cpu_memory="4GiB", max_tokens=4
    )
    assert report["rows_ok"] == 2
    expanded = batchgen.run(
        str(files.path),
        "rows.jsonl",
        "expanded.jsonl",
        weights="dequantized",
        dtype="float32",
        cpu_memory="4GiB",
        max_tokens=4,
    )
    assert expanded["policy"]["weight_format"] == "float32"
    assert (tmp_path / "kept.jsonl").read_bytes() == (tmp_path / "expanded.jsonl").read_bytes()


def test_a_configuration_with_formats_survives_json_and_stages(tmp_path):
    config = read_config(make(tmp_path, "qwen2"))
    assert config.layer_formats and config.end_formats
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    stage = config.stage(1, 2)
    assert stage.layer_formats == config.layer_formats[1:]
    assert layer_sizes(stage, "float32", MIXED) == layer_sizes(config, "float32", MIXED)[1:]
    plain = dataclasses.replace(config, layer_formats=(), end_formats=())
    assert not {"layer_formats", "end_formats"} & plain.to_json().keys()
    assert main_format(config, MIXED) == "q4_0" and main_format(config, "int8") == "int8"


def test_layers_of_one_format_keep_its_name_and_the_ends_their_own(tmp_path):
    files = make(
        tmp_path, "llama", lambda name: {"output.weight": "Q6_K", "token_embd.weight": "Q8_0"}.get(name, "Q4_0")
    )
    config = read_config(files)
    assert resolve_weights(files, "native") == "q4_0"
    assert (config.layer_formats, config.end_formats) == ((), (("embed", "q8_0"), ("lm_head", "q6_k")))
    store = find_or_convert(files, tmp_path / "stores", "float32", "q4_0")
    (embed,) = store.embeddings.extents["embeddings"].tensors
    head = {t.name: t.dtype for t in store.head.extents["head"].tensors}
    assert embed.dtype == "q8_0" and head == {"final_norm.weight": "float32", "lm_head.weight": "q6_k"}


def test_matrices_that_no_kernel_knows_are_dequantized_beside_native_ones(tmp_path):
    """As of the types that the gguf package alone reads."""
    kind = gguf.GGMLQuantizationType.TQ2_0
    files = make(tmp_path, "llama", lambda name: "TQ2_0" if name == "blk.1.ffn_down.weight" else "Q4_0")
    assert resolve_weights(files, "native") == MIXED
    info = weight_tensors(files)["blk.1.ffn_down.weight"]
    packed = np.fromfile(files.path, np.uint8, info.num_bytes, offset=info.offset).reshape(info.shape[0], -1)
    found = open_checkpoint(files).load_packed("layer", 1, torch.float32, MIXED)["down.weight"]
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(packed, kind)))
