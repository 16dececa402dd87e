"""Sequences whose logits were not finite: their KV is taken over by nobody, and what they took over is not what they fail by."""

from __future__ import annotations

from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import Sequence


class Spoilt:
    """The sequences with such logits of the sweeps whose results were taken last.

    A token whose KV holds NaN may spoil what is computed beside it, also of tokens before it: attention multiplies its values by zero.
    So a prefix that others take over may be spoilt by what follows it in one row.
    """

    def __init__(self) -> None:
        self._again: dict[Sequence, bool] = {}  # whether each runs again

    def may_be_of_others(self, sequence: Sequence, *, failed: bool = False) -> bool:
        """Note a sequence whose logits are not finite.

        Args:
            sequence: It has nothing but its prompt.
            failed: Whether its request has failed anyway.

        Returns:
            Whether it has taken over KV of others, and so runs again without that.
        """
        again = sequence.num_cached > 0 and sequence.takes_prefix and not failed
        self._again[sequence] = again
        return again

    def tell(self, scheduler: Scheduler) -> None:
        """Forget their prefixes, and have those run again that are to."""
        for sequence, again in self._again.items():
            scheduler.invalidate_prefix(sequence)
            if again:
                scheduler.run_alone(sequence)
        self._again.clear()
