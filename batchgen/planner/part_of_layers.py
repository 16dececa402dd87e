"""Seconds of sweeps whose Steps are too many to be simulated: those of two parts of the layers say what all take.

Layers are alike, and each part has them as evenly mixed over the tiers as the whole. What a sweep takes before its
layers are all at work is in both parts, so that their difference is what layers take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.core.plan import Plan
from batchgen.planner.costs import job_seconds
from batchgen.planner.parallel import stage_policy
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate
from batchgen.planner.sweep_sampling import LAYER_STEPS, ScheduledSweep, SimulatedStage, simulate_sweeps

# A sweep with more Steps than this is simulated over two parts of its layers with about as many Steps, the larger of
# which has three times as many layers as the other, and no fewer than these.
_MOST_STEPS = 1_600
_LEAST_LAYERS = 12
_LARGER = 3


def layers_simulated(candidate: Candidate) -> tuple[int, ...]:
    """The numbers of layers that are simulated: all of them, or those of two parts, the smaller one first.

    Deferred tokens go through all layers, KV by layer has as many of them as it needs, and layers that attend to the KV
    of others cannot do without these.
    """
    s = candidate.inputs
    layers, model = s.model.num_layers, s.model
    of_layer = LAYER_STEPS * s.num_gpu_batches
    cannot_part = s.deferral or candidate.counts.kv_layers or model.shared_kv_layers or model.per_layer_size
    larger = max(_LEAST_LAYERS, int(_MOST_STEPS / of_layer * _LARGER / (_LARGER + 1)))
    if cannot_part or layers * of_layer <= _MOST_STEPS or larger * (_LARGER + 1) >= layers * _LARGER:
        return (layers,)
    return larger // _LARGER, larger


def simulated_seconds(
    plan: Plan, candidate: Candidate, sweeps: Sequence[ScheduledSweep], modelled_s: Mapping[int, float]
) -> dict[int, float]:
    """Seconds of some of the sweeps by the simulator, over all layers.

    Args:
        plan: The candidate as a plan.
        candidate: The candidate.
        sweeps: All sweeps.
        modelled_s: Seconds by the cost model of those that are simulated, by their numbers.
    """
    numbers = sorted(modelled_s)
    parts = [_part(plan, candidate, layers) for layers in layers_simulated(candidate)]
    *smaller_s, simulated_s = [
        {i: seconds for i, (seconds,) in simulate_sweeps([part.stage], sweeps, numbers).items()} for part in parts
    ]
    if not smaller_s:
        return simulated_s
    smaller, larger = parts

    def seconds(i: int) -> float:
        small_s, large_s = smaller.modelled_s(sweeps[i]), larger.modelled_s(sweeps[i])
        slower = (simulated_s[i] - smaller_s[0][i]) / (large_s - small_s)
        return simulated_s[i] + slower * (modelled_s[i] - large_s)

    return {i: seconds(i) for i in numbers}


@dataclass(frozen=True)
class _Part:
    """A candidate for a part of its layers.

    Attributes:
        stage: The simulated lanes.
        inputs: The inputs of the cost model.
        placement: The placement of these layers.
    """

    stage: SimulatedStage
    inputs: CostInputs
    placement: Placement

    def modelled_s(self, sweep: ScheduledSweep) -> float:
        """Seconds of a sweep by the cost model."""
        return job_seconds(self.inputs, [sweep.phase], self.placement)


def _part(plan: Plan, candidate: Candidate, layers: int) -> _Part:
    """The candidate for its first layers, so many of them, as evenly mixed over the tiers as all are."""
    s, counts, policy = candidate.inputs, candidate.counts, plan.policy
    if layers < s.model.num_layers:
        policy = stage_policy(policy, layers)
        s = replace(s, model=s.model.first_layers(layers))
        counts = replace(counts, weight_layers=policy.weight_layers)
    stage = SimulatedStage(replace(plan, policy=policy), s.model, s.hardware)
    return _Part(stage, s, counts.placement(s))
