"""Tables of rotary embeddings: cos and sin of every position that a sequence may have."""

from __future__ import annotations

import torch

from batchgen.models import layers
from batchgen.models.config import ModelConfig
from batchgen.models.rope import RopeConfig


class RopeTables:
    """The (cos, sin) tables of a model's rotary embeddings, up to the longest sequence so far.

    A model with a context of 131,072 tokens and heads of 256 values takes 128 MiB for each of them, and most jobs have
    sequences of a few hundred tokens.
    """

    def __init__(self, config: ModelConfig, num_positions: int, context: int, device: torch.device) -> None:
        """Make the tables.

        Args:
            config: Configuration of the model.
            num_positions: Positions of the longest sequence that is expected.
            context: The most positions of a sequence.
            device: The device that computes.
        """
        self._config, self._context, self._device = config, context, device
        self._tables: dict[tuple[RopeConfig | None, int], layers.Rope | None] = {}
        self._positions = 0
        self.reserve(num_positions)

    def reserve(self, num_positions: int) -> None:
        """Have the tables hold some positions, at least twice as many as before where they have to grow."""
        if num_positions <= self._positions:
            return
        self._positions = min(self._context, max(num_positions, 2 * self._positions))
        for rope, head_dim in self._config.rotary_shapes:
            self._tables.pop((rope, head_dim), None)  # before the new one takes memory
            table = None
            if rope is not None:
                cos, sin = layers.rope_table(rope, head_dim, self._positions, self._context)
                table = cos.to(self._device), sin.to(self._device)
            self._tables[rope, head_dim] = table

    def of(self, layer: int) -> layers.Rope | None:
        """The (cos, sin) tables of a layer that attends; None: it has no rotary embedding."""
        return self._tables[self._config.rope_of(layer), self._config.attention_of(layer).head_dim]

    def clear(self) -> None:
        """Let go of the tables."""
        self._tables.clear()
