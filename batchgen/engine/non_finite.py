"""Sequences with NaN or infinity in their logits: no row reuses their KV, and those that reused KV run again alone."""

from __future__ import annotations

from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import Sequence


class NonFiniteSequences:
    """The sequences with non-finite logits in the sweeps whose results were taken last.

    Attention multiplies the values of masked tokens by zero, which leaves NaN as it is. So a token whose KV holds NaN
    spreads it to tokens before it too, and what follows a shared prefix in one row may make the prefix non-finite.
    """

    def __init__(self) -> None:
        self._rerun: dict[Sequence, bool] = {}

    def reruns(self, sequence: Sequence, *, failed: bool = False) -> bool:
        """Note a sequence with non-finite logits, and tell whether it runs again.

        Args:
            sequence: A sequence that has nothing but its prompt.
            failed: Whether its request has failed anyway.

        Returns:
            Whether it reused KV of other sequences, which may have been non-finite.
        """
        rerun = sequence.num_cached > 0 and sequence.takes_prefix and not failed
        self._rerun[sequence] = rerun
        return rerun

    def invalidate(self, scheduler: Scheduler) -> None:
        """Take the prefixes of these sequences out of the prefix cache, and schedule the reruns."""
        for sequence, rerun in self._rerun.items():
            scheduler.invalidate_prefix(sequence)
            if rerun:
                scheduler.run_alone(sequence)
        self._rerun.clear()
