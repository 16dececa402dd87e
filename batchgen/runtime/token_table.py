"""Sampled tokens on the device that computes: the next sweep takes them from there, before the host has them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.ops.host_copy import upload


class TokenTable:
    """The last sampled token of each sequence in flight, at its slot (`Sequence.token_slot`).

    To be used on the stream that computes: what is kept there is found by all that is launched later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)

    def keep(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """Keep the tokens that a sweep has sampled.

        Args:
            slots: Slot of each, int64.
            token_ids: The tokens on the device, int64 [slots].
        """
        if (last := int(slots.max())) >= self._ids.shape[0]:
            larger = torch.zeros(2 * (last + 1), dtype=torch.int64, device=self._device)
            larger[: self._ids.shape[0]].copy_(self._ids)
            self._ids = larger
        self._ids.index_copy_(0, upload(slots, self._device), token_ids)

    def fill(self, token_ids: Tensor, rows: Tensor, slots: Tensor) -> None:
        """token_ids[rows[i]] = the token at slots[i].

        Args:
            token_ids: Tokens of a micro-batch, int64 [tokens].
            rows: Their indices, int64 [pending tokens].
            slots: Slots of the tokens to fill in, int64 [pending tokens].
        """
        token_ids.index_copy_(0, rows, self._ids.index_select(0, slots))
