"""The adaptation of the block and of what is streamed to what is measured, between sweeps. No tensors.

Memory stays as planned. Output lengths decide how much KV a sequence is given at admission and how many sequences KV
has capacity for. Lane times decide which of the sequences whose KV lives in host memory are attended to by the CPU and
which are streamed to the accelerator (Pie section 3.4): the streamed fraction grows while (1) the link is not
saturated, (2) copies stay hidden behind compute and (3) throughput does not fall; it shrinks when compute waits for
copies. By the same conditions the number of layers whose KV streams changes, and so do the blocks that the pool has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from batchgen.core.kv_expansion import Recut
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.schedule.deferral_choice import DeferralChoice
from batchgen.schedule.expansion_choice import ExpansionChoice, Rows
from batchgen.schedule.knob import Direction, Knob
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.sweep_choice import SweepChoice
from batchgen.schedule.sweep_estimate import SweepLoad

_WINDOW_SWEEPS = 8  # measured together
_FEWEST_SWEEPS = 3  # by which windows are compared, and a change is taken back early
_LATE = 0.125  # part of the sequences in host memory that are left out of sweeps
_LONGEST_TRIAL = 4  # windows after which a change stays that nothing could be compared with
_SATURATED, _WAITING = 0.9, 0.05  # parts of a window's time
_WAITING_LONG = 0.2  # of the first sweeps of a window, which then ends
_MOST_GROWTH = 4  # times the planned block
_WORTH_CHANGING = 1.1
_FELL = 0.97  # throughput below this, of what it was before, takes a change back
_FEWEST_LENGTHS, _MOST_LENGTHS = 32, 4096
_SHORTER, _LONGER = 0.8, 1.25  # outputs against the plan's
_LENGTH_QUANTILE = 0.95
_LINKS = ("h2d", "d2h")


@dataclass(frozen=True)
class Change:
    """A change that adaptation has made.

    Attributes:
        sweep: number of the sweep after which it was made.
        what: "expected_output_len", "block", "streamed", "streamed_layers" or "deferred".
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
        tokens: tokens that were generated.
        has_prompts: Whether tokens of prompts were among those that went through the layers.
        busy_s: seconds in which each lane was busy.
        stalled_s: seconds in which compute stood still, by the lane it waited for.
    """

    seconds: float
    tokens: int
    busy_s: Mapping[str, float]
    stalled_s: Mapping[str, float]
    has_prompts: bool = False


@dataclass(frozen=True)
class _Rate:
    """Tokens generated in a second in a window of sweeps.

    Attributes:
        tokens_per_s: Tokens in a second, in sweeps without prompts where there are enough of them.
        has_prompts: Whether sweeps with prompts were counted.
    """

    tokens_per_s: float
    has_prompts: bool


@dataclass(frozen=True)
class _Trial:
    """A change that is taken back unless throughput shows that it does no harm.

    Attributes:
        what: Name of the knob: "block", "streamed", "streamed_layers" or "deferred".
        before: Throughput before the change.
        limits: Limits before the change.
        window: Number of the window after which it was made.
        on_device: Layers whose KV was on the device before the change, where KV is by layer.
    """

    what: str
    before: _Rate
    limits: SchedulerLimits
    window: int
    on_device: int = 0


class Adaptation:
    """The adaptation of a scheduler's limits, placements and division of layers, within memory that stays as planned.

    Attributes:
        changes: Changes made so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        planned_output_len: float,
        expected_output_len: int | None,
        lane_costs: LaneCosts = NOT_KNOWN,
        sweep_choice: SweepChoice | None = None,
        expansion_choice: ExpansionChoice | None = None,
        deferral_choice: DeferralChoice | None = None,
    ) -> None:
        """Leave everything as planned.

        Args:
            scheduler: Scheduler whose limits and placements are adapted.
            planned_output_len: Mean output length that the plan counted on, tokens.
            expected_output_len: The user's expected output length, which stands, tokens; None: it follows what is
                measured.
            lane_costs: The plan's seconds of what a sweep may have.
            sweep_choice: Chooses the sequences of each sweep that the CPU attends to; None: all of them.
            expansion_choice: Chooses the number of layers whose KV streams; None: it stays as it is.
            deferral_choice: Chooses how sequences whose attention is deferred go through each sweep; None: they go a
                layer further in each.
        """
        scheduler.expected_output_len = lambda s: self.expected_output_len(s.sampling.max_tokens)
        scheduler.sweep_choice = self._sweep_choice = sweep_choice
        scheduler.deferral_choice = deferral_choice
        scheduler.adapts, scheduler.brings_kv = True, lane_costs.streamed_key_s < lane_costs.token_s
        self.changes: list[Change] = []
        self._scheduler = scheduler
        self._planned = scheduler.limits
        self._given = expected_output_len
        self._lane_costs = lane_costs
        self._planned_len = planned_output_len
        self._expected: int | None = expected_output_len
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)
        self._footprints: deque[int] = deque(maxlen=_MOST_LENGTHS)  # tokens of KV of sequences that ended
        self._window: list[Measured] = []
        self._has_pipelined = False  # a sweep of the window, in which computation waits for the CPU as it should
        self._preempted = 0
        self._sweep = 0
        self._windows = 0
        self._trial: _Trial | None = None
        self._knobs = {"block": Knob(), "streamed": Knob(), "streamed_layers": Knob("up"), "deferred": Knob("up")}
        self._expansion_choice = expansion_choice if scheduler.expansion else None
        self._recut_to: int | None = None  # layers that are to be on the device
        if scheduler.has_layers_on_device and scheduler.limits.quota(KVPlacement.CPU):
            self._keep_from_cpu(True)  # an earlier call of the engine has put them there
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
            self._sweep_choice.measured(measured.seconds, measured.busy_s)
        if self._scheduler.deferral_choice:
            self._scheduler.deferral_choice.measured(measured.busy_s)
        self._measure_streaming(measured)
        self._has_pipelined = self._has_pipelined or self._scheduler.pipelines
        self._window.append(measured)
        if len(self._window) < _WINDOW_SWEEPS and not self._has_failed_early() and not self._waits_long():
            return
        rate = _rate(self._window)
        self._windows += 1
        if self._trial is not None:
            self._judge(rate, self._trial)
        self._follow_lengths()
        if self._trial is None:
            self._fit_block(rate)
        if self._trial is None and self._recut_to is None:
            self._divide_layers(rate)
        if self._trial is None:
            self._share_host_kv(rate)
        if self._trial is None and not self._has_pipelined:
            self._fit_deferred(rate)
        self._window, self._has_pipelined = [], False
        self._preempted = self._scheduler.num_preempted

    def _has_failed_early(self) -> bool:
        """Tell whether compute has waited for copies since a change, so that no whole window of that is needed."""
        return (
            self._trial is not None
            and len(self._window) >= _FEWEST_SWEEPS
            and self._streams_more(self._trial)
            and self._waited_frac("h2d") > 2 * _WAITING
        )

    def _waits_long(self) -> bool:
        """Tell whether compute waits for copies so long that layers should stream no more, where that is a choice."""
        return (
            self._expansion_choice is not None
            and self._trial is None
            and len(self._window) >= _FEWEST_SWEEPS
            and self._waited_frac(*_LINKS) > _WAITING_LONG
        )

    def _streams_more(self, trial: _Trial) -> bool:
        """Tell whether the change on trial is that more sequences are streamed, or the KV of more layers."""
        if trial.what == "streamed_layers":
            return self._num_on_device < trial.on_device
        now, before = (limits.quota(KVPlacement.STREAMED) for limits in (self._scheduler.limits, trial.limits))
        return trial.what == "streamed" and now > before

    def _judge(self, rate: _Rate, trial: _Trial) -> None:
        """Take a change back where copies are not hidden or throughput fell: Pie's second and third condition.

        A window with prompts in its sweeps says nothing about the throughput of one without, so another one is waited
        for.
        """
        waited = self._waited_frac("h2d")
        if self._recut_to is not None:
            return  # it has not been made yet
        if self._streams_more(trial) and waited > _WAITING:
            self._take_back(trial, f"compute waited for copies {waited:.0%} of the time")
        elif rate.has_prompts == trial.before.has_prompts:
            before, now = trial.before.tokens_per_s, rate.tokens_per_s
            if now < _FELL * before:
                self._take_back(trial, f"throughput fell from {before:,.1f} to {now:,.1f} tokens/s")
            self._trial = None
        elif self._windows - trial.window >= _LONGEST_TRIAL:
            self._trial = None

    def _take_back(self, trial: _Trial, why: str) -> None:
        self._trial = None
        self._knobs[trial.what].take_back(self._windows)
        if trial.what == "streamed_layers":
            self._want_layers(trial.on_device, why)
            return
        now, before = (_size(trial.what, limits) for limits in (self._scheduler.limits, trial.limits))
        self._set(trial.what, trial.limits, now, before, why)

    def _waited_frac(self, *lanes: str) -> float:
        """The part of the window's time in which compute waited for some lanes."""
        waited_s = sum(m.stalled_s.get(lane, 0.0) for m in self._window for lane in lanes)
        return waited_s / sum(m.seconds for m in self._window)

    def _try(self, what: str, direction: Direction, rate: _Rate, limits: SchedulerLimits, why: str) -> None:
        """Change limits until throughput has shown whether that helps."""
        self._knobs[what].turn(direction, self._windows)
        self._trial = _Trial(what, rate, self._scheduler.limits, self._windows)
        self._set(what, limits, _size(what, self._scheduler.limits), _size(what, limits), why)

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

    def _fit_block(self, rate: _Rate) -> None:
        """Set the quotas to what KV has capacity for, at the size that sequences turn out to have.

        They grow where outputs are shorter than planned and the whole quota is used, and shrink where outputs are
        longer and sequences had to be preempted.
        """
        scheduler, limits = self._scheduler, self._scheduler.limits
        if len(self._lengths) < min(self._enough, _MOST_LENGTHS):
            return
        length = sum(self._lengths) / len(self._lengths)
        full = len(scheduler.running) >= limits.max_num_seqs and bool(scheduler.waiting)
        shorter = length < _SHORTER * self._planned_len and full
        longer = length > _LONGER * self._planned_len and scheduler.num_preempted > self._preempted
        if (not shorter and not longer) or (shorter and not self._knobs["block"].may_turn("up", self._windows)):
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
        changed = replace(limits, max_num_seqs=block, kv_seqs=fitted)
        if shorter:
            self._try("block", "up", rate, changed, why)
        else:  # there is no choice
            self._set("block", changed, limits.max_num_seqs, block, why)

    def _share_host_kv(self, rate: _Rate) -> None:
        """Move some sequences between attention on the CPU and streaming (Pie section 3.4)."""
        limits = self._scheduler.limits
        quotas = limits.quotas
        on_cpu, streamed = quotas.get(KVPlacement.CPU, 0), quotas.get(KVPlacement.STREAMED, 0)
        # Attention on the CPU needs buffers, which the plan has only where it was to be.
        if limits.compute_tier != "gpu" or on_cpu + streamed < 2 or not self._planned.quota(KVPlacement.CPU):
            return
        if self._num_on_device or self._recut_to is not None:
            return  # no layer's KV is for the CPU alone
        total = sum(m.seconds for m in self._window)
        waited = {lane: self._waited_frac(lane) for lane in ("h2d", "cpu_attention")}
        link = sum(m.busy_s.get("h2d", 0.0) for m in self._window) / total
        late = self._sweep_choice.num_late if self._sweep_choice else 0
        is_late = waited["cpu_attention"] > _WAITING or late > _LATE * (on_cpu + streamed)
        direction: Direction
        if waited["h2d"] > _WAITING and streamed:
            direction, most, why = "down", streamed, f"compute waited for copies {waited['h2d']:.0%} of the time"
        elif is_late and on_cpu and waited["h2d"] <= _WAITING and link < _SATURATED:
            direction, most = "up", on_cpu
            waited_frac = f"{waited['cpu_attention']:.0%}"
            why = f"compute waited for CPU attention {waited_frac} of the time, the link is {link:.0%} busy"
            why += f", {late} sequences were left out" if late else ""
        else:
            return
        knob = self._knobs["streamed"]
        if not knob.may_turn(direction, self._windows):
            return
        moved = min(most, max(1, round(knob.next_step(direction) * (on_cpu + streamed))))
        if direction == "up":
            moved = min(moved, self._most_hidden((_SATURATED - link) * total / len(self._window)))
            waited_s = waited["cpu_attention"] * total / len(self._window)
            moved = min(moved, self._most_staged(streamed, waited_s) - streamed)
            if moved < 1:
                return
        now = streamed + (moved if direction == "up" else -moved)
        kv_seqs = {**quotas, KVPlacement.CPU: on_cpu + streamed - now, KVPlacement.STREAMED: now}
        self._try("streamed", direction, rate, replace(limits, kv_seqs=kv_seqs), why)

    def _fit_deferred(self, rate: _Rate) -> None:
        """Have half as many sequences deferred where computation waits for them, and twice as many where the CPU idles.

        Never more than planned are, and none enters where the quota is 0 (APEX section 6).
        """
        limits, planned = self._scheduler.limits, self._planned.quota(KVPlacement.DEFERRED)
        if limits.kv_seqs is None or not planned:
            return
        now, waited = limits.quota(KVPlacement.DEFERRED), self._waited_frac("cpu_attention")
        busy = sum(m.busy_s.get("cpu_attention", 0.0) for m in self._window) / sum(m.seconds for m in self._window)
        direction: Direction
        if waited > _WAITING and now:
            direction, after, why = "down", now // 2, f"compute waited for CPU attention {waited:.0%} of the time"
        elif waited <= _WAITING and 2 * busy < _SATURATED and now < planned and self._scheduler.num_waiting:
            direction, after, why = "up", min(planned, max(1, 2 * now)), f"CPU attention is {busy:.0%} busy"
        else:
            return
        if self._knobs["deferred"].may_turn(direction, self._windows):
            kv_seqs = {**limits.quotas, KVPlacement.DEFERRED: after}
            self._try("deferred", direction, rate, replace(limits, kv_seqs=kv_seqs), why)

    def _most_hidden(self, link_s: float) -> int:
        """Sequences in host memory whose KV can come over the link in so many seconds, by the plan's rate."""
        on_host = self._on_host
        seq_s = self._lane_costs.streamed_key_s * sum(len(s.tokens) for s in on_host) / max(1, len(on_host))
        return int(link_s / seq_s) if seq_s else len(on_host)

    def _most_staged(self, streamed: int, waited_s: float) -> int:
        """Sequences that may stream without making sweeps longer by the micro-batches into which they are cut.

        One staging buffer holds those of a micro-batch, and each micro-batch reads all weights again. So there are no
        more of these than now, beyond what is planned, but those that take no longer than computation waits anyway.

        Args:
            streamed: Sequences that may stream now.
            waited_s: Seconds of a sweep in which computation waits for CPU attention.
        """
        rows = [s.num_prompt + self.expected_output_len(s.sampling.max_tokens) for s in self._on_host]
        capacity, batch_s = self._scheduler.limits.most_staged_tokens, self._lane_costs.batch_s
        if capacity is None or not batch_s or not rows:
            return len(rows)
        held = max(1, capacity * len(rows) // sum(rows))
        batches = max(1, ceil(streamed / held)) + int(waited_s / batch_s)
        return max(held * batches, self._planned.quota(KVPlacement.STREAMED))

    @property
    def _on_host(self) -> list[Sequence]:
        """The sequences in flight whose KV lies in host memory, but for those whose attention is deferred."""
        return [s for s in self._scheduler.running if s.kv_placement in (KVPlacement.CPU, KVPlacement.STREAMED)]

    @property
    def _num_on_device(self) -> int:
        """The layers whose KV is on the device, where KV is by layer."""
        expansion = self._scheduler.expansion
        return expansion.num_on_device if expansion else 0

    def _measure_streaming(self, measured: Measured) -> None:
        """Note what a sweep has shown of the seconds that computation and streaming take."""
        expansion = self._scheduler.expansion
        if self._expansion_choice is None or expansion is None:
            return
        decoding = [s for s in self._scheduler.running if s.num_generated > 1 and s.kv_placement is not KVPlacement.CPU]
        keys = sum(s.num_computed for s in decoding)
        streamed_keys = sum(s.num_computed for s in decoding if s.kv_placement is KVPlacement.STREAMED)
        compute_s = None if measured.has_prompts else measured.busy_s.get("compute", 0.0)
        load = SweepLoad(sampled=len(decoding), decodes=len(decoding), keys=keys)
        link_s = measured.busy_s.get("h2d", 0.0)
        self._expansion_choice.measured(expansion, load, streamed_keys, compute_s, link_s)

    def _divide_layers(self, rate: _Rate) -> None:
        """Choose the layers whose KV streams, by Pie's three conditions (section 3.4).

        Fewer stream where compute waits for copies. More do where it does not, the link has time left, and the rows
        known are done sooner with the sequences that then have blocks. Where none streams nothing is known of the link:
        from time to time one layer tries it.
        """
        choice, expansion = self._expansion_choice, self._scheduler.expansion
        if choice is None or expansion is None or not (rows := self._rows(expansion.least_blocks)):
            return
        now, waited = expansion.num_on_device, self._waited_frac(*_LINKS)
        link = sum(m.busy_s.get("h2d", 0.0) for m in self._window) / sum(m.seconds for m in self._window)
        is_probe = not expansion.num_streamed
        best = choice.best(expansion, rows, by_plan=is_probe)
        after_s, before_s = (choice.rest_s(expansion, n, rows, by_plan=is_probe) for n in (best, now))
        direction: Direction = "down" if best > now else "up"
        if (
            best == now
            or before_s < _WORTH_CHANGING * after_s
            or not self._knobs["streamed_layers"].may_turn(direction, self._windows)
        ):
            return
        if direction == "down" and waited > _WAITING:
            why = f"compute waited for copies {waited:.0%} of the time"
        elif direction == "up" and waited <= _WAITING and link < _SATURATED:
            best = max(n for n in expansion.choices if n < now) if is_probe else best
            why = f"compute did not wait for copies, the link is {link:.0%} busy"
        else:
            return
        self._knobs["streamed_layers"].turn(direction, self._windows)
        self._trial = _Trial("streamed_layers", rate, self._scheduler.limits, self._windows, now)
        self._want_layers(best, why)

    def _rows(self, most_blocks: int) -> Rows | None:
        """The rows in flight, and how many there may be; None: none is.

        Args:
            most_blocks: KV blocks of the longest row.
        """
        scheduler, limits = self._scheduler, self._scheduler.limits
        running = [s for s in scheduler.running if s.kv_placement.tier == KVPlacement.STREAMED.tier]
        if not running:
            return None
        others = len(scheduler.running) - len(running)
        block_size = scheduler.pools[KVPlacement.STREAMED.tier].kv_block_size
        expected = [self.expected_output_len(s.sampling.max_tokens) for s in running]
        context = sum(s.num_prompt + n / 2 for s, n in zip(running, expected, strict=True)) / len(running)
        longest = sum(s.num_prompt + n for s, n in zip(running, expected, strict=True)) / len(running)
        quota = sum(limits.quota(placement) for placement in (KVPlacement.CPU, KVPlacement.STREAMED))
        most = min(quota, limits.max_num_seqs - others, len(running) + scheduler.num_waiting)
        blocks = min(most_blocks, longest / block_size + 0.5)
        computed = sum(s.num_computed for s in running) / len(running)
        left = scheduler.num_waiting * sum(expected) / len(expected)
        left += sum(max(0, n - s.num_generated) for s, n in zip(running, expected, strict=True))
        return Rows(most, others, blocks, context, len(running), computed, left)

    def _want_layers(self, on_device: int, why: str) -> None:
        """Have so many layers' KV on the device before the next sweep."""
        expansion = self._scheduler.expansion
        assert expansion is not None, "no layer can be moved"
        layers = len(expansion.order)
        change = Change(self._sweep, "streamed_layers", layers - expansion.num_on_device, layers - on_device, why)
        self.changes.append(change)
        self._recut_to = on_device

    @property
    def wants_recut(self) -> bool:
        """True where another number of layers is to stream: `recut` is to be called once no sweep is under way."""
        return self._recut_to is not None

    def recut(self) -> Recut | None:
        """Have another number of layers stream from the next sweep on, with none under way.

        Returns:
            The change of the pool, which the executor must carry out at once; None: it cannot be made.
        """
        number, self._recut_to = self._recut_to, None
        recut = self._scheduler.recut(number) if number is not None else None
        if recut is None:
            self._trial = None
        else:
            self._keep_from_cpu(recut.after.num_on_device > 0)
        return recut

    def _keep_from_cpu(self, by_layer: bool) -> None:
        """Have the CPU attend to no sequence while layers' KV is on the device, and to as many as planned otherwise."""
        quotas = self._scheduler.limits.quotas
        on_host = sum(quotas.get(placement, 0) for placement in (KVPlacement.CPU, KVPlacement.STREAMED))
        on_cpu = 0 if by_layer else min(on_host, self._planned.quota(KVPlacement.CPU))
        kv_seqs = {**quotas, KVPlacement.CPU: on_cpu, KVPlacement.STREAMED: on_host - on_cpu}
        self._scheduler.limits = replace(self._scheduler.limits, kv_seqs=kv_seqs)
        self._move_host_kv()

    def _set(self, what: str, limits: SchedulerLimits, before: int, after: int, why: str) -> None:
        self.changes.append(Change(self._sweep, what, before, after, why))
        self._scheduler.limits = limits
        self._move_host_kv()

    def _move_host_kv(self) -> None:
        """Give sequences in flight the placements that the limits have a quota for."""
        limits = self._scheduler.limits
        quota = limits.quota(KVPlacement.CPU)
        if limits.compute_tier == "gpu":
            for i, sequence in enumerate(self._on_host):
                self._scheduler.set_placement(sequence, KVPlacement.CPU if i < quota else KVPlacement.STREAMED)


def _rate(window: list[Measured]) -> _Rate:
    decoding = [measured for measured in window if not measured.has_prompts]
    counted = decoding if len(decoding) >= _FEWEST_SWEEPS else window
    seconds = sum(measured.seconds for measured in counted)
    return _Rate(
        sum(measured.tokens for measured in counted) / seconds, counted is window and len(decoding) < len(window)
    )


def _size(what: str, limits: SchedulerLimits) -> int:
    if what == "block":
        return limits.max_num_seqs
    return limits.quota(KVPlacement.DEFERRED if what == "deferred" else KVPlacement.STREAMED)
