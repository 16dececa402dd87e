"""Seconds that a sweep takes on each lane: every formula once.

Every function is linear in the `Placement` it is given. With numbers it explains; with expressions of unknowns it makes the rows
of the linear programme (mip.py). The equations follow FlexGen's appendix A.3; each docstring says which and what was
changed. The common changes: rates are curves measured on the machine instead of constants; prompts are prefilled
next to decoding sequences (continuous admission), so T_pre and T_gen are one function of a Phase; KV is counted
with grouped-query attention, in bytes; decode attention on CPU and GPU is bound by bytes, not FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchgen.core.dtypes import FORMAT_BYTES, INT4, INT8, KEPT_FORMATS, KV_CODE_BITS, product_key
from batchgen.core.hardware import ComputeRates, Rates, known
from batchgen.core.plan import first_batch_cpu_share
from batchgen.core.routing import Routing
from batchgen.models.config import ModelConfig
from batchgen.planner.linear import Linear, number
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs, RuntimeModel

# Below these, sequences read a shared prefix one by one (ops/attention_plan.py).
_MIN_SHARED_TOKENS, _MIN_SHARED_SEQS = 64, 4

COPIES_SENT = 3  # queries, keys and values, of sequences that the CPU attends to


def _attended_on_cpu(s: CostInputs, at: Placement) -> Linear:
    return at.kv_cpu + (at.kv_disk if s.runtime.attends_disk_kv_on_cpu else 0)


def _brought_to_gpu(s: CostInputs, at: Placement) -> Linear:
    return at.kv_streamed + (0 if s.runtime.attends_disk_kv_on_cpu else at.kv_disk)


def experts_touched(model: ModelConfig, tokens: float, routing: Routing) -> float:
    """Experts of a layer that so many tokens go through."""
    return routing.touched(model.num_experts, model.experts_per_token, tokens)


def reads_on_demand(s: CostInputs, phase: Phase) -> bool:
    """Whether of experts on disk only those that tokens are routed to are read: after the router, so not ahead of anything."""
    return not s.on_gpu and 0 < phase.tokens <= s.on_demand_tokens


def experts_skipped_frac(s: CostInputs, phase: Phase) -> float:
    """Of a layer's experts, those that none of a sweep's tokens is routed to."""
    if not s.model.num_experts:
        return 0.0
    return 1 - experts_touched(s.model, phase.tokens, s.workload.routing) / s.model.num_experts


def experts_frac(model: ModelConfig) -> float:
    """Of the weights of a layer, those of matrices of its experts."""
    if not model.num_experts:
        return 0.0
    return model.num_experts * model.expert_params * model.expert_layers / model.num_layers / model.params_per_layer


def before_attention_frac(model: ModelConfig) -> float:
    """Of a layer's products, those before attention."""
    rows, columns = model.product_shapes["qkv"]
    return rows * columns / model.matmul_params_per_layer


def after_router_frac(model: ModelConfig) -> float:
    """Of the products that a token takes in a layer, those that wait for the router, by multiplications."""
    (rows, columns), (out_rows, out_columns) = model.product_shapes["qkv"], model.product_shapes["out"]
    before = rows * columns + out_rows * out_columns + model.num_experts * model.hidden_size
    return 1 - before / model.matmul_params_per_layer


def unequal_batches(s: CostInputs, phase: Phase) -> tuple[Phase, Phase]:
    """The two micro-batches of a sweep, where `CostInputs.balance` makes them: the second has nothing but sequences that the CPU attends to."""
    delegated = phase.decode_seqs * s.balance.cpu_frac if s.balance else 0.0
    second = delegated * (1 - _first_share(s, phase))
    first = replace(phase, decode_seqs=phase.decode_seqs - second)
    return first, replace(phase, prefill_tokens=0.0, prefill_seqs=0.0, decode_seqs=second, deferred_tokens=0.0)


def _first_share(s: CostInputs, phase: Phase) -> float:
    """Of the CPU's attention, the part that goes with the first of two unequal micro-batches."""
    assert s.balance is not None
    return first_batch_cpu_share(phase.tokens, phase.decode_seqs * s.balance.cpu_frac, s.balance.tokens)


def _product_rates(s: CostInputs, weight_format: str, *, in_rows: bool) -> Rates:
    """Of products with weights in a format. in_rows: as of `dtypes.product_key`.

    Where these rates are not known, they count as those of weights in the order of products, and these as if in the compute format.
    """
    key = product_key(weight_format, s.compute_format)
    if in_rows and _has_rows(s, weight_format):
        key = product_key(weight_format, s.compute_format, in_rows=True)
    return s.rates.rates("gemm_flops_per_s", key if s.rates.has_rates("gemm_flops_per_s", key) else s.compute_format)


def _has_rows(s: CostInputs, weight_format: str) -> bool:
    """Whether products with weights that lie as they are stored have rates of their own."""
    return s.rates.has_rates("gemm_flops_per_s", product_key(weight_format, s.compute_format, in_rows=True))


def linear_s(s: CostInputs, phase: Phase, *, in_rows: bool = False) -> float:
    """Seconds of one layer's matrix products: FlexGen's linear_layer^p and linear_layer^g over mm_flops.

    Changed: the rate depends on the tokens of one micro-batch, and prefill and decode tokens
    ride together. Each expert that is touched multiplies the tokens that chose it: the busiest as many as `Routing` says, the others
    the mean of the rest.

    in_rows: of a layer all of which streams.
    """
    if s.balance is not None:
        return sum(linear_s(s.one_batch, part, in_rows=in_rows) for part in unequal_batches(s, phase))
    return sum(_linear_parts_s(s, phase, in_rows=in_rows))


def longer_in_rows_s(s: CostInputs, phase: Phase) -> tuple[float, float]:
    """Seconds by which one layer's products take longer where its weights stream: of all but its experts, and of its experts.

    What streams lies as it is stored, and not in the order in which products read it fastest. Not in FlexGen's model.
    """
    if not _has_rows(s, s.main_format):
        return 0.0, 0.0
    if s.balance is not None:
        parts = [longer_in_rows_s(s.one_batch, part) for part in unequal_batches(s, phase)]
        return sum(dense for dense, _ in parts), sum(experts for _, experts in parts)
    ordered, stored = (_linear_parts_s(s, phase, in_rows=in_rows) for in_rows in (False, True))
    return max(0.0, stored[0] - ordered[0]), max(0.0, stored[1] - ordered[1])


def _streamed_products_s(s: CostInputs, phase: Phase, at: Placement) -> Linear:
    """Seconds by which one layer's products take longer with a placement, of which a part streams."""
    dense_s, experts_s = longer_in_rows_s(s, phase)
    if s.on_gpu:
        return at.w_streamed * (dense_s + experts_s) if dense_s + experts_s else 0.0
    found: Linear = 0.0
    if dense_s:
        dense_bytes = at.w_disk * s.layer_bytes - at.experts_disk * s.all_expert_bytes
        found = dense_bytes * (dense_s / (s.layer_bytes - s.all_expert_bytes))
    return found + at.experts_disk * experts_s if experts_s else found


def _linear_parts_s(s: CostInputs, phase: Phase, *, in_rows: bool) -> tuple[float, float]:
    """`linear_s` of all but a layer's experts, and of its experts."""
    if phase.tokens == 0:
        return 0.0, 0.0
    rates = _product_rates(s, s.main_format, in_rows=in_rows)
    model, batch_tokens = s.model, phase.tokens / s.num_gpu_batches

    def seconds(params: int, tokens: float) -> float:
        return 2 * params * phase.tokens / rates.at(width=model.hidden_size, tokens=max(1.0, tokens))

    if not model.num_experts:
        return seconds(model.matmul_params_per_layer, batch_tokens), 0.0
    chosen = model.experts_per_token * model.expert_params * model.expert_layers // model.num_layers
    routing, assigned = s.workload.routing, batch_tokens * model.experts_per_token
    others = max(0.0, experts_touched(model, batch_tokens, routing) - 1)
    busiest = min(batch_tokens, assigned, routing.imbalance * assigned / (others + 1))
    of_experts = busiest / assigned * seconds(chosen, busiest)
    if others:  # which share the rest equally
        of_experts += (1 - busiest / assigned) * seconds(chosen, (assigned - busiest) / others)
    return seconds(model.matmul_params_per_layer - chosen, batch_tokens), of_experts


def _with_kv(s: CostInputs, kind: str) -> Rates:
    """Rates of what handles KV along the way: their own with packed KV, where they were measured."""
    packed = s.kv_format in KV_CODE_BITS and s.rates.has_rates(kind, s.kv_format)
    return s.rates.rates(kind, s.kv_format if packed else s.compute_format)


def elementwise_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's norms, rotary embedding, activation, adds and KV writes; not in FlexGen's model."""
    rate = _with_kv(s, "elementwise_bytes_per_s").at(tokens=max(1.0, phase.tokens))
    return phase.tokens * s.model.elementwise_bytes_per_token(int(s.element_bytes)) / rate


def all_reduce_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's two sums over the ranks that share it, for which compute waits; not in FlexGen's model."""
    rate = s.hardware.all_reduce_bytes_per_s
    if rate is None or not phase.tokens:
        return 0.0
    return 2 * (s.num_gpu_batches * s.hardware.all_reduce_overhead_s + phase.tokens * s.hidden_bytes / rate)


def _seen(s: CostInputs, context: float) -> float:
    """Tokens attended to, averaged over layers with and without a sliding window."""
    layers = s.model.window_layers
    seen: float = sum(count * (context if w is None else min(w, context)) for w, count in layers.items())
    return seen / s.model.num_layers


def _shared_tokens(s: CostInputs, phase: Phase) -> float:
    """Prefix tokens that the block attends to once for all, on a compute device that holds them."""
    shared = s.workload.shared_prefix_len
    worth_it = shared >= _MIN_SHARED_TOKENS and phase.decode_seqs >= _MIN_SHARED_SEQS and not any(s.model.windows)
    return shared if worth_it else 0.0


def prefill_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's attention of new prompts to themselves: FlexGen's att^p over bmm_flops.

    Changed: causal (half of s^2), and of a prompt whose prefix is shared only the rest, which is what is computed anew.
    """
    if phase.prefill_seqs == 0:
        return 0.0
    square = max(
        1.0, s.workload.prompt_len.mean_square - (s.workload.prompt_len.mean**2 - s.workload.computed_prompt_len**2)
    )
    longest: float = square**0.5
    flops = 4 * s.model.num_heads * s.model.head_dim * (square / 2) * (_seen(s, longest) / longest) * phase.prefill_seqs
    return flops / _with_kv(s, "prefill_attention_flops_per_s").at(context=longest)


def shared_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's attention to a prefix that rows share, by new prompts and by decoding sequences.

    One product for the block, bound by FLOPs. Not in FlexGen's model.
    """
    shared = s.workload.shared_prefix_len
    queries = phase.prefill_tokens + (phase.decode_seqs if _shared_tokens(s, phase) else 0.0)
    if not shared or not queries:
        return 0.0
    kind = "shared_attention_flops_per_s"
    if not s.rates.has_rates(kind, s.compute_format):
        kind = "prefill_attention_flops_per_s"
    flops = 4 * s.model.num_heads * s.model.head_dim * _seen(s, shared) * queries
    return flops / s.rates.rates(kind, s.compute_format).at(context=shared)


def decode_kv_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of stored KV that one layer's decode attention reads if all sequences were of one class.

    4 bls (s + n/2) h1 in FlexGen, which has one KV head per head and 2 bytes per number.
    """
    return phase.decode_seqs * (_seen(s, phase.context) - _shared_tokens(s, phase)) * s.kv_token_bytes


def decode_attention_s(s: CostInputs, phase: Phase, device: ComputeRates) -> float:
    """Seconds of one layer's decode attention if all of the block were on `device`.

    att^g of FlexGen's gpu_comp^g and cpu_comp^g. Changed: bytes of KV over a measured rate, per head group, batch and context.
    """
    if phase.decode_seqs == 0:
        return 0.0
    bytes_read = decode_kv_bytes(s, phase)
    if s.dequantizes_kv:
        bytes_read *= s.element_bytes / FORMAT_BYTES[INT4]
    rate = device.rates("decode_attention_bytes_per_s", s.compute_format if s.dequantizes_kv else s.kv_format).at(
        group=s.model.num_heads // s.model.num_kv_heads,
        batch=max(1.0, phase.decode_seqs / s.num_gpu_batches),
        context=max(1.0, _seen(s, phase.context) - _shared_tokens(s, phase)),
    )
    seconds = bytes_read / rate
    return seconds + (bytes_read / known(device.expand_bytes_per_s) if s.dequantizes_kv else 0.0)


def _attended_in_layer(s: CostInputs, phase: Phase) -> Phase:
    """Sequences whose attention is deferred that the CPU attends to beside one layer of a sweep: each in one layer of all."""
    sweeps = s.model.num_layers + 1  # of a token
    return replace(phase, decode_seqs=phase.deferred_tokens * sweeps / s.model.num_layers)


def deferred_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of CPU attention to deferred sequences beside one layer of a sweep, which they do not hold up.

    N_C of APEX's inequality (6), times the whole sweep. The rate is that of a deferred batch of all of them.
    """
    if not phase.deferred_tokens:
        return 0.0
    together = replace(phase, decode_seqs=phase.deferred_tokens * (s.model.num_layers + 1))
    return decode_attention_s(s, together, s.hardware.cpu) / s.model.num_layers


def products_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's computation but for attention and dequantizing, with the fixed time of each micro-batch."""
    fixed_s = s.rates.step_overhead_s + 2 * s.rates.waking_overhead_s  # before attention and after it
    return linear_s(s, phase) + elementwise_s(s, phase) + all_reduce_s(s, phase) + s.num_gpu_batches * fixed_s


def dequantize_weights_s(s: CostInputs) -> float:
    """Seconds of dequantizing one layer's 4-bit weights, once per sweep (or per micro-batch, FlexGen)."""
    if s.weight_format != "int4":
        return 0.0
    return (
        s.dequantized_layer_bytes
        / known(s.rates.expand_bytes_per_s)
        * (s.num_gpu_batches if s.runtime.dequantizes_per_micro_batch else 1)
    )


def _dequantize_experts_s(s: CostInputs) -> float:
    return dequantize_weights_s(s) * experts_frac(s.model)


def dequantizes_after_router(s: CostInputs) -> bool:
    """Whether of a layer's 4-bit experts only those are dequantized that tokens go through, wherever these lie."""
    return not s.on_gpu and s.num_gpu_batches == 1


def _history_tokens(s: CostInputs, phase: Phase) -> float:
    """Tokens whose KV is brought in for one decoding sequence, in whole blocks, where nothing of it is given back."""
    return phase.context - 1 + (s.kv_block_size - 1) / 2


def streamed_kv_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of one layer's history that come to the compute device in a sweep if all sequences were `streamed`.

    A shared prefix comes once for each micro-batch.
    """
    shared = s.workload.shared_prefix_len
    own = max(0.0, _history_tokens(s, phase) - shared)

    def brought(own: float, shared: float) -> float:
        return phase.decode_seqs * own + shared * min(phase.decode_seqs, s.num_gpu_batches)

    tokens = brought(own, shared)
    if s.window:  # the mean over layers
        most = s.window - 1 + s.kv_block_size - 1
        windowed = brought(min(own, most), min(shared, max(0.0, most - own)))
        tokens += (windowed - tokens) * s.window_layers / s.model.num_layers
    return tokens * s.kv_token_bytes


def _disk_bytes(s: CostInputs, phase: Phase) -> tuple[float, float]:
    """(read, written) of one layer if all sequences were on disk: whole blocks.

    Every token rewrites its sequence's last one, prompts are written once, and share nothing.
    """
    prompts = phase.prefill_tokens + phase.prefill_seqs * (s.workload.shared_prefix_len + (s.kv_block_size - 1) / 2)
    read = phase.decode_seqs * _history_tokens(s, phase) / s.kv_block_size
    return read * s.disk_block_bytes, (phase.decode_seqs + prompts / s.kv_block_size) * s.disk_block_bytes


def moved_bytes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Bytes of one layer over each transfer lane: FlexGen's ctog, gtoc, dtoc and ctod, prefill and decode together.

    Changed: CPU attention takes queries, keys and values of its sequences out and results back (FlexGen counts these
    with the activations); KV of streamed sequences comes over the bus; KV on disk moves in whole blocks; of experts those may
    be left out that no token is routed to.
    """
    deferred_rows = s.deferral.rows / s.workload.num_seqs if s.deferral else 0.0
    kv_deferred = phase.prefill_tokens * s.kv_token_bytes * deferred_rows
    kv_prefilled = phase.prefill_tokens * s.kv_token_bytes - kv_deferred
    kv_new = kv_prefilled + phase.decode_seqs * s.kv_token_bytes
    from_disk, to_disk = _disk_bytes(s, phase)
    skipped = experts_skipped_frac(s, phase) if reads_on_demand(s, phase) else 0.0
    disk = {
        "disk_read": at.w_disk * s.layer_bytes
        - at.experts_disk * (skipped * s.all_expert_bytes)
        + at.kv_disk * from_disk,
        "disk_write": at.kv_disk * to_disk,
    }
    if not s.on_gpu:
        return disk
    on_cpu = _attended_on_cpu(s, at)
    activations = at.act_cpu * (phase.tokens * s.hidden_bytes)
    result = s.model.num_heads * s.model.head_dim * s.element_bytes
    delegated_out = phase.decode_seqs * (result + s.kv_token_bytes) + kv_prefilled  # queries are as large as results
    h2d = at.w_streamed * s.layer_bytes + at.kv_streamed * streamed_kv_bytes(s, phase) + activations
    # What the last layer makes stays where the head is computed.
    d2h = on_cpu * delegated_out + at.kv_streamed * kv_new + activations * (1 - 1 / s.model.num_layers)
    d2h += phase.deferred_tokens * (result + s.kv_token_bytes) + kv_deferred
    h2d += phase.deferred_tokens * result
    if not s.runtime.attends_disk_kv_on_cpu:
        page = s.kv_block_bytes / s.disk_block_bytes  # of what is on disk the padding stays in host memory
        h2d += at.kv_disk * (from_disk * page)
        d2h += at.kv_disk * (to_disk * page)
    return {"h2d": h2d + on_cpu * (phase.decode_seqs * result), "d2h": d2h} | disk


def _disk_requests(phase: Phase, at: Placement) -> tuple[Linear, Linear]:
    """(reads, writes) of one layer's KV: one for each sequence."""
    return at.kv_disk * phase.decode_seqs, at.kv_disk * (phase.decode_seqs + phase.prefill_seqs)


def layer_lanes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for one layer of one sweep; T of FlexGen's T_pre and T_gen is their maximum (`bounds`).

    comp of FlexGen is two lanes here: with K >= 2 micro-batches, CPU attention of one runs during the products of
    another (NEO section 3). What follows one another within a layer makes lanes of its own, named `chain...` (`_chains`).
    Where the GPU is emulated by the same cores, nothing overlaps that needs them: the lane `cores`. On a CPU-only machine attention is
    part of compute, as is what the kernel does for each request to the disk: products wait for their slowest core. DRAM
    carries every byte that enters or leaves host memory. Reads and writes share the disk: the lane `disk`. A GPU
    computes no faster than the host launches: the lane `launch`.
    """
    moved = moved_bytes(s, phase, at)
    at_least = products_s(s, phase) + prefill_attention_s(s, phase) + shared_attention_s(s, phase)
    at_least += dequantize_weights_s(s)
    before = at_least + _streamed_products_s(s, phase, at)
    own_attention = decode_attention_s(s, phase, s.rates)
    hardware = s.hardware
    reads, writes = _disk_requests(phase, at)
    requests_s = (reads + writes) * hardware.disk_cpu_overhead_s
    lanes: dict[str, Linear] = {
        "disk_read": moved["disk_read"] * (1 / hardware.disk_read_bytes_per_s) + reads * hardware.disk_read_overhead_s,
        "disk_write": moved["disk_write"] * (1 / hardware.disk_write_bytes_per_s)
        + writes * hardware.disk_write_overhead_s,
    }
    if "disk_read" not in s.runtime.serial:  # or their sum counts anyway
        lanes["disk"] = lanes["disk_read"] + lanes["disk_write"]
    on_disk = moved["disk_read"] + moved["disk_write"]
    kv_read = decode_kv_bytes(s, phase)
    if s.on_gpu:
        # Where the CPU cannot attend to this format, no sequence is placed there, so its cost does not matter.
        cpu = decode_attention_s(s, phase, hardware.cpu) if can_delegate(s) else 0.0
        if s.rates.launch_overhead_s:
            lanes["launch"] = s.num_gpu_batches * s.rates.launch_overhead_s
        waking_s = s.num_gpu_batches * s.rates.waking_overhead_s  # for attention
        if can_delegate(s) and phase.decode_seqs:
            cpu += s.num_gpu_batches * hardware.cpu.waking_overhead_s
        # What the CPU has found for deferred sequences is fetched by compute itself.
        results = phase.deferred_tokens * s.model.num_heads * s.model.head_dim * s.element_bytes
        results_s = results / known(hardware.h2d_bytes_per_s)
        at_least, before = at_least + results_s, before + results_s
        lanes["compute"] = before + (at.kv_gpu + _brought_to_gpu(s, at)) * (own_attention + waking_s)
        delegated = _attended_on_cpu(s, at) * cpu
        lanes["cpu_attention"] = delegated + deferred_attention_s(s, phase)
        if "compute" not in s.runtime.serial:
            lanes |= _chains(s, phase, at, at_least, before, lanes["compute"], delegated)
            if hardware.shared_cores:
                lanes["cores"] = lanes["compute"] + lanes["cpu_attention"] + _copy_s(s, moved) + requests_s
        lanes["h2d"] = moved["h2d"] * (1 / known(hardware.h2d_bytes_per_s))
        lanes["d2h"] = moved["d2h"] * (1 / known(hardware.d2h_bytes_per_s))
        if s.hardware.link_overhead_s:
            for lane, overhead_s in _link_overheads_s(s, phase, at).items():
                lanes[lane] = lanes[lane] + overhead_s
        dram = moved["h2d"] + moved["d2h"] + on_disk + _attended_on_cpu(s, at) * kv_read
        dram += decode_kv_bytes(s, _attended_in_layer(s, phase))
    else:
        lanes["compute"] = before + own_attention + requests_s
        if dequantizes_after_router(s):
            lanes["compute"] = lanes["compute"] - experts_skipped_frac(s, phase) * _dequantize_experts_s(s)
        if reads_on_demand(s, phase):
            _add_on_demand(s, phase, at, lanes)
        read = s.layer_bytes if s.weight_format in (INT8, *KEPT_FORMATS) else s.dequantized_layer_bytes
        dram = on_disk + (read * (1 - experts_frac(s.model) * experts_skipped_frac(s, phase)) + kv_read)
    lanes["dram"] = dram * (1 / hardware.dram_bytes_per_s)
    return lanes


def _link_overheads_s(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds that copies of one layer take beside those of their bytes: one for each tensor, and for each kind of micro-batches' data.

    In proportion to what is where, though a tenth of the sequences are copied as often as all of them: else it would not be linear.
    """
    one_s = s.hardware.link_overhead_s
    all_s = s.num_gpu_batches * one_s
    on_cpu, to_gpu = _attended_on_cpu(s, at), _brought_to_gpu(s, at)
    h2d = at.w_streamed * (s.layer_tensors * one_s) + at.act_cpu * all_s
    d2h = (to_gpu + at.act_cpu) * all_s
    if phase.prefill_tokens:
        d2h = d2h + on_cpu * all_s
    if phase.decode_seqs:
        h2d, d2h = h2d + (to_gpu + on_cpu) * all_s, d2h + on_cpu * (COPIES_SENT * all_s)
    if phase.deferred_tokens:
        h2d, d2h = h2d + one_s, d2h + COPIES_SENT * one_s
    return {"h2d": h2d, "d2h": d2h}


def _add_on_demand(s: CostInputs, phase: Phase, at: Placement, lanes: dict[str, Linear]) -> None:
    """Change the lanes of a layer to those of one whose experts on disk are read on demand.

    The Steps are `read_dense`, `route` and `read_experts` of schedule/step_graph.py. What all tokens need is read ahead while the
    layer before routes, the experts when the router has chosen, and what comes after them waits. So neither products nor
    the disk go on beside that: two chains. Of 4-bit weights only experts that were read are dequantized.
    """
    touched_frac = 1 - experts_skipped_frac(s, phase)
    read_s = s.all_expert_bytes * touched_frac / s.hardware.disk_read_bytes_per_s
    mixtures = s.model.expert_layers / s.model.num_layers
    tensors = mixtures * s.model.num_experts * touched_frac * len(s.expert_bytes)
    requests_s = tensors * s.hardware.disk_read_overhead_s
    dequantize_s = _dequantize_experts_s(s)
    if not dequantizes_after_router(s):
        lanes["compute"] = lanes["compute"] - at.experts_disk * (dequantize_s * (1 - touched_frac))
    for lane in {"disk_read", "disk"} & lanes.keys():
        lanes[lane] = lanes[lane] + at.experts_disk * requests_s
    layer_s = linear_s(s, phase) + sum(longer_in_rows_s(s, phase)) + elementwise_s(s, phase) + all_reduce_s(s, phase)
    after_s = layer_s * after_router_frac(s.model) * mixtures
    dense_s = (at.w_disk * s.layer_bytes - at.experts_disk * s.all_expert_bytes) * (
        1 / s.hardware.disk_read_bytes_per_s
    )
    lanes["chain_experts"] = lanes["compute"] + at.experts_disk * (read_s + requests_s)
    lanes["chain_dense"] = dense_s + at.experts_disk * (read_s + requests_s + after_s + dequantize_s * touched_frac)


def _chains(
    s: CostInputs, phase: Phase, at: Placement, at_least: float, before: Linear, compute: Linear, attention: Linear
) -> dict[str, Linear]:
    """Seconds of what cannot overlap within one layer of one sweep: Steps that wait for one another, or behind one another.

    The Steps are those of schedule/step_graph.py. With K = 1 micro-batch, queries go out, the CPU attends, results come
    back, and activations that wait in host memory come and go, all between the same batch's products. With K >= 2 only
    activations are waited for, as they are fetched when the batch before has ended. Of two unequal batches (NEO) each waits for
    its own products and then for its part of CPU attention.

    A link serves its Steps in order, and a layer's weights are issued when the layer two before it has ended. So what is
    issued after them waits for them: activations from host memory, KV of the second micro-batch, and where the CPU
    attends, the products of the first and the last batch.

    Args:
        at_least: seconds of products and prefill attention where no weights stream.
        before: the same with the placement.
        compute: of these and of attention on the GPU.
        attention: on the CPU, of what is not deferred.
    """
    h2d, d2h = known(s.hardware.h2d_bytes_per_s), known(s.hardware.d2h_bytes_per_s)
    batches, layer_s = s.num_gpu_batches, s.layer_bytes / h2d
    if s.runtime.serial:  # its link is waited for anyway
        return {"chain": before + attention} if batches == 1 else {}
    hidden = phase.tokens * s.hidden_bytes
    result = phase.decode_seqs * s.model.num_heads * s.model.head_dim * s.element_bytes
    on_cpu = _attended_on_cpu(s, at)
    copied: Linear = 0.0  # seconds of each micro-batch's copies beside their bytes
    if s.hardware.link_overhead_s and phase.decode_seqs:
        copied = on_cpu * ((COPIES_SENT + 1) * s.hardware.link_overhead_s)
    sent_s = result * (1 / d2h + 1 / h2d) + phase.decode_seqs * s.kv_token_bytes / d2h
    delegated = attention + on_cpu * sent_s
    weights = at.w_streamed * layer_s

    def only_if(flag: Linear) -> Linear:
        """Nothing where the flag is 1; where it is 0, so little that what it is added to does not bind."""
        return (flag - 1) * layer_s

    if batches == 1:
        moved = at.act_cpu * (hidden * (1 / h2d + 1 / d2h))
        return {
            "chain": before + delegated + moved + copied,
            "chain_weights": before + delegated + moved + copied + weights + only_if(at.acts_wait),
        }
    fetched = at.act_cpu * (hidden / h2d)
    chains = {
        "chain": compute + fetched,
        "chain_weights": weights + fetched + at.act_cpu * at_least + only_if(at.acts_wait),
        "chain_ahead": weights + before * (1 / batches) + only_if(at.delegates),
    }
    if (
        s.balance is not None
    ):  # KV that comes to the GPU is the first batch's; what it waits for is left to the simulator
        share = _first_share(s, phase)
        first, second = (
            products_s(s.one_batch, part) + _streamed_products_s(s.one_batch, part, at)
            for part in unequal_batches(s, phase)
        )
        chains["chain_first"] = first + dequantize_weights_s(s) + share * delegated + copied
        chains["chain_second"] = second + (1 - share) * delegated + copied
    elif phase.decode_seqs:
        page = s.kv_block_bytes / s.disk_block_bytes
        staged = at.kv_streamed * streamed_kv_bytes(s, phase) + at.kv_disk * (_disk_bytes(s, phase)[0] * page)
        staged = staged * (1 / batches / h2d)
        chains["chain_kv"] = weights + staged + before * (1 - 1 / batches) + only_if(at.stages)
    return chains


def _copy_s(s: CostInputs, moved: Mapping[str, Linear]) -> Linear:
    """Seconds for which copies to and from an emulated GPU take the cores that compute."""
    rate = s.hardware.copy_bytes_per_s
    return 0.0 if rate is None else (moved.get("h2d", 0.0) + moved.get("d2h", 0.0)) * (1 / rate)


def can_delegate(s: CostInputs) -> bool:
    """Whether decode attention can run on the CPU beside the GPU: FlexGen cannot with compressed KV."""
    if s.dequantizes_kv:
        return False
    return s.hardware.cpu.has_rates("decode_attention_bytes_per_s", s.kv_format)


def head_lanes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for embeddings, which come before the layers, and for logits and sampling, which come after them.

    FlexGen leaves them out (footnote 1); with small models or large vocabularies they count.
    """
    flops = 2 * s.model.vocab_size * s.model.embed_size * phase.logits_rows
    tokens = max(1.0, phase.logits_rows / s.num_gpu_batches)
    ordered_s, in_rows_s = (
        flops / _product_rates(s, s.output_format, in_rows=in_rows).at(width=s.model.hidden_size, tokens=tokens)
        for in_rows in (False, True)
    )
    sampling_s = phase.logits_rows * s.model.vocab_size / s.hardware.sampling_logits_per_s
    compute: Linear = sampling_s + ordered_s
    if s.on_gpu and in_rows_s > ordered_s:  # chunks that come over lie as they are stored
        compute = compute + at.head_cpu * (in_rows_s - ordered_s)
    lanes: dict[str, Linear] = {"compute": compute}
    if s.on_gpu:
        moved = at.head_cpu * s.head_bytes + at.act_gpu * (phase.tokens * s.hidden_bytes)
        lanes["h2d"] = moved * (1 / known(s.hardware.h2d_bytes_per_s))
        lanes["dram"] = moved * (1 / s.hardware.dram_bytes_per_s)
        if s.hardware.shared_cores and "compute" not in s.runtime.serial:
            lanes["cores"] = compute + _copy_s(s, {"h2d": moved})
    return lanes


def sweep_overhead_s(s: CostInputs, phase: Phase) -> float:
    """Scheduling, packing and bookkeeping of one sweep, during which nothing else runs."""
    return s.hardware.sweep_overhead_s + phase.sampled * s.hardware.sequence_overhead_s


def bounds(runtime: RuntimeModel, lanes: Mapping[str, Linear]) -> list[Linear]:
    """Expressions none of which may exceed the time, in seconds.

    The maximum over lanes under perfect overlap (FlexGen 4.3), plus what the runtime runs by itself.
    """
    alone = [lanes[name] for name in runtime.serial if name in lanes]
    together = [lane for name, lane in lanes.items() if name not in runtime.serial]
    base = sum(alone) if alone else 0.0
    return [base + lane for lane in together] or [base]


def slowest_s(s: CostInputs, lanes: Mapping[str, Linear]) -> float:
    """Seconds that lanes of a placement of numbers take together: the largest of their bounds."""
    return max(map(number, bounds(s.runtime, lanes)))


def job_seconds(s: CostInputs, phases: Sequence[Phase], at: Placement) -> float:
    """T = T_pre l + T_gen (n - 1) l (FlexGen A.3), for any sequence of phases, with what is not in the layers."""
    return sum(
        phase.sweeps
        * (
            s.model.num_layers * slowest_s(s, layer_lanes(s, phase, at))
            + slowest_s(s, head_lanes(s, phase, at))
            + sweep_overhead_s(s, phase)
        )
        for phase in phases
    )
