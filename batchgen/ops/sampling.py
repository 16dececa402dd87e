"""The sampling parameters of the rows of a batch, as arrays. No torch here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Draws(NamedTuple):
    """Sampling parameters of the rows that a token is drawn from; each attribute has one value for each row.

    If tokens are equally likely, top-k and top-p keep those with the smaller ids.

    Attributes:
        temperature: Temperature, fp32; positive, normal and finite.
        top_k: Number of most likely tokens that are kept, int64. 0: all tokens.
        top_p: Cumulative probability of the most likely tokens that are kept, fp64. 1: all tokens.
        min_p: Least probability of a token that is kept, as a fraction of the largest probability, fp64.
        uniform: Random number, fp64 in [0, 1). min-p, then top-k, then top-p are applied. Then the token is drawn at
            which the cumulative probability, in the order of ids, passes this number.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
