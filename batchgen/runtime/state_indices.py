"""The state rows of a part of a batch as tensors, on the device that updates the states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.ops.host_copy import upload
from batchgen.schedule.state_rows import StateRows


class StateIndices(NamedTuple):
    """A `StateRows` as tensors, int32: the arguments of `models.state.mix_state` after the states."""

    source: Tensor
    target: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: StateRows | None, device: torch.device) -> StateIndices | None:
        """The rows on a device; None: there are none."""
        if rows is None:
            return None
        # A column of one row is contiguous to numpy, and not to torch, unless it is copied.
        return cls(*(upload(x.copy(), device) for x in (rows.source, rows.target, rows.starts)))
