"""Sampling parameters of a batch of rows. No torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Draws(NamedTuple):
    """Sampling parameters, one of each kind for every row.

    Of equally likely tokens top-k and top-p keep the first.

    Attributes:
        temperature: fp32, normal and finite.
        top_k: int64; 0: all tokens.
        top_p: fp64; 1: all tokens.
        min_p: fp64.
        uniform: fp64 in [0, 1). The token drawn is the one at this part of the cumulative probabilities, in the order
            of tokens, of those that min-p, then top-k, then top-p leave in.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
