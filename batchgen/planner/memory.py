"""How much KV fits: the CPU memory budget less everything else that must be in memory. Pure arithmetic."""

from __future__ import annotations

from batchgen.errors import InputError
from batchgen.model_config import ModelConfig
from batchgen.policy import MemoryPlan
from batchgen.units import format_bytes

# Attention gathers and score tiles, allocator slack, tokenizer and writer buffers.
WORKSPACE_BYTES = 192 << 20


def activation_bytes(config: ModelConfig, dtype_bytes: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Peak bytes of a sweep beside weights and KV: one layer's activations and the logits.

    The widest point of a layer holds the residual, its norm, the projection's input and output; rotary embedding
    works in fp32. Logits are held in the weights' dtype and in fp32, with one row of work space each.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = config.intermediate_size * (3 if config.gated_mlp else 2)
    per_token = dtype_bytes * (4 * config.hidden_size + max(2 * heads, mlp))
    if config.rope is not None:
        per_token += 4 * 3 * heads
    return max_num_batched_tokens * per_token + max_num_seqs * config.vocab_size * (dtype_bytes + 8)


def plan_memory(
    config: ModelConfig,
    *,
    dtype_bytes: int,
    budget_bytes: int,
    process_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    min_tokens: int,
    block_size: int,
    most_kv_tokens: int | None = None,
) -> tuple[MemoryPlan, int]:
    """The split of the budget, and the number of KV blocks.

    process_bytes: what the process holds before weights are loaded. min_tokens: the smallest row that must fit
    (its prompt and output); max_model_len: the longest. most_kv_tokens: what the job is expected to use. Raises InputError, naming the smallest budget that would do.
    """
    weights = config.weight_bytes(dtype_bytes)
    activations = activation_bytes(config, dtype_bytes, max_num_batched_tokens, max_num_seqs) + WORKSPACE_BYTES
    block_bytes = block_size * config.kv_bytes_per_token(dtype_bytes)
    fixed = process_bytes + weights + activations
    needed = fixed + -(-min_tokens // block_size) * block_bytes
    if budget_bytes < needed:
        raise InputError(
            f"--cpu-memory {format_bytes(budget_bytes)} is too small for one row: weights take {format_bytes(weights)}, "
            f"the process and its work space {format_bytes(process_bytes + activations)}, {min_tokens} tokens of KV "
            f"{format_bytes(needed - fixed)}; give at least {format_bytes(needed * 1.01)}"
        )
    # More than every sequence at full length is never used; `most_kv_tokens` may know better, but any row must fit.
    useful = max_num_seqs * -(-max_model_len // block_size)
    if most_kv_tokens is not None:
        useful = min(useful, max(-(-most_kv_tokens // block_size), -(-max_model_len // block_size)))
    num_blocks = min((budget_bytes - fixed) // block_bytes, useful)
    return MemoryPlan(budget_bytes, process_bytes, weights, activations, num_blocks * block_bytes), num_blocks
