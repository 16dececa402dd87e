"""From logits to tokens. Every draw is a function of (seed, row id, sample, step) alone, so the same row gives
the same text whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Sized
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen import ops
from batchgen.draws import Draws
from batchgen.runtime.sequence import Sequence


@dataclass(frozen=True)
class SampledToken:
    """logprob and top: the chosen token's log-probability and the likeliest (token, logprob), if asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, row_id: str | int, sample: int, step: int) -> float:
    """The row's own draw in [0, 1), 53 bits of a keyed hash."""
    text = f"{seed}\0{type(row_id).__name__}\0{row_id}\0{sample}\0{step}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@dataclass(frozen=True)
class Sampled:
    """token_ids: int64 [sequences], on the device of the logits. tokens(): what the host is told of each, once the device has
    come so far."""

    token_ids: Tensor
    tokens: Callable[[], list[SampledToken]]


@torch.inference_mode()
def sample(logits: Tensor, sequences: Sized[Sequence]) -> Sampled:
    """The next token of each sequence. logits: fp32 [sequences, vocab], changed in place."""
    logprobs = _Logprobs(logits, sequences)
    for i, s in enumerate(sequences):
        if s.sampling.repetition_penalty != 1.0:
            _penalise(logits[i], s)
    constrained = [i for i, s in enumerate(sequences) if s.constraint is not None]
    if constrained:
        masks = np.stack([sequences[i].constraint.mask() for i in constrained])
        ops.forbid(logits, np.array(constrained), masks)
    chosen = ops.argmax(logits)
    drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0.0]
    if drawn:
        rows = logits if len(drawn) == len(sequences) else logits[torch.tensor(drawn)]
        chosen[torch.tensor(drawn)] = _draw(rows, [sequences[i] for i in drawn])
    return Sampled(chosen, lambda: [logprobs.of(i, token) for i, token in enumerate(chosen.tolist())])


class _Logprobs:
    """Log-probabilities before any penalty or grammar, of the sequences that want them."""

    def __init__(self, logits: Tensor, sequences: Sized[Sequence]) -> None:
        wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
        self._rows: dict[int, Tensor] = {}
        if not wanted:
            return
        rows = torch.tensor(wanted)
        counts = [min(sequences[i].sampling.logprobs, logits.shape[1]) for i in wanted]
        values, ids = logits[rows].topk(max(counts))
        lse = ops.lse(logits)[rows]
        tops = zip(counts, ids.tolist(), (values - lse[:, None]).tolist(), strict=True)
        self._top = {
            i: tuple(zip(ids[:n], values[:n], strict=True)) for i, (n, ids, values) in zip(wanted, tops, strict=True)
        }
        self._lse = dict(zip(wanted, lse.tolist(), strict=True))
        for i in wanted:
            self._rows[i] = logits[i].clone() if sequences[i].sampling.repetition_penalty != 1.0 else logits[i]

    def of(self, i: int, token: int) -> SampledToken:
        if i not in self._rows:
            return SampledToken(token)
        return SampledToken(token, self._rows[i][token].item() - self._lse[i], self._top[i])


def _penalise(row: Tensor, sequence: Sequence) -> None:
    """Repetition penalty (CTRL, Keskar et al. 2019) on the tokens of prompt and output, in place on [vocab]."""
    seen = torch.tensor(list(set(sequence.tokens)))
    values, penalty = row[seen], sequence.sampling.repetition_penalty
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Tensor, sequences: Sized[Sequence]) -> Tensor:
    params = [s.sampling for s in sequences]
    draws = Draws(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=np.array([uniform(s.sampling.seed, s.row_id, s.sample_index, s.num_generated) for s in sequences]),
    )
    return ops.draw(logits, draws)
