"""A model whose files are broken, through the command line.

Exit code 2 and one line that names the tensor, before a row is run.
"""

import json

import pytest
import torch
from command_line import refused
from quantized_checkpoints import fp8, requantize
from safetensors.torch import load_file, save_file
from test_as_found import retyped
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

ROUTER, DOWN = "blk.1.ffn_gate_inp.weight", "blk.1.ffn_down.weight"


def gguf_of(folder, family, change=lambda model: None):
    model = make_tiny_model(family, folder)
    change(model)
    write_tiny_gguf(model, folder / "model.gguf", tensor_type="Q8_0", tokenizer=make_tiny_tokenizer(folder))
    return folder / "model.gguf"


def mixture(change):
    """A GGUF of 4 experts whose layer 1 is changed."""
    return lambda folder: gguf_of(folder, "mixtral", lambda model: change(model.model.layers[1].mlp))


def replaced(module, name, values):
    setattr(module, name, torch.nn.Parameter(values.contiguous()))


def cut(of_whole):
    """The first so many bytes of a GGUF."""

    def make(folder):
        path = gguf_of(folder, "llama")
        data = path.read_bytes()
        path.write_bytes(data[: int(of_whole * len(data))])
        return path

    return make


def of_type(number):
    def make(folder):
        path = gguf_of(folder, "llama")
        retyped(path, DOWN, number)
        return path

    return make


def fp8_without(name):
    def make(folder):
        make_tiny_model("llama", folder, hidden_size=128, intermediate_size=128)
        requantize(folder, fp8(lambda r, c: (r, 1), {"quant_method": "fbgemm_fp8"}, "weight_scale"))
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


# what is wrong -> (makes the model in a folder, what the line says)
BROKEN = {
    "a router of too few experts": (
        mixture(lambda mlp: replaced(mlp.gate, "weight", mlp.gate.weight[:3])),
        [ROUTER, "[3, 64], its config asks for [4, 64]"],
    ),
    "a router of a narrower model": (
        mixture(lambda mlp: replaced(mlp.gate, "weight", mlp.gate.weight[:, :32])),
        [ROUTER, "[4, 32], its config asks for [4, 64]"],
    ),
    "fewer gates than experts": (
        mixture(lambda mlp: replaced(mlp.experts, "gate_up_proj", mlp.experts.gate_up_proj[:3])),
        ["blk.1.ffn_gate_exps.weight", "[3, 96, 64], its config asks for 4 experts first"],
    ),
    "fewer down projections than experts": (
        mixture(lambda mlp: replaced(mlp.experts, "down_proj", mlp.experts.down_proj[:2])),
        ["blk.1.ffn_down_exps.weight", "[2, 64, 96], its config asks for 4 experts first"],
    ),
    "a GGUF that ends among its tensors": (cut(0.7), ["model.gguf is truncated: tensor 'blk.", "fetch it again"]),
    "a GGUF that ends in its header": (cut(0.001), ["model.gguf is truncated or not a GGUF", "fetch it again"]),
    "a type that ggml does not have": (of_type(999), [DOWN, "unknown type 999"]),
    "a type that is not read": (of_type(15), [DOWN, "Q8_K"]),
    "FP8 without scales": (
        fp8_without("model.layers.1.mlp.up_proj.weight_scale"),
        ["model.layers.1.mlp.up_proj.weight", "in FP8 without scales"],
    ),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_one_line_names_what_is_wrong(tmp_path, wrong):
    make, named = BROKEN[wrong]
    (tmp_path / "model").mkdir()
    model = make(tmp_path / "model")
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt": "Yes."}) + "\n")
    message = refused("run", "-m", model, "-i", rows, "-o", output, "--dtype", "float32", "--cpu-memory", "4GiB")
    assert [text for text in named if text not in message] == [], message
    assert not output.exists() and not list(tmp_path.glob("out.jsonl.batchgen/parts/*"))
