"""Weights as found: a GGUF in one packed format stays in it, in memory, in stores and in what is planned."""

import itertools
import json
import struct

import gguf
import pytest
import torch
from command_line import invoke
from quantized_checkpoints import in_mxfp4, state
from thorough import covering
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.device import parse_device
from batchgen.core.dtypes import (
    BLOCK_FORMATS,
    FORMAT_BYTES,
    GGUF_FORMATS,
    MXFP4_EXPERTS,
    weight_row_bytes,
)
from batchgen.core.errors import InputError
from batchgen.engine.loader import choose_weights
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model, resolve_weights
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.layouts import is_quantized
from batchgen.models.store.weight_store import load_extent
from batchgen.ops import cpp
from batchgen.planner.sizes import group_bytes

OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 4}


def make_gguf(directory, tensor_type, family="llama", **overrides):
    """A tiny model whose rows are whole blocks of any format."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(directory)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = make_tiny_model(family, directory, **sizes | overrides)
    write_tiny_gguf(model, directory / "model.gguf", tensor_type=tensor_type, tokenizer=tokenizer)
    return resolve_model(str(directory / "model.gguf"))


def retyped(path, name, number):
    """Another type for a tensor of a GGUF."""
    data = path.read_bytes()
    at = data.index(name.encode()) + len(name)
    (dims,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * dims
    path.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])


def test_sizes_are_those_of_ggml():
    for name, sizes in GGUF_FORMATS.items():
        assert sizes == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert name.upper() in cpp.GGUF_TYPES
    for name in BLOCK_FORMATS:
        assert name.upper() in cpp.BLOCK_TYPES
        assert weight_row_bytes(512, name) == 512 * FORMAT_BYTES[name]


# Rows of heads are interleaved in llama alone.
@pytest.mark.parametrize(
    ("family", "weight_format"), covering(itertools.product(("llama", "qwen2"), GGUF_FORMATS), 0, "rows")
)
def test_rows_as_found_hold_the_expanded_numbers(tmp_path, weight_format, family):
    """In memory and in a store; all else is in the compute dtype."""
    files = make_gguf(tmp_path, weight_format.upper(), family)
    store = convert(files, tmp_path / "store", dtype="float32")
    assert store.weight_format == weight_format
    kept = resolve_model(str(store.path))
    assert resolve_weights(kept, "native") == weight_format
    expanded = open_checkpoint(files).load_layer(1, torch.float32)
    from_store = {
        k: v
        for e in store.layers[1].extents.values()
        for k, v in load_extent(store.layers[1], e, torch.float32).items()
    }
    for found in (open_checkpoint(f).load_packed("layer", 1, torch.float32, weight_format) for f in (files, kept)):
        assert found.keys() == expanded.keys() == from_store.keys()
        for name, numbers in expanded.items():
            assert torch.equal(from_store[name], numbers)
            if is_quantized(name, tuple(numbers.shape)):
                assert found[name].nbytes == numbers.numel() * FORMAT_BYTES[weight_format]
                assert torch.equal(
                    cpp.unpack_blocks(weight_format.upper(), found[name], torch.empty_like(numbers)), numbers
                )
            else:
                assert torch.equal(found[name], numbers)
    groups = group_bytes(store.config, "float32", weight_format)
    assert sum(groups.values()) == sum(t.num_bytes for e in store.layers[1].extents.values() for t in e.tensors)
    again = convert(kept, tmp_path / "expanded", dtype="float32", weights="dequantized")
    assert again.weight_format == "float32"


def test_experts_in_mxfp4_hold_the_expanded_numbers(tmp_path):
    """Of gpt-oss: rows of gate and up are apart, other matrices are in the compute dtype."""
    make_tiny_model("gpt_oss", tmp_path / "model")
    in_mxfp4(tmp_path / "model")
    files = resolve_model(str(tmp_path / "model"))
    assert resolve_weights(files, "native") == MXFP4_EXPERTS
    assert [resolve_weights(files, "dequantized"), resolve_weights(files, "auto", ())] == ["dequantized"] * 2
    store = convert(files, tmp_path / "store", dtype="bfloat16")
    kept = resolve_model(str(store.path))
    assert (store.weight_format, resolve_weights(kept, "native")) == (MXFP4_EXPERTS, MXFP4_EXPERTS)
    for layer in range(store.config.num_layers):
        expanded = open_checkpoint(files).load_layer(layer, torch.bfloat16)
        file = store.layers[layer]
        stored = [load_extent(file, extent, torch.bfloat16) for extent in file.extents.values()]
        from_store = {name: tensor for group in stored for name, tensor in group.items()}
        for f in (files, kept):
            found = open_checkpoint(f).load_packed("layer", layer, torch.bfloat16, MXFP4_EXPERTS)
            assert found.keys() == expanded.keys() == from_store.keys()
            for name, numbers in expanded.items():
                rows = found[name]
                if name in ("gate_up.weight", "down.weight"):
                    assert rows.nbytes == numbers.numel() * 17 / 32
                    rows = cpp.unpack_blocks("MXFP4", rows, torch.empty_like(numbers))
                assert torch.equal(rows, numbers) and torch.equal(from_store[name], numbers), name
    groups = group_bytes(store.config, "bfloat16", MXFP4_EXPERTS)
    assert sum(groups.values()) == sum(t.num_bytes for e in store.layers[0].extents.values() for t in e.tensors)
    again = convert(kept, tmp_path / "expanded", dtype="bfloat16", weights="dequantized")
    assert again.weight_format == "bfloat16"


def test_experts_that_were_expanded_are_numbers(tmp_path):
    """Whatever config.json still says."""
    make_tiny_model("gpt_oss", tmp_path)
    state(tmp_path, {"quant_method": "mxfp4"})
    assert resolve_weights(resolve_model(str(tmp_path)), "auto") == "native"
    open_checkpoint(resolve_model(str(tmp_path)))


def test_what_each_value_of_weights_means(tmp_path):
    files = make_gguf(tmp_path, "Q8_0")
    found = {q: resolve_weights(files, q) for q in ("auto", "native", "dequantized", "int4", "int8", "q8_0")}
    assert found == {
        "auto": "q8_0",
        "native": "q8_0",
        "dequantized": "dequantized",
        "int4": "int4",
        "int8": "int8",
        "q8_0": "q8_0",
    }
    assert resolve_weights(files, "auto", ()) == "dequantized"
    with pytest.raises(InputError, match="this device does not multiply weights in q8_0: leave it out"):
        resolve_weights(files, "native", ())
    with pytest.raises(InputError, match="'q4_0' is not one of auto, native, dequantized, int8, int4"):
        resolve_weights(files, "q4_0")
    plain = make_gguf(tmp_path / "plain", "F16")
    assert resolve_weights(plain, "native") == "native"


@pytest.mark.parametrize(("number", "named"), [(999, "unknown type 999"), (15, "unsupported type Q8_K")])
def test_types_that_nobody_reads_are_named_before_anything_is_loaded(tmp_path, number, named):
    files = make_gguf(tmp_path, "Q4_0")
    retyped(files.path, "blk.1.ffn_down.weight", number)
    with pytest.raises(InputError, match=named) as caught:
        open_checkpoint(files)
    assert "blk.1.ffn_down.weight" in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def little_memory(monkeypatch):
    """As if there were no room for expanded weights."""
    monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", 0)


def test_weights_are_expanded_where_that_takes_little_of_the_memory(tmp_path):
    files, cpu = make_gguf(tmp_path, "Q4_0"), parse_device("cpu")
    config = read_config(files)
    size = config.num_params * 4

    def chosen(memory, weights="auto", dtype="float32"):
        return choose_weights(files, config, weights, dtype, cpu, lambda: memory)

    assert [chosen(2 * size), chosen(2 * size - 1), chosen(size, dtype="bfloat16")] == [
        "dequantized",
        "q4_0",
        "dequantized",
    ]
    packed = resolve_model(str(convert(files, tmp_path / "packed", dtype="float32", weights="auto").path))
    found = [choose_weights(packed, config, "auto", "float32", cpu, lambda m=m: m) for m in (2 * size, 0)]
    assert found == ["dequantized", "q4_0"]
    assert [chosen(0, "dequantized"), chosen(0, "int8"), chosen(2 * size, "q4_0"), chosen(2 * size, "native")] == [
        "dequantized",
        "int8",
        "q4_0",
        "q4_0",
    ]


def test_the_engine_runs_block_quantized_weights_as_they_are(tmp_path, monkeypatch, little_memory):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files = make_gguf(tmp_path / "model", "Q4_0")
    store = find_or_convert(files, tmp_path / "stores", "float32", "q4_0")

    def run(model, weights="auto"):
        sampling = batchgen.SamplingParams(max_tokens=8)
        with batchgen.Engine(str(model), dtype="float32", weights=weights, sampling=sampling) as engine:
            tokens = [c.samples[0].token_ids for c in engine.generate(["The ferry", "Yes."])]
            return engine.policy.weight_format, engine.parts.loaded_bytes, tokens

    found, kept, expanded = run(files.path), run(store.path), run(files.path, "dequantized")
    assert found == kept and found[0] == "q4_0" and expanded[0] == "float32" and found[2] == expanded[2]
    config = read_config(files)
    matrices = config.num_layers * sum(r * c for group in config.layer_matrices.values() for r, c in group)
    matrices += 2 * config.vocab_size * config.embed_size
    assert expanded[1] - found[1] == matrices * (4 - 18 / 32)
    monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", 0.5)
    assert run(store.path) == expanded


def test_a_job_goes_on_whether_weights_are_expanded_or_not(tmp_path, monkeypatch, little_memory):
    """The results are the same, so a fingerprint does not tell one from the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files = make_gguf(tmp_path / "model", "Q4_0")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "The ferry"}\n{"prompt": "Yes."}\n')
    report = batchgen.run(str(files.path), "rows.jsonl", "out.jsonl", **OPTIONS)
    assert report["policy"]["weight_format"] == "q4_0" and report["rows_ok"] == 2
    assert (
        batchgen.run(str(files.path), "rows.jsonl", "out.jsonl", weights="dequantized", **OPTIONS)["state"]
        == "already complete"
    )
    batchgen.run(str(files.path), "rows.jsonl", report="cached.json", **OPTIONS)
    assert json.loads((tmp_path / "cached.json").read_text())["policy"]["weight_format"] == "q4_0"
    report = batchgen.run(str(files.path), "rows.jsonl", "expanded.jsonl", weights="dequantized", **OPTIONS)
    assert report["policy"]["weight_format"] == "float32"
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expanded.jsonl").read_bytes()


def test_a_plan_says_how_weights_are_kept(tmp_path, monkeypatch):
    """Of a machine with more or less memory than this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files = make_gguf(tmp_path / "model", "Q4_0")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "The ferry"}\n{"prompt": "Yes."}\n')
    found = {}
    for name, frac, then in (("kept", 0, 0.5), ("expanded", 0.5, 0)):
        monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", frac)
        sizes = ["--dtype", "float32", "--cpu-memory", "4GiB", "--max-tokens", "4"]
        code, _, message = invoke("plan", "-m", files.path, "-i", "rows.jsonl", "-o", "plan.json", *sizes)
        assert code == 0, message
        monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", then)
        report = batchgen.run(str(files.path), "rows.jsonl", f"{name}.jsonl", plan="plan.json", **OPTIONS)
        found[name] = report["policy"]["weight_format"], (tmp_path / f"{name}.jsonl").read_bytes()
    assert [found["kept"][0], found["expanded"][0]] == ["q4_0", "float32"] and found["kept"][1] == found["expanded"][1]
