"""The correction of planned seconds by what a lane has taken in the last sweeps. No tensors."""

from __future__ import annotations

# What one sweep has shown of a lane counts this much less with each sweep after it; of sweeps in a row that show
# nothing, with the first ones only.
_DECAY, _MOST_DECAYS = 0.8, 20
# Measured sweeps that the plan's seconds count as much as, at first.
_PLANNED_SWEEPS = 2


class Correction:
    """The seconds that a lane was busy, over those that were planned; sweeps long ago count less."""

    def __init__(self) -> None:
        self._waiting: list[float] = []  # planned seconds of sweeps that have not been measured
        self._planned = self._measured = 0.0
        self._idle = 0  # sweeps in a row in which the lane was to do nothing

    @property
    def factor(self) -> float:
        """The factor on planned seconds."""
        return self._measured / self._planned if self._planned else 1.0

    def expect(self, planned_s: float) -> None:
        """Note the planned seconds of a sweep that is launched."""
        self._waiting.append(planned_s)

    def take(self, measured_s: float) -> None:
        """Take the measured seconds of the first sweep that has not been measured."""
        self.add(self._waiting.pop(0) if self._waiting else 0.0, measured_s)

    def add(self, planned_s: float, measured_s: float) -> None:
        """Learn from a sweep that has been measured. planned_s: 0 where the lane was to do nothing."""
        self._idle = 0 if planned_s else self._idle + 1
        if self._idle > _MOST_DECAYS:
            return
        if planned_s and not self._planned:
            self._planned = self._measured = _PLANNED_SWEEPS * planned_s
        self._planned = _DECAY * self._planned + planned_s
        self._measured = _DECAY * self._measured + (measured_s if planned_s else 0.0)
