"""The fastest placement as a mixed-integer program (MIP): FlexGen's equation (1), over the lanes of costs.py.

The unknowns are counts: layers per weight tensor and tier, sequences per KV placement, micro-batches whose activations
stay on the GPU. As real numbers they make the LP, a bound no placement can beat; as integers the placement that can be
carried out. Both come from the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from batchgen.core.kv_placement import TIERS, KVPlacement
from batchgen.core.units import GIB
from batchgen.planner.costs import can_delegate, head_lanes, job_seconds, layer_lanes, sweep_overhead_s
from batchgen.planner.linear import Expression, Linear, number, total
from batchgen.planner.memory import peak_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Amounts, Counts, Placement, placement_of
from batchgen.planner.problem import Allowed, CostInputs
from batchgen.planner.solver import MIP
from batchgen.planner.startup import spared_by_disk_s, startup_s

# Integer placements are proven this close to the fastest one, and to the one that moves least.
GAP = 1e-4
# Placements whose jobs take longer than the fastest by this part are as good.
EQUALLY_FAST = 5e-3
_MOVING_GAP = 0.01
# The solver keeps rows to within some bytes; the runtime keeps budgets to the byte.
_TOLERANCE_BYTES = 64 << 10
_MOVING = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class Solution:
    """A placement that the solver found.

    Attributes:
        seconds: time of all sweeps.
        startup_s: time from where weights begin to load to the first sweep.
        placement, counts: the placement, as fractions and as counts of layers, sequences and micro-batches.
        memory_price_s: seconds that one more GiB of a tier would save.
        lane_price_s: seconds that a 10 % faster lane would save, both at this block size and to first order (from the
            duals; empty for integer placements).
        columns: values of the MIP's columns, for the solver to start from again.
    """

    seconds: float
    placement: Placement
    counts: Counts
    memory_price_s: dict[str, float]
    lane_price_s: dict[str, float]
    columns: tuple[float, ...] = ()
    startup_s: float = 0.0

    @property
    def job_s(self) -> float:
        """Seconds of the job, from where weights begin to load."""
        return self.startup_s + self.seconds


def with_embeddings(s: CostInputs, solution: Solution) -> Solution:
    """The placement with the input embeddings on the GPU, if it leaves memory for them there.

    They are worth less than anything else in that memory: all they save is copies of a row for each token.
    """
    if not s.on_gpu or not s.embedding_bytes:
        return solution
    counts = replace(solution.counts, embeddings_on_gpu=1, embeddings_on_disk=0)
    placement = counts.placement(s)
    if number(peak_bytes(s, placement)["gpu"]) > s.budgets["gpu"] - _TOLERANCE_BYTES:
        return solution
    return replace(solution, counts=counts, placement=placement)


def in_host_memory(s: CostInputs, phases: Sequence[Phase], allowed: Allowed) -> Solution | None:
    """The placement without a GPU that has weights and KV in host memory, where that is known to be about the fastest.

    The disk could only spare some of the start-up: no sweep is faster with it. None where that would matter, where the
    placement does not fit, or where it is not allowed: then a solver must decide.
    """
    if s.on_gpu or "cpu" not in allowed.weight_tiers or KVPlacement.CPU not in allowed.kv_placements:
        return None
    layers, batches = s.model.num_layers, s.num_gpu_batches
    seqs = {name: s.swept_seqs * (name == KVPlacement.CPU) for name in KVPlacement} | {"deferred": s.deferred_seqs}
    counts = Counts({group: (0, layers, 0) for group in s.group_bytes}, seqs, (0, batches), 0)
    placement = counts.placement(s)
    for tier, peak in peak_bytes(s, placement).items():
        if number(peak) > max(0, s.budgets[tier] - _TOLERANCE_BYTES):
            return None
    seconds, before_s = job_seconds(s, phases, placement), number(startup_s(s, placement))
    if spared_by_disk_s(s, kv=KVPlacement.DISK in allowed.kv_placements) > EQUALLY_FAST * (seconds + before_s):
        return None
    return Solution(seconds, placement, counts, {}, {}, (), before_s)


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
        within_s: seconds of the job within which the placement is sought that keeps buses and disk least busy; None:
            the fastest placement is sought.
        start: a solution of the same inputs and phases, which the solver begins with. Where it needs no weight store
            that has to be written first, none is sought that does.
    """
    mip = _PlacementMIP(s, phases, allowed, integer)
    if within_s is not None:
        mip.move_least(within_s)
        if start and not number(start.placement.needs_store):
            mip.write_no_store()
    columns = start.columns if start else ()
    if not mip.solve(GAP if within_s is None else _MOVING_GAP, columns):
        return None
    counts = mip.counts()
    # Integer placements are costed as numbers; a relaxed one is what the solver says (its buffers are relaxed too).
    placement = counts.placement(s) if integer else mip.placement_value()
    seconds = job_seconds(s, phases, placement) if integer else mip.seconds()
    before_s = number(startup_s(s, placement)) if phases else 0.0
    memory, lanes = ({}, {}) if integer else mip.prices()
    return Solution(seconds, placement, counts, memory, lanes, mip.columns, before_s)


def fits(s: CostInputs, allowed: Allowed) -> bool:
    """Return true if the budgets allow any placement of the LP relaxation."""
    return _PlacementMIP(s, (), allowed, False).solve(GAP)


def shortfall_bytes(s: CostInputs, phases: Sequence[Phase], allowed: Allowed, tier: str) -> float | None:
    """The least extra memory of one tier with which some integer placement fits; None if it alone cannot help."""
    mip = _PlacementMIP(s, phases, allowed, True, elastic=tier)
    return mip.value(mip.slack) * GIB if mip.solve(GAP) else None


class _PlacementMIP(MIP):
    """The unknowns and rows for one set of inputs; it is the `Rounding` of its placement."""

    def __init__(
        self, s: CostInputs, phases: Sequence[Phase], allowed: Allowed, integer: bool, elastic: str | None = None
    ) -> None:
        super().__init__()
        self.s, self.phases = s, phases
        self.integer = integer
        self.amounts = self._make_amounts(allowed, elastic)
        self.placement = placement_of(s, self.amounts, self)
        self.slack: Linear = self.column() if elastic else 0.0
        self.memory_rows: dict[str, int] = {}
        for tier, peak in peak_bytes(s, self.placement).items():
            capacity = max(0, s.budgets[tier] - _TOLERANCE_BYTES) / GIB
            limit = self.slack + capacity if tier == elastic else capacity
            self.memory_rows[tier] = self.at_most(peak * (1 / GIB), limit)
        self.lane_rows: list[tuple[int, str, Linear]] = []
        objective: list[Linear] = []
        self.fixed_s = 0.0
        for phase in phases if elastic is None else ():
            layer, head = self.column(), self.column()
            self._add_bounds(layer, layer_lanes(s, phase, self.placement))
            self._add_bounds(head, head_lanes(s, phase, self.placement))
            objective += [phase.sweeps * s.model.num_layers * layer, phase.sweeps * head]
            self.fixed_s += phase.sweeps * sweep_overhead_s(s, phase)
        self.startup: Linear = startup_s(s, self.placement) if phases and elastic is None else 0.0
        self.objective = total((*objective, self.startup)) if elastic is None else self.slack

    def _make_amounts(self, allowed: Allowed, elastic: str | None) -> Amounts[Expression]:
        """The unknowns, each group of which adds up to what is placed."""
        s, layers, batches = self.s, self.s.model.num_layers, self.s.num_gpu_batches
        tiers = [tier for tier in allowed.weight_tiers if tier in s.budgets]
        if elastic != "disk" and s.loading.store_bytes > s.budgets["disk"]:
            tiers = [tier for tier in tiers if tier != "disk"]
        classes = [name for name in allowed.kv_placements if _class_exists(s, name)]

        def in_tiers() -> tuple[Expression, Expression, Expression]:
            gpu, cpu, disk = (self._count(layers if tier in tiers else 0) for tier in TIERS)
            return gpu, cpu, disk

        amounts = Amounts(
            weight_layers={group: in_tiers() for group in s.group_bytes},
            kv_seqs={name: self._count(s.swept_seqs if name in classes else 0) for name in KVPlacement},
            kv_layers=self._count(layers - 1) if allowed.kv_by_layer else Expression({}),
            activation_batches=(self._count(batches if s.on_gpu else 0), self._count(batches)),
            head_on_gpu=self._count(1 if s.on_gpu else 0),
            # An accelerator's chunks come from host memory.
            head_on_disk=self._count(1 if "disk" in tiers and s.head_table_bytes and not s.on_gpu else 0),
            embeddings_on_disk=self._count(1 if "disk" in tiers and s.embedding_table_bytes else 0),
        )
        for of_group in amounts.weight_layers.values():
            self.equal(total(of_group), layers)
        self.equal(total(amounts.kv_seqs.values()), s.swept_seqs)
        self.equal(total(amounts.activation_batches), batches)
        return amounts

    def _count(self, most: int) -> Expression:
        return self.column(most, integer=self.integer)

    def any(self, amounts: Sequence[Linear], most: int) -> Expression:
        flag = self._count(1)
        self.at_most(total(amounts), most * flag)
        return flag

    def least(self, most: int, *shares: tuple[Linear, float]) -> Expression:
        count = self._count(most)
        for amount, parts in shares:
            self.at_most(amount, count * parts)
        return count

    def if_any(self, amounts: Sequence[Linear], most: int, value: Linear, highest: float, lowest: Linear) -> Expression:
        size = self.column()
        self.at_most(value - highest * (1 - self.any(amounts, most)), size)
        self.at_most(lowest, size)
        return size

    def _add_bounds(self, seconds: Expression, lanes: dict[str, Linear]) -> None:
        for lane, lane_s in lanes.items():
            self.lane_rows.append((self.at_most(lane_s, seconds), lane, lane_s))

    def move_least(self, within_s: float) -> None:
        """Make the time a limit, and the seconds of the lanes that move data the objective."""
        self.at_most(self.objective, within_s - self.fixed_s)
        moving: list[Linear] = []
        for phase in self.phases:
            lanes = layer_lanes(self.s, phase, self.placement)
            moving += [phase.sweeps * self.s.model.num_layers * lanes[lane] for lane in _MOVING if lane in lanes]
        self.objective = total(moving)

    def write_no_store(self) -> None:
        """Leave weights where no weight store has to be written for them."""
        if isinstance(self.placement.needs_store, Expression):
            self.at_most(self.placement.needs_store, 0)

    def seconds(self) -> float:
        """Seconds of all sweeps in the solution."""
        return self.value(self.objective) - self.value(self.startup) + self.fixed_s

    def counts(self) -> Counts:
        """The solution's counts, which are whole numbers in an integer solution."""

        def read(amount: Linear) -> float:
            return round(self.value(amount)) if self.integer else self.value(amount)

        amounts = self.amounts
        return Counts(
            {group: (read(gpu), read(cpu), read(disk)) for group, (gpu, cpu, disk) in amounts.weight_layers.items()},
            {name: read(count) for name, count in amounts.kv_seqs.items()} | {"deferred": self.s.deferred_seqs},
            (read(amounts.activation_batches[0]), read(amounts.activation_batches[1])),
            read(amounts.head_on_gpu),
            head_on_disk=read(amounts.head_on_disk),
            embeddings_on_disk=read(amounts.embeddings_on_disk),
            kv_layers=read(amounts.kv_layers),
        )

    def placement_value(self) -> Placement:
        """The solution's fractions and buffers."""
        return Placement(*(self.value(getattr(self.placement, f.name)) for f in fields(Placement)))

    def prices(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds that one more GiB of each tier, and 10 % more of each lane's rate, would save to first order."""
        memory = {tier: max(0.0, -self.dual(row)) for tier, row in self.memory_rows.items()}
        lanes: dict[str, float] = {}
        for row, lane, seconds in self.lane_rows:
            saved = abs(self.dual(row)) * self.value(seconds) * (1 - 1 / 1.1)
            lanes[lane] = lanes.get(lane, 0.0) + saved
        return memory, lanes


def _class_exists(s: CostInputs, kv_placement: str) -> bool:
    """Return true if sequences can have the KV placement; the number of deferred ones is fixed before."""
    if kv_placement == "deferred":
        return False
    if not s.on_gpu:
        return kv_placement in ("cpu", "disk")
    return kv_placement != "cpu" or can_delegate(s)
