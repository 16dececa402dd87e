"""Seconds of each kind of Step from its quantities: tokens, sequences, keys, rows, bytes. Each formula is here alone.

The cost model (costs.py) takes the quantities of a phase's average sweep, the simulator (step_costs.py) those of a
scheduled micro-batch. Where a function takes `batches`, its quantities are those of so many like micro-batches
together, each with its part of them.

The equations follow FlexGen's appendix A.3; each docstring says which and what was changed. The common changes: rates
are curves measured on the machine instead of constants; KV is counted with grouped-query attention, in bytes; decode
attention on CPU and GPU is bound by bytes, not FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, overload

from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import INT4, KV_CODE_BITS, matmul_key, packed_matmul_key
from batchgen.core.hardware import ComputeRates, Rates, known
from batchgen.core.routing import Routing
from batchgen.models.config import ModelConfig
from batchgen.ops.state_chunks import CHUNK
from batchgen.planner.layer_sizes import AttentionKind
from batchgen.planner.linear import Linear
from batchgen.planner.problem import CostInputs

# Copies that send one micro-batch's queries, keys and values to the CPU, which attends to them.
COPIES_SENT = 3
# Keys of a sequence whose decode attention reads memory as fast as it can be read.
_LONG_CONTEXT = 4096


class MatmulSeconds(NamedTuple):
    """Seconds of one layer's matmuls.

    Attributes:
        dense: Seconds of all matmuls but those of experts.
        experts: Seconds of the experts' matmuls.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Seconds of all matmuls."""
        return self.dense + self.experts


def matmul_s(
    s: CostInputs, tokens: float, batches: int = 1, *, as_stored: bool = False, packed: bool = False
) -> MatmulSeconds:
    """Seconds of one layer's matmuls: FlexGen's linear_layer^p and linear_layer^g over mm_flops.

    Changed: the rate depends on the tokens of one micro-batch, and prefill and decode tokens ride together. Each expert
    that is touched multiplies the tokens that chose it: the busiest as many as `Routing` says, the others the mean of
    the rest.

    Args:
        s: The inputs of the cost model.
        tokens: Tokens of all micro-batches.
        batches: Number of micro-batches.
        as_stored: Whether the weights lie as they are stored, as streamed ones do; otherwise they are prepacked.
        packed: Whether 4-bit weights are multiplied as they are (`multiplies_packed`); otherwise as dequantized ones.
    """
    if tokens == 0:
        return MatmulSeconds(0.0, 0.0)
    if packed:
        rates = s.rates.rates("gemm_flops_per_s", packed_matmul_key(s.compute_format))
    else:
        rates = _matmul_rates(s, s.main_format, as_stored=as_stored)
    model, batch_tokens = s.model, tokens / batches

    def seconds(params: int, expert_tokens: float) -> float:
        return 2 * params * tokens / rates.at(width=model.hidden_size, tokens=max(1.0, expert_tokens))

    if not model.num_experts:
        return MatmulSeconds(seconds(model.matmul_params_per_layer, batch_tokens), 0.0)
    chosen = model.experts_per_token * model.expert_params * model.expert_layers // model.num_layers
    routing, assigned = s.workload.routing, batch_tokens * model.experts_per_token
    others = max(0.0, experts_touched(model, batch_tokens, routing) - 1)
    busiest = min(batch_tokens, assigned, routing.imbalance * assigned / (others + 1))
    experts_s = busiest / assigned * seconds(chosen, busiest)
    if others:  # which share the rest equally
        experts_s += (1 - busiest / assigned) * seconds(chosen, (assigned - busiest) / others)
    return MatmulSeconds(seconds(model.matmul_params_per_layer - chosen, batch_tokens), experts_s)


def matmul_as_stored_s(s: CostInputs, tokens: float, batches: int = 1) -> MatmulSeconds:
    """Seconds that one layer's matmuls take longer where its weights lie as they are stored. Not in FlexGen's model."""
    if not _has_rates_as_stored(s, s.main_format):
        return MatmulSeconds(0.0, 0.0)
    prepacked, stored = (matmul_s(s, tokens, batches, as_stored=as_stored) for as_stored in (False, True))
    return MatmulSeconds(max(0.0, stored.dense - prepacked.dense), max(0.0, stored.experts - prepacked.experts))


def _matmul_rates(s: CostInputs, weight_format: str, *, as_stored: bool) -> Rates:
    """Rates of matmuls with weights in a format.

    Where rates of weights as they are stored are not known, they count as those of prepacked ones, and these as if in
    the compute format.
    """
    key = matmul_key(weight_format, s.compute_format)
    if as_stored and _has_rates_as_stored(s, weight_format):
        key = matmul_key(weight_format, s.compute_format, as_stored=True)
    return s.rates.rates("gemm_flops_per_s", key if s.rates.has_rates("gemm_flops_per_s", key) else s.compute_format)


def _has_rates_as_stored(s: CostInputs, weight_format: str) -> bool:
    """True if matmuls with weights as they are stored have rates of their own."""
    return s.rates.has_rates("gemm_flops_per_s", matmul_key(weight_format, s.compute_format, as_stored=True))


def experts_touched(model: ModelConfig, tokens: float, routing: Routing) -> float:
    """Experts of a layer that so many tokens go through."""
    return routing.touched(model.num_experts, model.experts_per_token, tokens)


def experts_read_ahead(model: ModelConfig, tokens: float, routing: Routing) -> tuple[float, float]:
    """Experts of a layer that a sweep of so many tokens reads before it has routed them, and their part of the needed.

    Where experts are read on demand.
    """
    return routing.read_ahead(model.num_experts, model.experts_per_token, tokens)


def experts_frac(model: ModelConfig) -> float:
    """The part of a layer's weights that is in matrices of its experts."""
    if not model.num_experts:
        return 0.0
    return model.num_experts * model.expert_params * model.expert_layers / model.num_layers / model.params_per_layer


@lru_cache(maxsize=64)
def before_attention_frac(model: ModelConfig) -> float:
    """The part of a layer's matmuls that comes before attention, by multiplications."""
    return _mean_projection(model, model.projected_size) / model.matmul_params_per_layer


def _mean_projection(model: ModelConfig, size_of: Callable[[int], int]) -> float:
    """Weights of a projection between the hidden states and so many values of each layer, the mean over layers."""
    return sum(map(size_of, range(model.num_layers))) * model.hidden_size / model.num_layers


@lru_cache(maxsize=64)
def after_router_frac(model: ModelConfig) -> float:
    """The part of a token's matmuls in a layer that waits for the router, by multiplications."""
    attention_params = _mean_projection(model, model.projected_size) + _mean_projection(model, model.mixed_size)
    before = attention_params + model.num_experts * model.hidden_size
    return 1 - before / model.matmul_params_per_layer


def elementwise_s(s: CostInputs, tokens: float) -> float:
    """Seconds of one layer's norms, rotary embedding, activation, adds and KV writes; not in FlexGen's model."""
    rate = _kv_rates(s, "elementwise_bytes_per_s").at(tokens=max(1.0, tokens))
    return tokens * s.model.elementwise_bytes_per_token(int(s.element_bytes)) / rate


def all_reduce_s(s: CostInputs, tokens: float, batches: int = 1) -> float:
    """Seconds of one layer's two all-reduces over the ranks that share it, for which compute waits."""
    rate = s.hardware.all_reduce_bytes_per_s
    if rate is None or not tokens:
        return 0.0
    return 2 * (batches * s.hardware.all_reduce_overhead_s + tokens * s.hidden_bytes / rate)


def pre_overhead_s(rates: ComputeRates) -> float:
    """Fixed seconds of one micro-batch in one layer before attention; those of any later Step are a waking."""
    return rates.step_overhead_s + rates.waking_overhead_s


def layer_overhead_s(rates: ComputeRates) -> float:
    """Fixed seconds of one micro-batch in one layer before and after attention."""
    return pre_overhead_s(rates) + rates.waking_overhead_s


def multiplies_packed(s: CostInputs, tokens: float) -> bool:
    """Tell whether a sweep of so many tokens multiplies 4-bit weights as they are, and dequantizes none.

    `packed_products.packed_tokens` has chosen up to how many tokens that is faster.
    """
    return s.weight_format == INT4 and 0 < s.packed_tokens >= tokens


def dequantize_s(s: CostInputs) -> float:
    """Seconds of dequantizing one layer's 4-bit weights, once in a sweep that does so (`multiplies_packed`)."""
    if s.weight_format != INT4:
        return 0.0
    return s.dequantized_layer_bytes / known(s.rates.expand_bytes_per_s)


def dequantize_experts_s(s: CostInputs) -> float:
    """Seconds of dequantizing all experts of one layer, as `dequantize_s` counts them."""
    return dequantize_s(s) * experts_frac(s.model)


def prefill_attention_s(s: CostInputs, kind: AttentionKind, prompts: float, mean_square: float) -> float:
    """Seconds of one layer's attention of prompts to themselves: FlexGen's att^p over bmm_flops.

    Changed: it is half of s^2 where it is causal.

    Args:
        s: The inputs of the cost model.
        kind: The layer's kind.
        prompts: Number of prompts.
        mean_square: Mean of the squares of their numbers of tokens.
    """
    longest: float = mean_square**0.5
    pairs = mean_square / 2 if s.model.causal else mean_square
    flops = 4 * kind.shape.q_size * pairs * (kind.seen(longest) / longest) * prompts
    return flops / _kv_rates(s, "prefill_attention_flops_per_s").at(context=longest)


def prefix_attention_s(s: CostInputs, kind: AttentionKind, queries: float, prefix: float) -> float:
    """Seconds of one layer's attention to a prefix that all queries see: one matmul, bound by FLOPs."""
    if not prefix or not queries:
        return 0.0
    curve = "shared_attention_flops_per_s"
    if not s.rates.has_rates(curve, s.compute_format):
        curve = "prefill_attention_flops_per_s"
    flops = 4 * kind.shape.q_size * kind.seen(prefix) * queries
    return flops / s.rates.rates(curve, s.compute_format).at(context=prefix)


def decode_attention_s(
    s: CostInputs, kind: AttentionKind, seqs: float, keys: float, device: ComputeRates, batches: int = 1
) -> float:
    """Seconds of one layer's decode attention on a device: att^g of FlexGen's gpu_comp^g and cpu_comp^g.

    Changed: bytes of KV over a measured rate, per head group, batch and context.

    Args:
        s: The inputs of the cost model.
        kind: The layer's kind.
        seqs: Sequences of all micro-batches, with one query each.
        keys: Keys that each of them sees, averaged over the layers.
        device: The rates of the device.
        batches: Number of micro-batches.
    """
    if seqs == 0:
        return 0.0
    rate = device.rates("decode_attention_bytes_per_s", s.kv_format).at(
        group=kind.shape.num_heads // kind.shape.num_kv_heads, batch=max(1.0, seqs / batches), context=max(1.0, keys)
    )
    return seqs * keys * kind.kv_token_bytes / rate


def few_queries_attention_s(
    s: CostInputs, kind: AttentionKind, seqs: float, keys: float, queries: float, device: ComputeRates, batches: int = 1
) -> float:
    """Seconds of one layer's attention for a few queries of each sequence, which share one pass over its KV.

    It lasts as long as reading KV once, or as the product.

    Args:
        s: The inputs of the cost model.
        kind: The layer's kind.
        seqs: Sequences of all micro-batches.
        keys: Keys that each of them sees, averaged over the layers.
        queries: Mean number of queries of a sequence.
        device: The rates of the device.
        batches: Number of micro-batches.
    """
    read_s = decode_attention_s(s, kind, seqs, keys, device, batches)
    return read_s if queries == 1 else max(read_s, prefix_attention_s(s, kind, seqs * queries, keys))


def state_update_s(s: CostInputs, seqs: float, device: ComputeRates, batches: int = 1) -> float:
    """Seconds of one state layer's updates by one token of each sequence: each state is read and written.

    Args:
        s: The inputs of the cost model.
        seqs: Sequences of all micro-batches, with one token each.
        device: The rates of the device.
        batches: Number of micro-batches.
    """
    if not seqs or not s.state_row_bytes:
        return 0.0
    batch = max(1.0, seqs / batches)
    if device.has_rates("state_update_bytes_per_s", s.state_dtype):
        rate = device.rates("state_update_bytes_per_s", s.state_dtype).at(batch=batch)
    elif device is s.hardware.cpu:
        rate = s.hardware.dram_bytes_per_s
    else:
        kv_format = next(iter(device.decode_attention_bytes_per_s))
        rate = device.rates("decode_attention_bytes_per_s", kv_format).at(group=1, batch=batch, context=_LONG_CONTEXT)
    return 2 * seqs * s.state_row_bytes / rate


def state_prefill_s(s: CostInputs, tokens: float, prompt_tokens: float) -> float:
    """Seconds of one state layer's updates by the chunks of prompts.

    Args:
        s: The inputs of the cost model.
        tokens: Tokens of all prompts.
        prompt_tokens: Tokens of one prompt.
    """
    if not tokens or s.model.state is None:
        return 0.0
    if s.rates.has_rates("state_prefill_flops_per_s", s.compute_format):
        rate = s.rates.rates("state_prefill_flops_per_s", s.compute_format).at(context=prompt_tokens)
    elif s.rates.has_rates("gemm_flops_per_s", "float32"):
        rate = s.rates.rates("gemm_flops_per_s", "float32").at(width=s.model.hidden_size, tokens=CHUNK)
    else:
        rate = _kv_rates(s, "prefill_attention_flops_per_s").at(context=prompt_tokens)
    return tokens * s.model.state.prefill_flops / rate


def _kv_rates(s: CostInputs, kind: str) -> Rates:
    """Rates of Steps that handle KV beside what they compute: those with packed KV, where they were measured."""
    packed = s.kv_format in KV_CODE_BITS and s.rates.has_rates(kind, s.kv_format)
    return s.rates.rates(kind, s.kv_format if packed else s.compute_format)


def logits_s(s: CostInputs, rows: float, batches: int = 1, *, as_stored: bool = False) -> float:
    """Seconds of so many rows of logits, which FlexGen leaves out (footnote 1)."""
    flops = 2 * s.model.output_size * s.model.embed_size * rows
    tokens = max(1.0, rows / batches)
    return flops / _matmul_rates(s, s.output_format, as_stored=as_stored).at(width=s.model.hidden_size, tokens=tokens)


def sampling_s(s: CostInputs, rows: float) -> float:
    """Seconds of choosing a token from each row of logits."""
    return rows * s.model.output_size / s.hardware.sampling_logits_per_s


def embedding_rows_s(s: CostInputs, tokens: float) -> float:
    """Seconds of reading the rows of so many tokens from an embedding table on disk, where tokens differ."""
    hardware, page_bytes = s.hardware, aligned(s.embedding_row_bytes)
    return tokens * transfer_s(page_bytes, hardware.disk_read_bytes_per_s, 1, hardware.disk_read_overhead_s)


def schedule_s(s: CostInputs, sampled: float, batches: int) -> float:
    """Seconds of scheduling, packing and bookkeeping of one sweep, in which nothing else runs.

    Args:
        s: The inputs of the cost model.
        sampled: Sequences that the sweep samples.
        batches: Its micro-batches.
    """
    hardware = s.hardware
    fixed_s = hardware.sweep_overhead_s + max(0, batches - 1) * hardware.batch_overhead_s
    return fixed_s + sampled * hardware.sequence_overhead_s


def query_bytes(s: CostInputs) -> float:
    """Bytes of one token's queries in one layer, and of its attention's result, which are as large: the mean."""
    return s.layers.mean_result


def attention_input_bytes(s: CostInputs) -> float:
    """Bytes of one token's queries, keys and values in one layer, which are sent to the CPU: the mean."""
    return s.layers.mean_sent


def call_overhead_s(s: CostInputs) -> float:
    """Seconds of a Step that reads or writes the disk beside its requests, where its thread is one beside all cores."""
    return s.hardware.disk_call_overhead_s if s.shares_cores else 0.0


@overload
def transfer_s(
    size: float, bytes_per_s: float | None, requests: float = 0.0, request_overhead_s: float = 0.0
) -> float: ...


@overload
def transfer_s(
    size: Linear, bytes_per_s: float | None, requests: Linear = 0.0, request_overhead_s: float = 0.0
) -> Linear: ...


def transfer_s(
    size: Linear, bytes_per_s: float | None, requests: Linear = 0.0, request_overhead_s: float = 0.0
) -> Linear:
    """Seconds of moving bytes over a link, or between disk and memory, in so many copies or requests.

    Args:
        size: Bytes, as a number or an expression.
        bytes_per_s: Rate of the link or the disk.
        requests: Number of copies or requests.
        request_overhead_s: Seconds of each beside its bytes.
    """
    seconds = size * (1 / known(bytes_per_s))
    return seconds + requests * request_overhead_s if request_overhead_s else seconds
