"""Tiny checkpoints with an MTP module."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_mtp(path: Path, source: str, *, planted: bool, seed: int = 0) -> None:
    """Add an MTP module to a checkpoint of one file.

    Args:
        path: Directory of the checkpoint.
        source: Name of a layer that attends, up to its number; the module's layer is a copy of it.
        planted: Whether the model becomes one whose next token follows from the last one alone, as no layer adds
            anything, and the module knows how. Otherwise the module is random.
        seed: Seed of what is random.
    """
    (file,) = path.glob("*.safetensors")
    tensors, rng = load_file(file), torch.Generator().manual_seed(seed)
    norm = next(t for name, t in tensors.items() if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    hidden = len(norm)
    if planted:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor.zero_()
    for name, tensor in list(tensors.items()):
        if name.startswith(f"{source}."):
            tensors[f"mtp.layers.0.{name[len(source) + 1 :]}"] = tensor.clone()
    vectors = {name: torch.randn(hidden, generator=rng) / 4 for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    projection = torch.randn(hidden, 2 * hidden, generator=rng) / hidden**0.5
    if planted:
        vectors["pre_fc_norm_embedding"].zero_()  # a weight of 1
        projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    tensors |= {f"mtp.{name}.weight": vector for name, vector in vectors.items()}
    tensors |= {"mtp.fc.weight": projection, "mtp.norm.weight": norm.clone()}
    save_file(tensors, file, metadata={"format": "pt"})
