"""Models that this user may not read: one line that names the file, whichever it is, wherever a model is named."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_for_planning, resolve_model
from batchgen.models.model_versions import model_versions
from batchgen.models.store.weight_store import open_store


@contextmanager
def closed(path):
    """A file or a directory that only its owner could open, and this process as somebody else."""
    mode, user = path.stat().st_mode, os.geteuid()
    parents = [(parent, parent.stat().st_mode) for parent in path.parents if parent.stat().st_uid == user]
    path.chmod(0)
    for parent, before in parents:
        if before & 0o5 != 0o5:
            parent.chmod(before | 0o5)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
        for parent, before in parents:
            parent.chmod(before)


def refusals(model) -> list[str]:
    """The errors with which each way to a model fails."""
    found = []
    for attempt in (load, lambda spec: resolve_for_planning(spec)):
        try:
            attempt(str(model))
        except InputError as error:
            found.append(str(error))
    assert found and all("\n" not in line and "Permission denied" in line for line in found), found
    return found


def load(spec):
    files = resolve_model(spec)
    model_versions(files)
    read_config(files)
    if files.kind == "store":
        open_store(files.path)
    open_checkpoint(files).load_head(torch.float32)


@pytest.mark.parametrize(
    "name",
    [".", "config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00010.safetensors"],
)
def test_a_directory_and_each_of_its_files(tmp_path, name):
    model = tmp_path / "model"
    make_tiny_model("llama", model, max_shard_size="60KB")
    with closed(model / name):
        assert all(str(model) in line for line in refusals(model))


def test_a_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(make_tiny_model("llama", tmp_path / "model"), path)
    with closed(path):
        assert all(str(path) in line for line in refusals(path))


@pytest.mark.parametrize("name", [".", "manifest.json", "layer-00001.safetensors"])
def test_a_store(tmp_path, name):
    make_tiny_model("llama", tmp_path / "model")
    store = tmp_path / "store"
    convert(resolve_model(str(tmp_path / "model")), store, dtype="float32")
    with closed(store / name):
        assert all(str(store) in line for line in refusals(store))


def test_a_directory_above_the_model(tmp_path):
    model = tmp_path / "above" / "model"
    make_tiny_model("llama", model)
    with closed(tmp_path / "above"):
        refusals(model)
        refusals(model / "config.json")
