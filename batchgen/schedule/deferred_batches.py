"""Deferred batches: sequences that go through a layer in a sweep, while the CPU attends beside it (APEX section 3.3).

A deferred batch begins a token together, in one micro-batch: embedding, norm and QKV of the first layer. Then the CPU
attends, and the sweep goes on without it. In a later sweep it joins the first micro-batch where that comes to the same
layer: output projection, MLP, norm and QKV of the next layer, with the batch's own rows in one product. Then the CPU
attends again. After the last layer it has its logits with the batch. In a pipelined sweep it joins the last micro-batch
instead, waits there for the CPU in each layer, and is through with its token at the end. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

# Sweeps that pass a deferred batch by because the CPU is not done with it; the next one waits.
MOST_PASSED_BY = 8


@dataclass
class DeferredBatch:
    """Sequences that are at the same layer of a token.

    Attributes:
        number: Number of the deferred batch.
        batch: Micro-batch in which it began.
        layer: Layer that the CPU attends for.
        attention: Id of the Step in which the CPU attends.
        sweep: Sweep in which that Step was made.
    """

    number: int
    batch: int
    layer: int = 0
    attention: int = -1
    sweep: int = -1


@dataclass
class DeferredBatches:
    """The deferred batches of one job.

    Attributes:
        waiting: deferred batches that wait for the CPU, or for a sweep to come to their layer, in the order in which
            they were sent.
        ended: deferred batches that had their logits in the latest sweep.
        pipelines: Whether the next sweep is pipelined: they go with its last micro-batch through all layers that they
            have left, the CPU attending beside the other micro-batches (APEX section 3.4).
    """

    waiting: list[DeferredBatch] = field(default_factory=list)
    ended: list[DeferredBatch] = field(default_factory=list)
    pipelines: bool = False

    def keep_step(self, num_layers: int, begun: Iterable[DeferredBatch]) -> None:
        """Go a layer further with all deferred batches, as a sweep would if the CPU were always done in time.

        Deferred batches are replaced, so lists of them that somebody keeps stay as they are.

        Args:
            num_layers: Layers of the model.
            begun: Deferred batches that begin a token.
        """
        last = num_layers - 1
        self.ended = [c for c in self.waiting if c.layer == last]
        self.waiting = [*(replace(c, layer=c.layer + 1) for c in self.waiting if c.layer < last), *begun]

    def take_due(self, layer: int, sweep: int, can_join: Callable[[DeferredBatch], bool]) -> list[DeferredBatch]:
        """Take the deferred batches that join at a layer, which wait no more.

        In a pipelined sweep they are all that wait at the layer, those that were sent in the sweep too.

        Args:
            layer: Layer that the sweep is at.
            sweep: Number of the sweep; a deferred batch that was sent in the same one is not due.
            can_join: Tells whether the CPU is done; where a deferred batch was passed by too often, nobody asks.
        """
        due = [
            c
            for c in self.waiting
            if c.layer == layer
            and (self.pipelines or (c.sweep < sweep and (sweep - c.sweep > MOST_PASSED_BY or can_join(c))))
        ]
        self.waiting = [c for c in self.waiting if c not in due]
        return due
