"""The choice, before each sweep, of the sequences that the CPU attends to in it (NEO section 3.2). No tensors.

The estimates are the plan's seconds, corrected by what sweeps have taken so far: those with CPU attention apart from
those without, as both processors hold up each other in ways that no plan has. A sweep may go without sequences whose
attention on the CPU would hold up the device. None of them waits forever: they take the next places on the device that
become free. Where none does they have their turns, one at a time, in a small part of the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.core.plan import Policy
from batchgen.schedule.correction import Correction
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.sweep_estimate import BatchCut, CpuLoad, SweepLoad, SweepSeconds, load_of, sweep_seconds

# A sequence that was left out of so many sweeps in a row, and of twice as many as the device has gone without a free
# place, has its turn, once it adds no more than this part of the seconds since the last turn.
_MOST_SWEEPS_LATE, _TURN_FRAC = 32, 0.05
# Part of the sequences in flight that must have places on the device.
_FEWEST_PLACES = 1 / 8
# A sequence that was left out of so many sweeps in a row may run again on the device.
_PATIENCE = 8
# Sweeps without CPU attention after which some sequences try whether the CPU has become faster, as often as turns may
# be: first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
# Sweeps with CPU attention after which a few go without it, to see how long those take: first, and how many then.
_FIRST_ALONE, _ALONE_SWEEPS = 16, 8


class _Kind:
    """The corrections of one kind of sweep: with prompts or without, with CPU attention or without.

    Attributes:
        compute: Correction of the plan's seconds of computation.
        total: Correction of the sweep's seconds, as estimated with corrected seconds of computation and CPU attention.
    """

    def __init__(self) -> None:
        self.compute, self.total = Correction(), Correction()


class _Launched(NamedTuple):
    """A sweep that has not been measured.

    Attributes:
        load: The part that the CPU does not attend to.
        on_cpu: The part that it attends to.
        is_telling: Whether it tells what others like it take: not where a few sequences had their turn.
        streams: Whether KV comes over the link in it, for which computation may wait too.
    """

    load: SweepLoad
    on_cpu: CpuLoad
    is_telling: bool
    streams: bool


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
        self._cpu = Correction()
        self._kinds = {(prompts, on_cpu): _Kind() for prompts in (False, True) for on_cpu in (False, True)}
        self._launched: deque[_Launched] = deque()
        self._late: dict[Sequence, int] = {}  # sweeps in a row that a sequence was left out of
        self._since_place = self._longest_without_place = 0  # sweeps in which no late sequence moved to the device
        self._idle = 0  # sweeps in a row without CPU attention
        self._pause = _FIRST_PAUSE
        self._since_turn_s = 0.0
        # Decoding sweeps with CPU attention since the last ones without it, after how many there are some, and how many
        # of these are left.
        self._with_cpu, self._until_alone, self._alone_left = 0, _FIRST_ALONE, 0
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
        mean_keys = keys[-1] / len(delegated) if delegated else load.keys / max(1, load.decodes)
        count = self._best(load, keys) if delegated else 0
        streams = any(one.sequence.kv_placement is KVPlacement.STREAMED for one in sweep)
        moves = any(
            one.sequence.swap_table is not None for one in delegated
        )  # to the host, for which it is in the sweep
        if not moves and self._looks_at_none(load, CpuLoad(count, keys[count])):
            self._launched.append(_Launched(load, CpuLoad(), is_telling=True, streams=streams))
            left_out = {one.sequence for one in delegated}
            return [one for one in sweep if one.sequence not in left_out]
        late = self._late_of(delegated, count, load, keys, mean_keys)
        self._late = {one.sequence: self._late.get(one.sequence, 0) + 1 for one in late}
        self._since_place += bool(late)
        self.num_left_out += len(late)
        attended = CpuLoad(len(delegated) - len(late), keys[-1] - sum(one.num_keys for one in late))
        is_telling = not late or not 0 < attended.seqs < self._telling(mean_keys)
        self._limit(load, attended, mean_keys)
        self._since_turn_s += self._seconds(load, attended).total
        self._launched.append(_Launched(load, attended, is_telling, streams))
        return [one for one in sweep if one.sequence not in self._late] if late else sweep

    def measured(self, seconds: float, busy_s: Mapping[str, float]) -> None:
        """Take what a sweep has taken.

        Args:
            seconds: Wall time.
            busy_s: Seconds in which each lane was busy.
        """
        if not self._launched:
            return
        load, on_cpu, is_telling, streams = self._launched.popleft()
        if not is_telling:
            return
        planned, kind = sweep_seconds(self._costs, self._cut, load, on_cpu), self._kind(load, on_cpu)
        kind.compute.add(planned.compute, busy_s.get("compute", 0.0))
        self._cpu.add(planned.cpu_attention, busy_s.get("cpu_attention", 0.0))
        if not streams:
            kind.total.add(self._by_lanes(load, on_cpu).total, seconds)

    def forget(self, sequence: Sequence) -> None:
        """Count a sequence as one that has never been left out, as the CPU does not attend to it any more."""
        if self._late.pop(sequence, None) is not None:
            self._longest_without_place = max(self._longest_without_place, self._since_place)
            self._since_place = 0

    def _looks_at_none(self, load: SweepLoad, on_cpu: CpuLoad) -> bool:
        """Tell whether a sweep goes without CPU attention although it pays, to see what such sweeps take by now."""
        if load.prompt_tokens or not load.decodes:
            return False
        if not on_cpu.seqs:
            self._with_cpu, self._until_alone = 0, _FIRST_ALONE
            return False
        if self._alone_left:
            self._alone_left -= 1
            return True
        self._with_cpu += 1
        if self._with_cpu <= self._until_alone:
            return False
        self._with_cpu, self._until_alone = 0, min(2 * self._until_alone, _LONGEST_PAUSE)
        self._alone_left = _ALONE_SWEEPS - 1
        return True

    def _telling(self, mean_keys: float) -> int:
        """The number of sequences whose attention takes as long as what the CPU takes beside it, however few there are.

        The seconds of fewer tell little of those of many.
        """
        seq_s = self._costs.cpu_seq_s + mean_keys * self._costs.cpu_key_s
        return max(1, ceil(2 * self._costs.cpu_batch_s / seq_s)) if seq_s else 1

    def _late_of(
        self, delegated: list[ScheduledSequence], count: int, load: SweepLoad, keys: list[int], mean_keys: float
    ) -> list[ScheduledSequence]:
        """The sequences that are left out, where the first `count` come along, and perhaps some have their turn.

        Args:
            delegated: Sequences that the CPU attends to.
            count: Number of those that come along, beside any whose KV goes to the host in the sweep.
            load: The part of the sweep that the CPU does not attend to.
            keys: Tokens that the first n sequences attend to, for each n.
            mean_keys: Tokens that a sequence attends to.
        """
        late = [one for one in delegated[count:] if one.sequence.swap_table is None]
        if not late:
            return late
        late.sort(key=lambda one: -self._late.get(one.sequence, 0))
        turns = late[:1]
        patience = max(_MOST_SWEEPS_LATE, 2 * self._longest_without_place)
        if self._is_trying:
            turns, patience = late[: self._telling(mean_keys)], 0
        if self._late.get(late[0].sequence, 0) >= patience:
            with_them = CpuLoad(count + len(turns), keys[count] + sum(one.num_keys for one in turns))
            extra_s = self._seconds(load, with_them).total - self._seconds(load, CpuLoad(count, keys[count])).total
            if self._can_afford(extra_s):
                late = late[len(turns) :]
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
            tried = min(self._quota, self._telling(mean_keys))
            # Their KV goes to the host, and is computed again on the device.
            kv_s = tried * mean_keys * (self._costs.streamed_key_s + self._costs.token_s)
            own = load.without_prompts
            extra_s = self._seconds(own, CpuLoad(tried, tried * mean_keys)).total - self._seconds(own, CpuLoad()).total
            self.most_on_cpu = tried if self._can_afford(extra_s + kv_s) else 0

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

    def _kind(self, load: SweepLoad, on_cpu: CpuLoad) -> _Kind:
        return self._kinds[load.prompt_tokens > 0, on_cpu.seqs > 0]

    def _seconds(self, load: SweepLoad, on_cpu: CpuLoad) -> SweepSeconds:
        """Estimated seconds of a sweep: those by its lanes, corrected by what sweeps of its kind have taken."""
        seconds = self._by_lanes(load, on_cpu)
        return seconds._replace(total=self._kind(load, on_cpu).total.factor * seconds.total)

    def _by_lanes(self, load: SweepLoad, on_cpu: CpuLoad) -> SweepSeconds:
        """Seconds of a sweep by the plan's, corrected by what computation and CPU attention have taken."""
        factors = {"compute_factor": self._kind(load, on_cpu).compute.factor, "cpu_factor": self._cpu.factor}
        return sweep_seconds(self._costs, self._cut, load, on_cpu, **factors)


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
