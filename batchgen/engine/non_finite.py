"""Sequences with NaN or infinity in their logits, and reruns of those that reused KV of other sequences."""

from __future__ import annotations

from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import Sequence


class NonFiniteSequences:
    """The sequences with NaN or infinity in their logits, in the sweeps whose results were taken last.

    Their prefixes are taken out of the prefix cache, so that no other sequence reuses their KV. A sequence that reused
    KV of others runs once more without it.

    Attention multiplies the values of masked tokens by zero, and zero times NaN is NaN. So a token whose KV holds NaN
    makes the logits of tokens before it NaN too, and the tokens after a shared prefix may spoil the prefix.
    """

    def __init__(self) -> None:
        self._rerun: dict[Sequence, bool] = {}

    def reruns(self, sequence: Sequence, *, failed: bool = False) -> bool:
        """Note a sequence with non-finite logits, and tell whether it will run again.

        Args:
            sequence: A sequence that has generated nothing yet.
            failed: Whether its request has failed for another reason.

        Returns:
            True where the sequence reused KV of other sequences, which may have been non-finite, and has not `failed`.
        """
        rerun = sequence.num_cached > 0 and sequence.takes_prefix and not failed
        self._rerun[sequence] = rerun
        return rerun

    def invalidate(self, scheduler: Scheduler) -> None:
        """Take the prefixes of the noted sequences out of a scheduler's prefix cache, and schedule the reruns."""
        for sequence, rerun in self._rerun.items():
            scheduler.invalidate_prefix(sequence)
            if rerun:
                scheduler.run_alone(sequence)
        self._rerun.clear()
