"""How much weights take while they are loaded, and in what form they stay."""

import dataclasses
import weakref

import pytest
import torch
from model_tables import MIXED_SIZES
from tiny_gguf import mixed_types, write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core.kernel_choice import TORCH, KernelChoice, Measured, linear_key
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model, resolve_weights
from batchgen.models.formats.gguf import tensors as gguf_tensors
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tensor_files import block_packer
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.weights import Weights
from batchgen.schedule.residency import WeightResidency


def make(directory, family, kinds="Q4_0", *, tied=False):
    """A GGUF's checkpoint, its config, and that all of it is in memory."""
    path = directory / "model.gguf"
    model = make_tiny_model(family, directory, **MIXED_SIZES, tie_word_embeddings=tied)
    write_tiny_gguf(model, path, tensor_type=kinds)
    files = resolve_model(str(path))
    config = read_config(files)
    return (
        open_checkpoint(files, config),
        config,
        WeightResidency.in_memory(config, resolve_weights(files, "native")),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_are_given_back_as_they_are_packed(tmp_path, monkeypatch, family):
    """Where they are read whole, so that no more than one is in memory as it was read and as products read it."""
    checkpoint, config, residency = make(tmp_path, family)
    packed: list[weakref.ref] = []
    real = ops.pack_blocks

    def pack(weight, *rest, **options):
        own = {weight.data.untyped_storage().data_ptr()}
        assert {ref().untyped_storage().data_ptr() for ref in packed if ref() is not None} <= own
        packed.append(weakref.ref(weight.data))
        return real(weight, *rest, **options)

    monkeypatch.setattr(ops, "pack_blocks", pack)
    weights = Weights(config, residency, torch.float32, checkpoint=dataclasses.replace(checkpoint, load_unread=None))
    assert len(packed) == 1 + config.num_layers * (4 if family == "llama" else 2 + 2 * config.num_experts)
    weights.close()


def tensors_of(weight):
    parts = weight.parts if isinstance(weight, ops.SplitWeight) else [weight]
    return [part if isinstance(part, torch.Tensor) else part.data for part in parts]


@pytest.mark.parametrize("weight_format", ["native", "int8", "dequantized"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layers_of_a_store_keep_no_memory_beside_their_weights(tmp_path, family, weight_format):
    """Also where some matrices of what was read together are prepacked, and others are left as they were read."""
    if weight_format == "native":
        make(tmp_path, family)
    else:
        make_tiny_model(family, tmp_path, hidden_size=256)
    files = resolve_model(str(tmp_path / "model.gguf" if weight_format == "native" else tmp_path))
    config = read_config(files)
    store = find_or_convert(files, tmp_path / "offload", "bfloat16", weight_format)
    kept = "bfloat16" if weight_format == "dequantized" else resolve_weights(files, weight_format)
    shapes = {tuple(t.shape) for layer in store.layers for e in layer.extents.values() for t in e.tensors}
    some = sorted(shape for shape in shapes if len(shape) == 2)[::2]
    for bound in ([], some):
        kernels = KernelChoice(linear={linear_key(*shape, "bfloat16"): Measured(TORCH) for shape in bound})
        residency = WeightResidency.in_memory(config, kept)
        weights = Weights(config, residency, torch.bfloat16, store=store, kernels=kernels)
        of_layers = [w for layer in range(config.num_layers) for w in weights.layer(layer).values()]
        buffers = {t.untyped_storage().data_ptr(): t.untyped_storage() for w in of_layers for t in tensors_of(w)}
        assert sum(b.nbytes() for b in buffers.values()) <= 1.1 * sum(map(ops.weight_bytes, of_layers))
        weights.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_what_is_packed_while_it_is_read_is_the_same(tmp_path, monkeypatch, family, mixed, tied):
    """And no matrix is read whole, but a table of embeddings that makes no logits."""
    checkpoint, config, residency = make(tmp_path, family, mixed_types(family) if mixed else "Q4_0", tied=tied)
    assert config.tied_embeddings == tied
    monkeypatch.setattr(block_packer, "_PIECE_BYTES", 1 << 14)
    whole = Weights(config, residency, torch.bfloat16, checkpoint=dataclasses.replace(checkpoint, load_unread=None))
    read, real = [], gguf_tensors.read_by_threads
    monkeypatch.setattr(gguf_tensors, "read_by_threads", lambda name, *rest: (read.append(name), real(name, *rest)))
    pieces = Weights(config, residency, torch.bfloat16, checkpoint=checkpoint)
    assert set(read) <= (set() if tied else {"token_embd.weight"})
    assert pieces.num_bytes == whole.num_bytes
    for found, expected in zip(
        (pieces.embeddings, pieces.head, *map(pieces.layer, range(config.num_layers))),
        (whole.embeddings, whole.head, *map(whole.layer, range(config.num_layers))),
        strict=True,
    ):
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            pairs = zip(tensors_of(weight), tensors_of(expected[name]), strict=True)
            assert all(torch.equal(first, second) for first, second in pairs), name


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
    kept = resolve_weights(files, "native") if tensor_type == "Q8_0" else name
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
