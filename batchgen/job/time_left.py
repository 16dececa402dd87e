"""The time left of a running job, and the counts that it is predicted from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Seen:
    """A running job's counts since its first sweep.

    Attributes:
        rows: Number of rows that are done.
        repeated: Number of the done rows that got a duplicate's result.
        others: Number of rows that other workers have finished.
        prompt_tokens: Prompt tokens of rows that have been prefilled.
        cached_tokens: Part of `prompt_tokens` that came from the prefix cache.
        prefilled: Prompt tokens that went through the layers.
        prefill_keys: Tokens that these attended to, all together.
        decoded: Sequences that gained tokens in a sweep after that of their prompt, summed over sweeps.
        decode_keys: Tokens that the first token of each of these in a sweep attended to, all together.
        more_gained: Tokens that these gained beside one each: accepted drafts, and tokens that grammars forced.
    """

    rows: int = 0
    repeated: int = 0
    others: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled: int = 0
    prefill_keys: int = 0
    decoded: int = 0
    decode_keys: int = 0
    more_gained: int = 0


@dataclass(frozen=True)
class TimeLeft:
    """A prediction of the time left.

    Attributes:
        seconds: Seconds until the job ends.
        is_bound: True where nothing is known of output lengths but their limit, so that the job may end earlier.
    """

    seconds: float
    is_bound: bool


class Estimate(Protocol):
    """The interface of what predicts the time left."""

    def after_sweep(self, seconds: float, seen: Seen) -> None:
        """Take the counts after a sweep.

        Args:
            seconds: Seconds since the sweep before.
            seen: The job's counts.
        """

    def time_left(self) -> TimeLeft:
        """The predicted time left."""
