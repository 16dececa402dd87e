"""Sampled tokens on the device that computes: the next sweep takes them from there, before the host has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.schedule.sequence import LogitsRow

NOBODY = 0  # the place of no sequence
_FIRST_PLACES = 1024


def places_of(slots: np.ndarray) -> np.ndarray:
    """The places in the table of slots of sequences (`Sequence.token_slot`), int64."""
    return slots + 1


def places_of_rows(rows: Sequence[LogitsRow]) -> np.ndarray:
    """The places in the table of the sequences of some rows of logits, int64."""
    return places_of(np.array([sequence.token_slot for sequence, _ in rows], np.int64))


class TokenTable:
    """The last sampled token of each sequence in flight, at the place of its slot.

    To be used on the stream that computes: what is kept there is found by all that is launched later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros(_FIRST_PLACES, dtype=torch.int64, device=device)

    def reserve(self, places: np.ndarray) -> bool:
        """Have the table hold some places; True: it is in other memory than before.

        Args:
            places: Places, int64.
        """
        if (last := int(places.max(initial=NOBODY))) < self._ids.shape[0]:
            return False
        larger = torch.zeros(2 * last, dtype=torch.int64, device=self._device)
        larger[: self._ids.shape[0]].copy_(self._ids)
        self._ids = larger
        return True

    def keep(self, places: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens that a sweep has sampled, at places that the table holds, some of them NOBODY's.

        Args:
            places: Place of each, int64 [tokens], on the device.
            token_ids: The tokens on the device, int64 [tokens].
        """
        self._ids.index_copy_(0, places, token_ids)

    def fill(self, token_ids: Tensor, rows: Tensor, places: Tensor) -> None:
        """token_ids[rows[i]] = the token at places[i].

        Args:
            token_ids: Tokens of a micro-batch, int64 [tokens].
            rows: Their indices, int64 [pending tokens].
            places: Places of the tokens to fill in, int64 [pending tokens].
        """
        token_ids.index_copy_(0, rows, self._ids.index_select(0, places))

    def taken(self, token_ids: Tensor, places: Tensor) -> Tensor:
        """Tokens, those of which the host does not know from their places.

        Args:
            token_ids: Tokens, int64 [tokens].
            places: Place of each that the host does not know, NOBODY of the others, int64 [tokens].
        """
        return torch.where(places == NOBODY, token_ids, self._ids.index_select(0, places))
