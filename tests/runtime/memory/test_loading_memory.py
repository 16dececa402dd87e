"""How much weights take while they are loaded, and in what form they stay."""

import weakref

import pytest
import torch
from tiny_models import MIXED_SIZES, make_tiny_model, write_tiny_gguf

from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model, resolve_quantization
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.residency import WeightResidency
from batchgen.runtime.memory.weights import Weights


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_are_given_back_as_they_are_packed(tmp_path, monkeypatch, family):
    """So that no more than one is in memory as it was read and as products read it."""
    path = tmp_path / "model.gguf"
    write_tiny_gguf(make_tiny_model(family, tmp_path, **MIXED_SIZES), path, tensor_type="Q4_0")
    files = resolve_model(str(path))
    config = read_config(files)
    packed: list[weakref.ref] = []
    real = ops.pack_blocks

    def pack(weight, *rest, **options):
        own = {weight.data.untyped_storage().data_ptr()}
        assert {ref().untyped_storage().data_ptr() for ref in packed if ref() is not None} <= own
        packed.append(weakref.ref(weight.data))
        return real(weight, *rest, **options)

    monkeypatch.setattr(ops, "pack_blocks", pack)
    residency = WeightResidency.in_memory(config, resolve_quantization(files, "none"))
    weights = Weights(config, residency, torch.float32, checkpoint=open_checkpoint(files, config))
    assert len(packed) == 1 + config.num_layers * (4 if family == "llama" else 2 + 2 * config.num_experts)
    weights.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor_type", ["Q8_0", "F32"])
def test_embeddings_that_are_the_output_matrix_are_packed_and_in_memory_once(tmp_path, tensor_type, dtype):
    path = tmp_path / "model.gguf"
    model = make_tiny_model("llama", tmp_path, **MIXED_SIZES, tie_word_embeddings=True)
    write_tiny_gguf(model, path, tensor_type=tensor_type)
    files = resolve_model(str(path))
    config = read_config(files)
    assert config.tied_embeddings
    name = str(dtype).removeprefix("torch.")
    kept = resolve_quantization(files, "none") if tensor_type == "Q8_0" else name
    checkpoint = open_checkpoint(files, config)
    weights = Weights(config, WeightResidency.in_memory(config, kept), dtype, checkpoint=checkpoint)
    first = config.stage(0, config.num_layers - 1)
    rows = Weights(first, WeightResidency.in_memory(first, kept), dtype, checkpoint=checkpoint)
    table, as_read = weights.embeddings["embed.weight"], rows.embeddings["embed.weight"]
    assert not isinstance(as_read, ops.PackedWeight), "a stage without the output matrix only looks rows up"
    start, multiplied = weights.vocabulary_chunk(0, None)
    assert start == 0 and multiplied is table
    grows = tensor_type == "F32" and ops.kernels.packed_grows(dtype)
    assert isinstance(table, ops.PackedWeight) != grows and table.shape == as_read.shape
    ids = torch.arange(config.vocab_size).flip(0)
    assert torch.equal(ops.embedding(ids, table, dtype), ops.embedding(ids, as_read, dtype))
    assert ops.weight_bytes(table) - ops.weight_bytes(as_read) < 32 * as_read.data[0].nbytes
    weights.close()
    rows.close()
