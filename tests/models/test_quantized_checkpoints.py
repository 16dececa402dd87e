"""GPTQ, AWQ and compressed-tensors in 4 bits, and FP8: the numbers are those that the formats define.

They are so dequantized and as they are stored.
"""

import json

import numpy as np
import pytest
import torch
from command_line import invoke
from model_tables import DELTA_NETS, FAMILIES, GRANITE_MIXTURES, few_experts
from quantized_checkpoints import awq, compressed, e4m3, fp8, gptq, pack_quantized, requantize, state
from safetensors.torch import load_file, save_file
from thorough import covering
from tiny_models import make_tiny_model

from batchgen.core.device import parse_device
from batchgen.core.dtypes import DEQUANTIZED, FORMAT_BYTES, FP8_FORMATS, GROUP_FORMATS
from batchgen.core.errors import InputError
from batchgen.engine.loader import choose_weights
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model, resolve_weights, weight_tensors
from batchgen.models.formats.schemes import read_scheme
from batchgen.models.layouts import is_quantized
from batchgen.models.store.weight_store import load_extent
from batchgen.ops import cpp
from batchgen.planner.sizes import group_bytes_of_layers

FP8_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
# name -> (quantization_config, what makes a matrix), and what it is kept as where columns are multiples of its groups
SCHEMES = {
    "GPTQ": (gptq(32), "w4_g32"),
    "GPTQ, version 2, groups of 64": (gptq(64, version=2), "w4_g64"),
    "GPTQ, symmetric, a scale for each row": (gptq(None, symmetric=True), "w4_g64"),
    "GPTQ, act-order": (gptq(32, act_order=True), None),
    "AWQ": (awq(32), "w4_g32"),
    "AWQ, groups of 64": (awq(64), "w4_g64"),
    "W4A16": (pack_quantized(32, symmetric=True), "w4_g32"),
    "W4A16, zero points": (pack_quantized(64, symmetric=False), "w4_g64"),
    "W4A16, a scale for each row": (pack_quantized(None, symmetric=True), "w4_g64"),
    "W4A16, act-order": (pack_quantized(32, symmetric=True, act_order=True), None),
    "FP8, one scale": (
        fp8(lambda r, c: (), {"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
        "fp8_g32",
    ),
    "FP8 by row": (fp8(lambda r, c: (r, 1), {"quant_method": "fbgemm_fp8"}, "weight_scale"), "fp8_g32"),
    "FP8 by block": (
        fp8(
            lambda r, c: (-(-r // 128), -(-c // 128)),
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "weight_scale_inv",
        ),
        "fp8_g32",
    ),
    "FP8 of compressed-tensors": (
        fp8(
            lambda r, c: (r, 1),
            compressed("float-quantized", FP8_FLOATS | {"strategy": "channel"}, FP8_FLOATS),
            "weight_scale",
        ),
        "fp8_g32",
    ),
}
# Rows and columns of two blocks of FP8, the second one not whole; and of whole groups of 64.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
INNER = {
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
INNER |= {family: INNER["qwen2_moe"] | {"linear_value_head_dim": 48, "head_dim": 48} for family in DELTA_NETS}
INNER |= {"lfm2": {"block_auto_adjust_ff_dim": False}, "lfm2_moe": {"moe_intermediate_size": 64}}
INNER["gemma4"] = {"hidden_size_per_layer_input": 64}
INNER["qwen3_5"] = {"linear_value_head_dim": 48, "head_dim": 48}
ALL = [family for family in FAMILIES if family != "gpt_oss"]


def make(tmp_path, family, scheme, **sizes):
    """(model in these codes, the same numbers in fp32)."""
    path = tmp_path / "model"
    overrides = (
        SIZES | INNER.get(family, {}) | ({"ffn_dim": 256, "word_embed_proj_dim": 192} if family == "opt" else {})
    )
    make_tiny_model(family, path, **few_experts(family) | overrides | sizes)
    requantize(path, scheme, numbers=tmp_path / "numbers")
    return resolve_model(str(path)), resolve_model(str(tmp_path / "numbers"))


CASES = [(name, family) for name in SCHEMES for family in ALL]


@pytest.mark.parametrize(("name", "family"), covering(CASES, 30, "codes"))
def test_numbers_are_those_that_the_format_defines(tmp_path, monkeypatch, name, family):
    """Every tensor has them, however the family fuses it, and what is kept packed has them too, in a store as well."""
    monkeypatch.setattr("batchgen.models.tensor_files.reading.CHUNK_VALUES", 10_000)  # each matrix in several parts
    scheme, kept = SCHEMES[name]
    kept = None if family in GRANITE_MIXTURES else kept  # whose stacked experts are left as numbers
    files, plain = make(tmp_path, family, scheme)
    assert resolve_weights(files, "native") == (kept or "native")
    config, cpu = read_config(files), parse_device("cpu")  # with memory for what is expanded, and with little
    chosen = [choose_weights(files, config, "auto", "float32", cpu, lambda m=m: m) for m in (1 << 40, 0)]
    assert chosen == ([DEQUANTIZED, kept] if kept else ["native", "native"])
    assert_same_model(files, plain, kept, tmp_path)


def assert_same_model(files, plain, kept, tmp_path):
    checkpoint, wanted = open_checkpoint(files), open_checkpoint(plain)
    store = convert(files, tmp_path / "store", dtype="float32")
    assert store.weight_format == (kept or "float32")
    for layer in range(checkpoint.config.num_layers):
        numbers = wanted.load_layer(layer, torch.float32)
        found = checkpoint.load_layer(layer, torch.float32)
        file = store.layers[layer]
        stored = [load_extent(file, extent, torch.float32) for extent in file.extents.values()]
        for model in (found, {name: tensor for group in stored for name, tensor in group.items()}):
            assert model.keys() == numbers.keys()
            for name in numbers:
                assert torch.equal(model[name], numbers[name]), name
        if kept:
            packed = checkpoint.load_packed("layer", layer, torch.float32, kept)
            for name, rows in packed.items():
                if is_quantized(name, tuple(numbers[name].shape)):
                    assert rows.nbytes == numbers[name].numel() * FORMAT_BYTES[kept]
                    rows = cpp.unpack_blocks(kept.upper(), rows, torch.empty_like(numbers[name]))
                assert torch.equal(rows, numbers[name]), name
    if kept:
        written = [{e.name: sum(t.num_bytes for t in e.tensors) for e in f.extents.values()} for f in store.layers]
        assert [*group_bytes_of_layers(store.config, "float32", kept)] == written


def test_the_last_group_of_a_row_may_be_shorter(tmp_path):
    """Such a model is expanded."""
    files, plain = make(tmp_path, "llama", gptq(128))  # 192 columns
    assert resolve_weights(files, "native") == "native"
    assert_same_model(files, plain, None, tmp_path)


def test_layers_that_were_left_as_numbers_are_read(tmp_path):
    """Then all are expanded."""
    path = tmp_path / "model"
    make_tiny_model("llama", path, **SIZES)
    requantize(path, awq(64), numbers=tmp_path / "numbers", suffixes=("mlp.up_proj.weight", "mlp.down_proj.weight"))
    files = resolve_model(str(path))
    assert resolve_weights(files, "native") == "native"
    assert_same_model(files, resolve_model(str(tmp_path / "numbers")), None, tmp_path)


def test_gptq_of_experts_alone_is_read(tmp_path):
    """As the GPTQ checkpoints of Qwen3.5's mixtures are: what "dynamic" leaves out is stored as numbers."""
    path = tmp_path / "model"
    make_tiny_model("qwen3_5_moe", path, **SIZES | INNER["qwen3_5_moe"])
    config, pack = gptq(32, symmetric=True)
    left_out = ("lm_head", "model.language_model.embed_tokens", "-:.*attn.*", "-:.*shared_expert.*", "-:.*mtp.*")
    config |= {"dynamic": {pattern: {} for pattern in left_out} | {"+:.*experts.*": {"bits": 4}}}
    experts = tuple(f"experts.{e}.{part}_proj.weight" for e in range(8) for part in ("gate", "up", "down"))
    requantize(path, (config, pack), numbers=tmp_path / "numbers", suffixes=experts)
    files = resolve_model(str(path))
    assert any(name.endswith("mlp.experts.0.gate_proj.qweight") for name in weight_tensors(files))
    assert resolve_weights(files, "native") == "native"
    assert_same_model(files, resolve_model(str(tmp_path / "numbers")), None, tmp_path)


def test_scales_of_32_bits_are_not_cut(tmp_path):
    files, plain = make(tmp_path, "llama", pack_quantized(64, symmetric=True))
    path = files.path / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {k: t.float() if k.endswith("weight_scale") else t for k, t in tensors.items()}, path, metadata={"format": "pt"}
    )
    assert resolve_weights(files, "native") == "native"
    assert_same_model(files, plain, None, tmp_path)


@pytest.mark.parametrize("weight_format", GROUP_FORMATS)
@pytest.mark.parametrize("isa", cpp.instruction_sets())
def test_blocks_hold_what_is_written_of_them(weight_format, isa):
    """Any codes, zero points and scales of 16 bits, on every instruction set; several dtypes, rows for all threads."""
    size, num_bytes = GROUP_FORMATS[weight_format]
    rng = np.random.default_rng(size)
    blocks = rng.integers(0, 256, (70, 3, num_bytes), dtype=np.uint8)
    blocks[..., 0] &= 15
    blocks[..., 3] = rng.integers(0x30, 0x48, (70, 3))  # exponents of numbers of a usual size
    heads = blocks[..., :4].copy().view("<u4")
    scales, zeros = (heads & 0xFFFFFF00).view("<f4"), (heads & 255).astype(np.float32)
    nibbles = blocks[..., 4:].reshape(70, 3, -1, 1, 16) >> np.array([[0], [4]]) & 15
    wanted = torch.from_numpy((nibbles.reshape(70, 3, size) - zeros) * scales).view(70, -1)
    with cpp.using(isa):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.empty(70, 3 * size, dtype=dtype)
            packed = torch.from_numpy(blocks.reshape(70, -1))
            assert torch.equal(cpp.unpack_blocks(weight_format.upper(), packed, out), wanted.to(dtype))


@pytest.mark.parametrize("weight_format", FP8_FORMATS)
@pytest.mark.parametrize("isa", cpp.instruction_sets())
def test_blocks_of_fp8_hold_what_is_written_of_them(weight_format, isa):
    """Every number there is, the smallest ones too."""
    size, num_bytes = FP8_FORMATS[weight_format]
    blocks = np.zeros((70, 256 // size, num_bytes), np.uint8)
    scales = np.random.default_rng(0).uniform(1e-3, 1, blocks.shape[:2]).astype("<f4")
    bits = np.arange(256, dtype=np.uint8)
    bits[bits & 127 == 127] = 0
    blocks[..., :4], blocks[..., 4:] = scales[..., None].view(np.uint8), bits.reshape(-1, size)
    wanted = torch.from_numpy(e4m3(bits).astype(np.float32).reshape(-1, size) * scales[..., None]).view(70, -1)
    with cpp.using(isa):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.empty(70, 256, dtype=dtype)
            packed = torch.from_numpy(blocks.reshape(70, -1))
            assert torch.equal(cpp.unpack_blocks(weight_format.upper(), packed, out), wanted.to(dtype))


NOT_READ = {
    "GPTQ checkpoints of 3 bits": gptq(32)[0] | {"bits": 3},
    "GPTQ checkpoints of 8 bits": gptq(32)[0] | {"bits": 8},
    "AWQ checkpoints of 2 bits": awq(32)[0] | {"bits": 2},
    "version 'gemv'": awq(32)[0] | {"version": "GEMV"},
    "checkpoint_format 'marlin'": gptq(32)[0] | {"checkpoint_format": "marlin"},
    "dynamic {'+:.*mlp.*': {'bits': 8}}": gptq(32)[0] | {"dynamic": {"+:.*mlp.*": {"bits": 8}, "-:.*attn.*": {}}},
    "dynamic must be an object, not ['.*']": gptq(32)[0] | {"dynamic": [".*"]},
    "bits must be a whole number, not None": {"quant_method": "gptq", "group_size": 32},
    "group_size must be at least 1, or -1, not 0": gptq(32)[0] | {"group_size": 0},
    "fmt 'e5m2'": {"quant_method": "fp8", "fmt": "e5m2"},
    "[rows, columns], not [128]": {"quant_method": "fp8", "weight_block_size": [128]},
    "W8A16 (pack-quantized, num_bits 8)": compressed("pack-quantized", FP8_FLOATS | {"type": "int"}),
    "W4A8 (pack-quantized, activations)": compressed("pack-quantized", {"num_bits": 4, "type": "int"}, {"num_bits": 8}),
    "strategy 'tensor_group'": compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor_group"}),
    "bits must be a whole number, not '4'": gptq(32)[0] | {"bits": "4"},
    "bits must be a whole number, not True": awq(32)[0] | {"bits": True},
    "bits must be a whole number, not [4]": gptq(32)[0] | {"bits": [4]},
    "group_size must be a whole number, not None": gptq(32)[0] | {"group_size": None},
    "group_size must be a whole number, not '32'": awq(32)[0] | {"group_size": "32"},
    "group_size must be a whole number, not [32]": pack_quantized([32], symmetric=True)[0],
    "desc_act must be true or false, not 'false'": gptq(32)[0] | {"desc_act": "false"},
    "is_marlin_format must be true or false, not 'no'": gptq(32)[0] | {"is_marlin_format": "no"},
    "zero_point must be true or false, not 'True'": awq(32)[0] | {"zero_point": "True"},
    "version '1'": awq(32)[0] | {"version": 1},
    "checkpoint_format 'None'": gptq(32)[0] | {"checkpoint_format": None},
    "symmetric must be true or false, not 'yes'": pack_quantized(32, symmetric="yes")[0],
    "[rows, columns], not [True, 128]": {"quant_method": "fp8", "weight_block_size": [True, 128]},
    "[rows, columns], not '128'": {"quant_method": "fp8", "weight_block_size": "128"},
    "actorder must be one of": compressed(
        "pack-quantized",
        {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 32,
            "actorder": ["group"],
        },
    ),
    "num_bits '4'": compressed(
        "pack-quantized", {"num_bits": "4", "type": "int", "strategy": "group", "group_size": 32}
    ),
    "config_groups must be an object, not ['group_0']": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": ["group_0"],
    },
    "quant_method ['gptq']": {"quant_method": ["gptq"], "bits": 4},
    "quantization_config must be an object, not 'gptq'": "gptq",
    "quantization_config must be an object, not []": [],
    "quant_method 'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


@pytest.mark.parametrize("named", NOT_READ)
def test_what_is_not_supported_is_refused_by_name(tmp_path, named):
    make_tiny_model("llama", tmp_path / "model")
    state(tmp_path / "model", NOT_READ[named])
    with pytest.raises(InputError) as caught:
        read_config(resolve_model(str(tmp_path / "model")))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_orders_of_columns_have_two_names_each():
    orders = {"group": True, "dynamic": True, "weight": False, "static": False, True: True, False: False, None: False}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    for stated, act_order in orders.items():
        assert read_scheme(compressed("pack-quantized", weights | {"actorder": stated})).act_order is act_order


UP = "model.layers.1.mlp.up_proj"


def without(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name]).contiguous()

    return apply


# name -> (scheme, what is broken in its file, what the message says)
BROKEN = {
    "no scales of FP8": ("FP8 by row", without(f"{UP}.weight_scale"), "in FP8 without scales"),
    "scales of FP8 in another shape": (
        "FP8 by row",
        replaced(f"{UP}.weight_scale", lambda t: t[:3]),
        "for each of its rows",
    ),
    "blocks of FP8 in another shape": (
        "FP8 by block",
        replaced(f"{UP}.weight_scale_inv", lambda t: t[:1]),
        "blocks of 128 x 128 ask for",
    ),
    "no zero points": ("GPTQ", without(f"{UP}.qzeros"), f"no tensor {UP}.qzeros"),
    "no scales": ("AWQ", without(f"{UP}.scales"), f"no tensor {UP}.scales"),
    "groups of another size": (
        "GPTQ",
        replaced(f"{UP}.scales", lambda t: t[:2]),
        "groups of 32 columns, as config.json has them",
    ),
    "codes of another shape": ("GPTQ", replaced(f"{UP}.qweight", lambda t: t[:-1]), "its config asks for"),
    "codes of another dtype": ("W4A16", replaced(f"{UP}.weight_packed", lambda t: t.long()), "supported: I32"),
    "no matrix at all": ("W4A16", without(f"{UP}.weight_packed"), f"no tensor {UP}.weight"),
    "weights that are no numbers": (
        "FP8 by row",
        replaced(f"{UP}.weight", lambda t: torch.full_like(t.view(torch.uint8), 127).view(t.dtype)),
        "weights that are no numbers",
    ),
    "scales that are no numbers": ("AWQ", replaced(f"{UP}.scales", lambda t: t / 0), "no numbers"),
    "columns in a group that is not there": (
        "GPTQ, act-order",
        replaced(f"{UP}.g_idx", lambda t: t + 1),
        "groups that are not there",
    ),
    "columns out of order": ("GPTQ", replaced(f"{UP}.g_idx", lambda t: t.flip(0)), "out of order"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_does_not_fit_is_named(tmp_path, broken):
    name, change, said = BROKEN[broken]
    files, _ = make(tmp_path, "llama", SCHEMES[name][0])
    tensors = load_file(files.path / "model.safetensors")
    change(tensors)
    save_file(tensors, files.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as caught:
        checkpoint = open_checkpoint(files)
        checkpoint.load_layer(1, torch.float32) if not checkpoint.weight_format else checkpoint.load_packed(
            "layer", 1, torch.float32, checkpoint.weight_format
        )
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_job_with_such_a_model_ends_with_one_line(tmp_path):
    files, _ = make(tmp_path, "llama", SCHEMES["FP8 by row"][0])
    tensors = load_file(files.path / "model.safetensors")
    save_file(
        {k: t for k, t in tensors.items() if "weight_scale" not in k},
        files.path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Yes."}) + "\n")
    code, _, said = invoke("run", "-m", files.path, "-i", tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl")
    assert code == 2 and "in FP8 without scales" in said.splitlines()[-1] and "Traceback" not in said


def test_a_job_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files, plain = make(tmp_path, "llama", SCHEMES["AWQ"][0])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Yes."}) + "\n")
    found = []
    for model in (files, plain):
        options = ["--dtype", "float32", "--cpu-memory", "4GiB", "--max-tokens", "4", "--overwrite"]
        out = tmp_path / "out.jsonl"
        code, _, said = invoke("run", "-m", model.path, "-i", tmp_path / "rows.jsonl", "-o", out, *options)
        assert code == 0 and ("loading model (AWQ of 4 bits, groups of 32)" in said) == (model is files), said
        found.append(out.read_bytes())
    assert found[0] == found[1]
