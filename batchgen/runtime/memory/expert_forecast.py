"""The experts that a sweep will probably need of a layer: those that nearly all of the last sweeps needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A sweep's weight in an expert's share of sweeps.
_WEIGHT = 0.25
# Share from which on an expert is read ahead, as after five sweeps that needed it. Reads in vain cost most where the
# disk binds.
_LIKELY = 0.75


class ExpertForecast:
    """The shares of the last sweeps in which each expert of each layer was needed, the later ones weighing more."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._needed = np.zeros((num_layers, num_experts), dtype=bool)  # in the sweep that is under way
        self._shares = np.zeros((num_layers, num_experts))

    def add(self, layer: int, experts: Sequence[int]) -> None:
        """Count experts as needed in the sweep that is under way, once however often they are added."""
        self._needed[layer, list(experts)] = True

    def likely(self, layer: int) -> list[int]:
        """Begin another sweep of a layer, and return the experts that it will probably need, in ascending order."""
        needed, shares = self._needed[layer], self._shares[layer]
        if needed.any():
            shares += _WEIGHT * (needed - shares)
            needed[:] = False
        likely: list[int] = np.flatnonzero(shares >= _LIKELY).tolist()
        return likely
