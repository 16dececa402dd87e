"""`plan --devices`: predicted times of a job on several devices, for each strategy of using them together.

The strategies are the rows of the table `ALTERNATIVES`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.job import Job, why_not_run
from batchgen.job.mixed_devices import share_out, with_sequences
from batchgen.job.options import JobOptions
from batchgen.job.planning import plan_job
from batchgen.job.run_command import run_command, torchrun_command
from batchgen.planner.explain import TIER_NAMES, aligned
from batchgen.planner.problem import Problem
from batchgen.planner.search import TIE

_MOST = 100_000
_HERE = "cpu"  # a name of the machine that is planned for


@dataclass(frozen=True)
class Devices:
    """A number of devices of one kind.

    Attributes:
        count: Number of devices.
        hardware: Name of the hardware profile of each host; None: the plan's hardware.
        hosts: Number of hosts that have the devices, as many each. The devices of a host share the memory, cores and
            disk of one profile.
    """

    count: int
    hardware: str | None = None
    hosts: int = 1

    @classmethod
    def parse(cls, text: str, hosts: int | None = None) -> Devices:
        """Parse text such as "2x t4" or "2".

        Args:
            text: Number of devices, and perhaps the name of their hardware profile.
            hosts: Number of hosts that have them; None: one for each device.

        Raises:
            InputError: The text is not of this form.
        """
        parts = re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\S.*?)\s*)?", text)
        if parts is None or not 1 <= int(parts[1]) <= _MOST:
            raise InputError(f"--devices {text!r}: give how many and of what, as in '2x t4', or how many")
        count, name = int(parts[1]), None if parts[2] == _HERE else parts[2]
        hosts = count if hosts is None else hosts
        if hosts < 1 or count % hosts:
            raise InputError(f"--hosts {hosts}: {count:,} devices are not shared out evenly over so many")
        return cls(count, name, hosts)


def parse_kinds(text: str, hosts: int | None) -> tuple[Devices, ...]:
    """Parse text such as "1x t4 + 2x a100", or "2x t4" for devices of a single kind.

    Args:
        text: Number and hardware profile of the devices of each kind.
        hosts: Number of hosts that have them; None: one for each device.

    Raises:
        InputError: The text is not of this form.
    """
    kinds = tuple(re.split(r"\s+\+\s+|\s*\+\s*(?=\d+\s*x)", text))
    if len(kinds) == 1:
        return (Devices.parse(text, hosts),)
    if hosts is not None:
        raise InputError(f"--hosts is for devices of one kind: leave it out, and each of {text} has a host of its own")
    parsed = tuple(map(Devices.parse, kinds))
    if twice := [name for name, count in Counter(devices.hardware or _HERE for devices in parsed).items() if count > 1]:
        raise InputError(f"--devices {text!r}: {twice[0]} is there twice, so give it once, with the number of all")
    return parsed


@dataclass(frozen=True)
class Split:
    """The numbers of processes among which a job is split, by the thing that is split.

    Attributes:
        workers: Processes that each run a part of the rows.
        tensor_parallel: Processes (ranks) that each have a part of every layer.
        pipeline: Processes (stages) that each have some of the layers.
    """

    workers: int = 1
    tensor_parallel: int = 1
    pipeline: int = 1

    @property
    def processes(self) -> int:
        return max(self.workers, self.tensor_parallel, self.pipeline)

    def of(self, options: JobOptions) -> JobOptions:
        """The job's options for one of the processes."""
        return replace(options, tensor_parallel=self.tensor_parallel, pipeline=self.pipeline)


# From a split, and how many of its processes share a host, to the job and the problem of one of them. Raises
# InputError.
ProblemOf = Callable[[Split, int], tuple[Job, Problem]]


@dataclass(frozen=True)
class Alternative:
    """A strategy of using several devices for one job.

    Attributes:
        name: Name in text and JSON, with {} in place of the number of devices.
        words: Description for a person.
        split: Function from the number of devices to the split of the job.
    """

    name: str
    words: str
    split: Callable[[int], Split]


@dataclass(frozen=True)
class Outcome:
    """The result of planning a job by one strategy.

    Attributes:
        name: Name of the strategy.
        words: Description of the strategy.
        seconds: Predicted time of the whole job; None: there is no plan, for the given reason.
        total_tokens_per_s: Predicted prompt and output tokens per second of the whole job; None: there is no plan.
        memory_bytes: Peak bytes of each tier, for each device.
        reason: Reason why there is no plan.
        not_run: Reason why this version cannot run the plan; "": it can.
        command: Command that runs the plan, on each host or for each worker.
        shares: Part of the rows that all workers of a kind of device get, by kind.
    """

    name: str
    words: str
    seconds: float | None = None
    total_tokens_per_s: float | None = None
    memory_bytes: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    not_run: str = ""
    command: str = ""
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The plans of one job by all strategies of using several devices.

    Attributes:
        count: Number of devices.
        hosts: Number of hosts.
        hardware: Name of the devices.
        recommended: Name of the fastest strategy that this version runs; None: no strategy has a plan.
        outcomes: The result of each strategy.
    """

    count: int
    hosts: int
    hardware: str
    recommended: str | None
    outcomes: tuple[Outcome, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values: the field "devices" of the plan's JSON."""
        return asdict(self)


ALTERNATIVES = (
    Alternative("one worker", "on one of the devices", lambda count: Split()),
    Alternative("{} workers", "one on each, of one output (--share)", lambda count: Split(workers=count)),
    Alternative("tensor parallel", "every layer on all of them", lambda count: Split(tensor_parallel=count)),
    Alternative("pipeline", "each some of the layers", lambda count: Split(pipeline=count)),
)


def plan_split(job: Job, problem: Problem, split: Split) -> Plan:
    """The plan of one of several processes of a job; its time is that of the whole job.

    Each worker runs a part of the rows, reads the whole model and computes shared prefixes itself.

    Args:
        job: The job of one process.
        problem: The problem of one process, with all rows.
        split: The kind and number of processes.

    Raises:
        InputError: No plan fits.
    """
    return plan_job(job, with_sequences(problem, math.ceil(problem.workload.num_seqs / split.workers)))


def compare_devices(problem_for: ProblemOf, options: JobOptions, devices: Devices, hardware: str) -> Comparison:
    """Plan a job by each strategy of using several devices of one kind.

    Args:
        problem_for: Function from a split job's options to the job and the problem of one process.
        options: The job's options on one device.
        devices: The devices.
        hardware: Name of the devices' hardware profile.
    """
    outcomes = tuple(_outcome(way, problem_for, options, devices) for way in ALTERNATIVES)
    return Comparison(devices.count, devices.hosts, hardware, _fastest(outcomes), outcomes)


def _outcome(way: Alternative, problem_for: ProblemOf, options: JobOptions, devices: Devices) -> Outcome:
    split = way.split(devices.count)
    name, words = way.name.format(f"{devices.count:,}"), way.words
    of_host = 1 if split.processes == 1 else devices.count // devices.hosts
    if devices.count == 1 and split != way.split(2):
        return Outcome(name, words, reason="there is one device")
    try:
        job, problem = problem_for(split, of_host)
        plan = plan_split(job, problem, split)
    except InputError as error:
        return Outcome(name, words, reason=str(error))
    seconds = plan.prediction.total_s
    return Outcome(
        name,
        words,
        seconds,
        _tokens(problem) / seconds,
        {tier: sum(parts.values()) for tier, parts in plan.prediction.memory_bytes.items()},
        not_run=why_not_run(job, of_host),
        command=_command(job, options, plan, split, of_host),
    )


def compare_kinds(kinds: Sequence[tuple[Devices, str, ProblemOf]], options: JobOptions) -> Comparison:
    """Plan a job by each strategy of using devices of several kinds, each device in a host of its own.

    Args:
        kinds: For each kind: its devices, their name, and a function that returns the job and the problem of a process
            on such a device.
        options: The job's options on one device.
    """
    alone = [_outcome(ALTERNATIVES[0], problem_for, options, Devices(1)) for _, _, problem_for in kinds]
    seconds = [outcome.seconds or math.inf for outcome in alone]
    fastest = seconds.index(min(seconds))
    names = [name for _, name, _ in kinds]
    count = sum(devices.count for devices, _, _ in kinds)
    outcomes = [
        replace(alone[fastest], words=f"on a device of the fastest kind: {names[fastest]}"),
        _workers(kinds, options, count),
        *(Outcome(way.name, way.words, reason="is for devices of one kind") for way in ALTERNATIVES[2:]),
    ]
    hardware = " + ".join(f"{devices.count:,}x {name}" for devices, name, _ in kinds)
    return Comparison(count, count, hardware, _fastest(tuple(outcomes)), tuple(outcomes))


def _workers(kinds: Sequence[tuple[Devices, str, ProblemOf]], options: JobOptions, count: int) -> Outcome:
    """The result of planning a job with one worker on each device, of several kinds."""
    name = ALTERNATIVES[1].name.format(f"{count:,}")
    try:
        known = []
        for devices, _, problem_for in kinds:
            job, problem = problem_for(Split(), 1)
            known.append((devices.count, job, problem, plan_split(job, problem, Split())))
        parts = share_out(known)
    except InputError as error:
        return Outcome(name, ALTERNATIVES[1].words, reason=str(error))
    total = sum(part.count * part.sequences for part in parts)
    shares = {kind: part.count * part.sequences / total for (_, kind, _), part in zip(kinds, parts, strict=True)}
    words = ", ".join(f"{share:.0%} of the rows on {kind}" for kind, share in shares.items())
    seconds = max(part.end_s for part in parts)
    peaks = [part.plan.prediction.memory_bytes for part in parts if part.plan]
    tiers = dict.fromkeys(tier for peak in peaks for tier in peak)
    return Outcome(
        name,
        f"{ALTERNATIVES[1].words}: {words}",
        seconds,
        _tokens(known[0][2]) / seconds,
        {tier: max(sum(peak.get(tier, {}).values()) for peak in peaks) for tier in tiers},
        not_run=next(filter(None, (why_not_run(job) for _, job, _, _ in known)), ""),
        command=run_command(options, share=True),
        shares=shares,
    )


def _tokens(problem: Problem) -> float:
    """Number of tokens of all prompts and outputs of a problem."""
    workload = problem.workload
    outputs = workload.output_len.mean if workload.task == "generate" else 0.0
    return workload.num_seqs * (workload.prompt_len.mean + outputs)


def _command(job: Job, options: JobOptions, plan: Plan, split: Split, of_host: int) -> str:
    more: dict[str, Any] = {"device": "cuda"} if job.device.kind == "cuda" else {}
    more |= {"tensor_parallel": split.tensor_parallel, "pipeline": split.pipeline, "share": split.workers > 1}
    if split.workers > 1 and of_host > 1:  # workers know nothing of one another's memory
        more["cpu_memory"] = f"{plan.budgets['cpu'] >> 20}MiB"
        if (disk_memory := job.process_memory["disk_memory"]) is not None:
            more["disk_memory"] = f"{disk_memory >> 20}MiB"
    command = run_command(options, **more)
    hosts = split.processes // of_host
    return torchrun_command(command, hosts, of_host) if split.workers == 1 and hosts > 1 else command


def _fastest(outcomes: tuple[Outcome, ...]) -> str | None:
    """Name of the fastest strategy that this version runs; of equally fast ones, the first."""
    seconds = {o.name: o.seconds for o in outcomes if o.seconds is not None and not o.not_run}
    fastest = min(seconds.values(), default=math.inf)
    # Of equal times that of fewer devices is the better choice.
    return next((name for name, time_s in seconds.items() if time_s <= TIE * fastest), None)


def device_lines(comparison: Comparison) -> list[str]:
    """The lines that show a comparison of strategies to a person."""
    rows = [[_where(comparison), "time", "tokens/s", "memory of each", ""]]
    for outcome in comparison.outcomes:
        time = "-" if outcome.seconds is None else format_seconds(outcome.seconds)
        rate = "-" if outcome.total_tokens_per_s is None else f"{outcome.total_tokens_per_s:,.0f}"
        peaks = (f"{TIER_NAMES[tier]} {format_bytes(size)}" for tier, size in outcome.memory_bytes.items() if size)
        words = f"{outcome.words}: {outcome.reason}" if outcome.reason else outcome.words
        if outcome.not_run:
            words += f"; not run yet: {outcome.not_run}"
        mark = " <- recommended" if outcome.name == comparison.recommended else ""
        rows.append([outcome.name, time, rate, ", ".join(peaks) or "-", words + mark])
    best = [outcome for outcome in comparison.outcomes if outcome.name == comparison.recommended]
    return aligned(rows) + [f"recommended: {o.name}{_started(o, comparison)}: {o.command}" for o in best]


def _where(comparison: Comparison) -> str:
    if " + " in comparison.hardware:  # of several kinds
        return f"on {comparison.hardware}"
    text = f"on {comparison.count:,}x {comparison.hardware}"
    if comparison.hosts == comparison.count:
        return text
    return f"{text} in {'one host' if comparison.hosts == 1 else f'{comparison.hosts:,} hosts'}"


def _started(outcome: Outcome, comparison: Comparison) -> str:
    """Text that says on which hosts, and how many times on each, a strategy's command must be started."""
    if "--share" in outcome.command:
        each = comparison.count // comparison.hosts
        if outcome.shares:
            return ", on each device's host, with --device as it has there"
        devices = "a GPU of its own (CUDA_VISIBLE_DEVICES) and " if "--device cuda" in outcome.command else ""
        return (
            ", on each host"
            if each == 1
            else f", {each:,} times on each host, each with {devices}its part of the cores"
        )
    return ", on each host, with the same BATCHGEN_SECRET" if outcome.command.startswith("torchrun") else ""
