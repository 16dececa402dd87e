"""Tiny models as the quantizers of the field store them, and the numbers that they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

CODED_SUFFIXES = (
    "_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight", "fc1.weight", "fc2.weight",
    "w1.weight", "w2.weight", "w3.weight", "per_layer_input_gate.weight", "per_layer_projection.weight",
    "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight",
)  # fmt: skip
# rows and columns of a matrix, a generator -> (tensors by suffix, numbers fp32)
Pack = Callable[[int, int, np.random.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]


def nibbles(codes: np.ndarray, order=range(8)) -> torch.Tensor:
    """uint8 [a, b] -> int32 [a, b / 8, rounded up]: nibble i of a word is value order[i] of its eight."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8))).astype(np.uint32).reshape(len(codes), -1, 8)
    words = np.zeros(padded.shape[:2], np.uint32)
    for i, value in enumerate(order):
        words |= padded[..., value] << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32).copy())


def random_groups(rows, columns, size, rng, *, symmetric, dtype=np.float16):
    """Codes, scales and zero points; scales are numbers of 16 bits, in fp32."""
    groups = -(-columns // (size or columns))
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.06, (rows, groups)).astype(np.float32)
    scales = (
        scales.astype(np.float16).astype(np.float32)
        if dtype is np.float16
        else (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    )
    zeros = np.full((rows, groups), 8, np.uint8) if symmetric else rng.integers(4, 12, (rows, groups), dtype=np.uint8)
    return codes, scales, zeros


def numbers_of(codes, scales, zeros, group_of) -> torch.Tensor:
    """(code - zero point) * scale, which fp32 holds exactly."""
    values = (codes.astype(np.float64) - zeros[:, group_of]) * scales[:, group_of]
    assert (values == values.astype(np.float32)).all()
    return torch.from_numpy(values.astype(np.float32))


def gptq(size: int | None, *, version: int = 1, act_order: bool = False, symmetric: bool = False) -> tuple[dict, Pack]:
    """quantization_config, and what makes a matrix."""

    def pack(rows, columns, rng):
        codes, scales, zeros = random_groups(rows, columns, size, rng, symmetric=symmetric)
        group_of = np.arange(columns) // (size or columns)
        if act_order:
            group_of = rng.permutation(group_of)
        tensors = {
            "qweight": nibbles(codes).t().contiguous(),
            "qzeros": nibbles((zeros - (version == 1)).T & 15),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return tensors, numbers_of(codes, scales, zeros, group_of)

    config = {"quant_method": "gptq", "bits": 4, "group_size": size or -1, "desc_act": act_order, "sym": symmetric}
    return config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), pack


def awq(size: int) -> tuple[dict, Pack]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(rows, columns, rng):
        codes, scales, zeros = random_groups(rows, columns, size, rng, symmetric=False)
        tensors = {
            "qweight": nibbles(codes.T, order),
            "qzeros": nibbles(zeros.T, order),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        return tensors, numbers_of(codes, scales, zeros, np.arange(columns) // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return config | {"modules_to_not_convert": ["gate"]}, pack


def pack_quantized(size: int | None, *, symmetric: bool, act_order: bool = False) -> tuple[dict, Pack]:
    def pack(rows, columns, rng):
        codes, scales, zeros = random_groups(rows, columns, size, rng, symmetric=symmetric, dtype=None)
        group_of = np.arange(columns) // (size or columns)
        if act_order:
            group_of = rng.permutation(group_of)
        tensors = {
            "weight_packed": nibbles(codes),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = nibbles(zeros.T).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, numbers_of(codes, scales, zeros, group_of)

    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group" if size else "channel",
        "group_size": size,
        "actorder": "group" if act_order else None,
    }  # fmt: skip
    return compressed("pack-quantized", weights), pack


def compressed(form: str, weights: dict, activations: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def e4m3(bits: np.ndarray) -> np.ndarray:
    """The numbers of FP8's E4M3 codes: sign, exponent less 7 (0: of -6, without a leading 1), mantissa.

    Codes 127 and 255 are NaN.
    """
    exponent, mantissa = bits >> 3 & 15, (bits & 7).astype(np.float64)
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7)
    )
    return np.where(bits & 128, -size, size)


def fp8(scale_shape: Callable[[int, int], tuple[int, ...]], config: dict, name: str) -> tuple[dict, Pack]:
    """scale_shape: of a matrix's scales; block by block where it has two dimensions."""

    def pack(rows, columns, rng):
        bits = (
            rng.integers(0, 127, (rows, columns), dtype=np.uint8)
            | rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
        )
        shape = scale_shape(rows, columns)
        scales = rng.uniform(1e-3, 3e-3, shape).astype(np.float32)
        down, across = (*shape, 1, 1)[:2]
        per_row, per_column = config.get("weight_block_size") or (-(-rows // down), -(-columns // across))
        of_row, of_column = np.arange(rows) // per_row, np.arange(columns) // per_column
        each = scales.reshape(down, across)[of_row][:, of_column]
        numbers = torch.from_numpy(e4m3(bits).astype(np.float32) * each)
        tensors = {
            "weight": torch.from_numpy(bits).view(torch.float8_e4m3fn),
            name: torch.from_numpy(scales),
            "input_scale": torch.ones(1),
        }
        return tensors, numbers

    return config, pack


def requantize(
    path: Path, scheme: tuple[dict, Pack], *, suffixes=CODED_SUFFIXES, numbers: Path | None = None
) -> dict[str, torch.Tensor]:
    """Give the matrices of a tiny model other numbers, in a format of few bits; the numbers by name.

    numbers: a directory that gets the same model in fp32.
    """
    config, pack = scheme
    rng = np.random.default_rng(5)
    tensors = load_file(path / "model.safetensors")
    plain, made = dict(tensors), {}
    for name in [n for n in tensors if n.endswith(suffixes)]:
        rows, columns = tensors.pop(name).shape
        stored, plain[name] = pack(rows, columns, rng)
        tensors |= {f"{name.removesuffix('weight')}{suffix}": t for suffix, t in stored.items()}
        made[name] = plain[name]
    if numbers:
        numbers.mkdir(exist_ok=True)
        for file in path.iterdir():
            (numbers / file.name).write_bytes(file.read_bytes())
        save_file(plain, numbers / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    state(path, config)
    return made


def in_mxfp4(path, seed=0):
    """Makes the experts of a tiny gpt-oss random blocks and scales, and returns these by the name of their tensor."""
    rng = np.random.default_rng(seed)
    tensors, made = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.from_numpy(rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8))
        scales = torch.from_numpy(rng.integers(115, 130, (experts, rows, columns // 32), dtype=np.uint8))
        made[name] = blocks, scales
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    state(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return made


def state(path: Path, weights) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": weights}))
