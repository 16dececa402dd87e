"""The choice of the number of layers whose KV streams, by the seconds that the rest of the job takes (Pie section 3.4).

Those are seconds of sweeps, and of computing again what rows lose that have no blocks any more. The estimates are the
plan's seconds, corrected by what the lanes have taken so far. No tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from batchgen.core.kv_expansion import KVExpansion
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import LaneCosts
from batchgen.core.plan import Policy
from batchgen.schedule.correction import Correction
from batchgen.schedule.sweep_estimate import BatchCut, CpuLoad, SweepLoad, sweep_seconds


class Rows(NamedTuple):  # one for each window of sweeps
    """The rows that are in flight, or may be.

    Attributes:
        most: Sequences that could be in flight in the host's pool if all had KV blocks.
        others: Sequences in flight whose KV is in the device's own pool.
        blocks: KV blocks that a sequence is expected to have at its end.
        context: Tokens that a sequence attends to, half way through its output.
        in_pool: Sequences in flight in the host's pool.
        computed: Tokens that one of them has KV of by now.
        left: Tokens that all rows known have yet to generate.
    """

    most: int
    others: int
    blocks: float
    context: float
    in_pool: int
    computed: float
    left: float


class ExpansionChoice:
    """The choice of the number of layers whose KV is on the device."""

    def __init__(self, costs: LaneCosts, cut: BatchCut) -> None:
        """Rely on the plan.

        Args:
            costs: The plan's seconds of what a sweep may have.
            cut: The way in which sweeps are cut into micro-batches.
        """
        self._costs, self._cut = costs, cut
        self._compute, self._link = Correction(), Correction()

    def measured(
        self, expansion: KVExpansion, load: SweepLoad, streamed_keys: int, compute_s: float | None, link_s: float
    ) -> None:
        """Take what a sweep has taken.

        Args:
            expansion: Division of the layers in it.
            load: Sequences that decoded.
            streamed_keys: Tokens that those among them attended to whose KV streams.
            compute_s: Seconds in which the device computed; None: it computed prompts too.
            link_s: Seconds in which the link to the device was busy.
        """
        if compute_s is not None and load.decodes:
            self._compute.expect(sweep_seconds(self._costs, self._cut, load, CpuLoad()).compute)
            self._compute.take(compute_s)
        if planned_s := self._link_s(expansion, expansion.num_on_device, streamed_keys):
            self._link.expect(planned_s)
            self._link.take(link_s)

    def best(self, expansion: KVExpansion, rows: Rows, *, by_plan: bool = False) -> int:
        """The number of layers on the device with which the rows known are done soonest.

        Args:
            expansion: Division of the layers by now.
            rows: The rows in flight.
            by_plan: Whether the link is taken to be as fast as planned.
        """
        return min(expansion.choices, key=lambda number: self.rest_s(expansion, number, rows, by_plan=by_plan))

    def rest_s(self, expansion: KVExpansion, on_device: int, rows: Rows, *, by_plan: bool = False) -> float:
        """Estimated seconds of the rows known with so many layers on the device from now on.

        Rows in flight that have no blocks then are computed again.

        Args:
            expansion: Division of the layers by now.
            on_device: Number of layers on the device.
            rows: The rows in flight.
            by_plan: Whether the link is taken to be as fast as planned.
        """
        in_pool = max(1, min(rows.most, int(expansion.blocks_with(on_device) / rows.blocks)))
        again_s = max(0, rows.in_pool - in_pool) * rows.computed * self._costs.token_s * self._compute.factor
        seqs = rows.others + in_pool
        load = SweepLoad(sampled=seqs, decodes=seqs, keys=round(seqs * rows.context))
        computing_s = sweep_seconds(self._costs, self._cut, load, CpuLoad(), compute_factor=self._compute.factor).total
        link_factor = 1.0 if by_plan else self._link.factor
        sweep_s = max(computing_s, link_factor * self._link_s(expansion, on_device, in_pool * rows.context))
        return rows.left / seqs * sweep_s + again_s

    def _link_s(self, expansion: KVExpansion, on_device: int, keys: float) -> float:
        """Planned seconds in which weights, and the KV of so many tokens, come over the link."""
        return keys * self._costs.streamed_key_s * expansion.streamed_frac(on_device) + self._costs.transfer_s


def expansion_choice(policy: Policy, costs: LaneCosts) -> ExpansionChoice | None:
    """The choice for a policy whose KV streams, in some layers or in all; None where there is nothing to choose.

    Args:
        policy: The policy.
        costs: The plan's seconds of what a sweep may have.
    """
    if not policy.kv_seqs.get(KVPlacement.STREAMED) or not costs.streamed_key_s:
        return None
    return ExpansionChoice(costs, BatchCut(policy.num_gpu_batches, policy.batch_order, policy.balance_tokens))
