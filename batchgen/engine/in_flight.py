"""The sequences of a running call, for whoever predicts how long the rest of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class InFlight:
    """The sequences in flight, and those that wait in the engine.

    Attributes:
        prompt: Prompt tokens that each sequence in flight has yet to compute; 0 where it decodes.
        context: Tokens of the prompt of each sequence in flight, and those that it has generated.
        generated: Tokens that each sequence in flight has generated.
        limits: The most tokens that each of them may generate.
        queued_prompt: Prompt tokens of each sequence that waits in the engine, in the order of admission.
        queued_limits: The most tokens that each of these may generate.
    """

    prompt: Sequence[int] = ()
    context: Sequence[int] = ()
    generated: Sequence[int] = ()
    limits: Sequence[int] = ()
    queued_prompt: Sequence[int] = ()
    queued_limits: Sequence[int] = ()

    @classmethod
    def of(cls, scheduler: Scheduler) -> InFlight:
        """The sequences of a scheduler. Sequences of placement "deferred" count as those that decode."""
        running, queued = scheduler.running, list(scheduler.queued)
        return cls(
            [max(0, s.num_prompt - s.num_computed) for s in running],
            [len(s.tokens) for s in running],
            [s.num_generated for s in running],
            [1 if s.targets else s.sampling.max_tokens for s in running],
            [s.num_prompt for s in queued],
            [1 if s.targets else s.sampling.max_tokens for s in queued],
        )
