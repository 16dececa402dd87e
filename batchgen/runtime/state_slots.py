"""The slots of the states of a part of a batch as tensors, on the device that updates the states."""

from __future__ import annotations

import torch

from batchgen.ops.host_copy import upload
from batchgen.ops.state_slots import StateSlots
from batchgen.schedule.state_rows import StateRows


def upload_slots(rows: StateRows | None, device: torch.device) -> StateSlots | None:
    """The slots of state rows on a device, int32; None: there are none."""
    if rows is None:
        return None
    # A column of one row is contiguous to numpy, and not to torch, unless it is copied.
    return StateSlots(*(upload(x.copy(), device) for x in (rows.source, rows.target, rows.starts)))
