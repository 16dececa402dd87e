"""The adaptation of the block and of the streamed fraction to what is measured, between sweeps. No tensors.

Memory stays as planned. Output lengths decide how much KV a sequence is given at admission and how many sequences KV
has capacity for. Lane times decide which of the sequences whose KV lives in host memory are attended to by the CPU and
which are streamed to the accelerator (Pie section 3.4): the streamed fraction grows while (1) the link is not
saturated, (2) copies stay hidden behind compute and (3) throughput does not fall; it shrinks when compute waits for
copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sweep_choice import SweepChoice

_WINDOW_SWEEPS = 8  # measured together
_SATURATED, _WAITING = 0.9, 0.05  # parts of a window's time
_STEP_FRAC = 0.125  # of the sequences in host memory that change placement at a time
_MOST_GROWTH = 4  # times the planned block
_WORTH_CHANGING = 1.1
_FELL = 0.97  # throughput below this, of what it was before, takes a change back
_FEWEST_LENGTHS, _MOST_LENGTHS = 32, 4096
_SHORTER, _LONGER = 0.8, 1.25  # outputs against the plan's
_LENGTH_QUANTILE = 0.95


@dataclass(frozen=True)
class Change:
    """A change that adaptation has made.

    Attributes:
        sweep: number of the sweep after which it was made.
        what: "expected_output_len", "block" or "streamed".
        before: value before the change.
        after: value after it.
        why: reason, for people.
    """

    sweep: int
    what: str
    before: int
    after: int
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """The measured times of one sweep.

    Attributes:
        seconds: wall time.
        tokens: tokens that went through the layers.
        busy_s: seconds in which each lane was busy.
        stalled_s: seconds in which compute stood still, by the lane it waited for.
    """

    seconds: float
    tokens: int
    busy_s: Mapping[str, float]
    stalled_s: Mapping[str, float]


class Adaptation:
    """The adaptation of a scheduler's limits and placements, within pools that never change.

    Attributes:
        changes: Changes made so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        planned_output_len: float,
        expected_output_len: int | None,
        sweep_choice: SweepChoice | None = None,
    ) -> None:
        """Leave everything as planned.

        Args:
            scheduler: Scheduler whose limits and placements are adapted.
            planned_output_len: Mean output length that the plan counted on, tokens.
            expected_output_len: The user's expected output length, which stands, tokens; None: it follows what is
                measured.
            sweep_choice: Chooses the sequences of each sweep that the CPU attends to; None: all of them.
        """
        scheduler.expected_output_len = lambda s: self.expected_output_len(s.sampling.max_tokens)
        scheduler.sweep_choice = self._sweep_choice = sweep_choice
        self.changes: list[Change] = []
        self._scheduler = scheduler
        self._planned = scheduler.limits
        self._given = expected_output_len
        self._planned_len = planned_output_len
        self._expected: int | None = expected_output_len
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)
        self._footprints: deque[int] = deque(maxlen=_MOST_LENGTHS)  # tokens of KV of sequences that ended
        self._window: list[Measured] = []
        self._preempted = 0
        self._sweep = 0
        # A change on trial: what, tokens/s and limits before.
        self._undo: tuple[str, float, SchedulerLimits] | None = None
        self._settled: set[str] = set()  # what has been found not to help
        # The first outputs to end are the shortest: judged is only when the block has turned over.
        self._enough = max(_FEWEST_LENGTHS, 2 * scheduler.limits.max_num_seqs)

    def expected_output_len(self, max_tokens: int) -> int:
        """Tokens a sequence is expected to generate, for admission."""
        return max_tokens if self._expected is None else min(self._expected, max_tokens)

    def finished(self, num_generated: int, num_tokens: int) -> None:
        """Note that a sequence has ended.

        Args:
            num_generated: Tokens it generated.
            num_tokens: Tokens of its KV, those of its prompt included.
        """
        self._lengths.append(num_generated)
        self._footprints.append(num_tokens)

    def after_sweep(self, measured: Measured) -> None:
        """Take the times of a sweep, and act at the end of each window of sweeps."""
        self._sweep += 1
        if self._sweep_choice:
            self._sweep_choice.measured(measured.busy_s)
        self._window.append(measured)
        if len(self._window) < _WINDOW_SWEEPS:
            return
        rate = _rate(self._window)
        if self._undo is not None:
            self._judge(rate, *self._undo)
        self._follow_lengths()
        if self._undo is None:
            self._fit_block(rate)
        if self._undo is None:
            self._share_host_kv(rate)
        self._window = []
        self._preempted = self._scheduler.num_preempted

    def _judge(self, rate: float, what: str, before: float, limits: SchedulerLimits) -> None:
        """Take a change back where throughput fell: Pie's third condition, for either knob."""
        self._undo = None
        if rate >= _FELL * before:
            return
        self._settled.add(what)
        was, now = _size(what, self._scheduler.limits), _size(what, limits)
        self._set(what, limits, was, now, f"throughput fell from {before:,.1f} to {rate:,.1f} tokens/s")

    def _follow_lengths(self) -> None:
        if self._given is not None or len(self._lengths) < min(self._enough, _MOST_LENGTHS):
            return
        longest = max(s.sampling.max_tokens for s in self._scheduler.running) if self._scheduler.running else 0
        if self._scheduler.num_preempted > self._preempted + max(1, len(self._scheduler.running) // 16):
            expected, why = longest, "sequences had to be preempted"
        else:
            ordered = sorted(self._lengths)
            expected = ordered[int(_LENGTH_QUANTILE * (len(ordered) - 1))]
            why = f"95 % of {len(ordered)} outputs are no longer"
        before = self._expected or longest
        if expected and abs(expected - before) > 0.1 * before:
            self.changes.append(Change(self._sweep, "expected_output_len", before, expected, why))
            self._expected = expected

    def _fit_block(self, rate: float) -> None:
        """Set the quotas to what KV has capacity for, at the size that sequences turn out to have.

        They grow where outputs are shorter than planned and the whole quota is used, and shrink where outputs are
        longer and sequences had to be preempted.
        """
        scheduler, limits = self._scheduler, self._scheduler.limits
        if "block" in self._settled or len(self._lengths) < min(self._enough, _MOST_LENGTHS):
            return
        length = sum(self._lengths) / len(self._lengths)
        full = len(scheduler.running) >= limits.max_num_seqs and bool(scheduler.waiting)
        shorter = length < _SHORTER * self._planned_len and full
        longer = length > _LONGER * self._planned_len and scheduler.num_preempted > self._preempted
        if not shorter and not longer:
            return
        mean = sum(self._footprints) / len(self._footprints)
        fitted = {}
        for kv_placement, count in limits.quotas.items():
            pool = scheduler.pools.get(kv_placement.tier)
            if not count or pool is None:
                continue
            sharing = sum(n for c, n in limits.quotas.items() if c.tier == kv_placement.tier)
            fits = int(pool.num_blocks * pool.kv_block_size / (mean + pool.kv_block_size / 2) * count / sharing)
            most = min(2 * count, _MOST_GROWTH * self._planned.quota(kv_placement))
            fitted[kv_placement] = max(1, min(fits, count)) if longer else max(count, min(fits, most))
        block = sum(fitted.values())
        if max(block, limits.max_num_seqs) < _WORTH_CHANGING * min(block, limits.max_num_seqs):
            return
        why = f"outputs of {length:,.0f} tokens where {self._planned_len:,.0f} were planned"
        if shorter:
            self._undo = ("block", rate, limits)
        self._set("block", replace(limits, max_num_seqs=block, kv_seqs=fitted), limits.max_num_seqs, block, why)

    def _share_host_kv(self, rate: float) -> None:
        """Move some sequences between attention on the CPU and streaming (Pie section 3.4)."""
        limits = self._scheduler.limits
        quotas = limits.quotas
        on_cpu, streamed = quotas.get(KVPlacement.CPU, 0), quotas.get(KVPlacement.STREAMED, 0)
        # Attention on the CPU needs buffers, which the plan has only where it was to be.
        if limits.compute_tier != "gpu" or on_cpu + streamed < 2 or not self._planned.quota(KVPlacement.CPU):
            return
        total = sum(m.seconds for m in self._window)
        waited = {
            lane: sum(m.stalled_s.get(lane, 0.0) for m in self._window) / total for lane in ("h2d", "cpu_attention")
        }
        link = sum(m.busy_s.get("h2d", 0.0) for m in self._window) / total
        step = max(1, int(_STEP_FRAC * (on_cpu + streamed)))
        if waited["h2d"] > _WAITING and streamed:
            moved, why = -min(step, streamed), f"compute waited for copies {waited['h2d']:.0%} of the time"
        elif waited["cpu_attention"] > _WAITING and link < _SATURATED and waited["h2d"] <= _WAITING and on_cpu:
            moved = min(step, on_cpu)
            waited_frac = f"{waited['cpu_attention']:.0%}"
            why = f"compute waited for CPU attention {waited_frac} of the time, the link is {link:.0%} busy"
        else:
            return
        what = "streamed up" if moved > 0 else "streamed down"
        if what in self._settled:
            return
        self._undo = (what, rate, limits)
        changed = replace(
            limits, kv_seqs={**quotas, KVPlacement.CPU: on_cpu - moved, KVPlacement.STREAMED: streamed + moved}
        )
        self._set(what, changed, streamed, streamed + moved, why)

    def _set(self, what: str, limits: SchedulerLimits, before: int, after: int, why: str) -> None:
        self.changes.append(Change(self._sweep, what.split()[0], before, after, why))
        self._scheduler.limits = limits
        self._move_host_kv()

    def _move_host_kv(self) -> None:
        """Give sequences in flight the placements that the limits have a quota for."""
        limits = self._scheduler.limits
        on_host = [s for s in self._scheduler.running if s.kv_placement in (KVPlacement.CPU, KVPlacement.STREAMED)]
        quota = limits.quota(KVPlacement.CPU)
        if limits.compute_tier == "gpu":
            for i, sequence in enumerate(on_host):
                self._scheduler.set_placement(sequence, KVPlacement.CPU if i < quota else KVPlacement.STREAMED)


def _rate(window: list[Measured]) -> float:
    return sum(m.tokens for m in window) / sum(m.seconds for m in window)


def _size(what: str, limits: SchedulerLimits) -> int:
    return limits.max_num_seqs if what == "block" else limits.quota(KVPlacement.STREAMED)
