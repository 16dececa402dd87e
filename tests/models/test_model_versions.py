"""Weights that change while they are read: noticed, so that none are of one model in part and of another."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from quantized_checkpoints import gptq, requantize
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models import convert as conversion
from batchgen.models.as_weights import as_weights
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model, weight_tensors
from batchgen.models.identity import model_identity
from batchgen.models.layouts import stored_tensors
from batchgen.models.model_versions import changed_file, check_unchanged, model_versions
from batchgen.models.tensor_files.block_packer import BlockPacker


def edit(path) -> None:
    """Change the last byte in place, as a second later."""
    data, before = path.read_bytes(), path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(before + 10**9, before + 10**9))


def replace(path) -> None:
    """Put another file of the same size and time in its place."""
    data, stat = path.read_bytes(), path.stat()
    other = path.with_name("other")
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(other, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    os.replace(other, path)


def make(kind, path):
    """(what names the model, the file of its last layer)."""
    model = make_tiny_model(
        "llama", path / "model", max_shard_size="60KB" if kind == "shards" else "1GB", intermediate_size=128
    )
    if kind == "gguf":
        write_tiny_gguf(model, path / "tiny.gguf", tensor_type="Q8_0")
        return path / "tiny.gguf", path / "tiny.gguf"
    if kind == "gptq":
        requantize(path / "model", gptq(32))
    return path / "model", sorted((path / "model").glob("*.safetensors"))[-2 if kind == "shards" else 0]


def load_all(checkpoint):
    for j in range(checkpoint.config.num_layers):
        checkpoint.load_layer(j, torch.float32)
    checkpoint.load_head(torch.float32)


@pytest.mark.parametrize("change", [edit, replace])
@pytest.mark.parametrize("kind", ["whole", "shards", "gguf", "gptq"])
def test_a_file_that_changes_between_its_header_and_its_tensors_is_told(tmp_path, kind, change):
    model, file = make(kind, tmp_path)
    checkpoint = open_checkpoint(resolve_model(str(model)))
    checkpoint.load_embeddings(torch.float32)
    change(file)
    with pytest.raises(InputError, match=f"{file.name} was changed while it was read"):
        load_all(checkpoint)
    load_all(open_checkpoint(resolve_model(str(model))))


@pytest.mark.parametrize("change", [edit, replace])
def test_a_file_that_changes_while_its_rows_are_packed_is_told(tmp_path, change):
    """There it is opened once, and read by threads."""
    model, file = make("gguf", tmp_path)
    checkpoint = open_checkpoint(resolve_model(str(model)))
    rows = checkpoint.load_unread("layer", 0, torch.float32)["out.weight"]
    stored = stored_tensors(checkpoint.config, "layer", 0, "float32", checkpoint.weight_format)
    weight = as_weights(stored, {"out.weight": rows})["out.weight"]
    with BlockPacker(torch.float32) as packer:
        packer.pack(weight)
    change(file)
    with pytest.raises(InputError, match="was changed while it was read"), BlockPacker(torch.float32) as packer:
        packer.pack(weight)


def test_a_model_that_changes_after_it_was_identified_is_told(tmp_path):
    for kind in ("shards", "gguf", "store"):
        path = tmp_path / kind
        path.mkdir()
        model, file = make("shards" if kind == "store" else kind, path)
        if kind == "store":
            convert(resolve_model(str(model)), path / "store", dtype="float32")
            model, file = path / "store", path / "store" / "manifest.json"
        versions = model_versions(resolve_model(str(model)))
        check_unchanged(versions)
        assert changed_file(versions) is None
        for change in (edit, replace):
            copy = path / "copy"
            shutil.copy2(file, copy)
            versions = model_versions(resolve_model(str(model)))
            change(file)
            with pytest.raises(InputError, match=f"{file.name} was changed while the model was loaded"):
                check_unchanged(versions)
            os.replace(copy, file)
        file.unlink()
        assert changed_file(versions) == file


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "quantize_config.json", "model.safetensors.index.json"]
)
def test_what_says_what_a_model_is_counts_like_its_weights(tmp_path, name):
    model, _ = make("shards", tmp_path)
    if not (model / name).exists():
        (model / name).write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    versions = model_versions(resolve_model(str(model)))
    os.utime(model / name, ns=(1, 1))
    assert changed_file(versions) == model / name


def test_a_store_is_not_made_of_two_models(tmp_path, monkeypatch):
    """The weights are those of another model by the time that the model's identity is noted."""
    model, file = make("whole", tmp_path)

    def swapped(files):
        edit(file)
        return model_identity(files)

    monkeypatch.setattr(conversion, "model_identity", swapped)
    with pytest.raises(InputError, match="was changed while the model was loaded"):
        convert(resolve_model(str(model)), tmp_path / "store", dtype="float32")
    assert not (tmp_path / "store").exists()


# What tells one model from another when a job is resumed.


def test_large_models_that_differ_in_any_tensor_are_two(tmp_path, monkeypatch):
    """Parts are read of large files, some of each tensor."""
    monkeypatch.setattr("batchgen.models.identity._READ_WHOLE_BYTES", 0)
    make_tiny_model("llama", tmp_path, vocab_size=512, hidden_size=512, intermediate_size=1024)
    files, path = resolve_model(str(tmp_path)), tmp_path / "model.safetensors"
    before, data = model_identity(files), path.read_bytes()
    for info in weight_tensors(files).values():
        whole = slice(info.offset, info.offset + info.num_bytes)
        changed = np.frombuffer(data, np.uint8).copy()
        changed[whole] ^= 1
        path.write_bytes(changed.tobytes())
        os.utime(path, ns=(info.offset, info.offset))
        assert model_identity(files) != before
    path.write_bytes(data)
    assert model_identity(files) == before


def test_a_small_model_that_differs_in_one_byte_is_another(tmp_path):
    make_tiny_model("llama", tmp_path)
    files, path = resolve_model(str(tmp_path)), tmp_path / "model.safetensors"
    before, data = model_identity(files), bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data), len(data) // 7):
        data[at] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(at, at))
        assert model_identity(files) != before
        data[at] ^= 1
