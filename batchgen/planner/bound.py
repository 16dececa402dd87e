"""Lower bounds on the seconds of a job, whatever is placed where, which the search knows before any solver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from batchgen.core.hardware import known
from batchgen.planner.costs import (
    can_delegate,
    disk_bytes,
    experts_skipped_frac,
    phase_decode_attention_s,
    phase_dequantize_s,
    phase_matmul_s,
    phase_prefill_attention_s,
    phase_prefix_attention_s,
    streamed_bytes,
    sweep_overhead_s,
)
from batchgen.planner.linear import number
from batchgen.planner.memory import peak_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import all_reduce_s, elementwise_s, experts_frac, layer_overhead_s, transfer_s

_NOTHING = Placement(
    w_gpu=0, w_cpu=0, w_disk=0, kv_gpu=0, kv_cpu=0, kv_streamed=0, kv_disk=0, act_gpu=0, act_cpu=0,
    head_gpu=0, head_cpu=0, embed_disk=1, streamed_peak=0, disk_peak=0,
)  # fmt: skip


class LowerBounds:
    """Lower bounds of the entries of the searches of one problem, and of the problem with restrictions.

    What a sweep takes in any number of micro-batches is computed once, for entries that have the same phases, and so is
    the bound of an entry that several searches have.
    """

    def __init__(self) -> None:
        """Begin without any knowledge of phases."""
        self._products: dict[_Key, tuple[float, ...]] = {}
        self._sweeps: dict[_Key, tuple[_Sweep, ...]] = {}
        self._phases: dict[int, tuple[Phase, ...]] = {}  # by identity, which lasts as long as they are kept
        self._known: dict[tuple[_Key, int, str, bool], float] = {}  # quick and close bounds

    def quick_s(self, s: CostInputs, phases: tuple[Phase, ...]) -> float:
        """Seconds below `bound_s`, from parts of it that are soon computed: products, and weights that must move."""
        return self._once(s, phases, self._quick_s, close=False)

    def _once(self, s: CostInputs, phases: tuple[Phase, ...], bound: Callable[..., float], *, close: bool) -> float:
        """A bound of an entry, computed once: entries of one problem that have the same key differ in nothing else."""
        key = self._key(phases, s.weight_format, s.num_gpu_batches), s.max_num_seqs, s.kv_format, close
        if key not in self._known:
            self._known[key] = bound(s, phases)
        return self._known[key]

    def _quick_s(self, s: CostInputs, phases: tuple[Phase, ...]) -> float:
        layers, seconds = s.model.num_layers, 0.0
        weights, off_gpu_s = float(s.layer_bytes * layers), 0.0
        if s.on_gpu:
            weights = max(0.0, weights - s.budgets["gpu"])
            off_gpu_s = weights / layers / known(s.hardware.h2d_bytes_per_s)
        on_disk_s = max(0.0, weights - s.budgets["cpu"]) / layers / s.hardware.disk_read_bytes_per_s
        for phase, products_s in zip(phases, self._products_s(s, phases), strict=True):
            needed = 1 - _experts_left_out(s, phase)
            layer_s = max(products_s, off_gpu_s, on_disk_s * needed)
            seconds += phase.sweeps * (layers * layer_s + sweep_overhead_s(s, phase))
        return seconds

    def bound_s(self, s: CostInputs, phases: tuple[Phase, ...]) -> float:
        """Seconds that no placement can beat, without a solver; infinite where weights and KV fit nowhere.

        The bound counts compute with decode attention split between GPU and CPU at its best, what the GPU cannot hold
        and must cross the bus or be attended to by the CPU, and what must come from disk. Where not all fits, what
        costs least is away: KV, as far as there is any, or weights.
        """
        return self._once(s, phases, self._bound_s, close=True)

    def _bound_s(self, s: CostInputs, phases: tuple[Phase, ...]) -> float:
        layers = s.model.num_layers
        weights, kv = s.layer_bytes * layers, s.max_num_seqs * (s.seq_kv_bytes + s.seq_state_bytes)
        free = {tier: s.budgets[tier] - number(taken) for tier, taken in peak_bytes(s, _NOTHING).items()}
        if min(free.values()) < 0:
            return math.inf
        gpu, cpu = free.get("gpu", 0.0), free["cpu"]
        off_gpu, on_disk = max(0.0, weights + kv - gpu), max(0.0, weights + kv - gpu - cpu)
        total = 0.0
        overheads_s = s.num_gpu_batches * layer_overhead_s(s.rates)
        parts = zip(phases, self._products_s(s, phases), self._parts(s, phases), strict=True)
        for phase, products_s, sweep in parts:
            compute_s = products_s + sweep.prompts_s + overheads_s + all_reduce_s(s, phase.tokens, s.num_gpu_batches)
            attention_s = phase_decode_attention_s(s, phase, s.rates)
            layer_s = compute_s + attention_s
            if s.on_gpu:
                layer_s = _gpu_layer_s(s, phase, compute_s, attention_s, sweep.streamed_bytes, kv, off_gpu)
            if on_disk:
                layer_s = max(layer_s, _disk_s(s, sweep.kv_on_disk_s, on_disk, _experts_left_out(s, phase)))
            total += phase.sweeps * (layers * layer_s + sweep.overhead_s)
        return total

    def _products_s(self, s: CostInputs, phases: tuple[Phase, ...]) -> tuple[float, ...]:
        """Seconds of one layer's products in each phase, with dequantizing the weights that they need."""
        key = self._key(phases, s.weight_format, s.num_gpu_batches)
        if key not in self._products:
            self._products[key] = tuple(
                phase_matmul_s(s, phase)
                + phase_dequantize_s(s, phase) * (1 - experts_frac(s.model) * _experts_left_out(s, phase))
                for phase in phases
            )
        return self._products[key]

    def _parts(self, s: CostInputs, phases: tuple[Phase, ...]) -> tuple[_Sweep, ...]:
        """The parts of each phase that depend on the number of micro-batches only where these share prefixes."""
        copies = s.num_gpu_batches if s.workload.prefix_len else 0
        key = self._key(phases, s.kv_format, copies)
        if key not in self._sweeps:
            self._sweeps[key] = tuple(_Sweep.of(s, phase) for phase in phases)
        return self._sweeps[key]

    def _key(self, phases: tuple[Phase, ...], number_format: str, batches: int) -> _Key:
        self._phases[id(phases)] = phases
        return id(phases), number_format, batches


_Key = tuple[int, str, int]


class _Sweep(NamedTuple):
    """Seconds and bytes of one layer of a sweep that do not depend on the number of micro-batches.

    Attributes:
        prompts_s: Seconds of computation but for products and decode attention.
        streamed_bytes: `costs.streamed_bytes`.
        kv_on_disk_s: Seconds of reading and writing KV if all of it were on disk.
        overhead_s: Seconds of the whole sweep beside its layers.
    """

    prompts_s: float
    streamed_bytes: float
    kv_on_disk_s: float
    overhead_s: float

    @classmethod
    def of(cls, s: CostInputs, phase: Phase) -> _Sweep:
        attention_s = phase_prefill_attention_s(s, phase) + phase_prefix_attention_s(s, phase)
        read_bytes, written_bytes = disk_bytes(s, phase).on_disk
        read_s = transfer_s(read_bytes, s.hardware.disk_read_bytes_per_s)
        written_s = transfer_s(written_bytes, s.hardware.disk_write_bytes_per_s)
        prompts_s = attention_s + elementwise_s(s, phase.tokens)
        return cls(prompts_s, streamed_bytes(s, phase), read_s + written_s, sweep_overhead_s(s, phase))


def lower_bound_s(s: CostInputs, phases: tuple[Phase, ...]) -> float:
    """Seconds that no placement of one entry can beat (`LowerBounds.bound_s`)."""
    return LowerBounds().bound_s(s, phases)


def _experts_left_out(s: CostInputs, phase: Phase) -> float:
    """The part of a layer's experts that a sweep can do without, if experts are read on demand."""
    return 0.0 if s.on_gpu else experts_skipped_frac(s, phase)


def _gpu_layer_s(
    s: CostInputs, phase: Phase, compute_s: float, attention_s: float, streamed: float, kv: float, off_gpu: float
) -> float:
    """Seconds of one layer with a GPU, whatever it holds.

    With one micro-batch nothing but attention runs beside that of the CPU (`chain` of `costs._chains`).

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        compute_s: Seconds of one layer's computation but for decode attention.
        attention_s: Seconds of one layer's decode attention on the GPU.
        streamed: Bytes of one layer's KV and states that come to the GPU if all sequences are streamed.
        kv: Bytes of KV and states of all layers.
        off_gpu: Bytes of weights, KV and states of all layers that the GPU cannot hold.
    """
    layers, h2d = s.model.num_layers, known(s.hardware.h2d_bytes_per_s)
    # Weights count in full in every sweep, KV as far as it is filled.
    weights_off_gpu = max(0.0, off_gpu - kv) / layers
    filled = min(1.0, streamed * layers / kv) if kv else 0.0
    moved = weights_off_gpu + filled * min(kv, off_gpu) / layers
    weights_s = weights_off_gpu / h2d
    layer_s, moved_s = compute_s + attention_s, moved / h2d
    if attention_s and can_delegate(s):
        delegated_s = phase_decode_attention_s(s, phase, s.hardware.cpu)
        # With one micro-batch the CPU attends in the time that the GPU's other computation leaves.
        waited_s = compute_s if s.num_gpu_batches == 1 else 0.0
        attended_bytes_per_s = streamed / delegated_s
        if s.hardware.shared_cores:
            layer_s = compute_s + min(attention_s, delegated_s)
        else:
            rest_s = (compute_s - waited_s + attention_s) * delegated_s / (attention_s + delegated_s)
            layer_s = max(compute_s, waited_s + rest_s)
        moved_s = max(weights_s, (moved + waited_s * attended_bytes_per_s) / (h2d + attended_bytes_per_s))
    return max(layer_s, moved_s)


def _disk_s(s: CostInputs, kv_s: float, on_disk: float, skipped: float) -> float:
    """Seconds of one layer in which its weights and KV on disk come from there and go there.

    Args:
        s: The inputs of the cost model.
        kv_s: Seconds of one layer's KV and states if all of it were on disk.
        on_disk: Bytes of weights, KV and states of all layers that must be on disk.
        skipped: The part of the experts that need not be read.
    """
    layers, hardware = s.model.num_layers, s.hardware
    # Each: bytes, and the seconds that all of them would take.
    weights = ((s.layer_bytes - s.all_expert_bytes, 1.0), (s.all_expert_bytes, 1 - skipped))
    items = [(size * layers, transfer_s(read * size, hardware.disk_read_bytes_per_s)) for size, read in weights]
    items.append((s.max_num_seqs * (s.seq_kv_bytes + s.seq_state_bytes), kv_s))
    seconds = 0.0
    for size, whole_s in sorted((item for item in items if item[0]), key=lambda item: item[1] / item[0]):
        seconds += whole_s * min(1.0, on_disk / size)
        on_disk = max(0.0, on_disk - size)
    return float(seconds)
