"""A model run by its layer functions alone: no engine, no paged KV, states in one pool."""

from __future__ import annotations

import torch

from batchgen.models import layers
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.experts import split_experts
from batchgen.models.state import StateViews, mix_state
from batchgen.ops import dispatch as ops
from batchgen.ops.state_slots import StateSlots


class PlainModel:
    """Sequences, each in a slot, that go through all layers together."""

    def __init__(self, checkpoint: Checkpoint, slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.dtype = checkpoint.config, dtype
        config = self.config
        self.embeddings, self.head = checkpoint.load_embeddings(dtype), checkpoint.load_head(dtype)
        self.layers = [
            split_experts(config, checkpoint.load_layer(layer, dtype), layer) for layer in range(config.num_layers)
        ]
        self.lengths = [0] * slots
        self.kv: dict[tuple[int, int], torch.Tensor] = {}  # (layer, slot) -> keys and values [2, heads, tokens, dim]
        if config.state is not None:
            state = config.state
            self.states = {
                layer: StateViews(
                    torch.randn(slots, state.channels, state.kernel - 1, dtype=dtype),  # never read before it is set
                    torch.randn(slots, *state.matrix_shape),
                )
                for layer in config.state_layers
            }

    @torch.inference_mode()
    def __call__(self, tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Logits [tokens, vocabulary] of new tokens, by slot."""
        config, slots, counts = self.config, list(tokens), [len(ids) for ids in tokens.values()]
        positions = self._positions(slots, counts)
        ids = torch.tensor([i for each in tokens.values() for i in each])
        hidden = layers.embed(config, self.embeddings, ids, positions, self.dtype)
        for layer, weights in enumerate(self.layers):
            hidden = layers.post_attention(config, weights, hidden, self.mix(layer, hidden, slots, counts))
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        matrix = self.head.get("lm_head.weight", self.embeddings["embed.weight"])
        logits = layers.logits(config, layers.before_logits(config, self.head, hidden), matrix)
        return dict(zip(slots, logits.split(counts), strict=True))

    def mix(self, layer: int, hidden: torch.Tensor, slots: list[int], counts: list[int]) -> torch.Tensor:
        """What a layer's output projection takes. The next tokens of each slot are packed in `hidden`."""
        projected = layers.pre_attention(self.config, self.layers[layer], hidden)
        if not self.config.has_state(layer):
            return self._attend(layer, projected, slots, counts)
        target = torch.tensor(slots)
        source = torch.tensor([slot if self.lengths[slot] else -1 for slot in slots])
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        return mix_state(
            self.config, self.layers[layer], projected, self.states[layer], StateSlots(source, target, starts)
        )

    def _positions(self, slots: list[int], counts: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(n) + self.lengths[slot] for slot, n in zip(slots, counts, strict=True)])

    def _attend(self, layer, projected, slots, counts):
        config, positions = self.config, self._positions(slots, counts)
        rope = config.rope_of(layer)
        table = layers.rope_table(rope, config.head_dim, config.max_position) if rope else None
        options = layers.rotary_options(config, layer, self.layers[layer], table, positions, None)
        qkv = ops.rotary(layers.ungated(config, projected), config.num_heads, config.num_kv_heads, **options)
        results = []
        for slot, q, k, v in zip(slots, *(x.split(counts) for x in qkv), strict=True):
            new = torch.stack((k, v)).transpose(1, 2)
            old = self.kv.get((layer, slot))
            kv = new if old is None else torch.cat((old, new), dim=2)
            self.kv[layer, slot] = kv
            keys, values = kv.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
            later = torch.ones(len(q), keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - len(q) + 1)
            scores = (q.transpose(0, 1) @ keys.transpose(1, 2)).masked_fill(later, -torch.inf)
            results.append((scores.softmax(-1) @ values).transpose(0, 1))
        return layers.gate_attention(config, projected, torch.cat(results).contiguous())
