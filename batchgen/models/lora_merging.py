"""The merging of a LoRA adapter into a model's matrices, while these are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.classifiers import head_modules, refuse_tied
from batchgen.models.config import ModelConfig
from batchgen.models.families import GRANITE_MIXTURES
from batchgen.models.formats import fused_experts
from batchgen.models.formats.base import Change, StoredPart
from batchgen.models.formats.numbers import Numbers
from batchgen.models.hf.tensor_names import tensor_names
from batchgen.models.layouts import Part, all_parts
from batchgen.models.lora import DOWN, GATE_UP, MERGE, OUTPUT, Delta, Lora
from batchgen.models.tensor_files.reading import check_stored, read_numbers

_STRIPE_VALUES = 1 << 20
_OF_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)\.weight")
# The names of routers in transformers 5, where checkpoints have others.
_ROUTERS = {
    "mixtral": "layers.{}.mlp.gate",
    "phimoe": "layers.{}.mlp.router",
    **dict.fromkeys(GRANITE_MIXTURES, "layers.{}.block_sparse_moe.router"),
}
# Adapters of so many parameters of experts are in memory at a time: those of a layer, and of the next one.
_FACTORS_KEPT = 4
# The factors of all experts' products: [experts, rows, rank] and [experts, rank, columns].
Factors = tuple[Tensor, Tensor]


def merging(config: ModelConfig, lora: Lora, *, unfused: bool) -> Change:
    """The change of a model's stored parts by an adapter.

    Args:
        config: Configuration of the model.
        lora: The adapter.
        unfused: Whether the model is a GGUF, where each part is a single matrix of one expert (`all_parts`).

    Raises:
        InputError: The adapter is for another model.
    """
    names = tensor_names(config) | {OUTPUT: OUTPUT}
    if (router := _ROUTERS.get(config.family)) is not None:
        lora = replace(lora, deltas=_renamed(lora.deltas, router, names["router"], config.num_layers))

    def module_of(part: Part) -> tuple[str, str]:
        stem, _, suffix = part.name.rpartition(".")
        return names.get(stem, "").format(part.layer), suffix

    read = lru_cache(_FACTORS_KEPT)(_expert_factors)

    def change(part: Part, stored: StoredPart) -> StoredPart:
        if (matrices := _expert_matrices(config, part)) is not None:
            delta = lora.experts.get((part.layer, matrices.parameter))
            if delta is not None:
                _check_experts(config, delta, matrices.parameter)
                stored = _MergedExperts(stored, delta, matrices, config, read)
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

    without = next((layer for layer, _ in sorted(lora.experts) if not _has_experts(config, layer)), None)
    if without is not None:
        raise InputError(
            f"{lora.path} changes experts of layer {without}, counted from 0, and this model has none there: give the"
            " model that the adapter was trained on"
        )
    present = {module_of(part) for part in all_parts(config, unfused=unfused)}
    changed = {(module, "weight") for module in lora.deltas} | {
        (module, suffix) for module, _, suffix in (name.rpartition(".") for name in lora.replaced)
    }
    if config.hidden_output:  # `models/classifiers.py` reads them
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
    if config.tied_embeddings and not config.hidden_output:
        refuse_tied(lora, names["embed"])
    return change


def _renamed(deltas: Mapping[str, Delta], old: str, new: str, num_layers: int) -> dict[str, Delta]:
    """The additions with another name for a module of each layer. old, new: names, with {} for the layer's number."""
    names = {old.format(layer): new.format(layer) for layer in range(num_layers)}
    return {names.get(module, module): delta for module, delta in deltas.items()}


@dataclass(frozen=True)
class _Merged(StoredPart):
    """A matrix with what an adapter adds to it."""

    part: StoredPart
    delta: Delta

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        add_delta(out, self.delta)


@dataclass(frozen=True)
class _ExpertMatrices:
    """The matrices of experts that a part consists of.

    Attributes:
        parameter: The parameter of transformers that has them: `GATE_UP` or `DOWN`.
        role: "gate", "up" or "down"; "gate_up": the rows of each expert's gate, and then those of its up projection.
        experts: Numbers of the experts.
    """

    parameter: str
    role: str
    experts: range


def _expert_matrices(config: ModelConfig, part: Part) -> _ExpertMatrices | None:
    """The matrices of experts that a part consists of; None: it has none."""
    if found := _OF_EXPERT.fullmatch(part.name):
        number = int(found[1])
        return _ExpertMatrices(DOWN if found[2] == "down" else GATE_UP, found[2], range(number, number + 1))
    if not fused_experts.is_fused(part.name) or part.name.endswith("_bias"):
        return None
    parameter = part.name.removeprefix("experts.")
    return _ExpertMatrices(parameter, parameter.removesuffix("_proj"), range(config.num_experts))


def _has_experts(config: ModelConfig, layer: int) -> bool:
    return bool(config.num_experts) and layer < config.num_layers and config.has_experts(layer)


def _shape_of(config: ModelConfig, parameter: str) -> tuple[int, int]:
    """Rows and columns of one expert in a parameter of transformers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (2 * inner, hidden) if parameter == GATE_UP else (hidden, inner)


def _check_experts(config: ModelConfig, delta: Delta, parameter: str) -> None:
    """Raise InputError if the matrices of an adapter do not have the shapes of all experts."""
    ranks, (rows, columns) = config.num_experts * delta.rank, _shape_of(config, parameter)
    if not _is_turned(config, delta, parameter):
        check_stored(delta.a[0], delta.a[1], (ranks, columns))
        check_stored(delta.b[0], delta.b[1], (rows, ranks))


def _is_turned(config: ModelConfig, delta: Delta, parameter: str) -> bool:
    """True where the product is that of the transposed matrix, as PEFT has had it before 0.19."""
    ranks, (rows, columns) = config.num_experts * delta.rank, _shape_of(config, parameter)
    turned = delta.a[1].shape == (ranks, rows) and delta.b[1].shape == (columns, ranks)
    return turned and rows != columns and config.family != "gpt_oss"  # which stores it transposed


def _expert_factors(config: ModelConfig, delta: Delta, parameter: str) -> Factors:
    """The factors of the products of all experts of a layer."""
    a, b = _factors(delta)
    of_a = a.view(config.num_experts, delta.rank, -1)
    of_b = b.view(b.shape[0], delta.rank, config.num_experts).permute(2, 0, 1)
    if _is_turned(config, delta, parameter):
        return of_a.transpose(1, 2), of_b.transpose(1, 2)
    return of_b.contiguous(), of_a


@dataclass(frozen=True)
class _MergedExperts(StoredPart):
    """Matrices of experts with what an adapter adds to them.

    Attributes:
        part: The matrices without it.
        delta: The addition to all experts of the layer.
        matrices: The experts and rows that the part has.
        config: Configuration of the model.
        read: Function that reads the factors of all experts.
    """

    part: StoredPart
    delta: Delta
    matrices: _ExpertMatrices
    config: ModelConfig
    read: Callable[[ModelConfig, Delta, str], Factors] = field(compare=False)

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        left, right = self.read(self.config, self.delta, self.matrices.parameter)
        rows = self._rows(left.shape[1])
        matrices = out.split(out.shape[0] // len(self.matrices.experts))
        for expert, matrix in zip(self.matrices.experts, matrices, strict=True):
            _add_product(matrix, left[expert, rows], right[expert], self.delta.factor)

    def _rows(self, count: int) -> Tensor:
        """The rows of an expert in transformers' parameter, in the order of the part.

        In the parameters of gpt-oss the rows of gate and up alternate.

        Args:
            count: Rows of an expert in transformers' parameter.
        """
        rows = torch.arange(count)
        if self.matrices.parameter == DOWN:
            return rows
        gate, up = (rows[0::2], rows[1::2]) if self.config.family == "gpt_oss" else rows.chunk(2)
        return {"gate": gate, "up": up, "gate_up": torch.cat((gate, up))}[self.matrices.role]


def add_delta(out: Tensor, delta: Delta, rows: Sequence[int] = ()) -> None:
    """Add to a matrix what an adapter adds to it.

    Args:
        out: The matrix, or some of its rows.
        delta: The addition to the whole matrix.
        rows: Numbers of the rows that `out` has; empty: all.

    Raises:
        InputError: The addition is not finite.
    """
    a, b = _factors(delta)
    _add_product(out, b[list(rows)] if rows else b, a, delta.factor)


def _factors(delta: Delta) -> tuple[Tensor, Tensor]:
    """The matrices A and B of an adapter. Raises InputError where they are not finite."""
    a, b = (torch.empty(info.shape) for _, info in (delta.a, delta.b))
    for (name, info), values in ((delta.a, a), (delta.b, b)):
        read_numbers(name, info, values)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InputError(f"{delta.a[1].path} has a weight that is NaN or infinite: fetch it again")
    return a, b


def _add_product(out: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Add a product of two matrices to a matrix, some rows at a time."""
    step = max(1, _STRIPE_VALUES // out.shape[1])
    for rows, of_left in zip(out.split(step), left.split(step), strict=True):
        rows.copy_(rows.float().add_(of_left @ right, alpha=factor))
