"""The model, its memory, and the sweep that is being run: all that the work of Steps shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.core.attention_budget import CHOSEN_PAGES, AttentionBudget
from batchgen.core.routing import RoutingCounts
from batchgen.models import layers
from batchgen.models.config import ModelConfig
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.chosen_attention import PreparedPlan, paged_attention
from batchgen.ops.host_copy import upload
from batchgen.ops.long_steps import note
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.graphs import SweepGraphs
from batchgen.runtime.memory.activations import Activations
from batchgen.runtime.memory.kv_cache import KVCache
from batchgen.runtime.memory.state_cache import StateCache
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.weight_packing import Tensors
from batchgen.runtime.memory.weights import Weights
from batchgen.runtime.steps.rope_tables import RopeTables
from batchgen.runtime.sweep_options import Largest, OnLogits, SweepOptions
from batchgen.runtime.token_table import TokenTable, places_of_rows
from batchgen.schedule.packed_batch import PackedBatch
from batchgen.schedule.sequence import LogitsRow
from batchgen.schedule.step_graph import Step

# Operations of a Step for one of several chunks of tokens on a GPU, at most.
_CHUNK_OPERATIONS = 48


class StepContext:
    """The model, its memory, and the sweep that is being run.

    Attributes:
        tiers: tiers that weights and KV are in.
        device: device that computes, as torch names it.
        compute_tier: tier of its own memory.
        windows: for each layer its sliding window, None without one, or CHOSEN_PAGES where it chooses pages.
        attended_windows: sliding windows (or None, or CHOSEN_PAGES) that any attending layer has.
        activations: memory for activations that leave the accelerator.
        routing: numbers of tokens by expert, where the host computes.
        layer_steps: function from a number of tokens to the Steps of all layers of a sweep over so many that moves
            nothing, each with the function that does its work.
        graphs: sweeps captured as CUDA graphs; None: none is.
        tokens: sampled tokens on the device; None: the host hands them to the next sweep.
        deferred_of: Step id -> the deferred batch that it works for.
        on_logits: function that takes the sweep's logits.
        largest: takes the tokens that a CUDA graph chooses; None: the sweep's logits are wanted.
        take_hidden: function that takes the hidden states before the output matrix, [rows of logits, embed]; None:
            nobody wants them.
        vocabulary_chunks: Whether it takes chunks of the vocabulary.
        one_batch: Whether the sweep has one micro-batch.
        warms_up: Whether sweeps have dummy rows: attention launches every kernel, and nothing is received from other
            stages of a pipeline, or sent to them.
        expands: Whether the sweep dequantizes 4-bit weights layer by layer; otherwise they are multiplied as stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_cache: KVCache,
        tiers: Tiers,
        options: SweepOptions,
        states: StateCache | None = None,
    ) -> None:
        """Make what all sweeps need: rotary tables and buffers for activations."""
        self.config, self.weights, self.kv_cache, self.options = config, weights, kv_cache, options
        self._states = states
        self.tiers, self.device, self.compute_tier = tiers, tiers.device, tiers.compute_tier
        self.dedicated_core = tiers.dedicated_core
        self.activations = Activations(
            config,
            weights.dtype,
            tiers.arenas,
            options.batches_on_host,
            options.batch_tokens,
            options.delegated_seqs,
            options.deferred_seqs,
            options.stage_tokens if tiers.links else 0,
        )
        self.routing = RoutingCounts(config.num_experts, config.experts_per_token, config.expert_layers)
        self.windows = config.layer_windows(chooses=AttentionBudget.of(options.attention_budget) is not None)
        self.attended_windows = frozenset(self.windows[layer] for layer in config.attention_layers)
        positions = options.max_positions if options.rotary_positions is None else options.rotary_positions
        self.ropes = RopeTables(config, positions, options.max_positions, self.device)
        growth = layers.query_growth_table(config, options.max_positions)
        self.query_growth = None if growth is None else growth.to(self.device)
        self.layer_steps: Callable[[int], Sequence[tuple[Handler, Step]]] = lambda num_tokens: ()
        self.graphs: SweepGraphs | None = None
        self.tokens: TokenTable | None = None
        self.deferred_of: dict[int, DeferredBatchState] = {}
        self.on_logits: OnLogits = nobody_takes_logits
        self.largest: Largest | None = None
        self.take_hidden: Callable[[Sequence[LogitsRow], Tensor], None] | None = None
        self.vocabulary_chunks = self.one_batch = self.warms_up = self.expands = False
        self._logits: Tensor | None = None

    def layer(self, step: Step) -> Tensors:
        """The tensors of a Step's layer, as the sweep multiplies them."""
        return self.weights.layer(step.layer, step.weight_slot, expanded=self.expands)

    def attention_operands(self, window: int | None) -> AttentionOperands:
        """The operands of attention in layers with a sliding window, or in those without (None or CHOSEN_PAGES)."""
        shape = self.kv_cache.shape_in(window)
        heads, dtype = self.config.num_heads, self.weights.dtype
        return AttentionOperands(heads, shape.kv_heads, shape.head_dim, shape.kv_block_size, dtype, shape.format)

    def attend(
        self,
        step: Step,
        q: Tensor,
        kv: Tensor,
        plan: PreparedPlan,
        tier: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend in a Step's layer, [tokens, heads * head_dim].

        Args:
            step: A Step of the layer.
            q: Queries [tokens, heads, head_dim].
            kv: KV of the layer, with that of these tokens.
            plan: Attention plan of the sweep.
            tier: Tier of the pool that has the sequences' KV, or the summaries of it where it comes from elsewhere.
            out: Tensor for the result, of q's shape. None: a new tensor.
        """
        chooses = self.windows[step.layer] == CHOSEN_PAGES
        summaries = self.kv_cache.summaries(tier, step.layer) if chooses else None
        return paged_attention(q, kv, plan, summaries, out, **self._softmax(step, q.device))

    @property
    def states(self) -> StateCache:
        """The states of a model that has state layers."""
        assert self._states is not None, "the model has no state layers"
        return self._states

    def rotary(self, step: Step, positions: Tensor) -> dict[str, Any]:
        """Options of the rotary embedding in a Step's layer."""
        config, layer = self.config, step.layer
        tensors = self.layer(step) if config.qk_norm else {}
        return layers.rotary_options(config, layer, tensors, self.ropes.of(layer), positions, self.query_growth)

    def reserve_positions(self, batches: Sequence[PackedBatch]) -> None:
        """Have the host's rotary tables hold the positions of a sweep's tokens."""
        if self.options.rotary_positions is not None:
            self.ropes.reserve(1 + max((int(batch.positions.max(initial=-1)) for batch in batches), default=-1))

    def _softmax(self, step: Step, device: torch.device) -> dict[str, Any]:
        """Options of `ops.paged_attention` in a Step's layer, on the device that attends."""
        return {
            "bits": self.kv_cache.format.bits,
            "softcap": self.config.attention_softcap,
            "sinks": self.weights.sinks(step.layer, device),
        }

    def chunks(self, *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
        """The tensors, cut into tokens that go through a layer's matmuls together."""
        count = self.options.chunk_tokens
        if count is None or tensors[0].shape[0] <= count:
            return (tensors,)
        return _noted(zip(*(tensor.split(count) for tensor in tensors), strict=True))

    def take_logits(self, rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None:
        """Hand logits over, and keep the tokens that are chosen on the device for the next sweep."""
        core = self.dedicated_core
        with contextlib.nullcontext() if core is None else core.hosts():
            chosen = self.on_logits(rows, logits, start)
        if chosen is not None and self.tokens is not None:
            places = places_of_rows(rows)
            self.reserve_places(places)
            self.tokens.keep(upload(places, self.device), chosen)

    def reserve_places(self, places: np.ndarray) -> None:
        """Have the table of tokens, if there is one, hold some places, int64."""
        if self.tokens is not None and self.tokens.reserve(places) and self.graphs is not None:
            self.graphs.forget()  # they read and write the memory before

    def logits_buffer(self, x: Tensor, rows: ops.Weight) -> Tensor:
        """Memory for the logits of x, always the same: some that is new to the process costs more than filling it."""
        size = len(x) * rows.shape[0]
        if self._logits is None or self._logits.numel() < size:
            self._logits = None
            self._logits = x.new_empty(size, dtype=torch.float32)
            if self.graphs is not None:  # those that have the head write to the memory before
                self.graphs.forget()
        return self._logits[:size].view(len(x), rows.shape[0])

    def close(self) -> None:
        """Let go of all memory. Counts stay."""
        self.ropes.clear()
        self.deferred_of.clear()
        self.on_logits, self.largest = nobody_takes_logits, None
        self._logits = self.graphs = self.tokens = None
        del self.activations


# The work of a kind of Step, on the Step's micro-batch.
Handler = Callable[[StepContext, Step, BatchState], None]


def nobody_takes_logits(rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None:
    """Take the logits of a sweep that nobody asked for."""


def _noted(chunks: Iterable[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """Yield the chunks of a Step, and note what is launched for each but the first: that much every Step may have."""
    for number, chunk in enumerate(chunks):
        yield chunk
        if number:
            note(_CHUNK_OPERATIONS)
