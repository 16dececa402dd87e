"""From logits to tokens. Every draw is a function of (seed, row id, sample, step) alone, so the same row gives
the same text whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Sized
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen import ops
from batchgen.request import SamplingParams
from batchgen.runtime.sequence import Sequence

# Sorting whole vocabularies in float64 takes several times the logits' memory: this bounds it.
_ROWS_AT_ONCE = 32


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


@torch.inference_mode()
def sample(logits: Tensor, sequences: Sized[Sequence]) -> list[SampledToken]:
    """The next token of each sequence. logits: fp32 [sequences, vocab], changed in place."""
    sampled: list[SampledToken] = []
    for start in range(0, len(sequences), _ROWS_AT_ONCE):
        stop = start + _ROWS_AT_ONCE
        sampled.extend(_sample_rows(logits[start:stop], sequences[start:stop]))
    return sampled


def _sample_rows(logits: Tensor, sequences: Sized[Sequence]) -> list[SampledToken]:
    logprobs = _wanted_logprobs(logits, sequences)
    penalised = [i for i, s in enumerate(sequences) if s.sampling.repetition_penalty != 1.0]
    for i in penalised:
        _penalise(logits[i], sequences[i])
    chosen = ops.argmax(logits)
    drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0.0]
    if drawn:
        rows = torch.tensor(drawn)
        chosen[rows] = _draw(logits[rows], [sequences[i] for i in drawn])
    tokens = chosen.tolist()
    return [
        SampledToken(token) if i not in logprobs else _with_logprobs(token, logprobs[i], s.sampling.logprobs)
        for i, (token, s) in enumerate(zip(tokens, sequences, strict=True))
    ]


def _wanted_logprobs(logits: Tensor, sequences: Sized[Sequence]) -> dict[int, Tensor]:
    wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if not wanted:
        return {}
    rows = torch.log_softmax(logits[torch.tensor(wanted)], -1)
    return dict(zip(wanted, rows, strict=True))


def _with_logprobs(token: int, row: Tensor, count: int) -> SampledToken:
    values, ids = row.topk(min(count, row.shape[0]))
    return SampledToken(token, row[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _penalise(row: Tensor, sequence: Sequence) -> None:
    """Repetition penalty (CTRL, Keskar et al. 2019) on the tokens of prompt and output, in place on [vocab]."""
    seen = torch.tensor(list(set(sequence.tokens)))
    values, penalty = row[seen], sequence.sampling.repetition_penalty
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Tensor, sequences: Sized[Sequence]) -> Tensor:
    """Tokens [rows] drawn from logits [rows, vocab] after temperature, top-k, top-p and min-p."""
    params = [s.sampling for s in sequences]
    temperature = torch.tensor([p.temperature for p in params])[:, None]
    # In float64: a row's cumulative probabilities must not depend on how a batch is vectorised.
    probs = torch.softmax((logits / temperature).double(), -1)
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    if filtered:
        rows = torch.tensor(filtered)
        probs[rows] = _filter(probs[rows], [params[i] for i in filtered])
    draws = torch.tensor(
        [uniform(s.sampling.seed, s.row_id, s.sample_index, s.num_generated) for s in sequences], dtype=torch.float64
    )
    cumulative = probs.cumsum(-1)
    picked = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    # Rounding may point past the last token with any probability.
    last = probs.shape[-1] - 1 - (probs > 0).to(torch.int8).flip(-1).argmax(-1)
    return torch.minimum(picked, last)


def _filter(probs: Tensor, params: Sized[SamplingParams]) -> Tensor:
    """Probabilities [rows, vocab] with zero for every token that min-p, then top-k, then top-p leaves out."""
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    top_k = torch.tensor([p.top_k or probs.shape[-1] for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64)[:, None]
    keep = (rank < top_k) & (ordered >= min_p * ordered[:, :1])
    ordered = torch.where(keep, ordered, 0.0)
    share = ordered / ordered.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share  # mass of the likelier ones: the first token is always kept
    ordered = torch.where((before < top_p) | (top_p >= 1.0), ordered, 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)
