"""A figure of a paper beside what batchgen's planner predicts for the same setting."""

from __future__ import annotations

from dataclasses import dataclass

# A prediction that is off by more than this has a sentence that says why.
CLOSE = 0.25


@dataclass(frozen=True)
class PaperRow:
    """A figure of a paper beside what batchgen's planner predicts.

    Attributes:
        paper: The paper's system.
        item: The table or figure.
        setting: The setting, in words.
        unit: Tokens/s, seconds, or by how much something is faster than something else.
        published: The figure; None: the paper says that memory does not hold the setting.
        predicted: The prediction; None: the planner says the same.
        reason: A sentence that says why a prediction is off by more than a quarter; "" where it is not.
    """

    paper: str
    item: str
    setting: str
    unit: str
    published: float | None
    predicted: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """The part by which the prediction exceeds the figure; None where either says that memory is short."""
        if self.published is None or self.predicted is None:
            return None
        return self.predicted / self.published - 1

    @property
    def is_close(self) -> bool:
        """True if the prediction is off by no more than a quarter, or both say that memory is short."""
        if self.error is None:
            return self.published is self.predicted
        return abs(self.error) <= CLOSE
