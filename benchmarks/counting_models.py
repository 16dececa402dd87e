"""Models whose next token is the last one plus one: random weights copy nothing, and drafts need texts that repeat.

Embeddings are points on circles, each of which turns by a step of its own from token to token. The matrices of layers
stay random, but for those whose results are added to the residual: they are zero, and are read and multiplied like any
others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from random_model import LLAMA_3B, make_model

_CIRCLES = 512


def circle_steps() -> np.ndarray:
    """By how much each circle turns from token to token, in radians."""
    return np.random.default_rng(0).uniform(0, 2 * np.pi, _CIRCLES)


def circle_points(begin: int, end: int, width: int) -> np.ndarray:
    """Embeddings of the tokens from `begin` on, before `end`; fp32 [end - begin, width].

    Column 0 is 1; the cosines of all circles follow, then their sines, and zeros.
    """
    angles = np.arange(begin, end)[:, None] * circle_steps()
    points = np.zeros((len(angles), width), np.float32)
    points[:, 0], points[:, 1 : 1 + _CIRCLES] = 1.0, np.cos(angles) / 16
    points[:, 1 + _CIRCLES : 1 + 2 * _CIRCLES] = np.sin(angles) / 16
    return points


def counting_model(path: Path, layers: int) -> Path:
    """A model of Llama-3.2-3B's shape with so many layers, whose output matrix is that of the embeddings.

    One layer turns each circle by its step. Column 0 of each embedding is constant, so the first head of each group
    attends to its own token alone; two columns for each circle follow, which its values and outputs turn.
    """
    make_model(path, num_hidden_layers=layers)
    done = path / "counts"
    if done.exists():
        return path
    tensors = _Tensors(path)
    hidden, head, circles, steps = LLAMA_3B["hidden_size"], LLAMA_3B["head_dim"], _CIRCLES, circle_steps()
    embedding = tensors["model.embed_tokens.weight"]
    for begin in range(0, len(embedding), 4096):
        end = min(begin + 4096, len(embedding))
        embedding[begin:end] = _bfloat16(circle_points(begin, end, hidden))
    for layer in range(layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][:] = 0
    own = np.zeros((LLAMA_3B["num_key_value_heads"] * head, hidden), np.float32)
    own[:, 0] = 2.0
    heads = LLAMA_3B["num_attention_heads"] * head
    tensors["model.layers.0.self_attn.k_proj.weight"][:] = _bfloat16(own)
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = _bfloat16(np.tile(own, (heads // len(own), 1)))
    values = np.zeros((2 * circles, hidden), np.float32)
    values[:, 1 : 1 + 2 * circles] = np.eye(2 * circles)
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = _bfloat16(values)
    turn, gain = np.zeros((hidden, heads), np.float32), 8.0
    value_of = np.arange(2 * circles)  # head of each value: the first of those that share its KV head
    column = value_of // head * (heads // len(own)) * head + value_of % head
    i = np.arange(circles)
    turn[1 + i, column[i]], turn[1 + i, column[circles + i]] = np.cos(steps), -np.sin(steps)
    turn[1 + circles + i, column[i]], turn[1 + circles + i, column[circles + i]] = np.sin(steps), np.cos(steps)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = _bfloat16(gain * turn)
    done.touch()
    return path


class _Tensors:
    """The tensors of safetensors files in a directory, bfloat16 as uint16, to be written in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]

    def __getitem__(self, name: str) -> np.ndarray:
        path = self._path / self._files[name]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
        offset = 8 + length + entry["data_offsets"][0]
        return np.memmap(path, np.uint16, "r+", offset, tuple(entry["shape"]))


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The upper halves of fp32 numbers, rounded to nearest."""
    return ((numbers.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
