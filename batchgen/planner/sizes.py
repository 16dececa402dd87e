"""Bytes of single things, from shapes and formats: a layer's weights, its activations, logits, a block of KV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol

from batchgen.core.attention_budget import ALL
from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import FORMAT_BYTES, INT8, MIXED, weight_format_of
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import (
    EMBEDDINGS,
    end_bytes,
    layer_sizes,
    main_format,
    output_format,
    output_row_bytes,
    stored_tensors,
)
from batchgen.models.state_layers import StateRow
from batchgen.models.store.layout import layer_groups
from batchgen.ops.state_chunks import prepared_bytes
from batchgen.planner.layer_sizes import LayerSizes, sizes_of_layers

# Host memory for attention gathers and score tiles, allocator slack, tokenizer and writer buffers: what every job
# takes, what a token of the longest sequence adds, and the most.
_LEAST_WORKSPACE_BYTES, _WORKSPACE_TOKEN_BYTES, _MOST_WORKSPACE_BYTES = 112 << 20, 2 << 10, 192 << 20
# Partial results of attention to long contexts, which are cut for an accelerator's programs (ops/triton/plan.py), and
# allocator slack.
DEVICE_WORKSPACE_BYTES = 32 << 20
# GEMMs with 8-bit weights need quantized rows beside results: on the CPU of a part (csrc/bindings.cpp,
# most_packed_bytes), on an accelerator of all tokens of a chunk; where torch multiplies, its operands (ops/int8.py).
_CODED_ROWS_BYTES, _DEVICE_CODED_BYTES = 16 << 20, 128 << 20
_CHUNK_BYTES, _FEWEST_CHUNK_TOKENS = 16 << 20, 256
_GPU_CHUNK_TOKENS = 4096
_LOGITS_BYTES, _FEWEST_LOGIT_ROWS = 160 << 20, 32
# Drafts of each sequence whose logits are held with those of the sequences.
_HELD_DRAFTS = 4


def workspace_bytes(longest_tokens: int) -> int:
    """Host memory for attention gathers, allocator slack, and buffers of the tokenizer and the writer.

    Args:
        longest_tokens: Tokens of the longest sequence.
    """
    return min(_MOST_WORKSPACE_BYTES, _LEAST_WORKSPACE_BYTES + longest_tokens * _WORKSPACE_TOKEN_BYTES)


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes of a model in given formats, under the names that the papers use.

    Attributes:
        compute_format, weight_format, kv_format: dtypes of computation, of stored weights and of stored KV.
        kv_block_size: tokens of a KV block.
        state_dtype: format of the matrices of state layers.
        attention_budget: tokens that a decoding token attends to, as `--attention-budget` states them.
    """

    model: ModelConfig
    compute_format: str
    weight_format: str
    kv_format: str
    kv_block_size: int
    state_dtype: str = field(default="float32", kw_only=True)
    attention_budget: str = field(default=ALL, kw_only=True)

    @property
    def element_bytes(self) -> float:
        """Bytes of a number in the compute format."""
        return FORMAT_BYTES[self.compute_format]

    @cached_property
    def group_bytes(self) -> Mapping[str, int]:
        """Stored bytes of each group of a layer's tensors that is placed on its own (`ModelConfig.layer_tensors`)."""
        return group_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def layer_bytes(self) -> int:
        """W: stored bytes of one layer's weights."""
        return sum(self.group_bytes.values())

    @cached_property
    def layer_tensors(self) -> float:
        """Tensors of one layer, the mean over layers."""
        layers = group_tensors_of_layers(self.model, self.compute_format, self.weight_format)
        return sum(sum(groups.values()) for groups in layers) / len(layers)

    @cached_property
    def expert_bytes(self) -> Mapping[str, int]:
        """Stored bytes of one expert's matrices, by group; none where there are no experts."""
        return expert_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def all_expert_bytes(self) -> float:
        """Stored bytes of all experts of one layer, the mean of layers with and without."""
        mixtures = self.model.expert_layers / self.model.num_layers
        return mixtures * self.model.num_experts * sum(self.expert_bytes.values())

    @cached_property
    def disk_group_bytes(self) -> Mapping[str, int]:
        """Bytes, by group, of a host buffer that any layer is read into from disk."""
        return disk_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def slot_group_bytes(self) -> Mapping[str, int]:
        """Bytes of a buffer that the tensors of any layer fit into, by group of tensors: "qkv", "out", "up", "down"."""
        return slot_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def dequantized_slot_bytes(self) -> int:
        """Bytes of a buffer for the dequantized weights of any layer."""
        return sum(slot_bytes(self.model, self.compute_format, self.compute_format).values())

    @cached_property
    def dequantized_layer_bytes(self) -> float:
        """Bytes of one layer's weights in the compute format."""
        return self.model.params_per_layer * self.element_bytes

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a token's activations between layers: FlexGen's h."""
        return self.model.hidden_size * self.element_bytes

    @property
    def per_layer_bytes(self) -> float:
        """Bytes of a token's inputs of all layers from per-layer embeddings; 0 where the model has none."""
        return self.model.per_layer_width * self.element_bytes

    @property
    def head_bytes(self) -> float:
        """Bytes of the final norm and the output matrix."""
        embedding, head = self._end_bytes
        return float(head + (embedding if self.model.tied_embeddings else 0))

    @property
    def embedding_bytes(self) -> float:
        """Bytes of the input embedding, where it is a tensor of its own."""
        return 0.0 if self.model.tied_embeddings else float(self._end_bytes[0])

    @property
    def output_matrix_bytes(self) -> int:
        """Bytes of the output matrix, or of the token embedding if that is tied; 0 where the model makes no logits."""
        return self.model.output_size * self.output_row_bytes if self.model.has_head else 0

    @property
    def head_table_bytes(self) -> int:
        """Bytes of the table in `head_bytes`: the output matrix; where no logits are made, the embedding tied to it."""
        if self.output_matrix_bytes or not self.model.tied_embeddings:
            return self.output_matrix_bytes
        return self.model.vocab_size * self.embedding_row_bytes

    @cached_property
    def embedding_row_bytes(self) -> int:
        """Bytes of a row of the embedding table; 0 where it is not here."""
        if not self.model.embeds:
            return 0
        tensors = stored_tensors(self.model, "embeddings", 0, self.compute_format, self.weight_format)
        return tensors[EMBEDDINGS].num_bytes // self.model.vocab_size

    @property
    def embedding_table_bytes(self) -> int:
        """Bytes of the input embeddings' table, where it is a tensor of its own."""
        return 0 if self.model.tied_embeddings else self.model.vocab_size * self.embedding_row_bytes

    @cached_property
    def _end_bytes(self) -> tuple[int, int]:
        return end_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def main_format(self) -> str:
        """Format of most of the layers' weights."""
        return main_format(self.model, self.weight_format)

    @cached_property
    def output_format(self) -> str:
        """Format of the output matrix."""
        return output_format(self.model, self.compute_format, self.weight_format)

    @property
    def output_row_bytes(self) -> int:
        """Bytes of a row of the output matrix."""
        return output_row_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def layers(self) -> LayerSizes:
        """Bytes of KV and of what attention takes and gives, by layer."""
        formats = self.compute_format, self.kv_format
        return sizes_of_layers(self.model, *formats, self.kv_block_size, self.attention_budget)

    @cached_property
    def kv_token_bytes(self) -> float:
        """κ: stored bytes of the keys and values of one token in one layer, the mean over all layers."""
        return self.layers.mean_block / self.kv_block_size

    def kv_blocks(self, tokens: float) -> int:
        """KV blocks that hold so many tokens."""
        return -(-math.ceil(tokens) // self.kv_block_size)

    @cached_property
    def state_row_bytes(self) -> int:
        """Bytes of a sequence's state in one state layer; 0 where the model has no state layers."""
        state = self.model.state
        return StateRow(state, self.state_dtype, self.compute_format).num_bytes if state else 0

    @property
    def seq_state_bytes(self) -> int:
        """Bytes of a sequence's states in all layers."""
        return self.state_row_bytes * len(self.model.state_layers)

    @property
    def layer_state_bytes(self) -> float:
        """Bytes of a sequence's state in one layer, the mean over all layers."""
        return self.seq_state_bytes / self.model.num_layers

    @property
    def states_frac(self) -> float:
        """The part of the layers that are state layers."""
        return len(self.model.state_layers) / self.model.num_layers


class Batches(Protocol):
    """Numbers of sequences and tokens in flight: a `Policy`, or the inputs of the cost model."""

    @property
    def num_gpu_batches(self) -> int:
        """Micro-batches of a sweep."""

    @property
    def gpu_batch_size(self) -> int:
        """Sequences of a micro-batch, if all are of equal size."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in flight."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a sweep."""

    @property
    def captured_tokens(self) -> int:
        """Most tokens of a sweep that a GPU runs as a CUDA graph, if it may have more than one for each sequence."""

    @property
    def equal_parts(self) -> int:
        """Number of equal parts of a sweep of which a micro-batch has at most one."""

    @property
    def batch_seqs(self) -> int:
        """Most sequences of one micro-batch."""

    @property
    def batch_tokens(self) -> int:
        """Most tokens of one micro-batch."""

    @property
    def share_prefixes(self) -> bool:
        """True where rows share the KV of a prefix."""


def activation_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    logit_rows: int,
    *,
    on_gpu: bool,
    captured_tokens: int = 0,
    share_prefixes: bool = False,
) -> int:
    """Peak bytes of a sweep beside weights and KV: one layer's activations and `logit_rows` rows of logits.

    All tokens have the residual before and after, queries, keys, values, and attention's result, perhaps in two parts;
    those of a chunk (`chunk_tokens`) also the norm and what projections make, where rotary embedding works in fp32.
    On a GPU a token that attends to a shared prefix has two partial results in fp32 instead (ops/triton/attention.py).
    State layers have what their convolution makes beside what projections make. Logits are held in the weights' dtype
    and in fp32, with one row of workspace each.

    Args:
        captured_tokens: tokens of the largest sweep that may be captured on a GPU, which has memory of its own.
        share_prefixes: True where tokens may attend to a shared prefix.
    """
    heads = _widest_projection(config)
    per_token = dtype_bytes * (2 * config.hidden_size + heads + 2 * config.widest_mixed)
    if on_gpu and share_prefixes:
        per_token += 2 * 4 * (config.widest_mixed + 2 * config.num_heads) - dtype_bytes * config.widest_mixed
    per_token += dtype_bytes * 2 * config.per_layer_width  # rows of the table, and the inputs of all layers
    if config.state is not None:  # the convolution's results, and the gates in fp32
        value_heads = config.state.matrix_shape[0]
        per_token += dtype_bytes * config.state.channels + 8 * value_heads
        per_token += prepared_bytes(value_heads, dtype_bytes) if on_gpu else 0
    kept = 0  # from layer to layer
    mlp = (config.dense_size or config.intermediate_size) * (3 if config.gated_mlp else 2)
    k = config.experts_per_token
    if k:  # rows by expert, later overwritten by results; then in fp32 and 8 bytes: probabilities, order, sums
        kept = 0 if on_gpu else k * (config.intermediate_size + config.hidden_size)  # ops/scratch.py
        rows = config.intermediate_size * (3 if config.gated_mlp else 2) + config.hidden_size
        shared = config.shared_expert_size and 3 * config.shared_expert_size + config.hidden_size
        mlp = max(mlp, k * rows + shared) + (8 * config.num_experts + 16 * k + 8 * config.hidden_size) // dtype_bytes
    per_chunk_token = dtype_bytes * (2 * config.hidden_size + max(2 * heads + kept, mlp))
    if config.rope is not None:
        per_token += 4 * max(config.head_dim, config.global_head_dim)
        per_chunk_token += 4 * 3 * heads
    chunk = min(max_num_batched_tokens, chunk_tokens(config, dtype_bytes, on_gpu=on_gpu))
    output = config.output_size or config.hidden_size  # logits, or hidden states in fp32
    logits = logit_rows * output * (dtype_bytes + 8)
    captured = captured_tokens * (per_token + per_chunk_token)
    if captured_tokens:  # a graph may have the head too, whose fp32 is the same memory
        captured += min(logit_rows, captured_tokens) * output * dtype_bytes
    return max_num_batched_tokens * per_token + chunk * per_chunk_token + captured + logits


def most_captured_tokens(batches: Batches) -> int:
    """Tokens of the largest sweep that may be captured on a GPU."""
    return max(batches.captured_tokens, batches.gpu_batch_size)


def chunk_tokens(config: ModelConfig, dtype_bytes: int, *, on_gpu: bool) -> int:
    """Tokens that go through a layer's GEMMs together.

    They are enough for the best rate, and few enough for what is between two GEMMs to stay in a CPU's cache, or to take
    little of a GPU's memory.
    """
    if on_gpu:
        return _GPU_CHUNK_TOKENS
    widest = max(config.widest_mlp * (2 if config.gated_mlp else 1), config.widest_projected)
    return max(_FEWEST_CHUNK_TOKENS, _CHUNK_BYTES // (widest * dtype_bytes))


def logit_rows(config: ModelConfig, dtype_bytes: int) -> int:
    """Rows of logits that are computed together: enough for an efficient GEMM, in a bounded amount of memory."""
    output = config.output_size or config.hidden_size
    return max(_FEWEST_LOGIT_ROWS, _LOGITS_BYTES // (output * (dtype_bytes + 8)))


def planned_logit_rows(
    config: ModelConfig, dtype_bytes: int, batch_tokens: int, batch_seqs: int, task: str | None
) -> int:
    """Rows of logits that are computed together for one micro-batch: none where the model has no head.

    There is a row a sequence, or, where sequences are scored, perhaps one a token; but no more than `logit_rows`.

    Args:
        task: "generate", "score", or None for either.
    """
    rows = batch_seqs if task == "generate" else max(batch_seqs, batch_tokens)
    return min(rows, logit_rows(config, dtype_bytes)) if config.has_head else 0


def held_logit_rows(config: ModelConfig, dtype_bytes: int, batches: Batches, task: str | None) -> int:
    """The most rows of a sweep whose logits are all held, where the output matrix comes over in vocabulary chunks.

    There is a row for each sequence, and some for drafts and for tokens of prompts that are scored.

    Args:
        config: The model's configuration.
        dtype_bytes: Bytes of a number in the compute format.
        batches: Numbers of sequences and tokens in flight.
        task: "generate", "score", or None for either.
    """
    others = min(batches.max_num_batched_tokens, logit_rows(config, dtype_bytes))
    if task == "generate":
        others = min(others, _HELD_DRAFTS * batches.max_num_seqs)
    return batches.max_num_seqs + others


@lru_cache(maxsize=64)
def group_bytes_of_layers(config: ModelConfig, dtype: str, weight_format: str) -> tuple[Mapping[str, int], ...]:
    """Stored bytes of each layer's groups of tensors (`ModelConfig.layer_tensors`)."""
    return tuple(
        {group: sum(tensors.values()) for group, tensors in layer_groups(sizes).items()}
        for sizes in layer_sizes(config, dtype, weight_format)
    )


@lru_cache(maxsize=64)
def group_tensors_of_layers(config: ModelConfig, dtype: str, weight_format: str) -> tuple[Mapping[str, int], ...]:
    """Number of tensors in each group of each layer."""
    layers = layer_sizes(config, dtype, weight_format)
    return tuple({group: len(tensors) for group, tensors in layer_groups(sizes).items()} for sizes in layers)


@lru_cache(maxsize=64)
def group_bytes(config: ModelConfig, dtype: str, weight_format: str) -> Mapping[str, int]:
    """Stored bytes of each of a layer's groups of tensors.

    They are those of the largest layer, where MLPs of layers differ; the mean, rounded up, where formats or projections
    do.
    """
    layers = group_bytes_of_layers(config, dtype, weight_format)
    if weight_format == MIXED or len(set(map(config.projected_size, range(config.num_layers)))) > 1:
        return {group: -(-sum(layer[group] for layer in layers) // len(layers)) for group in layers[0]}
    return {group: max(layer[group] for layer in layers) for group in layers[0]}


@lru_cache(maxsize=64)
def disk_bytes(config: ModelConfig, dtype: str, weight_format: str) -> Mapping[str, int]:
    """Bytes of a host buffer that any layer is read into from disk; each group starts on a page of its own."""
    layers = group_bytes_of_layers(config, dtype, weight_format)
    return {group: aligned(max(layer[group] for layer in layers)) for group in layers[0]}


@lru_cache(maxsize=64)
def expert_bytes(config: ModelConfig, dtype: str, weight_format: str) -> Mapping[str, int]:
    """Stored bytes of the matrices of one expert, by the group that they are in.

    They are the mean where formats of layers differ. The mapping is empty where there are no experts.
    """
    if not config.expert_layers:
        return {}
    layers = [sizes for j, sizes in enumerate(layer_sizes(config, dtype, weight_format)) if config.has_experts(j)]

    def mean_bytes(stem: str) -> int:
        matrices = (
            size
            for sizes in layers
            for name, size in sizes.items()
            if name.startswith(stem) and name.endswith(".weight")
        )
        return sum(matrices) // (len(layers) * config.num_experts)

    return {"up": mean_bytes("gate_up."), "down": mean_bytes("down.")}


@lru_cache(maxsize=64)
def slot_bytes(config: ModelConfig, dtype: str, weight_format: str) -> Mapping[str, int]:
    """Bytes of a buffer for any layer's tensors of each group: for each tensor those of the largest.

    It is more than `group_bytes` where one kind of layer has the larger MLP and another a router or a shared expert
    beside it.
    """
    largest: dict[str, int] = {}
    for sizes in layer_sizes(config, dtype, weight_format):
        largest |= {name: max(size, largest.get(name, 0)) for name, size in sizes.items()}
    return {group: sum(tensors.values()) for group, tensors in layer_groups(largest).items()}


def coded_bytes(weight_format: str, *, on_gpu: bool) -> int:
    """Bytes of workspace of GEMMs with 8-bit weights."""
    return (_DEVICE_CODED_BYTES if on_gpu else _CODED_ROWS_BYTES) if weight_format == INT8 else 0


def sent_bytes(config: ModelConfig, dtype_bytes: int, batch_seqs: int) -> int:
    """Bytes of an accelerator with which queries, keys and values are prepared for attention on the CPU.

    There are they themselves, perhaps packed too, and in fp32 for the rotary embedding.
    """
    return batch_seqs * _widest_projection(config) * (2 * dtype_bytes + 16)


@lru_cache(maxsize=64)
def exchanged_values(config: ModelConfig, *, kv: bool) -> int:
    """Numbers of one token that are sent to the CPU in a layer, and those that come back: the most of both.

    Args:
        config: The model's configuration.
        kv: Whether keys and values are among them.
    """
    layers = range(config.num_layers)
    return max(map(config.projected_width if kv else config.sent_width, layers)) + config.widest_mixed


@lru_cache(maxsize=64)
def _widest_projection(config: ModelConfig) -> int:
    """The most numbers that the projections of a layer give for a token before it is mixed."""
    return max(map(config.projected_width, range(config.num_layers)))


def deferred_bytes(config: ModelConfig, dtype_bytes: int, seqs: int) -> int:
    """Bytes of an accelerator for sequences whose attention is deferred, beside those of a micro-batch.

    There are their activations between layers and once more while a batch takes them along, all that a batch has of its
    own rows, and what is on its way to the CPU.
    """
    rows = activation_bytes(config, dtype_bytes, seqs, 0, on_gpu=True)
    return rows + 2 * seqs * config.hidden_size * dtype_bytes + sent_bytes(config, dtype_bytes, seqs)


def store_bytes(config: ModelConfig, dtype: str, weights: str) -> int:
    """Bytes that a weight store takes on disk, but for its manifest.

    Args:
        config: The model's configuration.
        dtype: The compute dtype.
        weights: A value of `--weights`, or a format.
    """
    weight_format = weight_format_of(dtype, weights)
    layers = group_bytes_of_layers(config, dtype, weight_format)
    table = stored_tensors(config, "per_layer", 0, dtype, weight_format) if config.per_layer_size else {}
    ends = sum(end_bytes(config, dtype, weight_format)) + sum(stored.num_bytes for stored in table.values())
    return sum(sum(layer.values()) for layer in layers) + ends
