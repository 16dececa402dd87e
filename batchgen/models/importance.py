"""The importance of each input channel of a layer's matrices, for the quantization of their weights to 4 bits.

A few channels of a language model's activations are far larger than the rest, for any input. Errors of the weights that
are multiplied with them cost the most (AWQ: Lin et al., 2023, section 3.1). The importance of a channel is the mean
square of its activations for random tokens, which need no text and exist for any vocabulary. It is measured while the
model is read layer by layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import Weights, split_experts
from batchgen.models.layers import (
    embed,
    gate_attention,
    per_layer_inputs,
    post_attention,
    pre_attention,
    query_growth_table,
    rope_table,
    rotary_options,
    ungated,
)
from batchgen.models.state import StateViews, mix_state
from batchgen.models.tensor_files.table_rows import TableRows
from batchgen.ops import dispatch as ops
from batchgen.ops.state_slots import StateSlots

_SEQS, _TOKENS, _SEED = 8, 64, 20231
# Least importance as a fraction of the mean: no channel is given up, as other text may use it.
_LEAST_FRAC = 1e-3


def random_tokens(config: ModelConfig) -> Tensor:
    """Random token ids, int64 [seqs, tokens], which are equal for all models with this size of vocabulary."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(config.vocab_size, (_SEQS, min(_TOKENS, config.max_position)), generator=generator)


class ChannelImportance:
    """The measurement of the importance of input channels, one layer after the other.

    Invariant: `_hidden` is the input of the next layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        embeddings: Weights,
        token_ids: Tensor,
        sinks: Tensor | None = None,
        per_layer: TableRows | None = None,
    ) -> None:
        """Begin the measurement before the first layer.

        Args:
            config: Configuration of the model.
            embeddings: Tensors before the first layer (`Checkpoint.load_embeddings`).
            token_ids: Tokens whose activations are measured, int64 [seqs, tokens].
            sinks: Attention sinks of all layers (`Checkpoint.load_sinks`); or None.
            per_layer: Table of per-layer embeddings (`Checkpoint.open_per_layer`); or None.
        """
        self._config = config
        self._seqs, self._tokens = token_ids.shape
        self._positions = torch.arange(self._tokens).repeat(self._seqs)
        table = embeddings["embed.weight"]
        assert not isinstance(table, ops.SplitWeight)
        self._hidden = embed(config, embeddings, token_ids.view(-1), self._positions, table.dtype)
        self._sinks = None if sinks is None else sinks.float().view(config.num_layers, config.num_heads)
        self._per_layer = None
        if per_layer is not None:
            rows = per_layer.rows(token_ids.view(-1).numpy(), table.dtype)
            self._per_layer = per_layer_inputs(config, embeddings, self._hidden, rows)
        self._reused = {config.kv_source(j) for j in range(config.num_layers) if not config.owns_kv(j)}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}  # of layers whose KV is reused
        self._layer = 0

    def next_layer(self, tensors: Weights) -> dict[str, Tensor]:
        """Run the next layer, and return the mean square of each input channel of its matrices.

        Args:
            tensors: Tensors of the layer (`Checkpoint.load_layer`). The calls must have all layers in order.

        Returns:
            Mean squares, fp32 [in] and above zero, by the name of the matrix [out, in].
        """
        config = self._config
        weights = split_experts(config, tensors, self._layer)
        seen: dict[str, Tensor] = {}

        def on_input(name: str, x: Tensor) -> None:
            seen[name] = _bounded(x.float().square().mean(0))

        with torch.inference_mode():
            projected = pre_attention(config, weights, self._hidden, on_input=on_input)
            if config.has_state(self._layer):
                mixed = self._mix(weights, projected)
            else:
                mixed = gate_attention(config, projected, self._attention(weights, ungated(config, projected)))
            per_layer = None if self._per_layer is None else self._per_layer[self._layer]
            self._hidden = post_attention(config, weights, self._hidden, mixed, on_input=on_input, per_layer=per_layer)
        self._layer += 1
        return seen

    def _attention(self, weights: Weights, qkv: Tensor) -> Tensor:
        """Attention of all sequences, [tokens, heads * head_dim]."""
        config = self._config
        q, k, v = self._attention_inputs(weights, qkv)
        sinks = None if self._sinks is None else self._sinks[self._layer]
        attended = _attend(q, k, v, config.windows[self._layer], config.attention_softcap, sinks)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _attention_inputs(self, weights: Weights, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the keys and values that they meet, [seqs, heads, tokens, head_dim] each."""
        config, layer = self._config, self._layer
        rope, shape = config.rope_of(layer), config.attention_of(layer)
        table = rope_table(rope, shape.head_dim, self._tokens) if rope else None
        growth = query_growth_table(config, self._tokens)
        options = rotary_options(config, layer, weights, table, self._positions, growth)
        kv_heads = shape.num_kv_heads if config.owns_kv(layer) else 0
        q, k, v = (
            x.unflatten(0, (self._seqs, self._tokens)).transpose(1, 2)
            for x in ops.rotary(qkv, config.num_heads, kv_heads, **options)
        )
        if not kv_heads:
            k, v = self._kv[config.kv_source(layer)]
        elif layer in self._reused:
            self._kv[layer] = k, v
        return q, k, v

    def _mix(self, weights: Weights, projected: Tensor) -> Tensor:
        """The result of a state layer for all sequences, [tokens, out_size]."""
        state = self._config.state
        assert state is not None, "the layer has states"
        inputs = projected.new_zeros(self._seqs, state.channels, state.kernel - 1)
        views = StateViews(inputs, torch.zeros(self._seqs, *state.matrix_shape))
        target = torch.arange(self._seqs)
        starts = torch.arange(0, self._seqs * self._tokens + 1, self._tokens)
        slots = StateSlots(torch.full_like(target, -1), target, starts)
        return mix_state(self._config, weights, projected, views, slots)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float, sinks: Tensor | None) -> Tensor:
    """Causal attention of whole sequences, without paged KV.

    Args:
        q: Queries, scaled, [seqs, heads, tokens, head_dim].
        k, v: Keys and values, [seqs, heads, tokens, head_dim].
        window: Number of positions that a token attends to; None: all.
        softcap: Cap of the scores; 0: no cap.
        sinks: Attention sinks, fp32 [heads]; or None.
    """
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    scores = scores.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(3)[..., : k.shape[2]]
    return (weights @ v.float().repeat_interleave(group, 1)).to(v.dtype)


def _bounded(mean_squares: Tensor) -> Tensor:
    """Mean squares made finite and positive; all equal if activations were beyond the range of their dtype."""
    if not mean_squares.isfinite().all() or mean_squares.max() == 0:
        return torch.ones_like(mean_squares)
    return mean_squares.clamp(min=_LEAST_FRAC * mean_squares.mean().item())
