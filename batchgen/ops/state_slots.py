"""The slots of sequences' states, as the operations of state layers take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateSlots(NamedTuple):
    """The slots of sequences' states in a pool, and the sequences' places among packed tokens.

    A slot may be the source of several sequences. The target of a sequence is no other sequence's source or target. A
    sequence without tokens has its state copied.

    Attributes:
        source: Slot of each sequence's state before its first token here, int32 or int64 [sequences]. -1: zeros.
        target: Slot of each sequence's state after its last token, of the same type. Where `dispatch.can_capture` is
            true, a state with a slot below 0 is not kept.
        starts: Number of each sequence's first token, then the number of all tokens, of the same type, [sequences + 1].
    """

    source: Tensor
    target: Tensor
    starts: Tensor
