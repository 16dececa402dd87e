"""Memory for activations that leave the accelerator or come back, made with the engine: no sweep asks for any."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.runtime.memory.transfers import Arena
from batchgen.schedule.step_graph import EXCHANGE_SLOTS, HIDDEN_SLOTS


class Activations:
    """Buffers in both memories. What they take is a part of the plan's "activations".

    Invariant: a buffer is touched by one Step at a time, as the schedule has it.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        arenas: Mapping[str, Arena],
        batches_on_host: int,
        batch_tokens: int,
        delegated_seqs: int,
        deferred_seqs: int = 0,
        stage_tokens: int = 0,
    ) -> None:
        """Make the buffers.

        Args:
            config: Configuration of the model.
            dtype: Compute dtype.
            arenas: Memory by tier.
            batches_on_host: Micro-batches, the last ones, whose activations wait in host memory between layers.
            batch_tokens: Most tokens of a micro-batch.
            delegated_seqs: Most sequences of a micro-batch that the CPU attends to; 0: it attends to none.
            deferred_seqs: Most sequences in flight whose attention is deferred.
            stage_tokens: Most tokens of a sweep whose activations an accelerator gets from the previous stage of a
                pipeline, or hands to the next one; 0: there is one stage.
        """
        self.batches_on_host = batches_on_host
        host, device = arenas["cpu"].memory, arenas["gpu"].memory
        hidden = batch_tokens, config.hidden_size
        self._waiting = [host.zeros(hidden, dtype) for _ in range(batches_on_host)]
        # Of each of them, the inputs of all layers from per-layer embeddings.
        inputs = batch_tokens * config.per_layer_width
        self._inputs = [host.zeros((inputs,), dtype) for _ in self._waiting if inputs]
        self._input_shape = config.num_layers, config.per_layer_size
        self.on_device = [device.zeros(hidden, dtype) for _ in range(HIDDEN_SLOTS if batches_on_host else 0)]
        layers = range(config.num_layers)
        widths = max(map(config.sent_width, layers)), max(map(config.mixed_size, layers))
        self._exchange = [
            tuple(host.zeros((delegated_seqs * width,), dtype) for width in widths)
            for _ in range(EXCHANGE_SLOTS)
            if delegated_seqs
        ]
        # Of each of them, by its slot, queries for attention on the CPU and what came of it, [slots, width]: as wide as
        # in any layer.
        self.deferred = tuple(
            host.zeros((deferred_seqs, width), dtype) if deferred_seqs else torch.empty(0, width, dtype=dtype)
            for width in widths
        )
        # Of a stage of a pipeline, what comes from the previous one and goes to the next one in a sweep.
        exchanged = stage_tokens, config.hidden_size
        self._arriving, self._leaving = (
            host.zeros(exchanged, dtype) if stage_tokens and not is_end else torch.empty(0, dtype=dtype)
            for is_end in (config.embeds, config.has_head)
        )
        self._fetched, self._exchanged = cycle(self.on_device), cycle(self._exchange)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, in both memories."""
        buffers = (
            *self._waiting,
            *self._inputs,
            *self.on_device,
            self._arriving,
            self._leaving,
            *(t for pair in self._exchange for t in pair),
            *self.deferred,
        )
        return sum(t.nbytes for t in buffers)

    def waiting(self, batch: int, tokens: int) -> Tensor:
        """Host memory in which the activations of a micro-batch wait: [tokens, hidden]."""
        return self._waiting[batch % self.batches_on_host][:tokens]

    def waiting_inputs(self, batch: int, tokens: int) -> Tensor:
        """Host memory for the inputs of a micro-batch's layers from per-layer embeddings: [layers, tokens, size]."""
        layers, size = self._input_shape
        return self._inputs[batch % self.batches_on_host][: layers * tokens * size].view(layers, tokens, size)

    def fetched(self, tokens: int) -> Tensor:
        """Memory of the accelerator for activations in one layer, [tokens, hidden]: at every call the next buffer."""
        return next(self._fetched)[:tokens]

    def arriving(self, first: int, tokens: int) -> Tensor:
        """Host memory for what the previous stage sends, [tokens, hidden], from the token `first` of a sweep on."""
        return self._arriving[first : first + tokens]

    def leaving(self, first: int, tokens: int) -> Tensor:
        """Host memory for what goes to the next stage, [tokens, hidden], from the token `first` of a sweep on."""
        return self._leaving[first : first + tokens]

    def exchange(self, seqs: int, sent_width: int, mixed_size: int) -> tuple[Tensor, Tensor]:
        """Host memory for what the CPU gets, [seqs, sent_width], and for its results, [seqs, mixed_size].

        Every call returns the next pair of buffers in turn.
        """
        sent, mixed = next(self._exchanged)
        return sent[: seqs * sent_width].view(seqs, sent_width), mixed[: seqs * mixed_size].view(seqs, mixed_size)
