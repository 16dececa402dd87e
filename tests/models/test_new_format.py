"""A format of weights is one file and one row in a table (docs/adding_a_format.md).

A toy format is read, whole and cut for ranks.
"""

import json
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model, resolve_weights
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart
from batchgen.models.formats.schemes import SCHEMES
from batchgen.models.shard import shard_of
from batchgen.models.tensor_files.reading import check_stored, read_numbers


@dataclass(frozen=True)
class Negated(Scheme):
    """Matrices with the wrong sign."""

    def describe(self):
        return "negated"

    def find(self, tensors, stem, shape, *, in_layer):
        name = f"{stem}.negated"
        if name not in tensors:
            return None
        check_stored(name, tensors[name], shape)
        return NegatedMatrix((name, tensors[name]))


@dataclass(frozen=True)
class NegatedMatrix(StoredPart):
    source: NamedTensor

    def fill(self, out):
        read_numbers(*self.source, out)
        out.neg_()


def test_a_new_format_is_one_class_and_one_row(tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, "negated", lambda config: Negated())
    for name in ("plain", "negated"):
        make_tiny_model("llama", tmp_path / name)
    path = tmp_path / "negated" / "model.safetensors"
    tensors = {
        name.replace(".weight", ".negated") if ".layers." in name and tensor.ndim == 2 else name: tensor
        for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items()
    }
    save_file({name: -tensor if name.endswith("negated") else tensor for name, tensor in tensors.items()}, path)
    config_path = tmp_path / "negated" / "config.json"
    stated = json.loads(config_path.read_text()) | {"quantization_config": {"quant_method": "negated"}}
    config_path.write_text(json.dumps(stated))

    plain, negated = (resolve_model(str(tmp_path / name)) for name in ("plain", "negated"))
    assert resolve_weights(negated, "native") == "native"
    config = read_config(plain)
    for shard in (None, shard_of(config, 1, 2)):
        expected, loaded = (open_checkpoint(files, shard=shard) for files in (plain, negated))
        for layer in range(config.num_layers):
            of_layer = loaded.load_layer(layer, torch.float32)
            for name, tensor in expected.load_layer(layer, torch.float32).items():
                assert torch.equal(of_layer[name], tensor)
