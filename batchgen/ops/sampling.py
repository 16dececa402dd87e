"""How tokens are to be drawn at random, for a batch of rows. No torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Draws(NamedTuple):
    """A number of each kind for every row.

    temperature: fp32, normal and finite. top_k: int64, 0: all tokens. top_p: fp64, 1: all. min_p: fp64. uniform: fp64 in [0, 1), which
    decides on the token: the one at this part of the cumulative probabilities, in the order of tokens, of those that
    min-p, then top-k, then top-p leave in. Of equally likely ones top-k and top-p keep the first.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
