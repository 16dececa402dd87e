"""Random draws, and what they are held to: the tokens of `reference.draw`, in float64."""

import numpy as np
import torch

from batchgen.ops import reference
from batchgen.ops.sampling import Draws


def draws(uniform, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Of one number, or of one a row."""
    rows = len(uniform)
    return Draws(
        np.broadcast_to(np.float32(temperature), rows).copy(),
        np.broadcast_to(np.int64(top_k), rows).copy(),
        np.broadcast_to(np.float64(top_p), rows).copy(),
        np.broadcast_to(np.float64(min_p), rows).copy(),
        uniform,
    )


def drawn(compute, logits, given, rows=None):
    """A token of each row, or of some rows and -1 of others."""
    tokens = torch.full((len(logits),), -1, device=logits.device)
    compute.draw(logits, np.arange(len(logits)) if rows is None else rows, given, tokens)
    return tokens.cpu()


def check_draws(got, logits, given):
    """Checks tokens drawn from softmax weights in fp32, and returns how many differ where the last digits decide."""
    meant = drawn(reference, logits, given)
    if torch.equal(got, meant):
        return 0
    slack = 2e-6
    near = [
        drawn(
            reference,
            logits,
            given._replace(
                top_p=given.top_p * (1 + p),
                min_p=given.min_p * (1 + m),
                uniform=np.clip(given.uniform + u, 0, 1),  # at 1 the last token that can be drawn
            ),
        )
        for u in (-slack, slack)
        for p in (-slack, slack)
        for m in (-slack, slack)
    ]
    for row, token in enumerate(got.tolist()):
        low, high = (f(n[row].item() for n in [meant, *near]) for f in (min, max))
        assert low <= token <= high, (row, low, token, high)
    return (got != meant).sum().item()
