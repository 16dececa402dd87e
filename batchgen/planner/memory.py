"""Memory of each tier: one statement for each item, of a placement that is planned or of a policy that is run.

The MIP's rows (`peak_bytes`), what a plan shows (`placement_bytes`, `memory_parts`) and what the runtime allocates
(`plan_memory`) all follow from `fixed_items`. They differ in what they put in: an average layer or each layer as it is
(`Held`), and in KV, of which a plan reserves what its sequences need (`kv_bytes`), while pools take what is left of the
budgets (kv_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.core.direct_io import aligned
from batchgen.core.draft_rates import draft_state_share
from batchgen.core.dtypes import INT4
from batchgen.core.kv_placement import TIERS, KVPlacement
from batchgen.core.plan import (
    PINNED_BYTES,
    MemoryPlan,
    Policy,
    passing_bytes,
    spread_layers,
    vocabulary_chunk_bytes,
    vocabulary_chunk_rows,
)
from batchgen.models.config import ModelConfig
from batchgen.planner.kv_memory import Demand, kv_pools
from batchgen.planner.linear import Linear, number, total
from batchgen.planner.placement import WHOLE_NUMBERS, Placement, passing_seqs, staging_blocks, staging_states
from batchgen.planner.problem import CostInputs
from batchgen.planner.sizes import (
    DEVICE_WORKSPACE_BYTES,
    Batches,
    Sizes,
    activation_bytes,
    coded_bytes,
    deferred_bytes,
    exchanged_values,
    group_bytes_of_layers,
    held_logit_rows,
    most_captured_tokens,
    planned_logit_rows,
    sent_bytes,
    workspace_bytes,
)
from batchgen.schedule.step_graph import EXCHANGE_SLOTS, HEAD_SLOTS, HIDDEN_SLOTS, KV_SLOTS, WEIGHT_SLOTS

# Snapshots of states, of which there are one and one more for so many sequences.
SEQS_PER_SNAPSHOT = 32


class Item(NamedTuple):
    """Bytes of one thing in one tier.

    Attributes:
        part: key of `MemoryPlan.parts`.
        stream: the stream of an accelerator in which it is allocated anew; None: it is held from beginning to end.
    """

    tier: str
    part: str
    size: Linear
    stream: str | None = None


@dataclass(frozen=True)
class Held:
    """Everything but KV, by the place where it is: numbers, or linear expressions of unknowns.

    Attributes:
        on_gpu: true if there is an accelerator.
        task: "generate", "score", or None for either.
        process_bytes: host memory that the process takes before any of the model's.
        longest_tokens: tokens of the longest sequence.
        rotary_positions: positions of the rotary tables of the compute device.
        weights: tier -> stored bytes of layers.
        stream_buffer: bytes of one accelerator buffer for a layer's weights that live elsewhere.
        read_buffer: bytes of one host buffer for a layer's weights from disk.
        head_gpu, head_cpu: 1 where the output matrix is.
        embed_gpu: 1 if the input embeddings are on the accelerator.
        head_disk, embed_disk: 1 if the output matrix, or a table of embeddings beside it, is on disk.
        act_gpu, act_cpu: micro-batches whose activations wait there between layers.
        acts_wait: 1 if `act_cpu` is above 0.
        delegates: 1 if the CPU attends to any sequence for the accelerator.
        deferred_seqs: sequences whose attention is deferred.
        staged_blocks: KV blocks of one staging buffer of the compute device.
        passing_bytes: accelerator's memory beside the links, for KV that does not lie as it is copied.
        disk_blocks: KV blocks of one host buffer for KV from or to disk.
        state_slots: tier -> state slots; empty where there are no states.
        staged_states: state rows of one staging buffer of the compute device.
        disk_states: state rows of one host buffer for states from or to disk.
    """

    on_gpu: bool
    task: str | None
    process_bytes: int
    longest_tokens: int
    rotary_positions: int
    weights: Mapping[str, Linear]
    stream_buffer: Linear
    read_buffer: Linear
    head_gpu: Linear
    head_cpu: Linear
    embed_gpu: Linear
    head_disk: Linear
    embed_disk: Linear
    act_gpu: Linear
    act_cpu: Linear
    acts_wait: Linear
    delegates: Linear
    deferred_seqs: int
    staged_blocks: Linear
    passing_bytes: Linear
    disk_blocks: Linear
    state_slots: Mapping[str, Linear]
    staged_states: Linear
    disk_states: Linear


def fixed_items(s: Sizes, batches: Batches, held: Held) -> Iterator[Item]:
    """All that takes memory beside KV: FlexGen's gpu_peak and cpu_peak, where one sweep may both prefill and decode.

    Changed from FlexGen: weights in transit are double-buffered in parts of a layer's streamed weights; KV in transit
    is that of two micro-batches; activations are those of the tokens of one sweep; logits count.
    """
    yield Item("cpu", "process", held.process_bytes)
    yield from _weight_items(s, batches, held)
    yield from _activation_items(s, batches, held)
    device = "gpu" if held.on_gpu else "cpu"
    yield Item(device, "KV in transit", held.staged_blocks * (KV_SLOTS * s.layers.largest_block))
    if held.on_gpu:
        yield Item("gpu", "KV in transit", held.passing_bytes)
    if held.on_gpu or s.layers.pads_blocks:
        yield Item("cpu", "KV in transit", held.disk_blocks * (2 * KV_SLOTS * aligned(s.layers.largest_block)))
    if s.model.state is None:
        return
    for tier, slots in held.state_slots.items():
        yield Item(tier, "state", slots * s.seq_state_bytes)
    yield Item(device, "state in transit", held.staged_states * (KV_SLOTS * s.state_row_bytes))
    if held.on_gpu:
        yield Item("cpu", "state in transit", held.disk_states * (2 * KV_SLOTS * s.state_row_bytes))


def _weight_items(s: Sizes, batches: Batches, held: Held) -> Iterator[Item]:
    """Weights in memory, and their buffers. What is on disk takes nothing of its budget: it was there before."""
    if held.on_gpu:
        yield Item("gpu", "weights", held.weights["gpu"])
        yield Item("gpu", "weights in transit", held.stream_buffer * WEIGHT_SLOTS)
    yield Item("cpu", "weights", held.weights["cpu"])
    yield Item("cpu", "weights in transit", held.read_buffer * WEIGHT_SLOTS)
    if s.weight_format == INT4:
        device = "gpu" if held.on_gpu else "cpu"
        yield Item(device, "expanded weights", s.dequantized_slot_bytes + held.delegates * s.dequantized_slot_bytes)
    embeddings = (1 - held.embed_gpu) * s.embedding_bytes - held.embed_disk * s.embedding_table_bytes
    head = held.head_cpu * s.head_bytes + held.head_disk * (s.head_bytes - s.head_table_bytes)
    yield Item("cpu", "weights", embeddings + head)
    if held.on_gpu:
        yield Item("gpu", "weights", held.embed_gpu * s.embedding_bytes + held.head_gpu * s.head_bytes)
    if not s.output_matrix_bytes:
        return
    device, comes_over = ("gpu", held.head_cpu) if held.on_gpu else ("cpu", held.head_disk)
    chunk = vocabulary_chunk_bytes(s.model.output_size, s.output_row_bytes, from_disk=not held.on_gpu)
    yield Item(device, "weights in transit", comes_over * (HEAD_SLOTS * chunk))
    if held.task != "score":  # to choose tokens, all of the vocabulary has to be there
        logits = held_logit_rows(s.model, int(s.element_bytes), batches, held.task) * s.model.output_size * 4
        yield Item(device, "logits", comes_over * logits, "compute" if held.on_gpu else None)


def _activation_items(s: Sizes, batches: Batches, held: Held) -> Iterator[Item]:
    """Activations within a layer, between layers, and on their way to the CPU's attention; workspace."""
    model, element = s.model, int(s.element_bytes)
    captured = most_captured_tokens(batches) if held.on_gpu else 0
    rows = planned_logit_rows(model, element, batches.batch_tokens, batches.batch_seqs, held.task)
    work = coded_bytes(s.weight_format, on_gpu=held.on_gpu) + activation_bytes(
        model,
        element,
        batches.batch_tokens,
        rows,
        on_gpu=held.on_gpu,
        captured_tokens=captured,
        share_prefixes=batches.share_prefixes,
    )
    hidden, waiting = batches.batch_tokens * int(s.hidden_bytes), _waiting_bytes(s, batches)
    workspace = workspace_bytes(held.longest_tokens)
    yield Item("gpu" if held.on_gpu else "cpu", "activations", held.rotary_positions * model.rotary_position_bytes)
    if not held.on_gpu:
        yield Item("cpu", "activations", work + workspace + (batches.num_gpu_batches - 1) * waiting)
        yield Item("cpu", "activations", held.head_disk * -_spared_by_chunks(s, rows))
        return
    yield Item("gpu", "activations", work + DEVICE_WORKSPACE_BYTES, "compute")
    yield Item("gpu", "activations", held.act_gpu * waiting, "compute")
    yield Item("gpu", "activations", held.acts_wait * (HIDDEN_SLOTS * hidden))
    yield Item("gpu", "activations", held.delegates * sent_bytes(model, element, batches.batch_seqs), "d2h")
    exchanged = batches.batch_seqs * exchanged_values(model, kv=True) * element
    yield Item("cpu", "activations", workspace + PINNED_BYTES)
    other_stages = (not model.embeds) + (not model.has_head)
    yield Item("cpu", "activations", other_stages * batches.num_gpu_batches * hidden)
    yield Item("cpu", "activations", held.act_cpu * waiting + held.delegates * (EXCHANGE_SLOTS * exchanged))
    if held.deferred_seqs:
        waits = held.deferred_seqs * exchanged_values(model, kv=False) * element
        yield Item("cpu", "activations", waits)
        yield Item("gpu", "activations", deferred_bytes(model, element, held.deferred_seqs), "compute")


def _spared_by_chunks(s: Sizes, rows: int) -> int:
    """Bytes of logits, of those that `activation_bytes` counts, where they are those of a vocabulary chunk at a time.

    Args:
        s: Sizes of the model.
        rows: Rows of logits that are computed together.
    """
    others = s.model.output_size - vocabulary_chunk_rows(s.model.output_size) if s.output_matrix_bytes else 0
    return rows * others * (int(s.element_bytes) + 4)  # what they are computed in, and their fp32


def _waiting_bytes(s: Sizes, batches: Batches) -> int:
    """Bytes of one micro-batch's activations between layers, with the layers' inputs from per-layer embeddings."""
    return int(batches.batch_tokens * (s.hidden_bytes + s.per_layer_bytes))


def kv_bytes(s: CostInputs, at: Placement) -> dict[str, Linear]:
    """KV reserved in each tier: of its sequences, and in memory once for a prefix that they share."""
    all_seqs = s.swept_seqs * s.seq_kv_bytes
    shared, chunks = s.shared_kv_bytes, s.chunk_kv_bytes * s.swept_seqs / s.max_num_seqs
    deferred = s.deferred_seqs * (s.seq_kv_bytes + s.chunk_kv_bytes / s.max_num_seqs)
    return {
        "gpu": at.kv_gpu * (all_seqs + chunks) + (shared if s.on_gpu else 0.0) + _passing_summary_bytes(s, at),
        "cpu": (at.kv_cpu + at.kv_streamed) * (all_seqs + chunks)
        + (deferred + shared)
        + at.kv_disk * (s.swept_seqs * s.disk_seq_summary_bytes),
        "disk": at.kv_disk * (s.swept_seqs * s.disk_seq_kv_bytes),
    }


def _passing_summary_bytes(s: CostInputs, at: Placement) -> Linear:
    """Bytes of a GPU's memory for the summaries of pages that come to it, if it has them.

    Where the CPU attends to others, they are in host memory, which `kv_bytes` reserves in any case.
    """
    if not s.on_gpu or not s.layers.summary_block:
        return 0.0
    of_streamed = s.seq_blocks * s.layers.summary_block
    return (at.kv_streamed * of_streamed + at.kv_disk * s.disk_seq_summary_bytes) * s.swept_seqs


def peak_bytes(s: CostInputs, at: Placement) -> dict[str, Linear]:
    """Most bytes held in each tier in the whole job: FlexGen's gpu_peak, cpu_peak and nvme_peak.

    KV counts as the plan reserves it. The sums are what `plan_memory` gives the runtime for the same placement, or a
    little more; but for a weight store, which is there when the runtime begins.
    """
    sizes: dict[str, list[Linear]] = {tier: [kv] for tier, kv in kv_bytes(s, at).items() if tier != "gpu" or s.on_gpu}
    for item in fixed_items(s, s, _held_by_placement(s, at)):
        sizes[item.tier].append(item.size)
    sizes["disk"].append(at.needs_store * s.loading.store_bytes)
    return {tier: total(items) for tier, items in sizes.items()}


def _held_by_placement(s: CostInputs, at: Placement) -> Held:
    """Contents of a placement, with layers of average size, and buffers beside the links as large as they may be."""
    weights = s.layer_bytes * s.model.num_layers
    return Held(
        on_gpu=s.on_gpu,
        task=s.workload.task,
        process_bytes=s.process_bytes,
        longest_tokens=s.longest_seq_len,
        rotary_positions=(s.max_model_len or s.longest_seq_len) if s.on_gpu else s.longest_seq_len,
        weights={"gpu": at.w_gpu * weights, "cpu": at.w_cpu * weights, "disk": at.w_disk * weights},
        stream_buffer=at.streamed_peak * sum(s.slot_group_bytes.values()),
        read_buffer=at.disk_peak * sum(s.disk_group_bytes.values()),
        head_gpu=at.head_gpu if s.on_gpu else 0,
        head_cpu=at.head_cpu,
        embed_gpu=at.embed_gpu,
        head_disk=at.head_disk,
        embed_disk=at.embed_disk,
        act_gpu=at.act_gpu * s.num_gpu_batches,
        act_cpu=at.act_cpu * s.num_gpu_batches,
        acts_wait=at.acts_wait,
        delegates=at.delegates,
        deferred_seqs=s.deferred_seqs,
        staged_blocks=at.staged_blocks,
        passing_bytes=2 * passing_bytes(aligned(s.layers.largest_block)),
        disk_blocks=at.disk_blocks,
        state_slots=state_slots(_seqs_by_tier(s, at), s.share_prefixes, s.draft_state_share) if s.model.state else {},
        staged_states=at.staged_states,
        disk_states=at.disk_states,
    )


def _seqs_by_tier(s: CostInputs, at: Placement) -> dict[str, Linear]:
    """Sequences in flight by the tier of their KV."""
    on_gpu: dict[str, Linear] = {"gpu": at.kv_gpu * s.swept_seqs} if s.on_gpu else {}
    on_host = (at.kv_cpu + at.kv_streamed) * s.swept_seqs + s.deferred_seqs
    return on_gpu | {"cpu": on_host, "disk": at.kv_disk * s.swept_seqs}


def state_slots(seqs: Mapping[str, Linear], share_prefixes: bool, draft_share: float = 0.0) -> dict[str, Linear]:
    """State slots of each tier: one for each sequence, some for snapshots where prefixes are shared, some for drafts.

    In memory there is one more, so that few sequences have a snapshot too; on disk, a tier without sequences has none.

    Args:
        seqs: tier -> sequences in flight.
        share_prefixes: `Policy.share_prefixes`.
        draft_share: Slots for the states after drafts, for each sequence (`draft_state_share`).
    """
    snapshots = 1 / SEQS_PER_SNAPSHOT if share_prefixes else 0.0
    return {
        tier: count + count * (snapshots + draft_share) + (1 if share_prefixes and tier != "disk" else 0)
        for tier, count in seqs.items()
    }


def placement_bytes(s: CostInputs, at: Placement) -> dict[str, dict[str, float]]:
    """Weights, KV and activations between layers by tier: FlexGen's wg..hd in bytes."""
    held = _held_by_placement(s, at)
    on_disk = [held.weights["disk"], held.head_disk * s.head_table_bytes, held.embed_disk * s.embedding_table_bytes]
    weights: dict[str, list[Linear]] = {tier: [] for tier in TIERS} | {"disk": on_disk}
    for item in fixed_items(s, s, held):
        if item.part == "weights":
            weights[item.tier].append(item.size)
    kv, waiting = kv_bytes(s, at), _waiting_bytes(s, s)
    seqs = _seqs_by_tier(s, at)
    states = {tier: slots * s.seq_state_bytes for tier, slots in held.state_slots.items()}
    return {
        "weights": {tier: number(total(sizes)) for tier, sizes in weights.items()},
        "KV": {tier: number(kv[tier]) if seqs.get(tier) else 0.0 for tier in TIERS},
        **({"state": {tier: number(states[tier]) if seqs.get(tier) else 0.0 for tier in TIERS}} if states else {}),
        "activations": {"gpu": number(held.act_gpu * waiting), "cpu": number(held.act_cpu * waiting), "disk": 0.0},
    }


def memory_parts(s: CostInputs, at: Placement) -> dict[str, dict[str, float]]:
    """Peak bytes of each tier: what is placed there, the process, and the buffers beside them."""
    placed = placement_bytes(s, at)
    parts: dict[str, dict[str, float]] = {}
    for tier, peak in peak_bytes(s, at).items():
        of_tier = {name: tiers[tier] for name, tiers in placed.items() if tiers[tier]}
        if tier == "disk":
            of_tier.pop("weights", None)  # they were there before, so they take nothing of the budget
            peak -= at.needs_store * s.loading.store_bytes  # likewise
        if not s.on_gpu:
            of_tier.pop("activations", None)  # they are among the buffers
        if tier == "cpu":
            of_tier["process"] = float(s.process_bytes)
        of_tier["buffers"] = max(0.0, number(peak) - sum(of_tier.values()))
        parts[tier] = of_tier
    return parts


def plan_memory(
    config: ModelConfig, policy: Policy, demand: Demand, *, dtype: str, budgets: Mapping[str, int], process_bytes: int
) -> MemoryPlan:
    """Split each budget under a policy: fixed parts first, KV pools take what is left.

    Args:
        config: the model.
        policy: places of weights, KV and activations, and numbers of sequences and tokens of a sweep.
        demand: requirements of the rows that must fit beside them.
        dtype: the compute dtype.
        budgets: tier -> bytes; with one for "gpu" there is an accelerator.
        process_bytes: bytes that the process holds before weights are loaded.

    Raises:
        InputError: a budget is too small; the message names the smallest that would do.
    """
    sizes = Sizes(
        config,
        dtype,
        policy.weight_format,
        policy.kv_format,
        policy.kv_block_size,
        state_dtype=policy.state_dtype,
        attention_budget=policy.attention_budget,
    )
    held = _held_by_policy(sizes, policy, demand, on_gpu="gpu" in budgets, process_bytes=process_bytes)
    parts: dict[str, dict[str, int]] = {tier: {} for tier in TIERS if tier in budgets}
    parts["cpu"]["process"] = 0  # shown even where nothing is known of it
    streams = {"compute": 0, "d2h": 0}
    for item in fixed_items(sizes, policy, held):
        if num_bytes := int(number(item.size)):
            of_tier = parts[item.tier]
            of_tier[item.part] = of_tier.get(item.part, 0) + num_bytes
            if item.stream is not None:
                streams[item.stream] += num_bytes
    staging_bytes = int(number(held.staged_blocks)) * KV_SLOTS * sizes.layers.largest_block
    pools = kv_pools(config, policy, parts, budgets, demand, staging_bytes)
    for tier, num_bytes in pools.tier_bytes.items():
        if num_bytes:
            parts[tier]["KV"] = num_bytes
    held_rows = held_logit_rows(config, int(sizes.element_bytes), policy, demand.task)
    return MemoryPlan(
        budgets=dict(budgets),
        parts=parts,
        kv_blocks=pools.blocks,
        staging_blocks=int(number(held.staged_blocks)),
        batch_tokens=policy.batch_tokens,
        logit_rows=planned_logit_rows(
            config, int(sizes.element_bytes), policy.batch_tokens, policy.batch_seqs, demand.task
        ),
        held_logit_rows=held_rows if any("logits" in of_tier for of_tier in parts.values()) else None,
        window=pools.window,
        window_blocks=pools.window_blocks,
        state_slots={tier: int(number(slots)) for tier, slots in held.state_slots.items()},
        staging_states=int(number(held.staged_states)),
        expansion=pools.expansion,
        stream_bytes={} if not held.on_gpu or (policy.all_on_gpu and config.embeds and config.has_head) else streams,
    )


def policy_state_slots(s: Sizes, policy: Policy) -> dict[str, int]:
    """State slots of each tier that has sequences under a policy; none where the model has no state layers."""
    seqs: dict[str, int] = {}
    for name, count in policy.kv_seqs.items():
        if count and s.model.state:
            tier = KVPlacement(name).tier
            seqs[tier] = seqs.get(tier, 0) + count
    share = draft_state_share(policy.max_num_seqs) if policy.draft_states else 0.0
    slots_of = state_slots(seqs, policy.share_prefixes, share)
    return {tier: int(number(slots)) for tier, slots in slots_of.items()}


def _held_by_policy(s: Sizes, policy: Policy, demand: Demand, *, on_gpu: bool, process_bytes: int) -> Held:
    """Contents of a policy, with each layer as large as it is."""
    layers, slots = group_bytes_of_layers(s.model, s.compute_format, s.weight_format), s.slot_group_bytes
    weights: dict[str, int] = dict.fromkeys(TIERS, 0)
    stream_buffer = read_buffer = 0
    for group, counts in policy.weight_layers.items():
        groups = [(tier, sizes[group]) for tier, sizes in zip(spread_layers(counts), layers, strict=True)]
        for tier, size in groups:
            weights[tier] += size
        read_buffer += max((aligned(size) for tier, size in groups if tier == "disk"), default=0)
        stream_buffer += slots[group] if any(counts[1:]) else 0
    seqs = policy.kv_seqs
    longest_blocks = s.kv_blocks(demand.longest_tokens)
    in_sweep = [(KVPlacement(name).in_sweep("gpu" if on_gpu else "cpu", True), count) for name, count in seqs.items()]
    passing = [count for placement, count in in_sweep if placement is KVPlacement.STREAMED]
    attended = any(count for placement, count in in_sweep if placement in (KVPlacement.CPU, KVPlacement.DEFERRED))
    staged_seqs = passing_seqs(policy, passing, int(attended), WHOLE_NUMBERS)
    staged_blocks = int(number(staging_blocks(s, policy, longest_blocks, staged_seqs, int(attended))))
    staged_states = int(number(staging_states(s, policy, staged_seqs, int(attended))))
    links = 2 if seqs.get("disk") and s.layers.pads_blocks else 1
    return Held(
        on_gpu=on_gpu,
        task=demand.task,
        process_bytes=process_bytes,
        longest_tokens=demand.longest_tokens,
        rotary_positions=policy.max_model_len if on_gpu else demand.longest_tokens,
        weights=weights,
        stream_buffer=stream_buffer,
        read_buffer=read_buffer,
        head_gpu=int(on_gpu and policy.head_tier == "gpu"),
        head_cpu=int(policy.head_tier == "cpu"),
        embed_gpu=int(on_gpu and policy.embedding_tier == "gpu"),
        head_disk=int(policy.head_tier == "disk"),
        embed_disk=int(policy.embedding_tier == "disk" and not s.model.tied_embeddings),
        act_gpu=policy.activation_batches[0],
        act_cpu=policy.activation_batches[1],
        acts_wait=int(policy.activation_batches[1] > 0),
        delegates=int(on_gpu and seqs.get("cpu", 0) > 0),
        deferred_seqs=seqs.get("deferred", 0),
        staged_blocks=staged_blocks,
        passing_bytes=links * passing_bytes(aligned(s.layers.largest_block), staged_blocks) if staged_blocks else 0,
        disk_blocks=staged_blocks if seqs.get("disk") else 0,
        state_slots=policy_state_slots(s, policy),
        staged_states=staged_states,
        disk_states=staged_states if seqs.get("disk") else 0,
    )
