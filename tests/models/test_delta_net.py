"""Models with Gated DeltaNet layers, run by their layer functions, against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from model_tables import DELTA_NETS
from plain_model import PlainModel
from safetensors.torch import load_file, save_file
from tiny_gguf import round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.shard import shard_of
from batchgen.ops import cpp
from batchgen.ops import dispatch as ops

VARIANTS = [
    *((family, {}) for family in DELTA_NETS),
    ("qwen3_5", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    ("qwen3_5", {"linear_num_key_heads": 1, "attention_bias": True, "num_hidden_layers": 4, "layer_types": None}),
    ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 6}),
    ("qwen3_next", {"decoder_sparse_step": 2}),
]  # fmt: skip


@torch.inference_mode()
def assert_same_logits(model, plain: PlainModel, vocab_size: int, tolerance: float = 2e-3) -> None:
    """Prompts longer than a chunk of the state, cut in places, then single tokens of all sequences together."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (150, 9, 66)]
    wanted = [model(torch.tensor([text])).logits[0] for text in texts]
    cuts = [(0, 70, 131, 145), (0, 1, 2, 4), (0, 64, 65, 66)]
    results = [[] for _ in texts]
    for begin, end in zip(range(3), range(1, 4), strict=True):
        step = {slot: text[cuts[slot][begin] : cuts[slot][end]] for slot, text in enumerate(texts)}
        for slot, logits in plain({slot: ids for slot, ids in step.items() if ids}).items():
            results[slot].append(logits)
    for i in range(5):
        step = {slot: text[cuts[slot][3] + i :][:1] for slot, text in enumerate(texts)}
        for slot, logits in plain({slot: ids for slot, ids in step.items() if ids}).items():
            results[slot].append(logits)
    for parts, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_prompts_and_single_tokens_equal_transformers(family, overrides, tmp_path):
    model = make_tiny_model(family, tmp_path, **overrides)
    model.set_attn_implementation("eager")
    checkpoint = open_checkpoint(resolve_model(str(tmp_path)))
    assert checkpoint.config.state is not None
    assert_same_logits(model, PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_ggufs_equal_transformers(family, overrides, tmp_path):
    overrides = {name: value for name, value in overrides.items() if name != "norm_topk_prob"}  # which no file states
    model = make_tiny_model(family, tmp_path, **overrides)
    path = write_tiny_gguf(model, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(resolve_model(str(path)))
    wanted = open_checkpoint(resolve_model(str(tmp_path))).config
    assert checkpoint.config.state_layers == wanted.state_layers
    assert_same_logits(model, PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.mark.parametrize("family", DELTA_NETS)
def test_packed_ggufs_equal_their_dequantized_model(family, tmp_path):
    """Blocks of 32 columns, which lie across two value heads in the file's order of columns."""
    widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if family != "qwen3_5" else {}
    model = make_tiny_model(family, tmp_path, linear_value_head_dim=16, **widths)
    path = write_tiny_gguf(model, tmp_path / "model.gguf", tensor_type="Q8_0")
    checkpoint = open_checkpoint(resolve_model(str(path)))
    assert_same_logits(round_as_gguf(model, "Q8_0"), PlainModel(checkpoint, 3), model.config.vocab_size)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of each family, with value heads in groups, from safetensors, GGUF and weight store."""
    by_name = {}
    for family in DELTA_NETS:
        folder = tmp_path_factory.mktemp(family)
        widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        widths = {"intermediate_size": 128} if family == "qwen3_5" else widths
        model = make_tiny_model(family, folder / "hf", linear_value_head_dim=32, linear_num_key_heads=4,
                                linear_num_value_heads=8, **widths)  # fmt: skip
        by_name[family, "safetensors"] = resolve_model(str(folder / "hf"))
        path = write_tiny_gguf(model, folder / "model.gguf", tensor_type="Q8_0")
        by_name[family, "gguf"] = resolve_model(str(path))
        for kind in ("safetensors", "gguf"):
            convert(by_name[family, kind], folder / f"store of {kind}", dtype="float32")
            by_name[family, f"store of {kind}"] = resolve_model(str(folder / f"store of {kind}"))
    return by_name


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "store of safetensors", "store of gguf"])
@pytest.mark.parametrize("family", DELTA_NETS)
@torch.inference_mode()
def test_results_of_ranks_add_up(family, kind, files):
    """Each tensor-parallel rank has some key heads with their value heads, and a part of the output projection."""
    config = read_config(files[family, kind])
    whole = PlainModel(open_checkpoint(files[family, kind]), 2)
    ranks = [PlainModel(open_checkpoint(files[family, kind], shard=shard_of(config, rank, 2)), 2) for rank in range(2)]
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(80, config.hidden_size, generator=generator)
    for layer in range(config.num_layers):
        expected, *parts = (
            ops.linear(each.mix(layer, hidden, [0, 1], [70, 10]), each.layers[layer]["out.weight"])
            for each in (whole, *ranks)
        )
        torch.testing.assert_close(sum(parts), expected, atol=1e-4, rtol=1e-4)
    if kind.endswith("gguf"):  # packed rows are cut like numbers
        for rank in range(2):
            checkpoint = open_checkpoint(files[family, kind], shard=shard_of(config, rank, 2))
            for layer in range(config.num_layers):
                numbers = checkpoint.load_layer(layer, torch.float32)
                for name, rows in checkpoint.load_stored("layer", layer, torch.float32).items():
                    if rows.dtype == torch.uint8:
                        rows = cpp.unpack_blocks("Q8_0", rows, torch.empty_like(numbers[name]))
                    assert torch.equal(rows, numbers[name]), name


def as_published(folder, family: str, *, fp8: bool = False) -> dict[str, torch.Tensor]:
    """Give the tensors of a tiny model the names of published checkpoints, around a text model; experts' numbers.

    Experts of a layer are stacked, in FP8 with a scale for each block. A vision tower and a layer that predicts further
    tokens are beside them.
    """
    tensors = load_file(folder / "model.safetensors")
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    experts, stacked = {}, {}
    for name in [name for name in published if ".experts." in name]:
        stem, number, part, _ = name.split(".experts.")[0], *name.split(".experts.")[1].split(".")
        experts.setdefault(f"{stem}.experts", {})[int(number), part] = published.pop(name)
    for stem, matrices in experts.items():
        count = 1 + max(number for number, _ in matrices)
        gates, ups, downs = (
            torch.stack([matrices[number, f"{part}_proj"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{stem}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{stem}.down_proj": downs}
    numbers = dict(stacked)
    if fp8:
        for name, matrix in stacked.items():
            scales = torch.rand(matrix.shape[0], matrix.shape[1] // 32, matrix.shape[2] // 32) * 1e-2 + 1e-3
            each = scales.repeat_interleave(32, 1).repeat_interleave(32, 2)
            codes = (matrix / each).clamp(-400, 400).to(torch.float8_e4m3fn)
            published |= {name: codes, f"{name}_scale_inv": scales}
            numbers[name] = codes.float() * each
    else:
        published |= stacked
    published["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(48, 16)
    published["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64)
    published["mtp.fc.weight"] = torch.ones(64, 128)
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    outer = {"model_type": family, "architectures": [f"{prefix}ForConditionalGeneration"], "text_config": text}
    outer |= {"tie_word_embeddings": False, "vision_config": {"depth": 1}, "image_token_id": 1}
    if fp8:
        outer["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(outer))
    return numbers


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_published_checkpoint_is_read(family, tmp_path):
    model = make_tiny_model(family, tmp_path)
    as_published(tmp_path, family)
    checkpoint = open_checkpoint(resolve_model(str(tmp_path)))
    assert_same_logits(model, PlainModel(checkpoint, 3), model.config.vocab_size)


def test_stacked_experts_in_fp8_have_their_scales(tmp_path):
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    make_tiny_model("qwen3_5_moe", tmp_path, **sizes)
    numbers = as_published(tmp_path, "qwen3_5_moe", fp8=True)
    checkpoint = open_checkpoint(resolve_model(str(tmp_path)))
    for layer in range(checkpoint.config.num_layers):
        tensors = checkpoint.load_layer(layer, torch.float32)
        for name in ("gate_up", "down"):
            expected = numbers[f"model.language_model.layers.{layer}.mlp.experts.{name}_proj"].flatten(0, 1)
            torch.testing.assert_close(tensors[f"{name}.weight"], expected, atol=0, rtol=1e-6)
