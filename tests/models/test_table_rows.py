"""Rows of per-layer embeddings, read from the files of every kind of model."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from tiny_gguf import round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model

ROWS = np.array([7, 0, 511, 8, 9, 7, 300], dtype=np.int64)  # runs, single ones, and one twice


@pytest.fixture
def model(tmp_path):
    """A tiny model with per-layer embeddings, and its directory."""
    path = tmp_path / "model"
    return make_tiny_model("gemma4", path, dtype=torch.bfloat16), path


def rows_of(path, dtype=torch.float32):
    table = open_checkpoint(resolve_model(str(path))).open_per_layer()
    try:
        return table.rows(ROWS, dtype)
    finally:
        table.close()


def test_rows_of_safetensors_and_of_a_store_are_those_saved(model, tmp_path):
    saved, path = model
    wanted = saved.model.embed_tokens_per_layer.weight.detach()[ROWS].bfloat16()
    assert torch.equal(rows_of(path), wanted.float())
    for weights in ("dequantized", "int4"):
        store = tmp_path / weights
        convert(resolve_model(str(path)), store, dtype="bfloat16", weights=weights)
        assert torch.equal(rows_of(store, torch.bfloat16), wanted)
    assert rows_of(path).untyped_storage().nbytes() == rows_of(path).nbytes


@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0"])
def test_rows_of_a_gguf_and_of_its_store_are_dequantized(model, tmp_path, tensor_type):
    saved, _ = model
    gguf = write_tiny_gguf(saved, tmp_path / "m.gguf", tensor_type=tensor_type)
    wanted = round_as_gguf(saved, tensor_type).model.embed_tokens_per_layer.weight.detach()[ROWS]
    torch.testing.assert_close(rows_of(gguf), wanted, rtol=0, atol=1e-6)
    store = tmp_path / "store"
    convert(resolve_model(str(gguf)), store, dtype="float32")
    torch.testing.assert_close(rows_of(store), wanted, rtol=0, atol=1e-6)


def test_a_table_is_not_among_what_is_held(model):
    _, path = model
    checkpoint = open_checkpoint(resolve_model(str(path)))
    config = checkpoint.config
    assert "per_layer_embed.weight" not in checkpoint.load_embeddings(torch.float32)
    assert config.num_params - config.held_params == 512 * 3 * 32


def test_a_file_that_was_changed_is_refused(model):
    _, path = model
    table = open_checkpoint(resolve_model(str(path))).open_per_layer()
    table.rows(ROWS, torch.float32)
    os.utime(path / "model.safetensors", ns=(1, 1))
    with pytest.raises(InputError, match=r"model.safetensors was changed while it was read"):
        table.rows(ROWS, torch.float32)
    table.close()
