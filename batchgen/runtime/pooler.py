"""From hidden states to vectors: pooling over the tokens of a text, and the linear layers that follow."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sized
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.lora_merging import add_delta
from batchgen.models.pooling import Dense, Pooling, VectorSpec
from batchgen.models.tensor_files.headers import read_safetensors_header
from batchgen.models.tensor_files.reading import read_numbers, read_rows
from batchgen.ops.host_copy import download, upload
from batchgen.schedule.sequence import LogitsRow, Sequence

_ACTIVATIONS = {"Tanh": torch.tanh, "ReLU": F.relu, "GELU": F.gelu, "Sigmoid": torch.sigmoid, "SiLU": F.silu}


class Pooled(NamedTuple):
    """The pooled hidden states of a sequence's tokens in one sweep.

    Attributes:
        sequence: The sequence.
        first: Position of the first of these tokens.
        num_tokens: Number of the tokens.
        values: Their sum, or the hidden state of the one that is taken, fp32 [hidden].
    """

    sequence: Sequence
    first: int
    num_tokens: int
    values: Tensor


class Pooler:
    """The pooled hidden states of one sweep."""

    needs_host = False  # what runs next does not depend on vectors

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._groups: list[tuple[list[tuple[Sequence, int, int]], Tensor]] = []

    @torch.inference_mode()
    def take(self, rows: Sized[LogitsRow], hidden: Tensor) -> None:
        """Take hidden states.

        Args:
            rows: Tokens of sequences, those of each one after the other.
            hidden: Their hidden states, fp32 [rows, hidden].
        """
        if not len(rows):
            return
        runs = [(sequence, list(members)) for sequence, members in groupby(rows, itemgetter(0))]
        places = [(sequence, members[0][1], len(members)) for sequence, members in runs]
        counts = np.array([count for *_, count in places])
        if self._pooling == "mean" and len(places) < len(rows):
            owners = upload(np.repeat(np.arange(len(places)), counts), hidden.device)
            hidden = hidden.new_zeros(len(places), hidden.shape[1]).index_add_(0, owners, hidden)
        elif len(places) < len(rows):
            firsts = np.cumsum(counts) - counts
            hidden = hidden.index_select(0, upload(firsts, hidden.device))
        # Here and not by `results`: by then the next sweep may be under way.
        self._groups.append((places, download(hidden)))

    def results(self) -> Iterator[Pooled]:
        """Yield what has been pooled of each sequence."""
        for places, pooled in self._groups:
            for place, values in zip(places, pooled, strict=True):
                yield Pooled(*place, values)


class VectorHead:
    """The modules that make vectors of pooled hidden states, with their weights."""

    def __init__(self, head: VectorSpec) -> None:
        """Load the weights. Raises InputError where they cannot be read."""
        self.head = head
        self._layers = [_Layer(dense) for dense in head.dense]

    @torch.inference_mode()
    def vectors(self, pooled: Tensor) -> np.ndarray:
        """The vectors of texts, float32 [texts, size]. pooled: their pooled hidden states, fp32 [texts, hidden]."""
        for layer in self._layers:
            pooled = layer(pooled)
        head, kept = self.head, slice(self.head.dimensions)
        if not head.truncated:
            pooled = pooled[:, kept]
        if head.normalize:
            pooled = F.normalize(pooled)
        pooled = pooled[:, kept]
        if head.of_labels != "identity":
            pooled = pooled.softmax(1) if head.of_labels == "softmax" else pooled.sigmoid()
        return pooled.contiguous().numpy()


class _Layer:
    """A linear layer with its activation, and the norm after it, in fp32."""

    def __init__(self, dense: Dense) -> None:
        """Load the weights. Raises InputError where they cannot be read."""
        self._dense = dense
        stored = read_safetensors_header(dense.weights)

        def read(name: str, rows: tuple[int, ...] = ()) -> Tensor | None:
            if name not in stored:
                return None
            if rows:
                return torch.cat([read_rows(name, stored[name], row, row + 1) for row in rows]).float()
            read_numbers(name, stored[name], values := torch.empty(stored[name].shape))
            return values

        def needed(name: str, rows: tuple[int, ...] = ()) -> Tensor:
            if (values := read(name, rows)) is None:
                raise InputError(f"{dense.weights} has no tensor {name}: fetch it again")
            return values

        self._weight, self._bias = needed(f"{dense.prefix}weight", dense.rows), read(f"{dense.prefix}bias", dense.rows)
        if dense.added is not None:
            add_delta(self._weight, dense.added, dense.rows)
        self._norm = needed(f"{dense.norm}weight") if dense.norm else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight, self._bias)
        y = y if self._dense.activation == "Identity" else _ACTIVATIONS[self._dense.activation](y)
        return y if self._norm is None else F.layer_norm(y, self._norm.shape, self._norm, eps=self._dense.norm_eps)
