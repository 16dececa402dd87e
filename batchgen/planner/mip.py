"""The fastest placement as a mixed-integer programme (MIP): FlexGen's equation (1), over the lanes of costs.py.

The unknowns are counts: layers per weight tensor and tier, sequences per KV class, micro-batches whose activations stay
on the GPU. As real numbers they make the LP, a bound no placement can beat; as integers the placement that can be
carried out. Both come from the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from batchgen.core.plan import KV_CLASSES, TIERS
from batchgen.planner.costs import bounds, can_delegate, head_lanes, job_seconds, layer_lanes, sweep_overhead_s
from batchgen.planner.linear import Affine, Programme, total
from batchgen.planner.peak_memory import peak_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts, Placement, staged_classes
from batchgen.planner.problem import Allowed, CostInputs, Linear

GIB = 1 << 30
# Integer placements are proven this close to the fastest one, and to the one that moves least.
GAP = 1e-4
_MOVING_GAP = 0.01
# The solver keeps rows to within some bytes; the runtime keeps budgets to the byte.
_TOLERANCE_BYTES = 64 << 10
_MOVING = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class Solution:
    """A placement that the solver found.

    Attributes:
        seconds: of all sweeps.
        placement, counts: the same, as fractions and in whole things.
        memory_price_s: seconds that one more GiB of a tier would save.
        lane_price_s: seconds that a 10 % faster lane would save, both at this block size and to first order (from the
            duals; empty for integer placements).
        columns: what the solver found, for it to start from again.
    """

    seconds: float
    placement: Placement
    counts: Counts
    memory_price_s: dict[str, float]
    lane_price_s: dict[str, float]
    columns: tuple[float, ...] = ()


def with_embeddings(s: CostInputs, found: Solution) -> Solution:
    """The placement with the input embeddings on the GPU, if it leaves memory for them there.

    They are worth less than anything else in that memory: all they save is copies of a row for each token.
    """
    if not s.on_gpu or not s.embedding_bytes:
        return found
    counts = replace(found.counts, embeddings_on_gpu=1)
    placement = counts.placement(s)
    if peak_bytes(s, placement)["gpu"] > s.budgets["gpu"] - _TOLERANCE_BYTES:
        return found
    return replace(found, counts=counts, placement=placement)


def solve(
    s: CostInputs,
    phases: Sequence[Phase],
    allowed: Allowed,
    *,
    integer: bool,
    within_s: float | None = None,
    start: Solution | None = None,
) -> Solution | None:
    """The fastest placement, or None where the budgets allow none.

    Args:
        within_s: of the placements that take no longer than this, the one that keeps buses and disk least busy.
        start: a solution of the same inputs and phases, which the solver begins with.
    """
    programme = _PlacementProgramme(s, phases, allowed, integer)
    if within_s is not None:
        programme.move_least(within_s)
    columns = start.columns if start else ()
    if not programme.solve(GAP if within_s is None else _MOVING_GAP, columns):
        return None
    counts = programme.counts()
    # Integer placements are costed as numbers; a relaxed one is what the solver says (its buffers are relaxed too).
    placement = counts.placement(s) if integer else programme.placement_value()
    seconds = job_seconds(s, phases, placement) if integer else programme.seconds()
    memory, lanes = ({}, {}) if integer else programme.prices()
    return Solution(seconds, placement, counts, memory, lanes, programme.found)


def fits(s: CostInputs, allowed: Allowed) -> bool:
    """Whether the budgets allow any placement, in parts of whole things."""
    return _PlacementProgramme(s, (), allowed, False).solve(GAP)


def shortfall_bytes(s: CostInputs, phases: Sequence[Phase], allowed: Allowed, tier: str) -> float | None:
    """The least extra memory of one tier with which some placement of whole things fits; None if it alone cannot help."""
    programme = _PlacementProgramme(s, phases, allowed, True, elastic=tier)
    return programme.value(programme.slack) * GIB if programme.solve(GAP) else None


class _PlacementProgramme(Programme):
    """The unknowns and rows for one set of inputs."""

    def __init__(
        self, s: CostInputs, phases: Sequence[Phase], allowed: Allowed, integer: bool, elastic: str | None = None
    ) -> None:
        super().__init__()
        self.s, self.phases = s, phases
        self.integer = integer
        self._make_variables(allowed)
        self.slack = self.column() if elastic else Affine({})
        self.memory_rows: dict[str, int] = {}
        for tier, peak in peak_bytes(s, self.placement).items():
            capacity = max(0, s.budgets[tier] - _TOLERANCE_BYTES) / GIB
            limit = self.slack + capacity if tier == elastic else capacity
            self.memory_rows[tier] = self.at_most(peak * (1 / GIB), limit)
        self.lane_rows: list[tuple[int, dict[str, Linear]]] = []
        objective = []
        self.fixed_s = 0.0
        for phase in phases if elastic is None else ():
            layer, head = self.column(), self.column()
            self._add_bounds(layer, layer_lanes(s, phase, self.placement))
            self._add_bounds(head, head_lanes(s, phase, self.placement))
            objective += [phase.sweeps * s.model.num_layers * layer, phase.sweeps * head]
            self.fixed_s += phase.sweeps * sweep_overhead_s(s, phase)
        self.objective = total(objective) if elastic is None else self.slack

    def _make_variables(self, allowed: Allowed) -> None:
        s = self.s
        sizes, layers = s.group_bytes, s.model.num_layers
        tiers = [t for t in allowed.weight_tiers if t in s.budgets]
        classes = [c for c in allowed.kv_classes if _class_exists(s, c)]
        self.weights = {
            tensor: tuple(self._count(layers if tier in tiers else 0) for tier in TIERS) for tensor in sizes
        }
        self.kv = {c: self._count(s.swept_seqs if c in classes else 0) for c in KV_CLASSES}
        self.kv_layers = self._count(layers - 1) if allowed.kv_by_layer else Affine({})
        staying = self.kv_layers * (1 / layers)
        batches = s.num_gpu_batches
        self.activations = (self._count(batches if s.on_gpu else 0), self._count(batches))
        self.head_gpu = self._count(1 if s.on_gpu else 0)
        for tensor in sizes:
            self.equal(total(self.weights[tensor]), layers)
        self.equal(total(self.kv.values()), s.swept_seqs)
        self.equal(total(self.activations), batches)

        def fraction(tier: int) -> Affine:
            return total(self.weights[t][tier] * (size / (layers * s.layer_bytes)) for t, size in sizes.items())

        self.placement = Placement(
            w_gpu=fraction(0),
            w_cpu=fraction(1),
            w_disk=fraction(2),
            kv_gpu=self.kv["gpu"] * (1 / s.swept_seqs) + staying,
            kv_cpu=self.kv["cpu"] * (1 / s.swept_seqs),
            kv_streamed=self.kv["streamed"] * (1 / s.swept_seqs) - staying,
            kv_disk=self.kv["disk"] * (1 / s.swept_seqs),
            act_gpu=self.activations[0] * (1 / batches),
            act_cpu=self.activations[1] * (1 / batches),
            head_gpu=self.head_gpu,
            head_cpu=1 - self.head_gpu,
            streamed_peak=self._peak(s.slot_group_bytes, (1, 2), layers),
            disk_peak=self._peak(s.disk_group_bytes, (2,), layers),
            experts_disk=total(
                self.weights[group][2] * (size / (layers * sum(s.expert_bytes.values())))
                for group, size in s.expert_bytes.items()
            ),
            **self._buffers(),
        )

    def _peak(self, sizes: Mapping[str, int], tiers: Sequence[int], layers: int) -> Affine:
        """A buffer holds the fullest layer: what any layer has there."""
        used = [self._any([self.weights[tensor][i] for i in tiers], layers) * size for tensor, size in sizes.items()]
        return total(used) * (1 / sum(sizes.values()))

    def _buffers(self) -> dict[str, Linear]:
        """Placement.staged_blocks and those after it, the same as in `Counts.placement`."""
        s, batches = self.s, self.s.num_gpu_batches
        parts = s.equal_parts
        delegates: Linear = self._any([self.kv["cpu"]], s.max_num_seqs) if s.on_gpu else 0
        passing = self._count(s.batch_seqs)
        self.at_most(total(self.kv[c] for c in staged_classes(s)), passing * parts)
        attends: Linear = 1 if s.deferred_seqs else delegates  # the CPU
        self.at_most(attends, passing)
        staged = passing * s.longest_blocks + attends * s.delegated_prompt_blocks
        if not s.on_gpu:
            on_disk = staged
        elif s.runtime.attends_disk_kv_on_cpu:
            read = self._count(s.batch_seqs)
            self.at_most(self.kv["disk"], read * parts)
            on_disk = read * s.longest_blocks
        else:
            # As many as are staged, if any sequence is on disk.
            most = s.batch_seqs * s.longest_blocks + s.delegated_prompt_blocks
            on_disk = self.column()
            self.at_most(staged - most * (1 - self._any([self.kv["disk"]], s.max_num_seqs)), on_disk)
            self.at_most(self.kv["disk"] * (s.longest_blocks / parts), on_disk)
        waiting: Linear = self._any([self.activations[1]], batches) if s.on_gpu else 0
        stages: Linear = (
            self._any([self.kv[c] for c in staged_classes(s)], s.max_num_seqs) if s.on_gpu and batches > 1 else 0
        )
        flags = {"delegates": delegates, "acts_wait": waiting, "stages": stages}
        return {"staged_blocks": staged, "disk_blocks": on_disk} | flags

    def _any(self, counts: Sequence[Affine], most: int) -> Affine:
        """1 as soon as any of the counts, which add up to at most `most`, is not 0."""
        flag = self._count(1)
        self.at_most(total(counts), most * flag)
        return flag

    def _count(self, most: int) -> Affine:
        return self.column(most, integer=self.integer)

    def _add_bounds(self, seconds: Affine, lanes: dict[str, Linear]) -> None:
        runtime = self.s.runtime
        together: list[str | None] = [*(lane for lane in lanes if lane not in runtime.serial)] or [None]
        for lane, bound in zip(together, bounds(runtime, lanes), strict=True):
            row = self.at_most(bound, seconds)
            members = [*(m for m in runtime.serial if m in lanes), *([] if lane is None else [lane])]
            self.lane_rows.append((row, {m: lanes[m] for m in members}))

    def move_least(self, within_s: float) -> None:
        """Make the time a limit, and the seconds of the lanes that move data the objective."""
        self.at_most(self.objective, within_s - self.fixed_s)
        moving: list[Linear] = []
        for phase in self.phases:
            lanes = layer_lanes(self.s, phase, self.placement)
            moving += [phase.sweeps * self.s.model.num_layers * lanes[lane] for lane in _MOVING if lane in lanes]
        self.objective = total(moving)

    def seconds(self) -> float:
        """Of all sweeps."""
        return self.value(self.objective) + self.fixed_s

    def counts(self) -> Counts:
        read = (lambda count: round(self.value(count))) if self.integer else self.value
        return Counts(
            {tensor: (read(gpu), read(cpu), read(disk)) for tensor, (gpu, cpu, disk) in self.weights.items()},
            {name: read(v) for name, v in self.kv.items()} | {"deferred": self.s.deferred_seqs},
            (read(self.activations[0]), read(self.activations[1])),
            read(self.head_gpu),
            kv_layers=read(self.kv_layers),
        )

    def placement_value(self) -> Placement:
        return Placement(*(self.value(getattr(self.placement, f.name)) for f in fields(Placement)))

    def prices(self) -> tuple[dict[str, float], dict[str, float]]:
        memory = {tier: max(0.0, -self.dual(row)) for tier, row in self.memory_rows.items()}
        lanes: dict[str, float] = {}
        for row, members in self.lane_rows:
            price = abs(self.dual(row))
            for lane, expression in members.items():
                # A rate 10 % higher takes this much off the lane.
                saved = price * self.value(expression) * (1 - 1 / 1.1)
                lanes[lane] = lanes.get(lane, 0.0) + saved
        return memory, lanes


def _class_exists(s: CostInputs, kv_class: str) -> bool:
    """Whether sequences can be placed there: how many are deferred is fixed before."""
    if kv_class == "deferred":
        return False
    if not s.on_gpu:
        return kv_class in ("cpu", "disk")
    return kv_class != "cpu" or can_delegate(s)
