"""What goes into each tier's memory: everything but KV is given by the policy, KV pools take what is left. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from batchgen.core.direct_io import ALIGNMENT, aligned
from batchgen.core.dtypes import FORMAT_BYTES, INT4, INT8, MIXED
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import (
    PINNED_BYTES,
    TIERS,
    VOCABULARY_CHUNKS,
    MemoryPlan,
    Policy,
    passing_bytes,
    spread_layers,
)
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import end_bytes, layer_sizes, output_row_bytes
from batchgen.models.store.layout import layer_groups
from batchgen.planner.kv_memory import Demand, kv_block_bytes, kv_pools

# Attention gathers and score tiles, allocator slack, tokenizer and writer buffers.
WORKSPACE_BYTES = 192 << 20
# The same of an accelerator, which has no tokenizer.
DEVICE_WORKSPACE_BYTES = 32 << 20
# What products with weights of 8 bits need beside results: on the CPU rows of codes (csrc/bindings.cpp, most_packed_bytes); on an
# accelerator what torch makes its sums in (ops/int8.py).
_CODED_ROWS_BYTES, _DEVICE_CODED_BYTES = 16 << 20, 128 << 20
_CHUNK_BYTES, _FEWEST_CHUNK_TOKENS = 16 << 20, 256
_GPU_CHUNK_TOKENS = 4096
_LOGITS_BYTES, _FEWEST_LOGIT_ROWS = 160 << 20, 32
Add = Callable[[str, str, int], None]  # tier, what for, bytes


def activation_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    logit_rows: int,
    *,
    on_gpu: bool,
    captured_tokens: int = 0,
) -> int:
    """Peak bytes of a sweep beside weights and KV: one layer's activations and `logit_rows` rows of logits.

    Of all tokens there are the residual before and after, queries, keys, values, and attention's result, perhaps in two
    parts; of `chunk_tokens` also the norm and what projections make, where rotary embedding works in fp32. Logits are
    held in the weights' dtype and in fp32, with one row of work space each.

    Args:
        captured_tokens: of the largest decode sweep that may be captured on a GPU, which has memory of its own.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = dtype_bytes * (2 * config.hidden_size + heads + 2 * config.num_heads * config.head_dim)
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
        per_token += 4 * config.head_dim
        per_chunk_token += 4 * 3 * heads
    chunk = min(max_num_batched_tokens, chunk_tokens(config, dtype_bytes, on_gpu=on_gpu))
    logits = logit_rows * config.vocab_size * (dtype_bytes + 8)
    captured = captured_tokens * (per_token + per_chunk_token)
    return max_num_batched_tokens * per_token + chunk * per_chunk_token + captured + logits


def chunk_tokens(config: ModelConfig, dtype_bytes: int, *, on_gpu: bool) -> int:
    """Tokens that go through a layer's products together.

    Enough for their best rate, few enough for what is between two of them to stay in a CPU's cache, or to take little of a
    GPU's memory.
    """
    if on_gpu:
        return _GPU_CHUNK_TOKENS
    widest = max(config.widest_mlp * (2 if config.gated_mlp else 1), config.qkv_size)
    return max(_FEWEST_CHUNK_TOKENS, _CHUNK_BYTES // (widest * dtype_bytes))


def logit_rows(config: ModelConfig, dtype_bytes: int) -> int:
    """Rows of logits that are made together: enough for an efficient product, in a bounded amount of memory."""
    return max(_FEWEST_LOGIT_ROWS, _LOGITS_BYTES // (config.vocab_size * (dtype_bytes + 8)))


def planned_logit_rows(
    config: ModelConfig, dtype_bytes: int, batch_tokens: int, batch_seqs: int, task: str | None
) -> int:
    """Rows of logits that are made together for one micro-batch.

    A row a sequence, or, where sequences are scored, perhaps one a token; no more than `logit_rows`.

    Args:
        task: "generate", "score", or None for either.
    """
    rows = batch_seqs if task == "generate" else max(batch_seqs, batch_tokens)
    return min(rows, logit_rows(config, dtype_bytes))


def group_bytes_of_layers(config: ModelConfig, dtype: str, weight_format: str) -> list[dict[str, int]]:
    """Stored bytes of each layer's groups of tensors, `ModelConfig.layer_tensors`."""
    return [dict(layer) for layer in _group_bytes_of_layers(config, dtype, weight_format)]


@lru_cache(maxsize=64)
def _group_bytes_of_layers(config: ModelConfig, dtype: str, weight_format: str) -> tuple[dict[str, int], ...]:
    return tuple(
        {group: sum(own.values()) for group, own in layer_groups(sizes).items()}
        for sizes in layer_sizes(config, dtype, weight_format)
    )


@lru_cache(maxsize=64)
def group_tensors_of_layers(config: ModelConfig, dtype: str, weight_format: str) -> tuple[Mapping[str, int], ...]:
    """How many tensors each group of each layer has."""
    layers = layer_sizes(config, dtype, weight_format)
    return tuple({group: len(own) for group, own in layer_groups(sizes).items()} for sizes in layers)


@lru_cache(maxsize=64)
def _group_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    layers = _group_bytes_of_layers(config, dtype, weight_format)
    if weight_format == MIXED:
        return {group: -(-sum(layer[group] for layer in layers) // len(layers)) for group in layers[0]}
    return {group: max(layer[group] for layer in layers) for group in layers[0]}


def group_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    """Stored bytes of each of a layer's groups of tensors.

    Of the largest, where MLPs of layers differ; the mean, rounded up, where their formats do.
    """
    return dict(_group_bytes(config, dtype, weight_format))


def disk_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    """Bytes of a buffer in host memory that any layer's groups of tensors are read into from disk: each starts on a page of its own."""
    return dict(_disk_bytes(config, dtype, weight_format))


@lru_cache(maxsize=64)
def _disk_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    layers = _group_bytes_of_layers(config, dtype, weight_format)
    return {group: aligned(max(layer[group] for layer in layers)) for group in layers[0]}


@lru_cache(maxsize=64)
def _expert_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    layers = [s for j, s in enumerate(layer_sizes(config, dtype, weight_format)) if config.has_experts(j)]
    found = {}
    for group, stem in (("up", "gate_up."), ("down", "down.")):
        total = sum(
            size for s in layers for name, size in s.items() if name.startswith(stem) and name.endswith(".weight")
        )
        found[group] = total // (len(layers) * config.num_experts)
    return found


def expert_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    """Stored bytes of the matrices of one expert, by the group that they are in; the mean where formats of layers differ.

    None where there are no experts.
    """
    return dict(_expert_bytes(config, dtype, weight_format)) if config.expert_layers else {}


def slot_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    """Bytes of a buffer for any layer's tensors of each group: for each tensor the largest.

    More than `group_bytes` where one kind of layer has the larger MLP and another a router or a shared expert beside it.
    """
    return dict(_slot_bytes(config, dtype, weight_format))


@lru_cache(maxsize=64)
def _slot_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    largest: dict[str, int] = {}
    for sizes in layer_sizes(config, dtype, weight_format):
        largest |= {name: max(size, largest.get(name, 0)) for name, size in sizes.items()}
    return {group: sum(own.values()) for group, own in layer_groups(largest).items()}


def coded_bytes(weight_format: str, *, on_gpu: bool) -> int:
    """Work space of products with weights of 8 bits."""
    return (_DEVICE_CODED_BYTES if on_gpu else _CODED_ROWS_BYTES) if weight_format == INT8 else 0


def plan_memory(
    config: ModelConfig, policy: Policy, demand: Demand, *, dtype: str, budgets: Mapping[str, int], process_bytes: int
) -> MemoryPlan:
    """Split each budget under a policy: fixed parts first, KV pools take what is left.

    Args:
        config: the model.
        policy: where weights, KV and activations are, and how many sequences and tokens there are in a sweep.
        demand: what must fit beside them.
        dtype: the compute dtype.
        budgets: bytes of each tier; with one for "gpu" there is an accelerator.
        process_bytes: what the process holds before weights are loaded.

    Raises:
        InputError: a budget is too small; the message names the smallest that would do.
    """
    device = "gpu" if "gpu" in budgets else "cpu"
    parts: dict[str, dict[str, int]] = {tier: {} for tier in TIERS if tier in budgets}
    parts["cpu"]["process"] = process_bytes
    batch_tokens = policy.batch_tokens
    staging_blocks = _staging_blocks(policy, device, demand.longest_tokens)
    task = demand.task

    def add(tier: str, what: str, num_bytes: int) -> None:
        if num_bytes:
            parts[tier][what] = parts[tier].get(what, 0) + num_bytes

    rows = planned_logit_rows(config, int(FORMAT_BYTES[dtype]), batch_tokens, policy.batch_seqs, task)
    rows = rows if config.has_head else 0
    _add_weights(config, policy, dtype, device, task, add)
    _add_activations(config, policy, dtype, device, batch_tokens, rows, add)
    _add_staging(config, policy, device, staging_blocks, add)
    pools = kv_pools(config, policy, parts, budgets, demand)
    for tier, size in pools.tier_bytes.items():
        add(tier, "KV", size)
    return MemoryPlan(
        dict(budgets), parts, pools.blocks, staging_blocks, batch_tokens, rows, pools.window, pools.window_blocks
    )


def _add_weights(config: ModelConfig, policy: Policy, dtype: str, device: str, task: str | None, add: Add) -> None:
    layers = group_bytes_of_layers(config, dtype, policy.weight_format)
    on_disk = 0
    for group, counts in policy.weight_layers.items():
        read = 0  # of the largest layer
        for tier, sizes in zip(spread_layers(counts), layers, strict=True):
            if tier == "disk":  # which has them already: its budget is for what is added
                read = max(read, aligned(sizes[group]))
            else:
                add(tier, "weights", sizes[group])
        on_disk += read
    if device == "gpu":
        away = [group for group, (on_gpu, *elsewhere) in policy.weight_layers.items() if any(elsewhere)]
        slots = slot_bytes(config, dtype, policy.weight_format)
        add("gpu", "weights in transit", 2 * sum(slots[group] for group in away))
    add("cpu", "weights in transit", 2 * on_disk)
    if policy.weight_format == INT4:
        copies = 2 if device == "gpu" and policy.kv_seqs.get("cpu") else 1
        add(device, "expanded weights", copies * sum(slot_bytes(config, dtype, dtype).values()))
    embedding, head = end_bytes(config, dtype, policy.weight_format)
    head_tier, embedding_tier = (policy.head_tier, policy.embedding_tier) if device == "gpu" else ("cpu", "cpu")
    add(head_tier if config.tied_embeddings else embedding_tier, "weights", embedding)
    add(head_tier, "weights", head)
    if device == "gpu" and head_tier != "gpu" and config.has_head:
        row = output_row_bytes(config, dtype, policy.weight_format)
        chunks = 2 * -(-config.vocab_size // VOCABULARY_CHUNKS) * row
        add("gpu", "weights in transit", chunks)
        if task != "score":  # to choose tokens, all of the vocabulary has to be there
            add("gpu", "logits", policy.max_num_seqs * config.vocab_size * 4)


def _add_activations(
    config: ModelConfig, policy: Policy, dtype: str, device: str, batch_tokens: int, logit_rows: int, add: Add
) -> None:
    size = int(FORMAT_BYTES[dtype])
    captured = policy.gpu_batch_size if device == "gpu" else 0
    add(device, "activations", coded_bytes(policy.weight_format, on_gpu=device == "gpu"))
    work = activation_bytes(config, size, batch_tokens, logit_rows, on_gpu=device == "gpu", captured_tokens=captured)
    between = batch_tokens * config.hidden_size * size
    if device == "cpu":
        add("cpu", "activations", work + WORKSPACE_BYTES + (policy.num_gpu_batches - 1) * between)
        return
    on_gpu, on_host = policy.activation_batches
    add("gpu", "activations", work + DEVICE_WORKSPACE_BYTES + (on_gpu + (2 if on_host else 0)) * between)
    exchanged = config.qkv_size + config.num_heads * config.head_dim
    delegated = 2 * policy.batch_seqs * exchanged * size if policy.kv_seqs.get("cpu") else 0
    add("cpu", "activations", WORKSPACE_BYTES + PINNED_BYTES + on_host * between + delegated)
    if delegated:
        add("gpu", "activations", sent_bytes(config, size, policy.batch_seqs))
    if deferred := policy.kv_seqs.get("deferred", 0):
        add("cpu", "activations", 2 * deferred * config.num_heads * config.head_dim * size)
        add("gpu", "activations", deferred_bytes(config, size, deferred))


def sent_bytes(config: ModelConfig, dtype_bytes: int, batch_seqs: int) -> int:
    """Bytes of an accelerator with which queries, keys and values are made ready for CPU attention, beside other computation.

    They themselves, perhaps packed too, and in fp32 for the rotary embedding.
    """
    return batch_seqs * config.qkv_size * (2 * dtype_bytes + 16)


def deferred_bytes(config: ModelConfig, dtype_bytes: int, seqs: int) -> int:
    """Bytes of an accelerator for sequences whose attention is deferred, beside those of a micro-batch.

    Their activations between layers and once more while a batch takes them along, all that it has of its own rows, and what is
    on its way to the CPU.
    """
    own = activation_bytes(config, dtype_bytes, seqs, 0, on_gpu=True)
    return own + 2 * seqs * config.hidden_size * dtype_bytes + sent_bytes(config, dtype_bytes, seqs)


def stream_bytes(config: ModelConfig, policy: Policy, memory: MemoryPlan, dtype: str) -> dict[str, int]:
    """Bytes of an accelerator that work in each of its streams may hold at once, beside what is held from beginning to end.

    Nothing where no part of a sweep waits for the host: there memory may be allocated at any time, and CUDA graphs have their own.
    """
    if policy.all_on_gpu:
        return {}
    size, gpu = int(FORMAT_BYTES[dtype]), memory.parts["gpu"]
    d2h = sent_bytes(config, size, policy.batch_seqs) if policy.kv_seqs.get("cpu") else 0
    fetched = 2 * memory.batch_tokens * config.hidden_size * size if policy.activation_batches[1] else 0
    return {"compute": gpu["activations"] + gpu.get("logits", 0) - d2h - fetched, "d2h": d2h}


def _staging_blocks(policy: Policy, device: str, longest_tokens: int) -> int:
    """Blocks of one buffer: a micro-batch's part of what does not live on the compute device, at its longest."""
    away = {c: n for c, n in policy.kv_seqs.items() if n and KVPlacement(c).tier != device}
    if not away:
        return 0
    longest = -(-longest_tokens // policy.kv_block_size)
    attended = {"cpu", "deferred"} & away.keys()  # on the CPU
    passing = -(-sum(n for c, n in away.items() if c not in attended) // policy.equal_parts)
    blocks = max(1, passing) * longest
    if attended:  # their prompts pass through once
        blocks += -(-policy.batch_tokens // policy.kv_block_size) + min(policy.batch_seqs, policy.batch_tokens)
    return blocks


def _add_staging(config: ModelConfig, policy: Policy, device: str, staging_blocks: int, add: Add) -> None:
    block = kv_block_bytes(config, policy.kv_block_size, policy.kv_format)
    add(device, "KV in transit", 2 * staging_blocks * block)
    if device == "gpu" and staging_blocks:
        links = 2 if policy.kv_seqs.get("disk") and block % ALIGNMENT else 1
        add("gpu", "KV in transit", links * passing_bytes(aligned(block), staging_blocks))
    if policy.kv_seqs.get("disk") and (device == "gpu" or block % ALIGNMENT):
        add("cpu", "KV in transit", 4 * staging_blocks * aligned(block))
