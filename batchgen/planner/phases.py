"""Phases of a job: groups of like sweeps, with the rows that are prefilled and that decode in each.

A fluid model of the scheduler: rows enter as soon as the block and a sweep's token budget allow, stay for as many
sweeps as their outputs have tokens, and the last ones leave a block half empty. Lengths are a distribution, not
one number. The result is a handful of phases, each a number of like sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from batchgen.core.workload import Workload
from batchgen.planner.fluid import Setting, flow_through


@dataclass(frozen=True)
class Phase:
    """`sweeps` sweeps that are alike.

    Attributes:
        prefill_tokens, prefill_seqs: prompt tokens computed per sweep, and prompts completed per sweep.
        decode_seqs: sequences that gain a token from decoding, per sweep.
        context: tokens each of them attends to.
        logits_rows_per_prompt: rows of logits computed for a prompt.
        deferred_tokens: gained per sweep by sequences whose attention is deferred, which are not among `decode_seqs`.
        most_drafts: drafts that a decoding sequence has where anything is proposed for it.
        drafts: drafts of a decoding sequence per sweep, the mean over all.
        accepted: drafts of these that are accepted.
        forced: tokens of a decoding sequence per sweep that its grammar forces and that are not sampled: the mean.
    """

    sweeps: float
    prefill_tokens: float
    prefill_seqs: float
    decode_seqs: float
    context: float
    logits_rows_per_prompt: float = 1.0
    deferred_tokens: float = 0.0
    most_drafts: int = 0
    drafts: float = 0.0
    accepted: float = 0.0
    forced: float = 0.0

    @property
    def queries(self) -> float:
        """Tokens per sweep of a decoding sequence, drafts and forced ones included."""
        return 1 + self.drafts + self.forced

    @property
    def gained(self) -> float:
        """Tokens by which a decoding sequence grows per sweep."""
        return 1 + self.accepted + self.forced

    @property
    def decode_tokens(self) -> float:
        """Tokens per sweep of decoding sequences, drafts and forced ones included."""
        return self.decode_seqs * self.queries

    @property
    def tokens(self) -> float:
        """Tokens per sweep that go through the layers."""
        return self.prefill_tokens + self.decode_tokens + self.deferred_tokens

    @property
    def sampled(self) -> float:
        """Tokens generated per sweep; where prompts are scored, prompts that are done."""
        return self.prefill_seqs + self.decode_seqs * self.gained + self.deferred_tokens

    @property
    def logits_rows(self) -> float:
        """Rows of logits per sweep."""
        decoding = self.decode_seqs * (1 + self.drafts)
        return self.prefill_seqs * self.logits_rows_per_prompt + decoding + self.deferred_tokens


@dataclass(frozen=True)
class Deferral:
    """Sequences of placement "deferred" beside those that gain a token in every sweep (APEX section 3.3).

    Attributes:
        seqs: in flight.
        rows: in the whole job.
        sweeps_per_token: one for each layer, in which the CPU attends, and the one in which the token begins.
    """

    seqs: int
    rows: int
    sweeps_per_token: int


def deferral_of(workload: Workload, swept_seqs: int, most_seqs: int, sweeps_per_token: int) -> Deferral | None:
    """The deferral with at most `most_seqs` in flight that a job is long enough for.

    Its last sequences end when `swept_seqs` others, a token in every sweep, have run the rest of the job. None where
    that is over before any deferred sequence ends.
    """
    mean, longest = workload.output_len.mean, workload.output_len.max
    if most_seqs < 1 or mean <= 1:
        return None
    # Rows that the others end while a deferred one of mean length, and the longest one, is in flight.
    meanwhile, at_last = (swept_seqs * ((n - 1) * sweeps_per_token + 1) / mean for n in (mean, longest))
    waves = int((workload.num_seqs - (at_last - meanwhile)) / (most_seqs + meanwhile))
    if waves >= 1:
        return Deferral(most_seqs, waves * most_seqs, sweeps_per_token)
    seqs = int(workload.num_seqs - at_last)
    return Deferral(seqs, seqs, sweeps_per_token) if seqs >= 1 else None


@lru_cache(maxsize=4096)
def phases_of(
    workload: Workload,
    admission: str,
    max_num_seqs: int,
    max_num_batched_tokens: float,
    deferral: Deferral | None = None,
) -> tuple[Phase, ...]:
    """The phases of a whole job with at most `max_num_seqs` sequences in flight.

    Args:
        admission: "continuous" refills the block at once, "static" when the whole block has ended.
        deferral: Sequences beside those of the block, which are deferred.
    """
    if deferral is not None:
        others = replace(workload, num_seqs=workload.num_seqs - deferral.rows)
        phases = phases_of(others, admission, max_num_seqs, max_num_batched_tokens)
        return _with_deferred(phases, workload, deferral, max_num_batched_tokens)
    return phases_of_each(workload, ((admission, max_num_seqs, max_num_batched_tokens),))[0]


def phases_of_each(workload: Workload, settings: Sequence[tuple[str, int, float]]) -> list[tuple[Phase, ...]]:
    """The phases of a whole job for each setting of admission, sequences in flight and token budget."""
    within = [Setting(admission, min(size, workload.num_seqs), budget) for admission, size, budget in settings]
    known, logits_rows = known_phases(workload), workload.scored_len or 1.0
    missing = list(dict.fromkeys(setting for setting in within if setting not in known))
    for setting, groups in zip(missing, flow_through(workload, missing), strict=True):
        known[setting] = tuple(Phase(*group, logits_rows_per_prompt=logits_rows) for group in groups)
    return [known[setting] for setting in within]


@lru_cache(maxsize=16)
def known_phases(workload: Workload) -> dict[Setting, tuple[Phase, ...]]:
    """The phases of a job that were computed already, by setting: the searches of one plan have many in common."""
    return {}


def _with_deferred(phases: Iterable[Phase], workload: Workload, deferral: Deferral, budget: float) -> tuple[Phase, ...]:
    """Phases of the other rows, with the prompts and the tokens of those that are deferred spread over them.

    Where prompts exceed the token budget there are more sweeps.
    """
    phases = list(phases)
    sweeps = sum(phase.sweeps for phase in phases)
    tokens = deferral.rows * (workload.output_len.mean - 1) / sweeps
    more = workload.num_seqs / (workload.num_seqs - deferral.rows)
    extended = []
    for phase in phases:
        prompt_budget = max(1.0, budget - phase.decode_seqs - tokens)
        longer = max(1.0, phase.prefill_tokens * more / prompt_budget) if phase.prefill_tokens else 1.0
        extended.append(
            replace(
                phase,
                sweeps=phase.sweeps * longer,
                prefill_tokens=phase.prefill_tokens * more / longer,
                prefill_seqs=phase.prefill_seqs * more / longer,
                decode_seqs=phase.decode_seqs / longer,
                deferred_tokens=tokens / longer,
            )
        )
    return tuple(extended)
