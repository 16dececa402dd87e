"""The merging of a LoRA adapter into a model's matrices, while these are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.classifiers import head_modules
from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import Change, StoredPart
from batchgen.models.formats.numbers import Numbers
from batchgen.models.hf.tensor_names import tensor_names
from batchgen.models.layouts import Part, all_parts
from batchgen.models.lora import MERGE, Delta, Lora
from batchgen.models.tensor_files.reading import check_stored, read_numbers

_STRIPE_VALUES = 1 << 20


def merging(config: ModelConfig, lora: Lora, *, unfused: bool) -> Change:
    """The change of a model's stored parts by an adapter.

    Args:
        config: Configuration of the model.
        lora: The adapter.
        unfused: Whether the model is a GGUF, where each part is a single matrix of one expert (`all_parts`).

    Raises:
        InputError: The adapter is for another model.
    """
    names = tensor_names(config) | {"lm_head": "lm_head"}

    def module_of(part: Part) -> tuple[str, str]:
        stem, _, suffix = part.name.rpartition(".")
        return names.get(stem, "").format(part.layer), suffix

    def change(part: Part, stored: StoredPart) -> StoredPart:
        module, suffix = module_of(part)
        if (info := lora.replaced.get(f"{module}.{suffix}")) is not None:
            check_stored(module, info, part.shape)
            stored = Numbers(module, info, stored.added if isinstance(stored, Numbers) else 0)
        if suffix != "weight" or (delta := lora.deltas.get(module)) is None:
            return stored
        rank = delta.a[1].shape[0]
        check_stored(delta.a[0], delta.a[1], (rank, *part.shape[1:]))
        check_stored(delta.b[0], delta.b[1], (part.shape[0], rank))
        return _Merged(stored, delta)

    present = {module_of(part) for part in all_parts(config, unfused=unfused)}
    changed = {(module, "weight") for module in lora.deltas} | {
        (module, suffix) for module, _, suffix in (name.rpartition(".") for name in lora.replaced)
    }
    if config.hidden_output:  # `read_classifier` reads them
        of_head = head_modules(config.family)
        changed = {(module, suffix) for module, suffix in changed if module not in of_head}
    otherwise = {(module, suffix) for module, suffix in changed if unfused and "linear_attn." in module}
    if unfused and (missing := min(changed - present | otherwise, default=None)):
        raise InputError(
            f"{lora.path} changes {missing[0]}, which this GGUF has in another form, or not: if the model is the one"
            " that the adapter was trained on, take its safetensors in place of the GGUF"
        )
    if missing := min(changed - present, default=None):
        raise InputError(
            f"{lora.path} changes {missing[0]}, and this model has no such matrix of its own: give the model that the"
            f" adapter was trained on; if it is that, {MERGE}"
        )
    if config.tied_embeddings and any(module == names["embed"] for module, _ in changed):
        raise InputError(f"{lora.path} changes the embedding, which this model ties to its output matrix: {MERGE}")
    return change


@dataclass(frozen=True)
class _Merged(StoredPart):
    """A matrix with what an adapter adds to it."""

    part: StoredPart
    delta: Delta

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        add_delta(out, self.delta)


def add_delta(out: Tensor, delta: Delta) -> None:
    """Add to a matrix what an adapter adds to it. Raises InputError where that is not finite."""
    a, b = (torch.empty(info.shape) for _, info in (delta.a, delta.b))
    for (name, info), values in ((delta.a, a), (delta.b, b)):
        read_numbers(name, info, values)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InputError(f"{delta.a[1].path} has a weight that is NaN or infinite: fetch it again")
    step = max(1, _STRIPE_VALUES // out.shape[1])
    for rows, of_b in zip(out.split(step), b.split(step), strict=True):
        rows.copy_(rows.float().add_(of_b @ a, alpha=delta.factor))
