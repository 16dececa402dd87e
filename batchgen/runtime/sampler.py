"""From logits to tokens.

Every draw is a function of (seed, row id, sample, step) alone, so the same row gives the same text whatever else is in
the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.core.request import SamplingParams
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import download, upload
from batchgen.ops.sampling import Draws
from batchgen.schedule.sequence import NOT_FINITE, Sequence


class SampledToken(NamedTuple):  # one for each sequence of every sweep
    """A chosen token.

    Attributes:
        token_id: The token; NOT_FINITE where the model's logits, before any mask, hold NaN or infinity.
        logprob: Its log-probability; None: not asked for.
        top: The top-k as (token, log-probability), best first; empty: not asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of_numbers(cls, token_id: int, numbers: Sized[float], count: int | None = None) -> SampledToken:
        """A chosen token with log-probabilities.

        Args:
            token_id: The token.
            numbers: Its log-probability, the top n log-probabilities, and their n tokens.
            count: The k of its top-k; None: n.
        """
        logprob, *top = numbers
        n = len(top) // 2
        count = n if count is None else count
        return cls(token_id, logprob, tuple(zip(map(int, top[n : n + count]), top[:count], strict=True)))

    @property
    def numbers(self) -> list[float]:
        """Its log-probability, the log-probabilities of the top-k, and their tokens; it has them."""
        assert self.logprob is not None, "no log-probabilities were asked for"
        return [self.logprob, *(logprob for _, logprob in self.top), *(token for token, _ in self.top)]


class _PlainTokens(dict[int, SampledToken]):
    """Chosen tokens without log-probabilities, by token: each is made once."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


_PLAIN_TOKENS = _PlainTokens()


def uniform(seed: int, row_id: str | int, sample: int, step: int) -> float:
    """A row's own draw in [0, 1): 53 bits of a keyed hash."""
    text = f"{seed}\0{type(row_id).__name__}\0{row_id}\0{sample}\0{step}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@dataclass(frozen=True)
class Sampled:
    """The next token of each of some sequences. Nothing has waited for the device.

    Attributes:
        token_ids: Tokens of the vocabulary on the device, int64 [sequences].
        on_host: Tokens, or NOT_FINITE, in host memory once the device has come so far, int64 [sequences].
        wanted: Sequences that log-probabilities are wanted of, as indices.
        counts: For each of these, the k of its top-k.
        logprobs: For each of these, fp64 [wanted, 1 + 2 n]: the token's log-probability, the top n log-probabilities,
            and their tokens; None: nobody wants any.
    """

    token_ids: Tensor
    on_host: Tensor
    wanted: Sized[int] = ()
    counts: Sized[int] = ()
    logprobs: Tensor | None = None

    def tokens(self) -> list[SampledToken]:
        """The sampled tokens. To be called only once the device has come so far."""
        sampled = list(map(_PLAIN_TOKENS.__getitem__, self.on_host.tolist()))
        if self.logprobs is not None:
            for i, count, numbers in zip(self.wanted, self.counts, self.logprobs.tolist(), strict=True):
                sampled[i] = SampledToken.of_numbers(sampled[i].token_id, numbers, count)
        return sampled


@torch.inference_mode()
def sample(logits: Tensor, sequences: Sized[Sequence]) -> Sampled:
    """Choose the next token of each sequence.

    The host waits for nothing that the device has to do; two copies bring it tokens and log-probabilities.

    Args:
        logits: Logits, fp32 [sequences, vocab]; they are changed in place.
        sequences: Sequences, a row of the logits each.
    """
    constraints = {i: s.constraint for i, s in enumerate(sequences) if s.constraint is not None}
    if not constraints and all([s.sampling.is_argmax for s in sequences]):
        chosen, told = ops.argmax_if_finite(logits, NOT_FINITE)
        return Sampled(chosen, download(told))
    having = _Having(sequences)
    finite = ops.all_finite(logits)  # first: what is forbidden below is minus infinity
    logprobs = _Logprobs(logits, sequences, having)
    penalties = _Penalties(logits, sequences, having)
    if constraints:
        masks = np.stack([constraint.mask() for constraint in constraints.values()])
        ops.forbid(logits, np.array(list(constraints)), masks)
    chosen = ops.argmax(logits)
    drawn = having.indices(lambda sampling: not sampling.is_greedy)
    if drawn:
        ops.draw(logits, np.array(drawn), _draws([sequences[i] for i in drawn]), chosen)
    on_host = download(chosen.where(finite, NOT_FINITE))
    if not logprobs.wanted:
        return Sampled(chosen, on_host)
    penalties.take_back(logits)
    return Sampled(chosen, on_host, logprobs.wanted, logprobs.counts, download(logprobs.of(logits, chosen)))


class _Having:
    """The sampling parameters that sequences have, of which many have the same ones."""

    def __init__(self, sequences: Sized[Sequence]) -> None:
        self._sequences = sequences
        self._kinds = {id(s.sampling): s.sampling for s in sequences}

    def indices(self, holds: Callable[[SamplingParams], bool]) -> list[int]:
        """Indices of the sequences for whose parameters something holds."""
        holding = {key for key, sampling in self._kinds.items() if holds(sampling)}
        return [i for i, s in enumerate(self._sequences) if id(s.sampling) in holding] if holding else []


class _Logprobs:
    """Log-probabilities of the sequences that want them, before any penalty or grammar.

    Attributes:
        wanted: These sequences, as indices.
        counts: For each of them, the k of its top-k.
    """

    def __init__(self, logits: Tensor, sequences: Sized[Sequence], having: _Having) -> None:
        self.wanted = having.indices(lambda sampling: sampling.logprobs is not None)
        if not self.wanted:
            return
        self.counts = [min(sequences[i].sampling.logprobs, logits.shape[1]) for i in self.wanted]
        self._rows = upload(np.array(self.wanted), logits.device)
        rows = logits if len(self.wanted) == len(logits) else logits.index_select(0, self._rows)
        values, self._ids = rows.topk(max(self.counts))
        self._lse = ops.lse(rows)
        self._values = values - self._lse.unsqueeze(1)

    def of(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The log-probabilities of chosen tokens, and the top-k, fp64 [wanted, 1 + 2 n].

        Args:
            logits: Logits that the tokens were chosen from.
            chosen: Chosen tokens, int64 [sequences].
        """
        own = logits.gather(1, chosen.unsqueeze(1)).index_select(0, self._rows).double() - self._lse.double().unsqueeze(
            1
        )
        return torch.cat((own, self._values.double(), self._ids.double()), 1)


class _Penalties:
    """Changes to the logits of some tokens, in place, in vLLM's order.

    Biases are added; repetition penalties (CTRL, Keskar et al. 2019) scale the logits of tokens of prompt and output;
    frequency and presence penalties (OpenAI) are subtracted from those of the output.
    """

    def __init__(self, logits: Tensor, sequences: Sized[Sequence], having: _Having) -> None:
        self._positions: Tensor | None = None
        changed = having.indices(lambda sampling: sampling.changes_logits)
        if not changed:
            return
        changes = [_changes(sequences[i]) for i in changed]
        counts = [len(token_ids) for token_ids, _ in changes]
        positions = np.repeat(changed, counts) * logits.shape[1] + np.concatenate([ids for ids, _ in changes])
        self._positions = upload(positions, logits.device)
        bias, scale, off = upload(np.concatenate([values for _, values in changes], axis=1), logits.device)
        flat = logits.view(-1)
        self._before = flat.index_select(0, self._positions)
        values = self._before + bias
        flat.index_copy_(0, self._positions, torch.where(values > 0, values / scale, values * scale) - off)

    def take_back(self, logits: Tensor) -> None:
        """Give the logits of these tokens the values that they had before the changes."""
        if self._positions is not None:
            logits.view(-1).index_copy_(0, self._positions, self._before)


def _changes(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """(tokens whose logits change, changes) of a sequence.

    Returns:
        Tokens, each once, int64 [tokens], and fp32 [3, tokens]: what is added, then scales, then is subtracted.
    """
    sampling = sequence.sampling
    biases = dict(sampling.logit_bias)
    counts = Counter(sequence.generated) if sampling.presence_penalty or sampling.frequency_penalty else Counter()
    seen = set(sequence.tokens) if sampling.repetition_penalty != 1.0 else set()
    token_ids = sorted(seen.union(biases, counts))
    values = np.zeros((3, len(token_ids)), dtype=np.float32)
    for i, token_id in enumerate(token_ids):
        values[0, i] = biases.get(token_id, 0.0)
        values[1, i] = sampling.repetition_penalty if token_id in seen else 1.0
        if token_id in counts:
            values[2, i] = sampling.presence_penalty + sampling.frequency_penalty * counts[token_id]
    return np.array(token_ids, dtype=np.int64), values


def _draws(sequences: Sized[Sequence]) -> Draws:
    params = [s.sampling for s in sequences]
    return Draws(
        temperature=np.minimum([p.temperature for p in params], np.finfo(np.float32).max).astype(np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=np.array([uniform(s.sampling.seed, s.row_id, s.sample_index, s.num_generated) for s in sequences]),
    )
