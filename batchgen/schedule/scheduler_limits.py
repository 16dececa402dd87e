"""Limits of what a scheduler lets in and puts in a sweep. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.core.kv_placement import KVPlacement


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of what is in flight; they may be replaced between sweeps.

    Attributes:
        max_num_seqs: most sequences in flight.
        max_num_batched_tokens: most tokens of one sweep; longer prompts are chunked.
        admission: "continuous" or "static".
        kv_seqs: most sequences of each KV placement in flight, none where it is missing; None: no limit per placement.
        max_chunk_tokens: most tokens of one prompt in one sweep; None: no limit.
        compute_tier: tier of the compute device's own memory.
        deferred_rows: most sequences of a job that are admitted to placement DEFERRED; None: no limit. Those admitted
            near its end would be in flight long after all others.
        most_staged_tokens: most tokens of a sequence whose KV passes through a staging buffer, as that of prompts does
            wherever it is not in the compute device's own memory; None: no limit.
        max_logit_rows: most rows of logits of a sweep; None: no limit. Those beyond one for each sequence are for
            drafts and for prompts that are scored.
        sweeps_in_flight: most sweeps under way at once, each in another stage of a pipeline; each has its part of the
            sequences.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    admission: str = "continuous"
    kv_seqs: Mapping[KVPlacement, int] | None = None
    max_chunk_tokens: int | None = None
    compute_tier: str = "cpu"
    deferred_rows: int | None = None
    most_staged_tokens: int | None = None
    max_logit_rows: int | None = None
    sweeps_in_flight: int = 1

    def __post_init__(self) -> None:
        counts = (self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk_tokens)
        assert self.max_logit_rows is None or self.max_logit_rows > self.max_num_seqs, "no prompt could be scored"
        assert all(count is None or count >= 1 for count in counts), f"nothing could ever run: {self}"

    @property
    def quotas(self) -> Mapping[KVPlacement, int]:
        """The most sequences of each KV placement, of limits that have quotas."""
        assert self.kv_seqs is not None, "placements have no quotas"
        return self.kv_seqs

    def most_tokens(self, kv_placement: KVPlacement) -> int | None:
        """The most tokens of a sequence of a placement that its staging buffer holds; None: there is no limit."""
        return None if kv_placement.tier == self.compute_tier else self.most_staged_tokens

    def quota(self, kv_placement: KVPlacement) -> int:
        return self.max_num_seqs if self.kv_seqs is None else self.kv_seqs.get(kv_placement, 0)
