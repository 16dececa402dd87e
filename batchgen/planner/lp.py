"""Placement as a linear programme: FlexGen's equation (1), over the cost terms of cost.py, solved with PuLP.

The unknowns are counts: layers per weight tensor and tier, sequences per KV class, micro-batches whose activations stay
on the GPU. As real numbers they make the LP, a bound no placement can beat; as integers the placement that can be
carried out. Both come from the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import pulp

from batchgen.core.plan import KV_CLASSES, TIERS
from batchgen.planner.cost import bounds, can_delegate, head_lanes, layer_lanes, peak_bytes, sweep_overhead_s
from batchgen.planner.flow import Phase
from batchgen.planner.inputs import CostInputs, Linear, Placement
from batchgen.planner.solver_banner import silence_banner

GIB = 1 << 30
# Integer placements are proven this close to the best one.
_GAP = 1e-4
# The solver keeps rows to within some bytes; the runtime keeps budgets to the byte.
_TOLERANCE_BYTES = 64 << 10
_MOVING = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class Allowed:
    """What a plan may use. weight_tiers, kv_classes: subsets of policy.TIERS and policy.KV_CLASSES."""

    weight_tiers: tuple[str, ...] = TIERS
    kv_classes: tuple[str, ...] = KV_CLASSES


@dataclass(frozen=True)
class Counts:
    """A placement in whole things: policy.Policy's weight_layers, kv_seqs, activation_batches, head_tier, embedding_tier."""

    weight_layers: dict[str, tuple[float, float, float]]
    kv_seqs: dict[str, float]
    activation_batches: tuple[float, float]
    head_on_gpu: float
    embeddings_on_gpu: float = 0

    def placement(self, s: CostInputs) -> Placement:
        """Each group as parts of 1, and the buffers that the placement needs."""
        sizes, layers = s.group_bytes, s.model.num_layers

        def weights(tier: int) -> float:
            return sum(self.weight_layers[t][tier] * size for t, size in sizes.items()) / (layers * s.layer_bytes)

        def peak(groups: Mapping[str, int], tiers: Sequence[int]) -> float:
            used = (size for t, size in groups.items() if any(self.weight_layers[t][i] > 0 for i in tiers))
            return sum(used) / sum(groups.values())

        kv = {name: self.kv_seqs.get(name, 0) for name in KV_CLASSES}
        delegates = int(s.on_gpu and kv["cpu"] > 0)
        attends = int(delegates or s.deferred_seqs > 0)  # the CPU
        passing = max(-(-sum(kv[c] for c in _staged(s)) // s.num_gpu_batches), attends)
        staged = passing * s.longest_blocks + attends * s.delegated_prompt_blocks
        if s.runtime.attends_disk_kv_on_cpu:
            on_disk = -(-kv["disk"] // s.num_gpu_batches) * s.longest_blocks
        else:
            on_disk = staged if kv["disk"] else 0
        batches = sum(self.activation_batches)
        return Placement(
            w_gpu=weights(0),
            w_cpu=weights(1),
            w_disk=weights(2),
            **{f"kv_{c}": kv[c] / s.swept_seqs for c in ("gpu", "cpu", "streamed", "disk")},
            act_gpu=self.activation_batches[0] / batches,
            act_cpu=self.activation_batches[1] / batches,
            head_gpu=self.head_on_gpu,
            head_cpu=1 - self.head_on_gpu,
            streamed_peak=peak(sizes, (1, 2)),
            disk_peak=peak(s.disk_group_bytes, (2,)),
            staged_blocks=staged,
            disk_blocks=on_disk,
            delegates=delegates,
            acts_wait=int(self.activation_batches[1] > 0),
            stages=int(s.on_gpu and any(kv[c] > 0 for c in _staged(s))),
            embed_gpu=self.embeddings_on_gpu,
        )


@dataclass(frozen=True)
class Solution:
    """A placement that the solver found.

    Attributes:
        seconds: of all sweeps.
        placement, counts: the same, as fractions and in whole things.
        memory_price_s: seconds that one more GiB of a tier would save.
        lane_price_s: seconds that a 10 % faster lane would save, both at this block size and to first order (from the
            duals; empty for integer placements).
    """

    seconds: float
    placement: Placement
    counts: Counts
    memory_price_s: dict[str, float]
    lane_price_s: dict[str, float]


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


def job_seconds(s: CostInputs, phases: Sequence[Phase], at: Placement) -> float:
    """T = T_pre l + T_gen (n - 1) l (FlexGen A.3), for any sequence of phases, with what is not in the layers."""
    seconds: float = sum(
        phase.sweeps
        * (
            s.model.num_layers * max(bounds(s.runtime, layer_lanes(s, phase, at)))
            + max(bounds(s.runtime, head_lanes(s, phase, at)))
            + sweep_overhead_s(s, phase)
        )
        for phase in phases
    )
    return seconds


def solve(
    s: CostInputs, phases: Sequence[Phase], allowed: Allowed, *, integer: bool, within_s: float | None = None
) -> Solution | None:
    """The fastest placement, or None where the budgets allow none.

    Args:
        within_s: of the placements that take no longer than this, the one that keeps buses and disk least busy.
    """
    programme = _Programme(s, phases, allowed, integer)
    if within_s is not None:
        programme.move_least(within_s)
    if not programme.solve():
        return None
    counts = programme.counts()
    # Integer placements are costed as numbers; a relaxed one is what the solver says (its buffers are relaxed too).
    placement = counts.placement(s) if integer else programme.placement_value()
    seconds = (
        job_seconds(s, phases, placement) if integer else pulp.value(programme.problem.objective) + programme.fixed_s
    )
    memory, lanes = ({}, {}) if integer else programme.prices()
    return Solution(seconds, placement, counts, memory, lanes)


def shortfall_bytes(s: CostInputs, phases: Sequence[Phase], allowed: Allowed, tier: str) -> float | None:
    """The least extra memory of one tier with which some placement of whole things fits; None if it alone cannot help."""
    programme = _Programme(s, phases, allowed, True, elastic=tier)
    return pulp.value(programme.slack) * GIB if programme.solve() else None


class _Programme:
    """The variables and rows for one set of inputs."""

    def __init__(
        self, s: CostInputs, phases: Sequence[Phase], allowed: Allowed, integer: bool, elastic: str | None = None
    ) -> None:
        self.s, self.phases = s, phases
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self.category = "Integer" if integer else "Continuous"
        self._make_variables(allowed)
        self.slack: Linear = pulp.LpVariable("slack_gib", 0) if elastic else 0
        self.memory_rows: dict[str, str] = {}
        for tier, peak in peak_bytes(s, self.placement).items():
            capacity = max(0, s.budgets[tier] - _TOLERANCE_BYTES) / GIB + (self.slack if tier == elastic else 0)
            self.problem += peak * (1 / GIB) <= capacity, f"memory_{tier}"
        self.lane_rows: list[tuple[str, dict[str, float]]] = []
        objective = []
        self.fixed_s = 0.0
        for i, phase in enumerate(phases if elastic is None else ()):
            layer = pulp.LpVariable(f"layer_s_{i}", 0)
            head = pulp.LpVariable(f"head_s_{i}", 0)
            self._add_bounds(f"layer_{i}", layer, layer_lanes(s, phase, self.placement))
            self._add_bounds(f"head_{i}", head, head_lanes(s, phase, self.placement))
            objective += [phase.sweeps * s.model.num_layers * layer, phase.sweeps * head]
            self.fixed_s += phase.sweeps * sweep_overhead_s(s, phase)
        self.problem.setObjective(pulp.lpSum(objective) if elastic is None else self.slack + 0)

    def _make_variables(self, allowed: Allowed) -> None:
        s = self.s
        sizes, layers = s.group_bytes, s.model.num_layers
        tiers = [t for t in allowed.weight_tiers if t in s.budgets]
        classes = [c for c in allowed.kv_classes if _class_exists(s, c)]
        self.weights = {
            tensor: tuple(self._count(f"{tensor}_{tier}", layers if tier in tiers else 0) for tier in TIERS)
            for tensor in sizes
        }
        self.kv = {c: self._count(f"kv_{c}", s.swept_seqs if c in classes else 0) for c in KV_CLASSES}
        batches = s.num_gpu_batches
        self.activations = (self._count("act_gpu", batches if s.on_gpu else 0), self._count("act_cpu", batches))
        self.head_gpu = self._count("head_gpu", 1 if s.on_gpu else 0)
        for tensor in sizes:
            self.problem += pulp.lpSum(self.weights[tensor]) == layers
        self.problem += pulp.lpSum(self.kv.values()) == s.swept_seqs
        self.problem += pulp.lpSum(self.activations) == batches

        def fraction(tier: int) -> pulp.LpAffineExpression:
            return pulp.lpSum(self.weights[t][tier] * (size / (layers * s.layer_bytes)) for t, size in sizes.items())

        peaks = {
            "streamed_peak": self._peak("streamed", sizes, (1, 2), layers),
            "disk_peak": self._peak("disk", s.disk_group_bytes, (2,), layers),
        }
        self.placement = Placement(
            w_gpu=fraction(0),
            w_cpu=fraction(1),
            w_disk=fraction(2),
            **{f"kv_{c}": self.kv[c] * (1 / s.swept_seqs) for c in ("gpu", "cpu", "streamed", "disk")},
            act_gpu=self.activations[0] * (1 / batches),
            act_cpu=self.activations[1] * (1 / batches),
            head_gpu=self.head_gpu + 0,
            head_cpu=1 - self.head_gpu,
            **peaks,
            **self._buffers(),
        )

    def _peak(self, name: str, sizes: Mapping[str, int], tiers: Sequence[int], layers: int) -> pulp.LpAffineExpression:
        """A buffer holds the fullest layer: what any layer has there."""
        used = [
            self._any(f"{name}_{tensor}", [self.weights[tensor][i] for i in tiers], layers) * size
            for tensor, size in sizes.items()
        ]
        return pulp.lpSum(used) * (1 / sum(sizes.values()))

    def _buffers(self) -> dict[str, Linear]:
        """Placement.staged_blocks and those after it, the same as in `Counts.placement`."""
        s, batches = self.s, self.s.num_gpu_batches
        delegates = self._any("delegates", [self.kv["cpu"]], s.block_size) if s.on_gpu else 0
        passing = self._count("passing", s.gpu_batch_size)
        self.problem += passing * batches >= pulp.lpSum(self.kv[c] for c in _staged(s))
        attends = 1 if s.deferred_seqs else delegates  # the CPU
        self.problem += passing >= attends
        staged = passing * s.longest_blocks + attends * s.delegated_prompt_blocks
        if not s.on_gpu:
            on_disk = staged
        elif s.runtime.attends_disk_kv_on_cpu:
            read = self._count("read", s.gpu_batch_size)
            self.problem += read * batches >= self.kv["disk"]
            on_disk = read * s.longest_blocks
        else:
            # As many as are staged, if any sequence is on disk.
            most = s.gpu_batch_size * s.longest_blocks + s.delegated_prompt_blocks
            on_disk = pulp.LpVariable("disk_blocks", 0)
            self.problem += on_disk >= staged - most * (1 - self._any("disk_kv", [self.kv["disk"]], s.block_size))
            self.problem += on_disk >= self.kv["disk"] * (s.longest_blocks / batches)
        waiting = self._any("acts_wait", [self.activations[1]], batches) if s.on_gpu else 0
        stages = self._any("stages", [self.kv[c] for c in _staged(s)], s.block_size) if s.on_gpu and batches > 1 else 0
        flags = {"delegates": delegates, "acts_wait": waiting, "stages": stages}
        return {"staged_blocks": staged, "disk_blocks": on_disk} | flags

    def _any(self, name: str, counts: Sequence[pulp.LpVariable], most: int) -> pulp.LpVariable:
        """1 as soon as any of the counts, which add up to at most `most`, is not 0."""
        flag = pulp.LpVariable(f"any_{name}", 0, 1, self.category)
        self.problem += pulp.lpSum(counts) <= most * flag
        return flag

    def _count(self, name: str, most: int) -> pulp.LpVariable:
        return pulp.LpVariable(name, 0, most, self.category)

    def _add_bounds(self, name: str, seconds: pulp.LpVariable, lanes: dict[str, Linear]) -> None:
        runtime = self.s.runtime
        together: list[str | None] = [*(lane for lane in lanes if lane not in runtime.serial)] or [None]
        for lane, bound in zip(together, bounds(runtime, lanes), strict=True):
            row = f"{name}_{lane}"
            self.problem += seconds >= bound, row
            members = [*(m for m in runtime.serial if m in lanes), *([] if lane is None else [lane])]
            self.lane_rows.append((row, {m: lanes[m] for m in members}))

    def move_least(self, within_s: float) -> None:
        """Make the time a limit, and the seconds of the lanes that move data the objective."""
        self.problem += self.problem.objective <= within_s - self.fixed_s, "time"
        moving = []
        for phase in self.phases:
            lanes = layer_lanes(self.s, phase, self.placement)
            moving += [phase.sweeps * self.s.model.num_layers * lanes[lane] for lane in _MOVING if lane in lanes]
        self.problem.setObjective(pulp.lpSum(moving))

    def solve(self) -> bool:
        silence_banner()
        status = self.problem.solve(pulp.HiGHS(msg=False, threads=1, gapRel=_GAP))
        return bool(status == pulp.LpStatusOptimal)

    def counts(self) -> Counts:
        read = (lambda v: round(_value(v))) if self.category == "Integer" else _value
        return Counts(
            {tensor: (read(gpu), read(cpu), read(disk)) for tensor, (gpu, cpu, disk) in self.weights.items()},
            {name: read(v) for name, v in self.kv.items()} | {"deferred": self.s.deferred_seqs},
            (read(self.activations[0]), read(self.activations[1])),
            read(self.head_gpu),
        )

    def placement_value(self) -> Placement:
        return Placement(*(_value(getattr(self.placement, f.name)) for f in fields(Placement)))

    def prices(self) -> tuple[dict[str, float], dict[str, float]]:
        rows = self.problem.constraints
        memory = {tier: max(0.0, -(rows[f"memory_{tier}"].pi or 0.0)) for tier in peak_bytes(self.s, self.placement)}
        lanes: dict[str, float] = {}
        for row, members in self.lane_rows:
            price = abs(rows[row].pi or 0.0)
            for lane, expression in members.items():
                # A rate 10 % higher takes this much off the lane.
                saved = price * _value(expression) * (1 - 1 / 1.1)
                lanes[lane] = lanes.get(lane, 0.0) + saved
        return memory, lanes


def _value(expression: pulp.LpAffineExpression | pulp.LpVariable | float) -> float:
    """The solver's value; a variable that no row mentions is left at 0."""
    if isinstance(expression, (int, float)):
        return float(expression)
    terms = expression.items() if isinstance(expression, pulp.LpAffineExpression) else [(expression, 1)]
    constant = getattr(expression, "constant", 0.0)
    return float(constant + sum(weight * (variable.varValue or 0.0) for variable, weight in terms))


def _staged(s: CostInputs) -> tuple[str, ...]:
    """KV classes of which all KV passes through a staging buffer of the compute device in every sweep."""
    if not s.on_gpu:
        return ("disk",)
    return ("streamed",) if s.runtime.attends_disk_kv_on_cpu else ("streamed", "disk")


def _class_exists(s: CostInputs, kv_class: str) -> bool:
    """Whether sequences can be placed there: how many are deferred is fixed before."""
    if kv_class == "deferred":
        return False
    if not s.on_gpu:
        return kv_class in ("cpu", "disk")
    return kv_class != "cpu" or can_delegate(s)
