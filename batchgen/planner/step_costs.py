"""Seconds of each Step on a machine, from what its micro-batch computes and moves.

They are the planner's cost terms, split over the Steps that these cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchgen.core.direct_io import aligned
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import VOCABULARY_CHUNKS, Plan, kv_on_device, spread_layers
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.ops.attention_plan import SequenceSlice, find_shared_groups
from batchgen.planner.costs import (
    COPIES_SENT,
    after_router_frac,
    all_reduce_s,
    before_attention_frac,
    decode_attention_s,
    dequantize_weights_s,
    elementwise_s,
    experts_frac,
    experts_touched,
    head_lanes,
    linear_s,
    longer_in_rows_s,
    prefill_attention_s,
    shared_attention_s,
    sweep_overhead_s,
)
from batchgen.planner.linear import number
from batchgen.planner.memory import group_bytes_of_layers, group_tensors_of_layers
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import BATCHGEN, CostInputs
from batchgen.schedule.extents import runs_of
from batchgen.schedule.micro_batches import placement_in_sweep
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.scheduler import ScheduledSequence
from batchgen.schedule.step_graph import BatchFlow, Step, Streams
from batchgen.schedule.window_pool import NULL_BLOCK

_NOTHING_PLACED = Placement(*[0] * 13)
_HEAD_ELSEWHERE = replace(_NOTHING_PLACED, head_cpu=1)


@dataclass(frozen=True)
class Attended:
    """Attention of some sequences.

    contexts: keys that each one with a single new token sees, itself included. chunks: (new tokens, tokens before them) of
    each other one. shared: (new tokens, tokens of a prefix that all of these see), which the others do not count.
    """

    contexts: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class BatchLoad:
    """What one micro-batch of a sweep computes and moves, in each layer.

    tokens: those of sequences that only begin a token in the sweep (`deferred`) included.
    attended: attention of the sequences of each placement in the sweep; `windowed` in layers with a sliding window, where no
        prefix is shared.
    sampled: sequences that reach their last token, in this sweep or a later one; logits_rows: rows of logits. host_blocks: KV blocks that come
    from the host's pool; windowed_host_blocks: in layers with a sliding window; new_tokens: tokens whose KV goes there. disk_*: blocks (and runs of neighbouring ones) that are read and written,
    and all that pass through the staging buffer. hidden_on_host: activations wait in host memory between layers.
    """

    tokens: int
    sampled: int
    logits_rows: int
    attended: dict[KVPlacement, Attended]
    windowed: dict[KVPlacement, Attended]
    host_blocks: int = 0
    windowed_host_blocks: int = 0
    new_tokens: int = 0
    disk_reads: tuple[int, int] = (0, 0)
    disk_writes: tuple[int, int] = (0, 0)
    disk_blocks: int = 0
    hidden_on_host: bool = False

    @property
    def flow(self) -> BatchFlow:
        """The same as `PackedBatch.flow` gives."""
        return BatchFlow(
            placements=frozenset(self.attended),
            history=self.host_blocks > 0 or self.disk_reads[0] > 0,
            stored=self.new_tokens > 0,
            disk_read=self.disk_reads[0] > 0,
            disk_write=self.disk_writes[0] > 0,
            hidden_on_host=self.hidden_on_host,
            samples=self.logits_rows > 0,
        )

    @property
    def deferred(self) -> int:
        """Sequences that begin a token in the sweep, and leave it in the first layer."""
        return len(self.contexts_of(KVPlacement.DEFERRED))

    def contexts_of(self, placement: KVPlacement) -> tuple[int, ...]:
        return self.attended[placement].contexts if placement in self.attended else ()


def load_of(
    batch: Sequence[ScheduledSequence],
    *,
    kv_block_size: int,
    compute_tier: str,
    windows: bool = False,
    hidden_on_host: bool = False,
) -> BatchLoad:
    """The load of a scheduled micro-batch, before its sweep is committed. windows: whether any layer has a sliding window."""
    by_placement: dict[KVPlacement, list[ScheduledSequence]] = {}
    for scheduled in batch:
        by_placement.setdefault(placement_in_sweep(scheduled, compute_tier), []).append(scheduled)
    attended = {name: _attended(members, kv_block_size, sharing=True) for name, members in by_placement.items()}
    windowed = attended
    if windows:
        windowed = {name: _attended(members, kv_block_size, sharing=False) for name, members in by_placement.items()}
    staged = by_placement.get(KVPlacement.STREAMED, ())
    on_disk = [s for s in staged if _on_disk(s)]
    on_host = [s for s in staged if not _on_disk(s)]
    host_blocks = _history_blocks(on_host, kv_block_size, windowed=False)
    windowed_host_blocks = _history_blocks(on_host, kv_block_size, windowed=True) if windows else host_blocks
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []
    blocks = 0
    for s in on_disk:
        table, used = s.sequence.block_table, _blocks(s.num_keys, kv_block_size)
        reads += runs_of(table[: _blocks(s.sequence.num_computed, kv_block_size)])
        writes += runs_of(table[s.sequence.num_computed // kv_block_size : used])
        blocks += used
    return BatchLoad(
        tokens=sum([s.num_tokens for s in batch]),
        sampled=sum([s.num_keys == len(s.sequence.tokens) for s in batch]),
        logits_rows=sum([s.num_logits for s in batch]),
        attended=attended,
        windowed=windowed,
        host_blocks=host_blocks,
        windowed_host_blocks=windowed_host_blocks,
        new_tokens=sum(s.num_tokens for s in on_host),
        disk_reads=(sum(count for _, count in reads), len(reads)),
        disk_writes=(sum(count for _, count in writes), len(writes)),
        disk_blocks=blocks,
        hidden_on_host=hidden_on_host,
    )


def _on_disk(scheduled: ScheduledSequence) -> bool:
    kv_placement = scheduled.sequence.kv_placement
    return kv_placement is KVPlacement.DISK


def _blocks(tokens: int, kv_block_size: int) -> int:
    return -(-tokens // kv_block_size)


def _history_blocks(members: Sequence[ScheduledSequence], kv_block_size: int, *, windowed: bool) -> int:
    """Different blocks that hold KV of earlier sweeps."""
    if not windowed and not any(s.sequence.num_matched_blocks for s in members):
        return sum(_blocks(s.sequence.num_computed, kv_block_size) for s in members)  # nobody shares any
    tables = (s.sequence.table(windowed)[: _blocks(s.sequence.num_computed, kv_block_size)] for s in members)
    return len({block for table in tables for block in table} - {NULL_BLOCK})


def _attended(members: Sequence[ScheduledSequence], kv_block_size: int, *, sharing: bool) -> Attended:
    shared_tokens = [0] * len(members)
    shared = []
    if sharing and any(s.sequence.num_matched_blocks for s in members):
        slices = [
            SequenceSlice(
                s.num_tokens,
                s.sequence.num_computed,
                np.array([] if _on_disk(s) else s.sequence.block_table, dtype=np.int32),
            )
            for s in members
        ]
        for group in find_shared_groups(slices, [s.sequence.num_matched_blocks for s in members], kv_block_size):
            shared.append((sum(members[i].num_tokens for i in group.members), group.num_blocks * kv_block_size))
            for i in group.members:
                shared_tokens[i] = group.num_blocks * kv_block_size
    own = list(zip(members, shared_tokens, strict=True))
    return Attended(
        tuple(s.num_keys - skip for s, skip in own if s.num_tokens == 1),
        tuple((s.num_tokens, s.sequence.num_computed - skip) for s, skip in own if s.num_tokens > 1),
        tuple(shared),
    )


def weight_tiers(plan: Plan) -> dict[str, list[str]]:
    """Of each group of tensors, the tier in each layer."""
    return {group: list(spread_layers(counts)) for group, counts in plan.policy.weight_layers.items()}


def streams_of(plan: Plan, config: ModelConfig) -> Streams:
    """What has to be brought to the compute device."""
    residency = WeightResidency.of_policy(plan.policy, config)
    on_device = kv_on_device(len(residency.layers), plan.policy.kv_layers)
    of_stage = {"embeds": config.embeds, "has_head": config.has_head}
    return residency.streams("gpu" if "gpu" in plan.budgets else "cpu", on_device, **of_stage)


class StepCosts:
    """Seconds of the Steps of a plan on a machine. Formulas are the planner's, for one micro-batch at a time."""

    def __init__(self, plan: Plan, config: ModelConfig, hardware: HardwareProfile) -> None:
        policy = plan.policy
        self.config, self.hardware = config, hardware
        s = self._inputs = CostInputs(
            hardware=hardware,
            model=config,
            # What sequences share is in their loads: the planner's formulas would leave it out a second time.
            workload=replace(plan.workload, shared_prefix_len=0),
            runtime=BATCHGEN,
            compute_format=plan.dtype,
            weight_format=policy.weight_format,
            kv_format=policy.kv_format,
            admission=policy.admission,
            max_num_seqs=policy.max_num_seqs,
            num_gpu_batches=1,
            max_num_batched_tokens=policy.max_num_batched_tokens,
            kv_block_size=policy.kv_block_size,
            budgets=plan.budgets,
            process_bytes=0,
        )
        self._by_window = {
            w: replace(s, model=replace(config, windows=(w,) * config.num_layers)) for w in set(config.windows)
        }
        self._loaded_bytes = [0] * config.num_layers  # to an accelerator, in a sweep
        self._loaded_tensors = [0] * config.num_layers
        self._read_bytes = [0] * config.num_layers
        tiers = weight_tiers(plan)
        sizes = group_bytes_of_layers(config, plan.dtype, policy.weight_format)
        tensors = group_tensors_of_layers(config, plan.dtype, policy.weight_format)
        for group, of_layers in tiers.items():
            for j, tier in enumerate(of_layers):
                self._loaded_bytes[j] += sizes[j][group] if tier != "gpu" else 0
                self._loaded_tensors[j] += tensors[j][group] if tier != "gpu" else 0
                self._read_bytes[j] += aligned(sizes[j][group]) if tier == "disk" else 0
        of_one = s.expert_bytes
        self._streamed = [
            _Streamed.of(s, {g: of_layers[j] for g, of_layers in tiers.items()}) for j in range(config.num_layers)
        ]
        # Of one expert what is on disk, and in how many tensors.
        self._expert_sizes = [
            [size for group, size in of_one.items() if tiers[group][j] == "disk"] if config.has_experts(j) else []
            for j in range(config.num_layers)
        ]
        self._without_experts: set[tuple[int, int | None]] = set()  # (layer, slot) of what has been read so
        self._vocabulary_chunks = streams_of(plan, config).vocabulary_chunks
        self._embeds_on_gpu = WeightResidency.of_policy(policy, config).tier_of_embeddings(config) == "gpu"
        self._pre_frac = before_attention_frac(config)
        # Of what comes after attention, what comes before the experts.
        self._route_frac = 1 - after_router_frac(config) / (1 - self._pre_frac)
        self._dequantize_s = dequantize_weights_s(s)
        self._dequantize_experts_s = self._dequantize_s * experts_frac(config)
        self._chunks_s: dict[tuple[int, int, int | None], float] = {}
        self._begun: dict[int, BatchLoad] = {}  # deferred batch -> the micro-batch in which it began

    @property
    def element_bytes(self) -> float:
        """Of an activation."""
        return self._inputs.element_bytes

    def begun(self, deferred_batch: int, load: BatchLoad) -> None:
        """A deferred batch that began its token in this micro-batch, of a sweep that was not costed."""
        self._begun[deferred_batch] = load

    def sweep(self, loads: Sequence[BatchLoad]) -> Callable[[Step], float]:
        """A function that gives the seconds of a Step, to be called once for each Step of a sweep over these micro-batches.

        It is to be called in their order: what copies take of the cores of an emulated accelerator is added to the next
        computation.
        """
        hardware = self.hardware
        computing = [self._computing(load) for load in loads]
        joined = [0] * len(loads)  # rows of deferred batches that are with the micro-batch
        owed_s = 0.0

        def seconds(step: Step) -> float:
            nonlocal owed_s
            load, batch = loads[step.batch], computing[step.batch]
            if step.deferred_batch is not None:
                load = self._begun.setdefault(step.deferred_batch, load)
            if step.lane == "compute":
                if step.kind in ("embed", "load_attention", "join_deferred"):  # copies that compute makes itself
                    joined[step.batch] += load.deferred if step.kind == "join_deferred" else 0
                    moved = self._link_bytes(step, load)
                    h2d = hardware.h2d_bytes_per_s  # None where the CPU computes, which copies nothing
                    return moved / h2d + hardware.link_overhead_s if h2d and moved else 0.0
                own_s, also_s, owed_s = self._computing_with(joined[step.batch], load, batch, step), owed_s, 0.0
                if (step.layer, step.weight_slot) in self._without_experts:
                    own_s = self._without_experts_s(step, loads, own_s)
                elif len(loads) == 1 and not self._inputs.on_gpu and self.config.has_experts(step.layer):
                    own_s += self._dequantized_experts_s(step, loads)
                if step.kind == "pre":
                    joined[step.batch] = 0
                return own_s + also_s
            if step.kind == "attend_deferred":
                window = self.config.windows[step.layer]
                attended = (load.attended if window is None else load.windowed)[KVPlacement.DEFERRED]
                return self.attention_s(attended, window, hardware.cpu) + hardware.cpu.waking_overhead_s
            if step.lane == "cpu_attention":
                return batch.cpu_attention_s[step.layer]
            if step.kind in ("read_weight", "read_dense", "read_experts"):
                return self._read_s(step, loads)
            if step.lane == "disk_read":
                return self._disk_s(load.disk_reads, hardware.disk_read_bytes_per_s, hardware.disk_read_overhead_s)
            if step.lane == "disk_write":
                return self._disk_s(load.disk_writes, hardware.disk_write_bytes_per_s, hardware.disk_write_overhead_s)
            moved = self._link_bytes(step, load)
            if hardware.shared_cores and hardware.copy_bytes_per_s:
                owed_s += moved / hardware.copy_bytes_per_s
            rate = hardware.h2d_bytes_per_s if step.lane == "h2d" else hardware.d2h_bytes_per_s
            assert rate is not None  # there are such Steps with an accelerator alone
            return moved / rate + self._copies(step) * hardware.link_overhead_s

        return seconds

    def _read_s(self, step: Step, loads: Sequence[BatchLoad]) -> float:
        """Reading weights from disk: of a layer, of what all tokens need of it, or of the experts that a micro-batch adds."""
        hardware, sizes = self.hardware, self._expert_sizes[step.layer]
        if step.kind == "read_experts":
            count = self._added_experts(step, loads)
            return count * (sum(sizes) / hardware.disk_read_bytes_per_s + len(sizes) * hardware.disk_read_overhead_s)
        at = step.layer, step.weight_slot
        experts = self.config.num_experts * sum(sizes) if step.kind == "read_dense" else 0
        (self._without_experts.add if step.kind == "read_dense" else self._without_experts.discard)(at)
        return (self._read_bytes[step.layer] - experts) / hardware.disk_read_bytes_per_s

    def _added_experts(self, step: Step, loads: Sequence[BatchLoad]) -> float:
        """Experts of a layer that a micro-batch is expected to touch, and those before it are not."""
        is_last = step.layer == self.config.num_layers - 1
        tokens = [load.logits_rows if is_last else load.tokens for load in loads[: step.batch + 1]]
        together, before = (
            experts_touched(self.config, sum(some), self._inputs.workload.routing) for some in (tokens, tokens[:-1])
        )
        return together - before

    def _without_experts_s(self, step: Step, loads: Sequence[BatchLoad], own_s: float) -> float:
        """Seconds of a computation of a layer whose experts are read on demand. own_s: as of one that is read as a whole."""
        if step.kind == "route":
            return own_s * self._route_frac
        if step.kind == "post":
            own_s *= 1 - self._route_frac
        return own_s + self._dequantized_experts_s(step, loads)

    def _dequantized_experts_s(self, step: Step, loads: Sequence[BatchLoad]) -> float:
        """What a computation takes longer where 4-bit experts are dequantized after the router, those alone that are touched."""
        if step.kind == "expand_weight":
            return -self._dequantize_experts_s
        if step.kind == "post":
            return self._dequantize_experts_s * self._added_experts(step, loads) / self.config.num_experts
        return 0.0

    def between_s(self, loads: Sequence[BatchLoad]) -> float:
        """Scheduling, packing and bookkeeping of a sweep."""
        return sweep_overhead_s(self._inputs, Phase(1, 0, sum(load.sampled for load in loads), 0, 0))

    def attention_s(self, attended: Attended, window: int | None, device: ComputeRates) -> float:
        """Attention in one layer, for sequences of one placement."""
        s, total = self._by_window[window], 0.0
        if attended.contexts:
            seen = attended.contexts if window is None else [min(window, n) for n in attended.contexts]
            total += decode_attention_s(s, Phase(1, 0, 0, len(seen), sum(seen) / len(seen)), device)
        for new, before in attended.chunks:
            key = (new, before, window)
            if key not in self._chunks_s:
                own = prefill_attention_s(replace(s, workload=Workload.uniform(1, new, 1)), Phase(1, new, 1, 0, 0))
                self._chunks_s[key] = own + _prefix_s(s, new, before)
            total += self._chunks_s[key]
        return total + sum(_prefix_s(s, new, prefix) for new, prefix in attended.shared)

    def _layer_s(self, tokens: int) -> _LayerSeconds:
        """What a layer's computation takes but for attention."""
        phase = Phase(1, tokens, 0, 0, 0)
        s = self._inputs
        whole = float(linear_s(s, phase) + elementwise_s(s, phase) + all_reduce_s(s, phase)) if tokens else 0.0
        return _LayerSeconds(whole * self._pre_frac, whole * (1 - self._pre_frac), *longer_in_rows_s(s, phase))

    def _head_s(self, rows: int) -> float:
        """Logits, or those of one chunk of the vocabulary."""
        if not rows:
            return 0.0
        at = _HEAD_ELSEWHERE if self._vocabulary_chunks else _NOTHING_PLACED
        lanes = head_lanes(self._inputs, Phase(1, 0, rows, 0, 0), at)
        return number(lanes["compute"]) / max(1, self._vocabulary_chunks)

    def _computing_with(self, joined: int, load: BatchLoad, batch: _Computing, step: Step) -> float:
        """Seconds of a computation in which deferred batches take part: rows that have joined, and those that leave in the first layer."""
        if step.kind not in ("pre", "post", "head") or not (joined or load.deferred):
            return batch.seconds(step)
        waking_s = self._inputs.rates.waking_overhead_s
        if step.kind == "head":
            return self._head_s(load.logits_rows + joined) + waking_s
        rows = load.tokens - (0 if step.kind == "pre" and step.layer == 0 else load.deferred)
        if step.kind == "post" and step.layer == self.config.num_layers - 1:
            rows = load.logits_rows
        if not rows + joined:
            return 0.0
        layer, streamed = self._layer_s(rows + joined), self._streamed[step.layer]
        if step.kind == "pre":
            return layer.before_attention(streamed) + self._inputs.rates.step_overhead_s + waking_s
        return layer.after_attention(streamed) + waking_s

    def _computing(self, load: BatchLoad) -> _Computing:
        s = self._inputs
        on_device, on_cpu = {}, {}
        requests_s = 0.0
        if s.shares_cores:
            requests_s = (load.disk_reads[1] + load.disk_writes[1]) * self.hardware.disk_cpu_overhead_s
        for window in self._by_window:
            attended = dict(load.attended if window is None else load.windowed)
            delegated = attended.pop(KVPlacement.CPU, Attended())
            attended.pop(KVPlacement.DEFERRED, None)  # in Steps of its own
            on_cpu[window] = (
                self.attention_s(delegated, window, self.hardware.cpu) + self.hardware.cpu.waking_overhead_s
            )
            on_device[window] = requests_s + sum(self.attention_s(a, window, s.rates) for a in attended.values())
            on_device[window] += s.rates.waking_overhead_s
        waking_s = s.rates.waking_overhead_s
        layer = self._layer_s(load.tokens)
        last = self._layer_s(load.logits_rows) if self.config.has_head else layer  # with the tokens that go on from it
        return _Computing(
            pre_s=tuple(
                layer.before_attention(streamed) + s.rates.step_overhead_s + waking_s for streamed in self._streamed
            ),
            post_s=(
                *(layer.after_attention(streamed) + waking_s for streamed in self._streamed[:-1]),
                last.after_attention(self._streamed[-1]) + waking_s,
            ),
            attention_s=tuple(on_device[w] for w in self.config.windows),
            cpu_attention_s=tuple(on_cpu[w] for w in self.config.windows),
            head_s=self._head_s(load.logits_rows) + waking_s,
            dequantize_s=self._dequantize_s,
        )

    def _disk_s(self, moved: tuple[int, int], bytes_per_s: float, request_s: float) -> float:
        blocks, runs = moved
        return blocks * self._inputs.disk_block_bytes / bytes_per_s + runs * request_s

    def _copies(self, step: Step) -> int:
        """That a Step of a link makes."""
        if step.kind == "load_weight":
            return self._loaded_tensors[step.layer]
        return COPIES_SENT if step.kind in ("send_qkv", "send_deferred") else 1

    def _link_bytes(self, step: Step, load: BatchLoad) -> float:
        """Between the host's memory and an accelerator's."""
        s, kind = self._inputs, step.kind
        if kind == "load_weight":
            return self._loaded_bytes[step.layer]
        if kind == "load_head":
            chunk = -(-s.model.vocab_size // VOCABULARY_CHUNKS)
            rows = max(0, min(chunk, s.model.vocab_size - step.layer * chunk))
            return rows * s.model.embed_size * s.element_bytes
        if kind in ("embed", "load_hidden", "store_hidden"):
            rows = load.tokens - (0 if kind == "embed" or step.layer == 0 else load.deferred)
            stays = kind == "embed" and load.hidden_on_host != self._embeds_on_gpu
            return 0.0 if stays else rows * s.hidden_bytes
        if kind == "load_cache":
            windowed = self.config.windows[step.layer] is not None
            host_blocks = load.windowed_host_blocks if windowed else load.host_blocks
            return (host_blocks + (load.disk_blocks if load.disk_reads[0] else 0)) * s.kv_block_bytes
        if kind == "store_cache":
            return load.new_tokens * s.kv_token_bytes + load.disk_writes[0] * s.kv_block_bytes
        placement = KVPlacement.CPU if step.deferred_batch is None else KVPlacement.DEFERRED
        queries = len(load.contexts_of(placement))  # as large as results
        result = queries * s.model.num_heads * s.model.head_dim * s.element_bytes
        return result if kind in ("load_attention", "join_deferred") else result + queries * s.kv_token_bytes


@dataclass(frozen=True)
class _Streamed:
    """What streams of a layer, by bytes: of all but its experts what is before attention, and what is after it; and of its experts."""

    before: float
    after: float
    experts: float

    @classmethod
    def of(cls, s: CostInputs, tiers: Mapping[str, str]) -> _Streamed:
        """tiers: of each group of its tensors."""
        here = "gpu" if s.on_gpu else "cpu"
        experts = {g: s.all_expert_bytes * size / sum(s.expert_bytes.values()) for g, size in s.expert_bytes.items()}
        dense = {g: size - experts.get(g, 0.0) for g, size in s.group_bytes.items()}

        def part(groups: Mapping[str, float], names: Iterable[str]) -> float:
            whole = sum(groups.values())
            return sum(groups[g] for g in names if g in groups and tiers[g] != here) / whole if whole else 0.0

        return cls(part(dense, ("qkv",)), part(dense, dense.keys() - {"qkv"}), part(experts, experts))


@dataclass(frozen=True)
class _LayerSeconds:
    """Seconds of a layer's products and element-wise work before attention and after it, and by how much products take longer where weights stream."""

    before_s: float
    after_s: float
    longer_s: float
    experts_longer_s: float

    def before_attention(self, streamed: _Streamed) -> float:
        return self.before_s + self.longer_s * streamed.before

    def after_attention(self, streamed: _Streamed) -> float:
        return self.after_s + self.longer_s * streamed.after + self.experts_longer_s * streamed.experts


@dataclass(frozen=True)
class _Computing:
    """Seconds of one micro-batch's computations. pre_s, post_s, attention_s, cpu_attention_s: by layer."""

    pre_s: tuple[float, ...]
    post_s: tuple[float, ...]
    head_s: float
    dequantize_s: float
    attention_s: tuple[float, ...]
    cpu_attention_s: tuple[float, ...]

    def seconds(self, step: Step) -> float:
        if step.kind == "attention":
            return self.attention_s[step.layer]
        if step.kind in ("post", "route"):
            return self.post_s[step.layer]
        if step.kind == "pre":
            return self.pre_s[step.layer]
        own = {"head": self.head_s, "expand_weight": self.dequantize_s}
        return own[step.kind]


def _prefix_s(s: CostInputs, new: int, prefix: int) -> float:
    """Attention of new tokens to a prefix before all of them."""
    return shared_attention_s(replace(s, workload=Workload.uniform(1, prefix + new, 1, prefix)), Phase(1, new, 1, 0, 0))
