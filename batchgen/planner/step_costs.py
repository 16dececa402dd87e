"""Seconds of each Step of a scheduled sweep on a machine, from the loads of its micro-batches and step_seconds.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.core.attention_budget import CHOSEN_PAGES
from batchgen.core.direct_io import aligned
from batchgen.core.draft_rates import MOST_DRAFTS
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.core.kv_expansion import Recut
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import Plan, kv_on_device, spread_layers, vocabulary_chunk_rows
from batchgen.models.config import ModelConfig
from batchgen.planner.batch_load import Attended, BatchLoad, ChosenLoad
from batchgen.planner.layer_sizes import AttentionKind
from batchgen.planner.problem import CostInputs
from batchgen.planner.sizes import group_bytes_of_layers, group_tensors_of_layers
from batchgen.planner.step_seconds import (
    COPIES_SENT,
    MatmulSeconds,
    after_router_frac,
    all_reduce_s,
    before_attention_frac,
    call_overhead_s,
    decode_attention_s,
    dequantize_experts_s,
    dequantize_s,
    elementwise_s,
    embedding_rows_s,
    experts_read_ahead,
    experts_touched,
    few_queries_attention_s,
    logits_s,
    matmul_as_stored_s,
    matmul_s,
    multiplies_packed,
    pre_overhead_s,
    prefill_attention_s,
    prefix_attention_s,
    sampling_s,
    schedule_s,
    state_prefill_s,
    state_update_s,
    transfer_s,
)
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.step_graph import Step, Streams


def streams_of(plan: Plan, config: ModelConfig) -> Streams:
    """The weights and KV that a plan brings to the compute device in every sweep."""
    residency = WeightResidency.of_policy(plan.policy, config)
    on_device = kv_on_device(len(residency.layers), plan.policy.kv_layers)
    return residency.streams(
        plan.compute_tier,
        on_device,
        config.state_layers,
        config.kv_sources,
        choosing=config.choosing_layers(plan.policy.attention_budget),
        **config.ends,
    )


# Placements that the CPU attends to beside an accelerator.
_ON_CPU = (KVPlacement.CPU, KVPlacement.DEFERRED)


@dataclass(frozen=True)
class _PlacedLayer:
    """The weights of one layer that are not on the compute device.

    Attributes:
        loaded_bytes: Bytes that come to an accelerator in a sweep.
        loaded_tensors: Tensors that come to an accelerator in a sweep.
        read_bytes: Bytes that are read from disk in a sweep.
        expert_bytes: Bytes of each tensor of one expert that is on disk.
        before_frac: The part of the dense weights before attention that streams.
        after_frac: The part of the dense weights after attention that streams.
        experts_frac: The part of the experts' weights that streams.
    """

    loaded_bytes: int
    loaded_tensors: int
    read_bytes: int
    expert_bytes: tuple[int, ...]
    before_frac: float
    after_frac: float
    experts_frac: float

    @classmethod
    def of(
        cls,
        s: CostInputs,
        tiers: Mapping[str, str],
        sizes: Mapping[str, int],
        tensors: Mapping[str, int],
        mixture: bool,
    ) -> _PlacedLayer:
        """Place one layer.

        Args:
            s: The inputs of the cost model.
            tiers: The tier of each group of tensors.
            sizes: The bytes of each group.
            tensors: The number of tensors of each group.
            mixture: Whether the layer has experts.
        """
        compute_tier = "gpu" if s.on_gpu else "cpu"
        all_experts = {
            g: s.all_expert_bytes * size / sum(s.expert_bytes.values()) for g, size in s.expert_bytes.items()
        }
        dense = {g: size - all_experts.get(g, 0.0) for g, size in s.group_bytes.items()}

        def streamed_frac(groups: Mapping[str, float], names: Iterable[str]) -> float:
            whole = sum(groups.values())
            streamed = sum(groups[g] for g in names if g in groups and tiers[g] != compute_tier)
            return streamed / whole if whole else 0.0

        return cls(
            loaded_bytes=sum(size for g, size in sizes.items() if tiers[g] != "gpu"),
            loaded_tensors=sum(count for g, count in tensors.items() if tiers[g] != "gpu"),
            read_bytes=sum(aligned(size) for g, size in sizes.items() if tiers[g] == "disk"),
            expert_bytes=tuple(size for g, size in s.expert_bytes.items() if mixture and tiers[g] == "disk"),
            before_frac=streamed_frac(dense, ("qkv",)),
            after_frac=streamed_frac(dense, dense.keys() - {"qkv"}),
            experts_frac=streamed_frac(all_experts, all_experts),
        )


@dataclass(frozen=True)
class _LayerSeconds:
    """Seconds of a layer's matmuls and element-wise work but for attention.

    Attributes:
        before_s: Seconds before attention.
        after_s: Seconds after attention.
        as_stored: Seconds that matmuls take longer where all weights stream.
    """

    before_s: float
    after_s: float
    as_stored: MatmulSeconds

    def before_attention(self, layer: _PlacedLayer) -> float:
        """Seconds before attention in a layer of which a part streams."""
        return self.before_s + self.as_stored.dense * layer.before_frac

    def after_attention(self, layer: _PlacedLayer) -> float:
        """Seconds after attention in a layer of which a part streams."""
        return self.after_s + self.as_stored.dense * layer.after_frac + self.as_stored.experts * layer.experts_frac


class StepCosts:
    """Seconds of the Steps of a plan on a machine, for one micro-batch at a time."""

    def __init__(self, plan: Plan, config: ModelConfig, hardware: HardwareProfile) -> None:
        """Work out what the sweeps of a plan have in common.

        Args:
            plan: The plan.
            config: The model's configuration.
            hardware: The machine.
        """
        policy = plan.policy
        self.config, self.hardware = config, hardware
        s = self.inputs = CostInputs(
            hardware=hardware,
            model=config,
            # What sequences share is in their loads: the formulas would leave it out a second time.
            workload=replace(plan.workload, shared_prefix_len=0),
            compute_format=plan.dtype,
            weight_format=policy.weight_format,
            kv_format=policy.kv_format,
            admission=policy.admission,
            max_num_seqs=policy.max_num_seqs,
            num_gpu_batches=1,
            max_num_batched_tokens=policy.max_num_batched_tokens,
            kv_block_size=policy.kv_block_size,
            state_dtype=policy.state_dtype,
            attention_budget=policy.attention_budget,
            packed_tokens=policy.packed_tokens,
            captured_tokens=policy.captured_tokens,
            budgets=plan.budgets,
            process_bytes=0,
        )
        self.kinds = tuple(dict.fromkeys(map(s.layers.attention_kind, config.attention_layers)))
        self._kind_of = {layer: self.kinds.index(s.layers.attention_kind(layer)) for layer in config.attention_layers}
        tiers = {group: list(spread_layers(counts)) for group, counts in policy.weight_layers.items()}
        sizes = group_bytes_of_layers(config, plan.dtype, policy.weight_format)
        tensors = group_tensors_of_layers(config, plan.dtype, policy.weight_format)
        self.layers = [
            _PlacedLayer.of(s, {g: t[j] for g, t in tiers.items()}, sizes[j], tensors[j], config.has_experts(j))
            for j in range(config.num_layers)
        ]
        self._streams = streams_of(plan, config)
        self.vocabulary_chunks = self._streams.vocabulary_chunks
        # An emulated accelerator reads them where they are.
        self.fetches_summaries = not s.shares_cores and policy.summary_tier("gpu") == "cpu"
        embeddings = WeightResidency.of_policy(policy, config).tier_of_embeddings(config)
        self.embeds_on_gpu, self.reads_embeddings = embeddings == "gpu", embeddings == "disk"
        self._before_frac = before_attention_frac(config)
        # The part of what comes after attention that comes before the experts.
        self.route_frac = 1 - after_router_frac(config) / (1 - self._before_frac)
        self.dequantize_s, self.dequantize_experts_s = dequantize_s(s), dequantize_experts_s(s)
        self.without_experts: set[tuple[int, int | None]] = set()  # (layer, slot) of weights that were read so
        self._chunks_s: dict[tuple[int, int, int], float] = {}
        self._begun: dict[int, BatchLoad] = {}  # deferred batch -> the micro-batch in which it began

    def kind_of(self, layer: int) -> AttentionKind | None:
        """The kind of a layer's attention; None: it is a state layer."""
        return self.kinds[self._kind_of[layer]] if layer in self._kind_of else None

    def passing(self, step: Step, load: BatchLoad) -> BatchLoad | ChosenLoad:
        """The KV of a micro-batch that passes through the staging buffer in a Step's layer."""
        return load if load.chosen is None or not self._streams.chooses_staged(step.layer) else load.chosen

    @property
    def element_bytes(self) -> float:
        """Bytes of one number of an activation."""
        return self.inputs.element_bytes

    def begun(self, deferred_batch: int, load: BatchLoad) -> None:
        """Note a deferred batch that began its token in this micro-batch, of a sweep that was not costed."""
        self._begun[deferred_batch] = load

    def load_of_deferred(self, deferred_batch: int, load: BatchLoad) -> BatchLoad:
        """The micro-batch in which a deferred batch began: the one that is given, where none was noted."""
        return self._begun.setdefault(deferred_batch, load)

    def sweep(self, loads: Sequence[BatchLoad]) -> Callable[[Step], float]:
        """A function that gives the seconds of each Step of a sweep over these micro-batches.

        It is to be called once for each Step, in their order: what copies take of the cores of an emulated accelerator
        is added to the next computation.
        """
        return _SweepCosts(self, loads).seconds

    def between_s(self, loads: Sequence[BatchLoad]) -> float:
        """Seconds of scheduling, packing and bookkeeping of a sweep."""
        return schedule_s(self.inputs, sum(load.sampled for load in loads), len(loads))

    def recut_s(self, recut: Recut) -> float:
        """Seconds in which layers' KV comes to the device and leaves it, where KV by layer is divided anew."""
        hardware = self.hardware
        moved = [(recut.coming, hardware.h2d_bytes_per_s), (recut.leaving, hardware.d2h_bytes_per_s)]
        return sum(
            transfer_s(recut.bytes_of(layers), rate, len(layers), hardware.link_overhead_s)
            for layers, rate in moved
            if layers and rate
        )

    def layers_s(self, of_kind: Callable[[AttentionKind | None], float]) -> tuple[float, ...]:
        """Seconds of attention or of states' updates in each layer, from those of a layer of each kind.

        Args:
            of_kind: Gives the seconds of a layer whose attention is of a kind; None: of a state layer.
        """
        seconds = [of_kind(kind) for kind in self.kinds]
        if self.config.state_layers:
            seconds.append(of_kind(None))  # the last, which is number -1
        return tuple(seconds[self._kind_of.get(j, -1)] for j in range(self.config.num_layers))

    def attention_s(self, attended: Attended, kind: AttentionKind | None, device: ComputeRates) -> float:
        """Seconds of attention in one layer of a kind, for sequences of one placement; None: in a state layer."""
        if kind is None:
            return self._states_s(attended, device)
        s, total_s, number = self.inputs, 0.0, self.kinds.index(kind)
        if attended.contexts:
            keys = attended.contexts if kind.windows[0][0] is None else [kind.read(n) for n in attended.contexts]
            total_s += decode_attention_s(s, kind, len(keys), sum(keys) / len(keys), device)
        few = [(new, before) for new, before in attended.chunks if before and new <= 1 + MOST_DRAFTS]
        if few:
            queries, tokens = sum(new for new, _ in few) / len(few), sum(kind.read(new + before) for new, before in few)
            total_s += few_queries_attention_s(s, kind, len(few), tokens / len(few), queries, device)
        for new, before in attended.chunks:
            if before and new <= 1 + MOST_DRAFTS:
                continue
            key = (new, before, number)
            if key not in self._chunks_s:
                self._chunks_s[key] = prefill_attention_s(s, kind, 1, new * new)
                self._chunks_s[key] += prefix_attention_s(s, kind, new, before)
            total_s += self._chunks_s[key]
        return total_s + sum(prefix_attention_s(s, kind, new, prefix) for new, prefix in attended.shared)

    def _states_s(self, attended: Attended, device: ComputeRates) -> float:
        """Seconds of the updates of one state layer; of a shared prefix there is only the state after it."""
        s = self.inputs
        prompts_s = sum(state_prefill_s(s, new, new) for new, _ in attended.chunks)
        return prompts_s + state_update_s(s, len(attended.contexts), device)

    def layer_s(self, tokens: int, *, packed: bool) -> _LayerSeconds:
        """Seconds of a layer's computation but for attention.

        Args:
            tokens: Tokens that go through it.
            packed: Whether the sweep multiplies 4-bit weights as they are.
        """
        s = self.inputs
        whole_s = matmul_s(s, tokens, packed=packed).total + elementwise_s(s, tokens) + all_reduce_s(s, tokens)
        return _LayerSeconds(
            whole_s * self._before_frac, whole_s * (1 - self._before_frac), matmul_as_stored_s(s, tokens)
        )

    def head_s(self, rows: int) -> float:
        """Seconds of logits and sampling, or of one chunk of the vocabulary."""
        if not rows:
            return 0.0
        s, chunks = self.inputs, self.vocabulary_chunks
        seconds = logits_s(s, rows)
        if chunks:  # which come over, and lie as they are stored
            seconds = max(seconds, logits_s(s, rows, as_stored=True))
        return (sampling_s(s, rows) + seconds) / max(1, chunks)


@dataclass(frozen=True)
class _Computing:
    """Seconds of one micro-batch's computations, where no deferred batch takes part.

    Attributes:
        pre_s: Seconds of `pre` in each layer.
        post_s: Seconds of `post` in each layer.
        attention_s: Seconds of attention on the compute device in each layer.
        cpu_attention_s: Seconds of attention on the CPU in each layer.
        head_s: Seconds of the head, or of one chunk of the vocabulary.
    """

    pre_s: tuple[float, ...]
    post_s: tuple[float, ...]
    attention_s: tuple[float, ...]
    cpu_attention_s: tuple[float, ...]
    head_s: float

    @classmethod
    def of(cls, costs: StepCosts, load: BatchLoad, *, packed: bool) -> _Computing:
        """Work out a micro-batch's computations from its load.

        Args:
            costs: The costs of the plan.
            load: The micro-batch.
            packed: Whether the sweep multiplies 4-bit weights as they are.
        """
        s, hardware, config = costs.inputs, costs.hardware, costs.config

        def requests_s(kind: AttentionKind | None) -> float:
            """Seconds of the kernel's work for requests to the disk, which takes the cores that compute."""
            chooses = load.chosen is not None and kind is not None and kind.windows[0][0] == CHOSEN_PAGES
            reads = load.chosen.disk_reads if chooses and load.chosen is not None else load.disk_reads
            return (reads[1] + load.disk_writes[1]) * hardware.disk_cpu_overhead_s if s.shares_cores else 0.0

        waking_s = s.rates.waking_overhead_s

        def on_cpu_s(kind: AttentionKind | None) -> float:
            delegated = load.attended_by(kind).get(KVPlacement.CPU, Attended())
            return costs.attention_s(delegated, kind, hardware.cpu) + hardware.cpu.waking_overhead_s

        def on_device_s(kind: AttentionKind | None) -> float:
            attended = load.attended_by(kind)
            # Deferred sequences have Steps of their own.
            others = [a for placement, a in attended.items() if placement not in _ON_CPU]
            return requests_s(kind) + sum(costs.attention_s(a, kind, s.rates) for a in others) + waking_s

        layer = costs.layer_s(load.tokens, packed=packed)
        # The last one with the tokens that go on from it.
        last = costs.layer_s(load.logits_rows, packed=packed) if config.has_head else layer
        return cls(
            pre_s=tuple(layer.before_attention(placed) + pre_overhead_s(s.rates) for placed in costs.layers),
            post_s=(
                *(layer.after_attention(placed) + waking_s for placed in costs.layers[:-1]),
                last.after_attention(costs.layers[-1]) + waking_s,
            ),
            attention_s=costs.layers_s(on_device_s),
            cpu_attention_s=costs.layers_s(on_cpu_s),
            head_s=costs.head_s(load.logits_rows) + waking_s,
        )


class _SweepCosts:
    """Seconds of the Steps of one sweep."""

    def __init__(self, costs: StepCosts, loads: Sequence[BatchLoad]) -> None:
        self._costs, self._loads = costs, loads
        self._packed = multiplies_packed(costs.inputs, sum(load.tokens for load in loads))
        self._computing = [_Computing.of(costs, load, packed=self._packed) for load in loads]
        self._joined = [0] * len(loads)  # rows of deferred batches that are with the micro-batch
        self._owed_s = 0.0  # that copies take of the cores or the memory of the next computation

    def seconds(self, step: Step) -> float:
        """Seconds of a Step."""
        load = self._loads[step.batch]
        if step.deferred_batch is not None:
            load = self._costs.load_of_deferred(step.deferred_batch, load)
        return _SECONDS[step.kind](self, step, load)

    # Computation

    def copied_by_compute(self, step: Step, load: BatchLoad) -> float:
        """Seconds of a copy that compute makes itself; the CPU copies nothing."""
        if step.kind == "join_deferred":
            self._joined[step.batch] += load.deferred
        hardware = self._costs.hardware
        links = [(_BYTES[step.kind](self._costs, step, load), hardware.h2d_bytes_per_s)]
        if step.kind == "embed":
            links.append((_bytes_from_embedding(self._costs, load), hardware.d2h_bytes_per_s))
        seconds = sum(transfer_s(size, rate, 1, hardware.link_overhead_s) for size, rate in links if rate and size)
        if step.kind == "embed" and self._costs.reads_embeddings:
            seconds += embedding_rows_s(self._costs.inputs, load.tokens)
        return seconds

    def computed(self, step: Step, load: BatchLoad) -> float:
        """Seconds of a computation, and what the copies before it took of its cores, or the disk of the memory."""
        costs = self._costs
        seconds, owed_s, self._owed_s = self._with_deferred(step, load), self._owed_s, 0.0
        if (step.layer, step.weight_slot) in costs.without_experts:
            seconds = self._without_experts(step, seconds)
        elif len(self._loads) == 1 and not costs.inputs.on_gpu and costs.config.has_experts(step.layer):
            seconds += self._dequantized_after_router(step)
        if step.kind == "pre":
            self._joined[step.batch] = 0
        return seconds + owed_s

    def _with_deferred(self, step: Step, load: BatchLoad) -> float:
        """Seconds of a computation with the deferred batches that joined it, and without those that have left."""
        costs, joined = self._costs, self._joined[step.batch]
        if step.kind not in ("pre", "post", "head") or not (joined or load.deferred):
            return self._undeferred(step)
        rates = costs.inputs.rates
        if step.kind == "head":
            return costs.head_s(load.logits_rows + joined) + rates.waking_overhead_s
        rows = load.tokens - (0 if step.kind == "pre" and step.layer == 0 else load.deferred)
        if step.kind == "post" and step.layer == costs.config.num_layers - 1:
            rows = load.logits_rows
        if not rows + joined:
            return 0.0
        layer, placed = costs.layer_s(rows + joined, packed=self._packed), costs.layers[step.layer]
        if step.kind == "pre":
            return layer.before_attention(placed) + pre_overhead_s(rates)
        return layer.after_attention(placed) + rates.waking_overhead_s

    def _undeferred(self, step: Step) -> float:
        batch = self._computing[step.batch]
        if step.kind == "attention":
            return batch.attention_s[step.layer]
        if step.kind in ("post", "route"):
            return batch.post_s[step.layer]
        if step.kind == "pre":
            return batch.pre_s[step.layer]
        return batch.head_s if step.kind == "head" else self._costs.dequantize_s

    def _without_experts(self, step: Step, whole_s: float) -> float:
        """Seconds of a computation where experts are read on demand, from those where the layer is read as a whole."""
        if step.kind == "route":
            return whole_s * self._costs.route_frac
        if step.kind == "post":
            whole_s *= 1 - self._costs.route_frac
        return whole_s + self._dequantized_after_router(step)

    def _dequantized_after_router(self, step: Step) -> float:
        """Seconds that a computation takes longer where 4-bit experts are dequantized after the router, if touched."""
        if step.kind == "expand_weight":
            return -self._costs.dequantize_experts_s
        if step.kind == "post":
            return self._costs.dequantize_experts_s * self._added_experts(step) / self._costs.config.num_experts
        return 0.0

    def _added_experts(self, step: Step) -> float:
        """Experts of a layer that a micro-batch is expected to touch, and those before it are not."""
        config, routing = self._costs.config, self._costs.inputs.workload.routing
        is_last = step.layer == config.num_layers - 1
        tokens = [load.logits_rows if is_last else load.tokens for load in self._loads[: step.batch + 1]]
        together, before = (experts_touched(config, sum(some), routing) for some in (tokens, tokens[:-1]))
        return together - before

    # Attention on the CPU

    def chosen_pages(self, step: Step, load: BatchLoad) -> float:
        """Seconds of a choice of pages. Summaries count with attention, but for those that are in host memory."""
        costs, hardware = self._costs, self._costs.hardware
        seconds, chosen = pre_overhead_s(costs.inputs.rates), load.chosen
        if chosen is not None and costs.fetches_summaries:
            size = chosen.pages * costs.inputs.layers.summaries[costs.config.kv_source(step.layer)]
            seconds += transfer_s(size, hardware.h2d_bytes_per_s)
        return seconds

    def attended_on_cpu(self, step: Step, load: BatchLoad) -> float:
        """Seconds of CPU attention to the sequences of a micro-batch."""
        return self._computing[step.batch].cpu_attention_s[step.layer]

    def attended_deferred(self, step: Step, load: BatchLoad) -> float:
        """Seconds of CPU attention to a deferred batch."""
        costs, cpu = self._costs, self._costs.hardware.cpu
        kind = costs.kind_of(step.layer)
        attended = load.attended_by(kind)[KVPlacement.DEFERRED]
        return costs.attention_s(attended, kind, cpu) + cpu.waking_overhead_s

    # Links and disk

    def copied(self, step: Step, load: BatchLoad) -> float:
        """Seconds of a copy over a link, with what it takes of the cores of an emulated accelerator."""
        hardware, kind = self._costs.hardware, step.kind
        moved = _BYTES[kind](self._costs, step, load)
        if hardware.shared_cores and hardware.copy_bytes_per_s:
            self._owed_s += moved / hardware.copy_bytes_per_s
        copies = 1
        if kind == "load_weight":
            copies = self._costs.layers[step.layer].loaded_tensors
        elif kind in ("send_qkv", "send_deferred"):
            copies = COPIES_SENT
        elif kind in ("swap_in", "swap_out"):
            copies = (load.swapped_in if kind == "swap_in" else load.swapped_out)[1]
        rate = hardware.h2d_bytes_per_s if step.lane == "h2d" else hardware.d2h_bytes_per_s
        return transfer_s(moved, rate, copies, hardware.link_overhead_s)

    def read_weights(self, step: Step, load: BatchLoad) -> float:
        """Seconds of reading weights from disk: a layer's, those that all tokens need, or a micro-batch's experts."""
        costs, hardware, layer = self._costs, self._costs.hardware, self._costs.layers[step.layer]
        at, size, requests = (step.layer, step.weight_slot), sum(layer.expert_bytes), len(layer.expert_bytes)
        call_s = call_overhead_s(costs.inputs)
        if step.kind == "read_weight":
            costs.without_experts.discard(at)
            return self._over_memory(
                layer.read_bytes, transfer_s(layer.read_bytes, hardware.disk_read_bytes_per_s) + call_s
            )
        expert_s = transfer_s(size, hardware.disk_read_bytes_per_s, requests, hardware.disk_read_overhead_s)
        tokens, routing = sum(load.tokens for load in self._loads), costs.inputs.workload.routing
        ahead, part = experts_read_ahead(costs.config, tokens, routing)
        if step.kind == "read_experts":
            demanded = (1 - part) * self._added_experts(step)
            return self._over_memory(demanded * size, demanded * expert_s + call_s)
        costs.without_experts.add(at)
        dense = layer.read_bytes - costs.config.num_experts * size
        seconds = ahead * expert_s + transfer_s(dense, hardware.disk_read_bytes_per_s) + call_s
        return self._over_memory(ahead * size + dense, seconds)

    def read_kv(self, step: Step, load: BatchLoad) -> float:
        """Seconds of reading a micro-batch's KV, or its states, from disk."""
        s, hardware, config = self._costs.inputs, self._costs.hardware, self._costs.config
        passing = self._costs.passing(step, load)
        blocks, runs = passing.disk_reads if config.owns_kv(step.layer) else passing.all_disk
        size = blocks * aligned(s.layers.read_blocks[step.layer])
        if config.has_state(step.layer):
            size, runs = load.states.disk_in * s.state_row_bytes, load.states.disk_in
        seconds = transfer_s(size, hardware.disk_read_bytes_per_s, runs, hardware.disk_read_overhead_s)
        return self._over_memory(size, seconds + call_overhead_s(s))

    def read_head(self, step: Step, load: BatchLoad) -> float:
        """Seconds of reading one vocabulary chunk of the output matrix from disk."""
        size = _head_bytes(self._costs, step, load)
        seconds = transfer_s(size, self._costs.hardware.disk_read_bytes_per_s) + call_overhead_s(self._costs.inputs)
        return self._over_memory(size, seconds)

    def written_kv(self, step: Step, load: BatchLoad) -> float:
        """Seconds of writing a micro-batch's KV, or its states, to disk."""
        s, hardware = self._costs.inputs, self._costs.hardware
        blocks, runs = load.disk_writes
        size = blocks * aligned(s.layers.blocks[step.layer])
        if self._costs.config.has_state(step.layer):
            size, runs = load.states.disk_out * s.state_row_bytes, load.states.disk_out
        seconds = transfer_s(size, hardware.disk_write_bytes_per_s, runs, hardware.disk_write_overhead_s)
        return self._over_memory(size, seconds + call_overhead_s(s))

    def _over_memory(self, size: float, seconds: float) -> float:
        """The seconds of a Step of the disk, whose bytes take of the memory's bandwidth where the CPU computes."""
        if not self._costs.inputs.on_gpu:
            self._owed_s += size / self._costs.hardware.dram_bytes_per_s
        return seconds


# The seconds of each kind of Step. Those between stages of a pipeline are the pipeline's (sweep_sampling.py).
_SECONDS: Mapping[str, Callable[[_SweepCosts, Step, BatchLoad], float]] = {
    **dict.fromkeys(("embed", "load_attention", "join_deferred"), _SweepCosts.copied_by_compute),
    **dict.fromkeys(("pre", "attention", "post", "route", "expand_weight", "head"), _SweepCosts.computed),
    "choose_pages": _SweepCosts.chosen_pages,
    "cpu_attention": _SweepCosts.attended_on_cpu,
    "attend_deferred": _SweepCosts.attended_deferred,
    **dict.fromkeys(("read_weight", "read_dense", "read_experts"), _SweepCosts.read_weights),
    "read_head": _SweepCosts.read_head,
    "read_cache": _SweepCosts.read_kv,
    "write_cache": _SweepCosts.written_kv,
    **dict.fromkeys(("load_weight", "load_head", "load_hidden", "load_cache", "swap_in"), _SweepCosts.copied),
    **dict.fromkeys(("send_qkv", "send_deferred", "store_cache", "store_hidden", "swap_out"), _SweepCosts.copied),
}


def _weight_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    return costs.layers[step.layer].loaded_bytes


def _head_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    """Bytes of one chunk of the vocabulary, which is the Step's layer."""
    model = costs.inputs.model
    chunk = vocabulary_chunk_rows(model.output_size)
    return max(0, min(chunk, model.output_size - step.layer * chunk)) * costs.inputs.output_row_bytes


def _embedded_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    """Bytes of embedded rows that come to the accelerator: per-layer embeddings are looked up by the host alone."""
    s = costs.inputs
    if costs.embeds_on_gpu:
        return load.tokens * s.per_layer_bytes
    return 0.0 if load.hidden_on_host else load.tokens * (s.hidden_bytes + s.per_layer_bytes)


def _bytes_from_embedding(costs: StepCosts, load: BatchLoad) -> float:
    """Bytes of rows that are embedded on the accelerator, and wait in host memory."""
    s = costs.inputs
    waits = costs.embeds_on_gpu and load.hidden_on_host
    return load.tokens * (s.hidden_bytes + s.per_layer_bytes) if waits else 0.0


def _stored_hidden_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    return (load.tokens - (0 if step.layer == 0 else load.deferred)) * costs.inputs.hidden_bytes


def _loaded_hidden_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    """Bytes of activations, and of the layer's input from per-layer embeddings for all rows that begin it."""
    s = costs.inputs
    per_layer = (load.tokens - load.deferred) * s.per_layer_bytes / costs.config.num_layers
    begun = load.deferred * s.per_layer_bytes if step.layer == 0 else 0.0
    return _stored_hidden_bytes(costs, step, load) + per_layer + begun


def _staged_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    if costs.config.has_state(step.layer):
        return (load.states.host_in + load.states.disk_in) * costs.inputs.state_row_bytes
    windowed, passing = costs.config.windows[step.layer] is not None, costs.passing(step, load)
    host_blocks = load.windowed_host_blocks if windowed else passing.host_blocks
    disk_blocks = passing.all_disk[0] if passing.disk_reads[0] else 0
    if not costs.config.owns_kv(step.layer):
        host_blocks, disk_blocks = host_blocks + load.new_host_blocks, passing.all_disk[0]
    return (host_blocks + disk_blocks) * costs.inputs.layers.read_blocks[step.layer]


def _swapped_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    """Bytes of blocks that move to another pool, and of their summaries."""
    sizes = costs.inputs.layers
    blocks, _ = load.swapped_in if step.kind == "swap_in" else load.swapped_out
    return blocks * (sizes.blocks[step.layer] + sizes.summaries[step.layer])


def _stored_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    if costs.config.has_state(step.layer):
        return (load.states.host_out + load.states.disk_out) * costs.inputs.state_row_bytes
    block_bytes = costs.inputs.layers.blocks[step.layer]
    return load.new_tokens * block_bytes / costs.inputs.kv_block_size + load.disk_writes[0] * block_bytes


def _attended_seqs(step: Step, load: BatchLoad) -> int:
    """Sequences that the CPU attends to in the Step."""
    return len(load.contexts_of(KVPlacement.CPU if step.deferred_batch is None else KVPlacement.DEFERRED))


def _sent_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    s = costs.inputs
    sent = s.layers.sent[step.layer]
    if step.deferred_batch is not None:  # in a table that is as wide as in any layer
        sent += max(s.layers.queries) - s.layers.queries[step.layer]
    return _attended_seqs(step, load) * sent


def _result_bytes(costs: StepCosts, step: Step, load: BatchLoad) -> float:
    results = costs.inputs.layers.results
    return _attended_seqs(step, load) * (results[step.layer] if step.deferred_batch is None else max(results))


# The bytes of each kind of Step that copies between the host's memory and an accelerator's.
_BYTES: Mapping[str, Callable[[StepCosts, Step, BatchLoad], float]] = {
    "load_weight": _weight_bytes,
    "load_head": _head_bytes,
    "embed": _embedded_bytes,
    "load_hidden": _loaded_hidden_bytes,
    "store_hidden": _stored_hidden_bytes,
    "load_cache": _staged_bytes,
    "swap_in": _swapped_bytes,
    "swap_out": _swapped_bytes,
    "store_cache": _stored_bytes,
    "send_qkv": _sent_bytes,
    "send_deferred": _sent_bytes,
    "load_attention": _result_bytes,
    "join_deferred": _result_bytes,
}
