"""The choice, before each sweep, of the sequences that the CPU attends to in it (NEO section 3.2). No tensors.

The estimates are the plan's seconds, corrected by what the lanes have taken so far. A sweep may go without sequences
whose attention on the CPU would hold up the device. None of them waits forever: they take the next places on the
device that become free, and meanwhile have their turns, one at a time, in a small part of the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.core.plan import Policy
from batchgen.schedule.correction import Correction
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.sweep_estimate import BatchCut, CpuLoad, SweepLoad, SweepSeconds, load_of, sweep_seconds

# A sequence that was left out of so many sweeps in a row has its turn, once it adds no more than this part of the
# seconds since the last turn.
_MOST_SWEEPS_LATE, _TURN_FRAC = 32, 0.05
# Part of the sequences in flight that must have places on the device.
_FEWEST_PLACES = 1 / 8
# A sequence that was left out of so many sweeps in a row may run again on the device.
_PATIENCE = 8
# Sweeps without CPU attention after which one sequence tries whether the CPU has become faster, as often as turns may
# be: first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096


class SweepChoice:
    """The choice of the sequences that the CPU attends to in the next sweep.

    Attributes:
        num_left_out: Tokens so far that could have been in a sweep and were left for a later one.
        most_on_cpu: Sequences that the CPU should attend to at most, by the last sweep; None: there is no limit.
    """

    def __init__(self, costs: LaneCosts, cut: BatchCut, quota: int) -> None:
        """Rely on the plan.

        Args:
            costs: The plan's seconds of what a sweep may have.
            cut: The way in which sweeps are cut into micro-batches.
            quota: Sequences that the plan has the CPU attend to.
        """
        self._costs, self._cut, self._quota = costs, cut, quota
        self._compute, self._cpu = Correction(), Correction()
        self._late: dict[Sequence, int] = {}  # sweeps in a row that a sequence was left out of
        self._idle = 0  # sweeps in a row without CPU attention
        self._pause = _FIRST_PAUSE
        self._since_turn_s = 0.0
        self.num_left_out = 0
        self.most_on_cpu: int | None = None

    @property
    def num_late(self) -> int:
        """The sequences that were left out of the last sweep."""
        return len(self._late)

    @property
    def movable(self) -> list[Sequence]:
        """The sequences that had better run again on the device, the one that came last first."""
        return [sequence for sequence, sweeps in self._late.items() if sweeps >= _PATIENCE][::-1]

    def choose(self, sweep: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The sweep without the sequences whose attention on the CPU would hold up the device."""
        if not sweep:
            return sweep
        delegated = [one for one in sweep if one.sequence.kv_placement is KVPlacement.CPU and one.decodes]
        load = load_of(one for one in sweep if one.sequence.kv_placement is not KVPlacement.CPU or not one.decodes)
        keys = list(accumulate((one.num_keys for one in delegated), initial=0))
        count = self._best(load, keys) if delegated else 0
        late = self._late_of(delegated, count, load, keys)
        self._late = {one.sequence: self._late.get(one.sequence, 0) + 1 for one in late}
        self.num_left_out += len(late)
        attended = CpuLoad(len(delegated) - len(late), keys[-1] - sum(one.num_keys for one in late))
        self._limit(load, attended, keys[-1] / len(delegated) if delegated else load.keys / max(1, load.decodes))
        self._since_turn_s += self._seconds(load, attended).total
        planned = sweep_seconds(self._costs, self._cut, load, attended)
        self._compute.expect(planned.compute)
        self._cpu.expect(planned.cpu_attention)
        return [one for one in sweep if one.sequence not in self._late] if late else sweep

    def measured(self, busy_s: Mapping[str, float]) -> None:
        """Take the seconds that each lane was busy for a sweep."""
        self._compute.take(busy_s.get("compute", 0.0))
        self._cpu.take(busy_s.get("cpu_attention", 0.0))

    def forget(self, sequence: Sequence) -> None:
        """Count a sequence as one that has never been left out, as the CPU does not attend to it any more."""
        self._late.pop(sequence, None)

    def _late_of(
        self, delegated: list[ScheduledSequence], count: int, load: SweepLoad, keys: list[int]
    ) -> list[ScheduledSequence]:
        """The sequences that are left out, where the first `count` come along, and perhaps one has its turn.

        Args:
            delegated: Sequences that the CPU attends to.
            count: Number of those that come along, beside any whose KV goes to the host in the sweep.
            load: The part of the sweep that the CPU does not attend to.
            keys: Tokens that the first n sequences attend to, for each n.
        """
        late = [one for one in delegated[count:] if one.sequence.swap_table is None]
        if not late:
            return late
        overdue = max(late, key=lambda one: self._late.get(one.sequence, 0))
        patience = 0 if self._is_trying else _MOST_SWEEPS_LATE
        if self._late.get(overdue.sequence, 0) >= patience:
            with_it = self._seconds(load, CpuLoad(count + 1, keys[count] + overdue.num_keys))
            if self._can_afford(with_it.total - self._seconds(load, CpuLoad(count, keys[count])).total):
                late.remove(overdue)
                self._since_turn_s = 0.0
        return late

    def _can_afford(self, extra_s: float) -> bool:
        """Tell whether so many seconds for one sequence are a small part of those since the last turn."""
        return extra_s <= _TURN_FRAC * self._since_turn_s

    @property
    def _is_trying(self) -> bool:
        """Tell whether the CPU has attended to nothing for so long that it may have become faster."""
        return self._idle >= self._pause

    def _limit(self, load: SweepLoad, attended: CpuLoad, mean_keys: float) -> None:
        """Set how many sequences may be admitted for the CPU to attend to, by a sweep like this without prompts."""
        if attended.seqs:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._is_trying else self._pause
            self._idle = 0
        else:
            self._idle += 1
        if not load.decodes:
            return
        self.most_on_cpu = self._best(load.without_prompts, [n * mean_keys for n in range(self._quota + 1)])
        if self.most_on_cpu:
            self._pause = _FIRST_PAUSE
        elif self._is_trying:
            self.most_on_cpu = 1

    def _best(self, load: SweepLoad, keys: list[float] | list[int]) -> int:
        """The number of sequences with which the sweep has the most work done in a second.

        A sequence's token is worth the mean seconds that one takes in a sweep of the device's own. Where the device has
        none, all come along. The best number is none, all, or the most that hold up nothing: between these, seconds
        are linear in the number.

        Args:
            load: The part of the sweep that the CPU does not attend to.
            keys: Tokens that the first n sequences attend to, for each n.
        """
        most = len(keys) - 1
        if not load.decodes:
            return most
        own = load.without_prompts
        token_worth = self._seconds(own, CpuLoad()).total / load.decodes
        alone_s = self._seconds(load, CpuLoad()).total

        def work_rate(count: int) -> float:
            return (alone_s + count * token_worth) / self._seconds(load, CpuLoad(count, keys[count])).total

        hidden = bisect_right(
            range(1, most + 1), 0, key=lambda n: 0 if self._seconds(load, CpuLoad(n, keys[n])).hidden else 1
        )
        return max((most, hidden, 0), key=work_rate)

    def _seconds(self, load: SweepLoad, on_cpu: CpuLoad) -> SweepSeconds:
        return sweep_seconds(
            self._costs,
            self._cut,
            load,
            on_cpu,
            compute_factor=self._compute.factor,
            cpu_factor=self._cpu.factor,
        )


def sweep_choice(policy: Policy, costs: LaneCosts) -> SweepChoice | None:
    """The choice for a policy under which the CPU attends to some sequences; None where there is nothing to choose.

    Where the device has few places of its own, a sequence that is left out could only wait for the CPU.

    Args:
        policy: The policy.
        costs: The plan's seconds of what a sweep may have.
    """
    quota, places = (policy.kv_seqs.get(placement, 0) for placement in (KVPlacement.CPU, KVPlacement.DEVICE))
    few_places = places < _FEWEST_PLACES * policy.max_num_seqs
    if not quota or few_places or costs == NOT_KNOWN or policy.admission != "continuous":
        return None
    cut = BatchCut(policy.num_gpu_batches, policy.batch_order, policy.balance_tokens)
    return SweepChoice(costs, cut, quota)
