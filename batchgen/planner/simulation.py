"""The simulation of a plan's job, without a model.

The real scheduler and the real Steps run over rows with the lengths of the plan's workload, in the seconds that a
machine's profile gives for them. No torch.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.draft_rates import DraftRates, expected_accepted
from batchgen.core.hardware import HardwareProfile
from batchgen.core.kv_expansion import Recut
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import MemoryPlan, Plan
from batchgen.core.request import SamplingParams
from batchgen.core.workload import Lengths, Workload
from batchgen.models.config import ModelConfig
from batchgen.planner.batch_load import BatchLoad, load_of
from batchgen.planner.kv_memory import Demand
from batchgen.planner.memory import plan_memory
from batchgen.planner.memory_requirements import most_kv_tokens, process_share
from batchgen.planner.phases import Phase
from batchgen.planner.step_costs import StepCosts, streams_of
from batchgen.planner.step_simulator import OnStep, Simulator, Timeline
from batchgen.schedule.adaptation import Adaptation, Change, Measured
from batchgen.schedule.deferral_choice import deferral_choice
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.expansion_choice import expansion_choice
from batchgen.schedule.from_policy import kv_pools, longest_sequence, scheduler_limits, splitter
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.step_graph import LANES
from batchgen.schedule.sweep_choice import sweep_choice
from batchgen.schedule.sweeps import Sweeps
from batchgen.schedule.trace import TraceWriter

_MOST_PREFIX = 1 << 24  # tokens: the ids of one prefix, apart from those of another


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulated job.

    Attributes:
        total_s: Seconds of all the job's sweeps.
        sweeps: Number of the first sweeps, which were simulated.
        tokens: Tokens that went through the layers in these sweeps.
        job_tokens: Tokens that go through the layers in the whole job.
        timeline: The timeline of these sweeps.
        changes: Changes that adaptation made in these sweeps.
        left_out: Tokens that a sweep left for a later one, as the CPU was late with attention.
        moved: Number of sequences that the CPU attended to, and that moved to the GPU.
    """

    total_s: float
    sweeps: int
    tokens: int
    job_tokens: float
    timeline: Timeline
    changes: List[Change]
    left_out: int
    moved: int

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane was busy, over the whole job."""
        return {lane: seconds * self._stretch for lane, seconds in self.timeline.busy_s.items()}

    @property
    def stalled_s(self) -> dict[str, float]:
        """Seconds in which compute waited for each lane, over the whole job."""
        return {lane: seconds * self._stretch for lane, seconds in self.timeline.stalled_s.items()}

    @property
    def _stretch(self) -> float:
        return self.total_s / self.timeline.total_s


def simulate_job(
    plan: Plan,
    config: ModelConfig,
    hardware: HardwareProfile,
    *,
    max_sweeps: int | None = None,
    expected_output_len: int | None = None,
    on_step: OnStep | None = None,
    adapts: bool = False,
    rows: Iterable[tuple[int, int]] | None = None,
) -> SimulatedRun:
    """Simulate a plan's job.

    Args:
        plan: The plan.
        config: The model's configuration.
        hardware: The machine.
        max_sweeps: Most sweeps that are simulated: the rest of the job is extrapolated from the second half of them, by
            tokens. None: all are simulated.
        expected_output_len: Output length that the engine expects, in tokens; None: it expects none.
        on_step: Called for every Step, with its start and end in seconds from the first sweep.
        adapts: Whether the job adapts to what its sweeps take on the machine, as `batchgen run` does.
        rows: (prompt tokens, generated tokens) of each row; None: those of the plan's workload.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    job = SimulatedJob(plan, config, expected_output_len, rows, adapts=adapts)
    costs, sweeps = StepCosts(plan, config, hardware), Sweeps(streams_of(plan, config))
    simulator = Simulator(shared_cores=hardware.shared_cores, issue_s=hardware.issue_overhead_s, on_step=on_step)
    done = [(0.0, 0)]  # seconds and tokens after each sweep
    deferred_batches = DeferredBatches()
    while len(done) - 1 != max_sweeps and (sweep := job.next_sweep()):
        if (recut := job.recut_before) is not None:
            simulator.drain()
            simulator.spend(costs.recut_s(recut))
            sweeps.streams = replace(sweeps.streams, kv_on_device=recut.after.on_device)
        loads = sweep.loads
        simulator.spend(costs.between_s(loads))
        num_tokens = sum(load.tokens for load in loads)
        deferred_batches.pipelines = sweep.pipelines
        steps = sweeps.steps([load.flow for load in loads], deferred_batches, simulator.has_ended, num_tokens)
        simulator.run(steps, costs.sweep(loads))
        job.end_sweep(deferred_batches)
        job.adapt(simulator.now_s, *simulator.lanes_s())
        done.append((simulator.now_s, done[-1][1] + sum(load.tokens for load in loads) - job.num_refused))
    timeline = simulator.timeline()
    (half_s, half), (total_s, tokens) = done[len(done) // 2], done[-1]
    job_tokens = plan.workload.num_seqs * (plan.workload.computed_prompt_len + plan.workload.output_len.mean - 1)
    if job.has_work:
        total_s += max(0.0, job_tokens - tokens) * (total_s - half_s) / (tokens - half)
    else:
        total_s, job_tokens = timeline.total_s, tokens
    return SimulatedRun(
        total_s, len(done) - 1, tokens, job_tokens, timeline, job.changes, job.num_left_out, job.num_moved
    )


def trace_plan(
    plan: Plan, config: ModelConfig, hardware: HardwareProfile, path: str | Path, max_sweeps: int = 64
) -> SimulatedRun:
    """Write the timeline of a simulated job's first sweeps in the Chrome trace format.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
        BatchgenError: The file cannot be written.
    """
    trace = TraceWriter(path, f"{plan.model}: plan")
    try:
        return simulate_job(plan, config, hardware, max_sweeps=max_sweeps, on_step=trace.add)
    finally:
        trace.close()


def simulated_rows(workload: Workload, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Lengths of a workload's sequences: (prompt tokens, generated tokens) of each.

    Each quantile of the lengths comes once before any comes again, so that short jobs have the workload's mean lengths
    too.
    """
    draw = random.Random(seed)

    def endless(lengths: Lengths) -> Iterator[int]:
        while True:
            yield from draw.sample(lengths.values, len(lengths.values))

    return itertools.islice(
        zip(endless(workload.prompt_len), endless(workload.output_len), strict=True), workload.num_seqs
    )


def memory_of(plan: Plan, config: ModelConfig) -> MemoryPlan:
    """The memory plan of a plan's job. Raises InputError where the budgets do not hold it."""
    workload, context = plan.workload, plan.policy.max_model_len
    return plan_memory(
        config,
        plan.policy,
        Demand(
            min_tokens=min(workload.max_output_len + 1, context),
            longest_tokens=min(context, plan.workload.max_seq_len),
            most_kv_tokens=most_kv_tokens(plan),
            task=workload.task,
        ),
        dtype=plan.dtype,
        budgets=plan.budgets,
        process_bytes=process_share(plan),
    )


@dataclass(frozen=True)
class SimulatedSweep:
    """A sweep that the scheduler made.

    Attributes:
        loads: The load of each micro-batch; none where they are not wanted.
        phase: The sweep as the cost model counts it, without deferred sequences.
        pipelines: Whether deferred tokens go through all layers that they have left in it.
    """

    loads: list[BatchLoad]
    phase: Phase
    pipelines: bool = False


class SimulatedJob:
    """The engine's loop without an engine: rows in, sweeps out, each as long as its output is.

    Attributes:
        num_done: Number of finished rows.
        num_refused: Drafts of the last sweep that were refused.
        recut_before: Change of the layers whose KV streams, made just before the last sweep; None: there was none.
    """

    def __init__(
        self,
        plan: Plan,
        config: ModelConfig,
        expected_output_len: int | None = None,
        rows: Iterable[tuple[int, int]] | None = None,
        sweeps_in_flight: int = 1,
        *,
        adapts: bool = False,
    ) -> None:
        """Start with nothing in flight.

        Args:
            plan: The plan that is run.
            config: The model's configuration.
            expected_output_len: Output length that the engine expects, in tokens; None: it expects none.
            rows: (prompt tokens, generated tokens) of each row; None: those of the plan's workload.
            sweeps_in_flight: Most sweeps under way at once; above 1, in a pipeline, a sweep has run when `take_answers`
                is called.
            adapts: Whether the job adapts to what `adapt` is given.

        Raises:
            InputError: The budgets of the plan do not hold what it places.
        """
        policy, memory = plan.policy, memory_of(plan, config)
        if not round(plan.workload.shared_prefix_len):
            policy = replace(policy, share_prefixes=False)  # nothing would be found
        self._plan = plan
        self._reuses_kv = config.shared_kv_layers > 0
        chooses = any(config.choosing_layers(policy.attention_budget))
        self._budget = AttentionBudget.of(policy.attention_budget) if chooses else None
        self._windows = any(window is not None for window in config.windows)
        self._rows = enumerate(simulated_rows(plan.workload) if rows is None else rows)
        self._output_len: dict[Sequence, int] = {}  # of sequences in flight
        self._begun: list[list[Sequence]] = []  # of each micro-batch of the sweep, those whose token only begins
        self._deferred_batches: dict[int, list[Sequence]] = {}  # under way, by number
        self.num_done = self.num_refused = 0
        self.recut_before: Recut | None = None
        self._longest = longest_sequence(policy, memory, plan.compute_tier)
        limits = scheduler_limits(policy, memory, plan.compute_tier, sweeps_in_flight)
        self._sweeps_in_flight = sweeps_in_flight
        self._under_way: deque[list[Sequence]] = deque()  # sequences that sample, of each sweep of a pipeline
        expected = expected_output_len
        self._scheduler = Scheduler(kv_pools(policy, memory), limits, (lambda s: expected) if expected else None)
        self._split = splitter(policy, memory, plan.compute_tier)
        self._drafts: _SimulatedDrafts | None = None
        drafts = plan.prediction.drafts
        if plan.workload.drafts is not None and (drafts or plan.forced_per_step):
            self._drafts = _SimulatedDrafts(plan.workload.drafts)
        if drafts and self._drafts is not None:
            self._scheduler.drafting = Drafting([self._drafts], always=plan.prediction.most_drafts)
        self._adaptation: Adaptation | None = None
        if adapts and policy.admission == "continuous":
            costs = plan.prediction.lane_costs
            self._adaptation = Adaptation(
                self._scheduler,
                planned_output_len=plan.workload.output_len.mean,
                expected_output_len=expected,
                lane_costs=costs,
                sweep_choice=sweep_choice(policy, costs) if plan.compute_tier == "gpu" else None,
                expansion_choice=expansion_choice(policy, costs),
                deferral_choice=deferral_choice(policy, costs, config.num_layers)
                if plan.compute_tier == "gpu"
                else None,
            )
        self._generated = 0  # tokens since the last call of `adapt`
        self._had_prompts = False  # the last sweep
        nothing: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._before = (0.0, nothing, nothing)  # its arguments

    @property
    def changes(self) -> List[Change]:
        """The changes that adaptation has made."""
        return self._adaptation.changes if self._adaptation else []

    @property
    def num_left_out(self) -> int:
        """Tokens that a sweep left for a later one, as the CPU was late with attention."""
        return self._scheduler.num_left_out

    @property
    def num_moved(self) -> int:
        """Sequences that the CPU attended to, and that moved to the GPU."""
        return self._scheduler.num_moved

    def adapt(self, now_s: float, busy_s: Mapping[str, float], stalled_s: Mapping[str, float]) -> None:
        """Take the times of the sweep that has ended, where the job adapts to them.

        Args:
            now_s: Seconds from the start of the job.
            busy_s: Seconds that each lane was busy so far.
            stalled_s: Seconds that compute waited for each lane so far.
        """
        if self._adaptation:
            before_s, busy, stalled = self._before
            spent = [
                {lane: now[lane] - was[lane] for lane in was} for now, was in ((busy_s, busy), (stalled_s, stalled))
            ]
            self._adaptation.after_sweep(
                Measured(now_s - before_s, self._generated, spent[0], spent[1], self._had_prompts)
            )
            self._before, self._generated = (now_s, dict(busy_s), dict(stalled_s)), 0

    @property
    def has_work(self) -> bool:
        """True if any row is in flight or waits."""
        self._take_rows()
        return self._scheduler.has_work

    def next_sweep(self, wants_loads: Callable[[Phase], bool] = lambda phase: True) -> SimulatedSweep | None:
        """Schedule the next sweep, and count it as run unless sweeps are in a pipeline.

        Sequences have their new tokens at once, except deferred ones, whose token takes several sweeps and comes with
        `end_sweep`. Where nothing but such tokens is under way, the sweep has one empty micro-batch. In a pipeline
        (`sweeps_in_flight` above 1) tokens come with `take_answers`. Where all sequences are in sweeps under way there,
        the sweep has no micro-batch.

        Args:
            wants_loads: Whether the loads of a sweep are wanted, which take longer than all else; without them no
                sequence may begin a deferred token.

        Returns:
            The sweep; None when all rows are done.
        """
        if not self.has_work:
            return None
        adaptation = self._adaptation
        self.recut_before = adaptation.recut() if adaptation and adaptation.wants_recut else None
        sweep = self._scheduler.schedule()
        if not sweep and self._under_way:
            return SimulatedSweep([], _phase_of(sweep, self._plan.workload))
        phase = _phase_of(sweep, self._plan.workload)
        loads = self._loads(sweep) if wants_loads(phase) else []
        self._had_prompts = phase.prefill_tokens > 0
        self._commit(sweep)
        return SimulatedSweep(loads, phase, self._scheduler.pipelines)

    def _loads(self, sweep: list[ScheduledSequence]) -> list[BatchLoad]:
        """The load of each micro-batch of a sweep that is not committed yet."""
        batches = self._split(sweep, **self._scheduler.cut) or [[]]
        self._begun = [[s.sequence for s in batch if s.defers] for batch in batches]
        first_on_host = len(batches)
        if self._plan.compute_tier == "gpu":
            first_on_host -= self._plan.policy.activation_batches[1]
        return [
            load_of(
                batch,
                kv_block_size=self._plan.policy.kv_block_size,
                compute_tier=self._plan.compute_tier,
                windows=self._windows,
                reuses_kv=self._reuses_kv,
                hidden_on_host=k >= first_on_host,
                budget=self._budget,
            )
            for k, batch in enumerate(batches)
        ]

    def _commit(self, sweep: list[ScheduledSequence]) -> None:
        sampled = [s.sequence for s in sweep if s.samples]
        self._scheduler.commit(sweep)
        if self._sweeps_in_flight > 1:
            self._under_way.append(sampled)
        else:
            self._sample(sampled)

    def take_answers(self) -> None:
        """Take the tokens of the first of the sweeps under way, which has run."""
        self._sample(self._under_way.popleft())

    def end_sweep(self, deferred_batches: DeferredBatches) -> None:
        """Give sequences their next token whose last one has come through all layers."""
        for deferred_batch in (*deferred_batches.waiting, *deferred_batches.ended):
            if deferred_batch.number not in self._deferred_batches:
                self._deferred_batches[deferred_batch.number] = self._begun[deferred_batch.batch]
        for deferred_batch in deferred_batches.ended:
            self._sample(self._deferred_batches.pop(deferred_batch.number))

    def jump(self, most_sweeps: int) -> int:
        """Jump over sweeps of decoding alone that are alike, in which no sequence ends; called after a sweep.

        Returns:
            The number of sweeps that were jumped over: none where prompts are under way.
        """
        running = self._scheduler.running
        if self._drafts or any(s.num_remaining != 1 or s.kv_placement is KVPlacement.DEFERRED for s in running):
            return 0
        sweeps = min([most_sweeps, *(self._output_len[s] - s.num_generated - 1 for s in running)]) if running else 0
        return self._scheduler.advance(sweeps) if sweeps > 0 else 0

    def _sample(self, sampled: list[Sequence]) -> None:
        self.num_refused = 0
        for sequence in sampled:
            gained = 1 if self._drafts is None else self._gained(sequence, self._drafts)
            sequence.tokens += [0] * gained
            self._generated += gained
            if sequence.num_generated >= self._output_len[sequence]:
                del self._output_len[sequence]
                self._scheduler.finish(sequence)
                self.num_done += 1
                if self._adaptation and not sequence.targets:
                    self._adaptation.finished(sequence.num_generated, len(sequence.tokens))

        if self._scheduler.drafting is not None:
            self._scheduler.drafting.taken()

    def _gained(self, sequence: Sequence, drafts: _SimulatedDrafts) -> int:
        """Tokens that a sequence gains in a sweep, with its drafts that are accepted and those that are forced."""
        accepted, left = 0, max(0, self._output_len[sequence] - sequence.num_generated - 1)
        if sequence.drafts:
            accepted = drafts.accepted(len(sequence.drafts), left)
            self.num_refused += len(sequence.drafts) - accepted
            sequence.num_computed += accepted
            sequence.drafts = ()
        return 1 + accepted + min(drafts.forced(), left - accepted)

    def _take_rows(self) -> None:
        """Add as many rows as the engine holds ready, without those that fit no pool, which would fail there."""
        workload, policy = self._plan.workload, self._plan.policy
        while len(self._scheduler.waiting) < policy.max_num_seqs:
            if (numbered := next(self._rows, None)) is None:
                return
            row, (prompt, output) = numbered
            scored = 0 if workload.scored_len is None else min(prompt, round(workload.scored_len))
            most = 1 if scored else min(workload.max_output_len, policy.max_model_len - prompt)
            if most < 1 or prompt + most - 1 > self._longest:
                continue
            shared = min(prompt - 1, round(workload.prefix_len))
            first = 1 + (0 if workload.prefix_seqs is None else int(row / workload.prefix_seqs) * _MOST_PREFIX)
            tokens = [*range(first, first + shared), *[-row - 1] * (prompt - shared)]
            sequence = Sequence(row, row, 0, tokens, _sampling(most), targets=((0,),) * scored)
            self._output_len[sequence] = min(output, most)
            self._scheduler.add(sequence)


class _SimulatedDrafts:
    """The proposer of a simulated job, whose drafts are accepted at the workload's rates."""

    def __init__(self, rates: DraftRates) -> None:
        self._rates, self._draw, self._draw_forced = rates, random.Random(0), random.Random(1)

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: each sequence is looked at by itself."""

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """Some tokens, at most so many, as often as anything is proposed."""
        return Proposal([0] * most, 0) if self._draw.random() < self._rates.proposed else None

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: the rates are all there is to know."""

    def accepted(self, num_drafts: int, most: int) -> int:
        """The number of drafts that are accepted, at most so many."""
        for number in range(min(num_drafts, most)):
            if self._draw.random() >= self._rates.accepted:
                return number
        return min(num_drafts, most)

    def forced(self) -> int:
        """The number of tokens that a grammar forces after those of a step."""
        whole, part = divmod(self._rates.forced, 1)
        return int(whole) + (self._draw_forced.random() < part)


@lru_cache(256)
def _sampling(max_tokens: int) -> SamplingParams:
    """Sampling parameters of rows that generate so many tokens at most: checking them takes time."""
    return SamplingParams(max_tokens=max_tokens)


def _phase_of(sweep: list[ScheduledSequence], workload: Workload) -> Phase:
    prompts: list[ScheduledSequence] = []
    decodes: list[ScheduledSequence] = []
    for scheduled in sweep:
        if scheduled.sequence.num_computed < scheduled.sequence.num_prompt:
            prompts.append(scheduled)
        elif scheduled.sequence.kv_placement is not KVPlacement.DEFERRED or not scheduled.defers:
            decodes.append(scheduled)
    contexts = [s.num_keys for s in decodes]
    drafts: list[int] = []
    accepted = forced = 0.0
    if workload.drafts is not None and decodes:
        drafts = [s.num_drafts for s in decodes if s.num_drafts]
        accepted = sum(expected_accepted(workload.drafts.accepted, count) for count in drafts) / len(decodes)
        forced = sum(s.num_tokens - s.num_drafts - 1 for s in decodes) / len(decodes)
    return Phase(
        sweeps=1,
        prefill_tokens=sum(s.num_tokens for s in prompts),
        prefill_seqs=sum(s.samples for s in prompts),
        decode_seqs=len(contexts),
        context=sum(contexts) / len(contexts) if contexts else workload.prompt_len.mean,
        logits_rows_per_prompt=workload.scored_len or 1.0,
        most_drafts=max(drafts, default=0),
        drafts=sum(drafts) / max(1, len(decodes)),
        accepted=accepted,
        forced=forced,
    )
