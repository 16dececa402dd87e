"""Random LoRA adapters, saved by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path

import torch


def save_adapter(model: torch.nn.Module, folder: Path, seed: int = 0, **fields) -> torch.nn.Module:
    """Save a random adapter of a model to a folder; returns the model with it, as PEFT has it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 4, "lora_alpha": 6, **fields}))
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if values.requires_grad:
                values.add_(torch.randn(values.shape) * (0.3 if "lora_" in name else 0.1))
    adapted.save_pretrained(folder)
    return adapted
