"""Seconds of a sweep for each resource lane: sums over the Steps of a layer, and chains of Steps that wait.

Every function is linear in the `Placement` it is given. With numbers it explains; with expressions of unknowns it makes
the rows of the linear program (mip.py). The seconds of each kind of Step are in step_seconds.py. Prompts are
prefilled next to decoding sequences (continuous admission), so FlexGen's T_pre and T_gen are one function of a phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import NamedTuple

from batchgen.core.dtypes import INT8, NATIVE_FORMATS
from batchgen.core.hardware import ComputeRates, known
from batchgen.core.plan import VOCABULARY_CHUNKS, first_batch_cpu_share
from batchgen.ops.attention_plan import MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS
from batchgen.planner.batch_load import page_runs
from batchgen.planner.layer_sizes import AttentionKind
from batchgen.planner.linear import Linear, number
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.sizes import most_captured_tokens
from batchgen.planner.step_seconds import (
    COPIES_SENT,
    MatmulSeconds,
    after_router_frac,
    all_reduce_s,
    attention_input_bytes,
    call_overhead_s,
    decode_attention_s,
    dequantize_experts_s,
    dequantize_s,
    elementwise_s,
    embedding_rows_s,
    experts_frac,
    experts_read_ahead,
    experts_touched,
    few_queries_attention_s,
    layer_overhead_s,
    logits_s,
    matmul_as_stored_s,
    matmul_s,
    multiplies_packed,
    prefill_attention_s,
    prefix_attention_s,
    query_bytes,
    sampling_s,
    schedule_s,
    state_prefill_s,
    state_update_s,
    transfer_s,
)


def reads_on_demand(s: CostInputs, phase: Phase) -> bool:
    """True if experts on disk are read after the router, only those that tokens are routed to."""
    return not s.on_gpu and 0 < phase.tokens <= s.on_demand_tokens


def dequantizes_after_router(s: CostInputs) -> bool:
    """True if only those of a layer's 4-bit experts are dequantized that tokens go through, wherever these lie."""
    return not s.on_gpu and s.num_gpu_batches == 1


def experts_skipped_frac(s: CostInputs, phase: Phase) -> float:
    """The part of a layer's experts that none of a sweep's tokens is routed to."""
    if not s.model.num_experts:
        return 0.0
    return 1 - experts_touched(s.model, phase.tokens, s.workload.routing) / s.model.num_experts


def _experts_read_fracs(s: CostInputs, phase: Phase) -> tuple[float, float]:
    """The parts of a layer's experts that are read before a sweep's tokens are routed, and after, on demand."""
    if not s.model.num_experts:
        return 0.0, 0.0
    ahead, part = experts_read_ahead(s.model, phase.tokens, s.workload.routing)
    return ahead / s.model.num_experts, (1 - part) * (1 - experts_skipped_frac(s, phase))


def unequal_batches(s: CostInputs, phase: Phase) -> tuple[Phase, Phase]:
    """The two micro-batches of a sweep with `CostInputs.balance`; the CPU attends to all sequences of the second."""
    delegated = phase.decode_seqs * s.balance.cpu_frac if s.balance else 0.0
    second = delegated * (1 - _first_share(s, phase))
    first = replace(phase, decode_seqs=phase.decode_seqs - second)
    return first, replace(phase, prefill_tokens=0.0, prefill_seqs=0.0, decode_seqs=second, deferred_tokens=0.0)


def _first_share(s: CostInputs, phase: Phase) -> float:
    """The part of the CPU's attention that goes with the first of two unequal micro-batches."""
    assert s.balance is not None
    return first_batch_cpu_share(phase.tokens, phase.decode_seqs * s.balance.cpu_frac, s.balance.tokens)


def phase_matmul_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's matmuls in one sweep, with prepacked weights."""
    if s.balance is not None:
        return sum(phase_matmul_s(_part_inputs(s, phase), part) for part in unequal_batches(s, phase))
    packed = multiplies_packed(s, phase.tokens)
    return matmul_s(s, phase.tokens, s.num_gpu_batches, packed=packed).total


def phase_dequantize_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of dequantizing one layer's 4-bit weights in one sweep."""
    return 0.0 if multiplies_packed(s, phase.tokens) else dequantize_s(s)


def _part_inputs(s: CostInputs, phase: Phase) -> CostInputs:
    """Inputs of one of two unequal micro-batches of a sweep; 4-bit weights are multiplied as in the whole sweep."""
    if not s.packed_tokens or multiplies_packed(s, phase.tokens):
        return s.one_batch
    return replace(s.one_batch, packed_tokens=0)


def phase_matmul_as_stored_s(s: CostInputs, phase: Phase) -> MatmulSeconds:
    """Seconds that one layer's matmuls in one sweep take longer where all its weights lie as they are stored."""
    if s.balance is None:
        return matmul_as_stored_s(s, phase.tokens, s.num_gpu_batches)
    dense, experts = zip(
        *(phase_matmul_as_stored_s(s.one_batch, part) for part in unequal_batches(s, phase)), strict=True
    )
    return MatmulSeconds(sum(dense), sum(experts))


def _streamed_matmul_s(s: CostInputs, phase: Phase, at: Placement) -> Linear:
    """Seconds that one layer's matmuls take longer with a placement of which a part streams."""
    longer = phase_matmul_as_stored_s(s, phase)
    if s.on_gpu:
        return at.w_streamed * longer.total if longer.total else 0.0
    seconds: Linear = 0.0
    if longer.dense:
        dense_bytes = at.w_disk * s.layer_bytes - at.experts_disk * s.all_expert_bytes
        seconds = dense_bytes * (longer.dense / (s.layer_bytes - s.all_expert_bytes))
    return seconds + at.experts_disk * longer.experts if longer.experts else seconds


def _mean(s: CostInputs, of_kind: Callable[[AttentionKind], float]) -> float:
    """The mean over all layers of what attention takes; layers that do not attend take nothing."""
    return sum(kind.layers / s.model.num_layers * of_kind(kind) for kind in s.layers.attention_kinds)


def phase_prefill_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's attention of new prompts to themselves, without a prefix that they share."""
    states_s = s.states_frac * state_prefill_s(s, phase.prefill_tokens, s.workload.computed_prompt_len)
    if phase.prefill_seqs == 0:
        return states_s
    prompt = s.workload.prompt_len
    mean_square = max(1.0, prompt.mean_square - (prompt.mean**2 - s.workload.computed_prompt_len**2))
    return states_s + _mean(s, lambda kind: prefill_attention_s(s, kind, phase.prefill_seqs, mean_square))


def phase_prefix_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's attention to a shared prefix, by new prompts and by decoding sequences."""
    together = phase.decode_seqs if _shared_tokens(s, phase) else 0.0
    queries = together * phase.queries
    prefix = s.workload.prefix_len
    groups = 0.0 if s.workload.prefix_seqs is None else s.workload.prefixes_of(together)

    def seconds(kind: AttentionKind) -> float:
        product_s = prefix_attention_s(s, kind, phase.prefill_tokens + queries, prefix)
        # With few sequences in each group, a product takes as long as reading the prefixes.
        return max(product_s, decode_attention_s(s, kind, groups, kind.seen(prefix), s.rates, s.num_gpu_batches))

    return _mean(s, seconds)


def _shared_tokens(s: CostInputs, phase: Phase) -> float:
    """Prefix tokens that the block attends to once for all that have them, on a compute device that holds them."""
    shared = s.workload.prefix_len
    together = min(phase.decode_seqs, s.workload.prefix_seqs or phase.decode_seqs)
    pays = shared >= MIN_SHARED_TOKENS and together >= MIN_SHARED_SEQUENCES and not any(s.model.windows)
    return shared if pays else 0.0


def _keys(s: CostInputs, phase: Phase, kind: AttentionKind) -> float:
    """Keys that each decoding sequence attends to by itself, averaged over the layers of a kind."""
    return max(0.0, kind.read(phase.context) - _shared_tokens(s, phase))


def decode_kv_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of stored KV that one layer's decode attention reads if all sequences were of one class.

    4 bls (s + n/2) h1 in FlexGen, which has one KV head per head and 2 bytes per number.
    """
    return _mean(s, lambda kind: phase.decode_seqs * _keys(s, phase, kind) * kind.kv_token_bytes)


def phase_decode_attention_s(s: CostInputs, phase: Phase, device: ComputeRates) -> float:
    """Seconds of one layer's decode attention, or updates of states, in one sweep if the block were on the device."""
    seqs, batches = phase.decode_seqs, s.num_gpu_batches
    queries = phase.queries
    attention_s = _mean(
        s, lambda kind: few_queries_attention_s(s, kind, seqs, _keys(s, phase, kind), queries, device, batches)
    )
    return attention_s + s.states_frac * state_update_s(s, seqs, device, batches)


def _attended_in_layer(s: CostInputs, phase: Phase) -> Phase:
    """Deferred sequences that the CPU attends to beside one layer of a sweep: each in one layer of all."""
    sweeps = s.model.num_layers + 1  # of a token
    return replace(phase, decode_seqs=phase.deferred_tokens * sweeps / s.model.num_layers)


def deferred_attention_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of CPU attention to deferred sequences beside one layer of a sweep, which they do not hold up.

    N_C of APEX's inequality (6), times the whole sweep. The rate is that of a deferred batch of all of them.
    """
    if not phase.deferred_tokens:
        return 0.0
    together = replace(phase, decode_seqs=phase.deferred_tokens * (s.model.num_layers + 1))
    return phase_decode_attention_s(s, together, s.hardware.cpu) / s.model.num_layers


def batch_compute_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's computation but for attention and dequantizing, with each micro-batch's fixed time."""
    batches = s.num_gpu_batches
    seconds = phase_matmul_s(s, phase) + elementwise_s(s, phase.tokens) + all_reduce_s(s, phase.tokens, batches)
    return seconds + batches * layer_overhead_s(s.rates)


def prompt_compute_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of one layer's computation but for dequantizing and the attention of decoding sequences."""
    seconds = batch_compute_s(s, phase) + phase_prefill_attention_s(s, phase)
    return seconds + phase_prefix_attention_s(s, phase)


def _history_tokens(s: CostInputs, phase: Phase) -> float:
    """Tokens whose KV is brought in for one decoding sequence, in whole blocks, where no block is freed."""
    return phase.context - 1 + (s.kv_block_size - 1) / 2


def _chosen_blocks(s: CostInputs, phase: Phase) -> float | None:
    """KV blocks of earlier sweeps that come for the decoding sequences, where these choose pages; None: all come."""
    if s.layers.budget is None:
        return None
    blocks = math.ceil(phase.context / s.kv_block_size)
    chosen = s.layers.budget.pages(blocks, s.kv_block_size)
    # One token in so many begins a page, of which nothing is to come.
    return None if chosen >= blocks else phase.decode_seqs * (chosen - 1 / s.kv_block_size)


def _skipped_blocks(s: CostInputs, phase: Phase, brought: float) -> float:
    """KV blocks that do not come in layers where pages are chosen. brought: those that come in other layers."""
    chosen = _chosen_blocks(s, phase)
    return 0.0 if chosen is None else max(0.0, brought - chosen)


def streamed_kv_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of one layer's history that come to the compute device in a sweep if all sequences were `streamed`.

    A shared prefix comes once for each micro-batch. Of sequences that choose pages these alone come.
    """
    shared = s.workload.prefix_len
    unshared = max(0.0, _history_tokens(s, phase) - shared)
    times = _times_brought(s, phase)

    def brought(unshared: float, shared: float) -> float:
        return phase.decode_seqs * unshared + shared * times

    tokens = windowed = brought(unshared, shared)
    if s.window:
        most = s.window - 1 + s.kv_block_size - 1
        windowed = brought(min(unshared, most), min(shared, max(0.0, most - unshared)))
    skipped = _skipped_blocks(s, phase, tokens / s.kv_block_size) * s.layers.mean_choosing_block
    return s.read_kv_bytes(tokens, windowed) / s.model.num_layers - skipped


def _times_brought(s: CostInputs, phase: Phase) -> float:
    """The number of prefixes that come to the compute device: each in every micro-batch that has a sequence with it."""
    return min(phase.decode_seqs, s.workload.prefixes_of(phase.decode_seqs) + s.num_gpu_batches - 1)


def _prompt_states(s: CostInputs, phase: Phase) -> tuple[float, float]:
    """States of one sweep's prompts that (come to the compute device, leave it) if those of all were elsewhere.

    A state leaves with every part of its prompt, and comes with every part but the first.
    """
    if not s.model.state or not phase.prefill_tokens:
        return 0.0, 0.0
    parts = max(1.0, phase.prefill_seqs)
    return parts - phase.prefill_seqs, parts


def streamed_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of one layer's history and states that come to the compute device if all sequences were `streamed`."""
    states = phase.decode_seqs + _prompt_states(s, phase)[0]
    return streamed_kv_bytes(s, phase) + states * s.layer_state_bytes


def decode_state_bytes(s: CostInputs, phase: Phase) -> float:
    """Bytes of states that one layer's decoding sequences read and write."""
    return 2 * phase.decode_seqs * s.layer_state_bytes


class DiskBytes(NamedTuple):
    """Bytes of one layer if all sequences were on disk, each (read, written).

    Attributes:
        on_disk: Bytes of the disk: whole blocks.
        copied: Bytes of the links to an accelerator: the padding of blocks stays in host memory.
    """

    on_disk: tuple[float, float]
    copied: tuple[float, float]


def disk_bytes(s: CostInputs, phase: Phase) -> DiskBytes:
    """Bytes of one layer if all sequences were on disk.

    Every token rewrites its sequence's last block, prompts are written once, and a prefix that sequences of a
    micro-batch share is read once. States move whole.
    """
    prompts = phase.prefill_tokens + phase.prefill_seqs * (s.kv_block_size - 1) / 2
    shared = min(s.workload.prefix_len, _history_tokens(s, phase))
    again = max(0.0, phase.decode_seqs - _times_brought(s, phase))  # sequences that find it brought
    read = (phase.decode_seqs * _history_tokens(s, phase) - again * shared) / s.kv_block_size
    written = phase.decode_seqs + prompts / s.kv_block_size
    states_in, states_out = ((phase.decode_seqs + n) * s.layer_state_bytes for n in _prompt_states(s, phase))
    sizes, skipped = s.layers, _skipped_blocks(s, phase, read)

    def moved(stored: float, reused: float, choosing: float) -> tuple[float, float]:
        # What is reused comes with its new tokens.
        brought = read * stored + (read + written) * reused - skipped * choosing
        return brought + states_in, written * stored + states_out

    return DiskBytes(
        on_disk=moved(sizes.mean_disk_block, sizes.mean_disk_reused_block, sizes.mean_disk_choosing_block),
        copied=moved(sizes.mean_block, sizes.mean_reused_block, sizes.mean_choosing_block),
    )


def _chosen_chain(s: CostInputs, phase: Phase, at: Placement, compute: Linear) -> dict[str, Linear]:
    """Seconds of computation and of bringing chosen pages, which wait for each other within one layer of one sweep.

    Pages are chosen by the queries of a micro-batch, whose attention waits until they are there.

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        at: The placement.
        compute: Seconds of computation with the placement.
    """
    if (chosen := _chosen_blocks(s, phase)) is None:
        return {}
    hardware, sizes = s.hardware, s.layers
    read_s = transfer_s(chosen * sizes.mean_disk_choosing_block, hardware.disk_read_bytes_per_s)
    chain = compute + at.kv_disk * read_s
    if s.on_gpu:
        link_s = transfer_s(chosen * sizes.mean_choosing_block, hardware.h2d_bytes_per_s)
        chain = chain + (at.kv_streamed + at.kv_disk) * link_s
    return {"chain_pages": chain}


def moved_bytes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Bytes of one layer over each transfer lane: FlexGen's ctog, gtoc, dtoc and ctod, prefill and decode together.

    Changed: CPU attention takes queries, keys and values of its sequences out and results back (FlexGen counts these
    with the activations); KV of streamed sequences comes over the bus; KV on disk moves in whole blocks; states of
    sequences that are elsewhere come and go whole; experts may be left out that no token is routed to.
    """
    deferred_rows = s.deferral.rows / s.workload.num_seqs if s.deferral else 0.0
    states_in, states_out = (states * s.layer_state_bytes for states in _prompt_states(s, phase))
    of_prompts = phase.prefill_tokens * s.kv_token_bytes + states_out
    kv_deferred = of_prompts * deferred_rows
    kv_prefilled = of_prompts - kv_deferred
    kv_new = kv_prefilled + phase.decode_tokens * s.kv_token_bytes + phase.decode_seqs * s.layer_state_bytes
    of_disk = disk_bytes(s, phase)
    from_disk, to_disk = of_disk.on_disk
    skipped = 1 - sum(_experts_read_fracs(s, phase)) if reads_on_demand(s, phase) else 0.0
    weights_read = at.w_disk * s.layer_bytes - at.experts_disk * (skipped * s.all_expert_bytes)
    disk = {"disk_read": weights_read + at.kv_disk * from_disk, "disk_write": at.kv_disk * to_disk}
    if not s.on_gpu:
        return disk
    activations = at.act_cpu * (phase.tokens * s.hidden_bytes)
    delegated_out = phase.decode_seqs * attention_input_bytes(s) + kv_prefilled
    h2d = at.w_streamed * s.layer_bytes + at.kv_streamed * streamed_bytes(s, phase) + activations
    if s.per_layer_bytes:
        h2d += at.act_cpu * (phase.tokens * s.per_layer_bytes / s.model.num_layers)
    if states_in:
        h2d += at.kv_cpu * states_in + states_in * deferred_rows
    # What the last layer makes stays where the head is computed.
    d2h = at.kv_cpu * delegated_out + at.kv_streamed * kv_new + activations * (1 - 1 / s.model.num_layers)
    d2h += phase.deferred_tokens * attention_input_bytes(s) + kv_deferred
    h2d += phase.deferred_tokens * query_bytes(s)
    h2d += at.kv_disk * of_disk.copied[0]
    d2h += at.kv_disk * of_disk.copied[1]
    return {"h2d": h2d + at.kv_cpu * (phase.decode_seqs * query_bytes(s)), "d2h": d2h} | disk


def _requests(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Requests of one layer over each transfer lane beside its bytes.

    Disks have one request for each sequence's KV, and one for each run of chosen pages. Links have one copy for each
    tensor, and for each kind of micro-batches' data, in proportion to what is where, though a tenth of the sequences
    are copied as often as all of them: else it would not be linear.
    """
    keeping = len(s.model.kv_layers) / s.model.num_layers + s.states_frac  # layers that keep anything of a sequence
    requests: dict[str, Linear] = {
        "disk_read": at.kv_disk * (phase.decode_seqs * (keeping + _more_requests(s, phase))),
        "disk_write": at.kv_disk * ((phase.decode_seqs + phase.prefill_seqs) * keeping),
    }
    if not s.on_gpu or not s.hardware.link_overhead_s:
        return requests
    batches = s.num_gpu_batches
    on_cpu, to_gpu = at.kv_cpu, at.kv_streamed + at.kv_disk
    h2d = at.w_streamed * s.layer_tensors + at.act_cpu * batches
    d2h = (to_gpu + at.act_cpu) * batches
    if phase.prefill_tokens:
        d2h = d2h + on_cpu * batches
    if phase.decode_seqs:
        h2d, d2h = h2d + (to_gpu + on_cpu) * batches, d2h + on_cpu * (COPIES_SENT * batches)
    if phase.deferred_tokens:
        h2d, d2h = h2d + 1, d2h + COPIES_SENT
    return requests | {"h2d": h2d, "d2h": d2h}


def _more_requests(s: CostInputs, phase: Phase) -> float:
    """Requests to the disk beyond one for a decoding sequence that chooses pages, the mean over all layers."""
    if (chosen := _chosen_blocks(s, phase)) is None or not phase.decode_seqs:
        return 0.0
    pages, blocks = chosen / phase.decode_seqs, math.ceil(phase.context / s.kv_block_size)
    choosing = sum(s.model.choosing_layers(s.attention_budget)) / s.model.num_layers
    return choosing * page_runs(pages, blocks)


def _transfer_lanes(s: CostInputs, moved: Mapping[str, Linear], requests: Mapping[str, Linear]) -> dict[str, Linear]:
    """Seconds of one layer over each transfer lane."""
    hardware = s.hardware
    rates = {
        "h2d": (hardware.h2d_bytes_per_s, hardware.link_overhead_s),
        "d2h": (hardware.d2h_bytes_per_s, hardware.link_overhead_s),
        "disk_read": (hardware.disk_read_bytes_per_s, hardware.disk_read_overhead_s),
        "disk_write": (hardware.disk_write_bytes_per_s, hardware.disk_write_overhead_s),
    }
    return {
        lane: transfer_s(size, rates[lane][0], requests.get(lane, 0.0), rates[lane][1]) for lane, size in moved.items()
    }


@singledispatch  # benchmarks/flexgen_check.py has another one, for FlexGen's runtime
def layer_lanes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for one layer of one sweep; T of FlexGen's T_pre and T_gen is their maximum.

    FlexGen's comp is two lanes here: with K >= 2 micro-batches, CPU attention of one runs during the matmuls of another
    (NEO section 3). Steps that follow one another within a layer make lanes of their own, named `chain...` (`_chains`).
    Where the GPU is emulated by the same cores, nothing overlaps that needs them: the lane `cores`. On a CPU-only
    machine attention is part of compute, as is what the kernel does for each request to the disk: matmuls wait for
    their slowest core, and for memory while it takes what the disk brings. DRAM carries every byte that enters or
    leaves host memory. Reads and writes share the disk: the lane `disk`. A GPU computes no faster than the host
    launches: the lane `launch` (`_launch_s`).
    """
    moved, requests = moved_bytes(s, phase, at), _requests(s, phase, at)
    resident_s = prompt_compute_s(s, phase) + phase_dequantize_s(s, phase)
    compute = resident_s + _streamed_matmul_s(s, phase, at) + _issue_s(s, phase, at)
    transfers = _transfer_lanes(s, moved, requests)
    lanes: dict[str, Linear] = {name: transfers[name] for name in ("disk_read", "disk_write")}
    lanes["disk"] = lanes["disk_read"] + lanes["disk_write"]
    calls_s = at.kv_disk * (s.num_gpu_batches * call_overhead_s(s))
    lanes["disk_read"] = lanes["disk_read"] + at.w_disk * call_overhead_s(s)
    if phase.decode_seqs:
        lanes["disk_read"] = lanes["disk_read"] + calls_s
    lanes["disk_write"] = lanes["disk_write"] + calls_s
    requests_s = (requests["disk_read"] + requests["disk_write"]) * s.hardware.disk_cpu_overhead_s
    if s.on_gpu:
        _add_gpu_lanes(s, phase, at, lanes, resident_s, compute)
        if s.hardware.shared_cores:
            lanes["cores"] = lanes["compute"] + lanes["cpu_attention"] + _copy_s(s, moved) + requests_s
        lanes |= {name: transfers[name] for name in ("h2d", "d2h")}
    else:
        on_disk_s = (moved["disk_read"] + moved["disk_write"]) * (1 / s.hardware.dram_bytes_per_s)
        lanes["compute"] = compute + phase_decode_attention_s(s, phase, s.rates) + requests_s + on_disk_s
        if dequantizes_after_router(s):
            lanes["compute"] = lanes["compute"] - experts_skipped_frac(s, phase) * dequantize_experts_s(s)
        if reads_on_demand(s, phase):
            _add_on_demand(s, phase, at, lanes)
    lanes |= _chosen_chain(s, phase, at, lanes["compute"])
    lanes["dram"] = _dram_bytes(s, phase, at, moved) * (1 / s.hardware.dram_bytes_per_s)
    return lanes


def _issue_s(s: CostInputs, phase: Phase, at: Placement) -> Linear:
    """Seconds in which the thread that computes hands Steps to other lanes, for one layer of one sweep.

    Where sequences decode whose KV is elsewhere, each micro-batch has two of these Steps in a layer: queries go out and
    the CPU attends, or KV comes and goes. Without a GPU that counts as far as KV is on disk.
    """
    issue_s = s.hardware.issue_overhead_s
    if not issue_s or not phase.decode_seqs:
        return 0.0
    away = at.delegates + at.stages if s.on_gpu else at.kv_disk
    return away * (2 * s.num_gpu_batches * issue_s)


def _add_gpu_lanes(
    s: CostInputs, phase: Phase, at: Placement, lanes: dict[str, Linear], resident_s: float, compute: Linear
) -> None:
    """Add the lanes of computation on the GPU and beside it, with what waits for them.

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        at: The placement.
        lanes: The lanes to add to.
        resident_s: Seconds of one layer's computation but for decode attention where no weights stream.
        compute: Seconds of that computation with the placement.
    """
    hardware, batches = s.hardware, s.num_gpu_batches
    # Where the CPU cannot attend to this format, no sequence is placed there, so its cost does not matter.
    cpu_s = phase_decode_attention_s(s, phase, hardware.cpu) if can_delegate(s) else 0.0
    if can_delegate(s) and phase.decode_seqs:
        cpu_s += batches * hardware.cpu.waking_overhead_s
    gpu_s = phase_decode_attention_s(s, phase, s.rates) + batches * s.rates.waking_overhead_s
    if s.rates.launch_overhead_s:
        lanes["launch"] = _launch_s(s, phase, at)
    # Compute itself fetches what the CPU has found for deferred sequences.
    results_s = phase.deferred_tokens * query_bytes(s) / known(hardware.h2d_bytes_per_s)
    resident_s, compute = resident_s + results_s, compute + results_s
    lanes["compute"] = compute + (at.kv_gpu + at.kv_streamed + at.kv_disk) * gpu_s
    delegated = at.kv_cpu * cpu_s
    lanes["cpu_attention"] = delegated + deferred_attention_s(s, phase)
    lanes |= _chains(s, phase, at, resident_s, compute, lanes["compute"], delegated)


def _launch_s(s: CostInputs, phase: Phase, at: Placement) -> Linear:
    """Seconds in which the host launches one layer of one sweep.

    A sweep that is a CUDA graph launches nothing by itself. It is one where nothing moves. Where a part does, only that
    part is counted, since moving it takes longer anyway.
    """
    launch_s = s.num_gpu_batches * s.rates.launch_overhead_s
    if s.num_gpu_batches > 1 or phase.tokens > most_captured_tokens(s):
        return launch_s
    return launch_s * (at.w_streamed + at.kv_cpu + at.kv_streamed + at.kv_disk)


def _dram_bytes(s: CostInputs, phase: Phase, at: Placement, moved: Mapping[str, Linear]) -> Linear:
    """Bytes that enter or leave host memory for one layer of one sweep."""
    on_disk = moved["disk_read"] + moved["disk_write"]
    kv_read = decode_kv_bytes(s, phase) + decode_state_bytes(s, phase)
    if s.on_gpu:
        crossing = moved["h2d"] + moved["d2h"] + on_disk + at.kv_cpu * kv_read
        deferred = _attended_in_layer(s, phase)
        return crossing + (decode_kv_bytes(s, deferred) + decode_state_bytes(s, deferred))
    weights = s.layer_bytes if s.weight_format in (INT8, *NATIVE_FORMATS) else s.dequantized_layer_bytes
    return on_disk + (weights * (1 - experts_frac(s.model) * experts_skipped_frac(s, phase)) + kv_read)


def _add_on_demand(s: CostInputs, phase: Phase, at: Placement, lanes: dict[str, Linear]) -> None:
    """Change the lanes of a layer to those of one whose experts on disk are read on demand.

    The Steps are `read_dense`, `route` and `read_experts` of schedule/sweeps.py. What all tokens need, and experts
    that nearly all sweeps need, are read ahead while the layer before routes, the others when the router has chosen,
    and what comes after them waits. So neither matmuls nor the disk go on beside that: two chains. Of 4-bit weights
    only experts that tokens go through are dequantized.
    """
    touched_frac = 1 - experts_skipped_frac(s, phase)
    ahead_frac, demanded_frac = _experts_read_fracs(s, phase)
    mixtures = s.model.expert_layers / s.model.num_layers
    request_s = mixtures * s.model.num_experts * len(s.expert_bytes) * s.hardware.disk_read_overhead_s
    ahead_s, read_s = (
        frac * (transfer_s(s.all_expert_bytes, s.hardware.disk_read_bytes_per_s) + request_s)
        for frac in (ahead_frac, demanded_frac)
    )
    requests_s = (ahead_frac + demanded_frac) * request_s
    dequantize_all_s = dequantize_experts_s(s)
    if not dequantizes_after_router(s):
        lanes["compute"] = lanes["compute"] - at.experts_disk * (dequantize_all_s * (1 - touched_frac))
    for lane in {"disk_read", "disk"} & lanes.keys():
        lanes[lane] = lanes[lane] + at.experts_disk * requests_s
    layer_s = phase_matmul_s(s, phase) + phase_matmul_as_stored_s(s, phase).total
    layer_s += elementwise_s(s, phase.tokens) + all_reduce_s(s, phase.tokens, s.num_gpu_batches)
    after_s = layer_s * after_router_frac(s.model) * mixtures
    dense_bytes = at.w_disk * s.layer_bytes - at.experts_disk * s.all_expert_bytes
    dense_s = transfer_s(dense_bytes, s.hardware.disk_read_bytes_per_s)
    lanes["chain_experts"] = lanes["compute"] + at.experts_disk * read_s
    lanes["chain_dense"] = dense_s + at.experts_disk * (ahead_s + read_s + after_s + dequantize_all_s * touched_frac)


def _chains(
    s: CostInputs, phase: Phase, at: Placement, resident_s: float, before: Linear, compute: Linear, attention: Linear
) -> dict[str, Linear]:
    """Seconds of Steps that cannot overlap within one layer of one sweep, as they wait for or behind one another.

    The Steps are those of schedule/sweeps.py. With K = 1 micro-batch, queries go out, the CPU attends, results come
    back, and activations that wait in host memory come and go, all between the same batch's matmuls. With K >= 2 only
    activations are waited for, as they are fetched when the batch before has ended. Of two unequal batches (NEO) each
    waits for its own matmuls and then for its part of CPU attention.

    A link serves its Steps in order, and a layer's weights are issued when the layer two before it has ended. So Steps
    that are issued after them wait for them: activations from host memory, KV of the second micro-batch, and where the
    CPU attends, the matmuls of the first and the last batch.

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        at: The placement.
        resident_s: Seconds of matmuls and prefill attention where no weights stream.
        before: Seconds of matmuls and prefill attention with the placement.
        compute: Seconds of these and of attention on the GPU.
        attention: Seconds of attention on the CPU but for what is deferred.
    """
    h2d, d2h = known(s.hardware.h2d_bytes_per_s), known(s.hardware.d2h_bytes_per_s)
    batches, layer_s = s.num_gpu_batches, s.layer_bytes / h2d
    hidden = phase.tokens * s.hidden_bytes
    copied: Linear = 0.0  # seconds of each micro-batch's copies beside their bytes
    if s.hardware.link_overhead_s and phase.decode_seqs:
        copied = at.kv_cpu * ((COPIES_SENT + 1) * s.hardware.link_overhead_s)
    sent_s = phase.decode_seqs * (attention_input_bytes(s) / d2h + query_bytes(s) / h2d)
    delegated = attention + at.kv_cpu * sent_s
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
        "chain_weights": weights + fetched + at.act_cpu * resident_s + only_if(at.acts_wait),
        "chain_ahead": weights + before * (1 / batches) + only_if(at.delegates),
    }
    if s.balance is not None:
        # KV that comes to the GPU is the first batch's; what it waits for is left to the simulator.
        share = _first_share(s, phase)
        first, second = (
            batch_compute_s(_part_inputs(s, phase), part) + _streamed_matmul_s(s.one_batch, part, at)
            for part in unequal_batches(s, phase)
        )
        chains["chain_first"] = first + phase_dequantize_s(s, phase) + share * delegated + copied
        chains["chain_second"] = second + (1 - share) * delegated + copied
    elif phase.decode_seqs:
        staged = at.kv_streamed * streamed_bytes(s, phase) + at.kv_disk * disk_bytes(s, phase).copied[0]
        staged = staged * (1 / batches / h2d)
        chains["chain_kv"] = weights + staged + before * (1 - 1 / batches) + only_if(at.stages)
    return chains


def _copy_s(s: CostInputs, moved: Mapping[str, Linear]) -> Linear:
    """Seconds for which copies to and from an emulated GPU take the cores that compute."""
    rate = s.hardware.copy_bytes_per_s
    return 0.0 if rate is None else (moved.get("h2d", 0.0) + moved.get("d2h", 0.0)) * (1 / rate)


def can_delegate(s: CostInputs) -> bool:
    """True if decode attention can run on the CPU beside the GPU."""
    return s.hardware.cpu.has_rates("decode_attention_bytes_per_s", s.kv_format)


@singledispatch
def head_lanes(s: CostInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for embeddings, logits and sampling, which come before and after the layers."""
    prepacked_s, stored_s = (
        logits_s(s, phase.logits_rows, s.num_gpu_batches, as_stored=as_stored) for as_stored in (False, True)
    )
    compute: Linear = sampling_s(s, phase.logits_rows) + prepacked_s
    chunked = at.head_cpu if s.on_gpu else at.head_disk
    if stored_s > prepacked_s:  # chunks that come over lie as they are stored
        compute = compute + chunked * (stored_s - prepacked_s)
    compute = compute + at.reads_table(s) * embedding_rows_s(s, phase.tokens)
    lanes: dict[str, Linear] = {"compute": compute}
    if s.on_gpu:
        moved = at.head_cpu * s.head_bytes + at.act_gpu * (phase.tokens * (s.hidden_bytes + s.per_layer_bytes))
        lanes["h2d"] = transfer_s(moved, s.hardware.h2d_bytes_per_s)
        lanes["dram"] = moved * (1 / s.hardware.dram_bytes_per_s)
        if s.hardware.shared_cores:
            lanes["cores"] = compute + _copy_s(s, {"h2d": moved})
    elif s.output_matrix_bytes:
        read = at.head_disk * s.output_matrix_bytes
        calls_s = at.head_disk * (VOCABULARY_CHUNKS * call_overhead_s(s))
        lanes["disk_read"] = transfer_s(read, s.hardware.disk_read_bytes_per_s) + calls_s
        lanes["compute"] = compute + read * (1 / s.hardware.dram_bytes_per_s)
    return lanes


def sweep_overhead_s(s: CostInputs, phase: Phase) -> float:
    """Seconds of scheduling, packing and bookkeeping of one sweep, during which nothing else runs."""
    return schedule_s(s, phase.sampled, s.num_gpu_batches)


def slowest_s(lanes: Mapping[str, Linear]) -> float:
    """Seconds that lanes of a placement of numbers take together: the maximum under perfect overlap (FlexGen 4.3)."""
    return max(map(number, lanes.values()))


def job_seconds(s: CostInputs, phases: Sequence[Phase], at: Placement) -> float:
    """T = T_pre l + T_gen (n - 1) l (FlexGen A.3), for any sequence of phases, with what is not in the layers."""
    return sum(
        phase.sweeps
        * (
            s.model.num_layers * slowest_s(layer_lanes(s, phase, at))
            + slowest_s(head_lanes(s, phase, at))
            + sweep_overhead_s(s, phase)
        )
        for phase in phases
    )
