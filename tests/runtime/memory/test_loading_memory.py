"""How much a layer's weights take while they are loaded."""

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
