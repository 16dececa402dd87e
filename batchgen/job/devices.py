"""`plan --devices`: what a job would take on several devices, by each way of using them, and the fastest one.

A way that there is to use devices together is a row of `ALTERNATIVES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.options import JobOptions
from batchgen.job.planning import Case, plan_case
from batchgen.job.resolved import why_not_run
from batchgen.job.run_command import run_command, torchrun_command
from batchgen.job.workload import EstimatedWorkload
from batchgen.planner.explain import TIER_NAMES, aligned

# Times this close are equal: then fewer devices are the better choice.
_TIE = 1.02
_MOST = 100_000
_HERE = "cpu"  # a name of the machine that is planned for


@dataclass(frozen=True)
class Devices:
    """So many devices of one kind, with what its profile has of a host.

    Attributes:
        count: Of them.
        hardware: The name of each; None: that of the plan.
        hosts: That they are in, evenly; devices of a host share the memory, cores and disk of one profile.
    """

    count: int
    hardware: str | None = None
    hosts: int = 1

    @classmethod
    def parse(cls, text: str, hosts: int | None = None) -> Devices:
        """Of "2x t4", or "2". hosts: None: one for each. Raises InputError."""
        parts = re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\S.*?)\s*)?", text)
        if parts is None or not 1 <= int(parts[1]) <= _MOST:
            raise InputError(f"--devices {text!r}: give how many and of what, as in '2x t4', or how many")
        count, name = int(parts[1]), None if parts[2] == _HERE else parts[2]
        hosts = count if hosts is None else hosts
        if hosts < 1 or count % hosts:
            raise InputError(f"--hosts {hosts}: {count:,} devices are not shared out evenly over so many")
        return cls(count, name, hosts)


@dataclass(frozen=True)
class Split:
    """How processes share a job: its rows, or the model, every layer or each some of the layers."""

    workers: int = 1
    tensor_parallel: int = 1
    pipeline: int = 1

    @property
    def processes(self) -> int:
        return max(self.workers, self.tensor_parallel, self.pipeline)

    def of(self, options: JobOptions) -> JobOptions:
        """The options of one of the processes."""
        return replace(options, tensor_parallel=self.tensor_parallel, pipeline=self.pipeline)


# A split, and how many of its processes share a host -> the case of one of them. Raises InputError.
CaseOf = Callable[[Split, int], Case]


@dataclass(frozen=True)
class Alternative:
    """A way to use devices for one job.

    Attributes:
        name: As text and JSON have it, the number of devices in place of {}.
        words: How a job is started so.
        split: For a number of devices.
    """

    name: str
    words: str
    split: Callable[[int], Split]


@dataclass(frozen=True)
class Outcome:
    """What a job would take by one way.

    Attributes:
        name, words: Of the way.
        seconds, total_tokens_per_s: Of the whole job; None where it cannot be, for the reason given.
        memory_bytes: Peak of each tier, for each device.
        reason: Why it cannot be.
        not_run: Why this version does not run what it has planned; "" where it does.
        command: That runs it, on each host, or for each worker.
    """

    name: str
    words: str
    seconds: float | None = None
    total_tokens_per_s: float | None = None
    memory_bytes: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    not_run: str = ""
    command: str = ""


@dataclass(frozen=True)
class Comparison:
    """The ways beside each other. recommended: the name of the fastest of those that this version runs; None where no way fits."""

    count: int
    hosts: int
    hardware: str
    recommended: str | None
    outcomes: tuple[Outcome, ...]

    def to_json(self) -> dict[str, Any]:
        """As the plan's JSON has it under "devices"."""
        return asdict(self)


ALTERNATIVES = (
    Alternative("one worker", "on one of the devices", lambda count: Split()),
    Alternative("{} workers", "one on each, of one output (--share)", lambda count: Split(workers=count)),
    Alternative("tensor parallel", "every layer on all of them", lambda count: Split(tensor_parallel=count)),
    Alternative("pipeline", "each some of the layers", lambda count: Split(pipeline=count)),
)


def plan_split(case: Case, estimated: EstimatedWorkload, split: Split) -> Plan:
    """The plan of a job over several processes, as one of them has it, with the time of the whole job.

    Workers have a part of the rows each, read the whole model and compute shared prefixes as the others do.

    Args:
        case: Of one process.
        estimated: The workload of the whole job.
        split: How processes share it.

    Raises:
        InputError: No plan fits.
    """
    sequences = math.ceil(estimated.workload.num_seqs / split.workers)
    return plan_case(case, estimated._replace(workload=replace(estimated.workload, num_seqs=sequences)))[0]


def compare_devices(
    case_of: CaseOf, options: JobOptions, estimated: EstimatedWorkload, devices: Devices, hardware: str
) -> Comparison:
    """Plan a job for each way of using devices.

    Args:
        case_of: Gives the case of one process.
        options: The job's, on one device.
        estimated: Its workload.
        devices: How many there are, in how many hosts.
        hardware: What each is called.
    """
    outcomes = tuple(_outcome(way, case_of, options, estimated, devices) for way in ALTERNATIVES)
    return Comparison(devices.count, devices.hosts, hardware, _fastest(outcomes), outcomes)


def _outcome(
    way: Alternative, case_of: CaseOf, options: JobOptions, estimated: EstimatedWorkload, devices: Devices
) -> Outcome:
    split = way.split(devices.count)
    name, words = way.name.format(f"{devices.count:,}"), way.words
    of_host = 1 if split.processes == 1 else devices.count // devices.hosts
    workload = estimated.workload
    outputs = workload.output_len.mean if workload.task == "generate" else 0.0
    tokens = workload.num_seqs * (workload.prompt_len.mean + outputs)
    if devices.count == 1 and split != way.split(2):
        return Outcome(name, words, reason="there is one device")
    try:
        case = case_of(split, of_host)
        plan = plan_split(case, estimated, split)
    except InputError as error:
        return Outcome(name, words, reason=str(error))
    seconds = plan.prediction.total_s
    return Outcome(
        name,
        words,
        seconds,
        tokens / seconds,
        {tier: sum(parts.values()) for tier, parts in plan.prediction.memory_bytes.items()},
        not_run=why_not_run(case.job),
        command=_command(case, options, plan, split, of_host),
    )


def _command(case: Case, options: JobOptions, plan: Plan, split: Split, of_host: int) -> str:
    more: dict[str, Any] = {"device": "cuda"} if case.job.device.kind == "cuda" else {}
    more |= {"tensor_parallel": split.tensor_parallel, "pipeline": split.pipeline, "share": split.workers > 1}
    if split.workers > 1 and of_host > 1:  # workers know nothing of one another's memory
        more["cpu_memory"] = f"{plan.budgets['cpu'] >> 20}MiB"
        if case.request.disk_memory is not None:
            more["disk_memory"] = f"{case.request.disk_memory >> 20}MiB"
    command = run_command(options, **more)
    hosts = split.processes // of_host
    return torchrun_command(command, hosts, of_host) if split.workers == 1 and hosts > 1 else command


def _fastest(outcomes: tuple[Outcome, ...]) -> str | None:
    """The first of those that are not slower than any other that runs."""
    seconds = {o.name: o.seconds for o in outcomes if o.seconds is not None and not o.not_run}
    fastest = min(seconds.values(), default=math.inf)
    return next((name for name, own in seconds.items() if own <= _TIE * fastest), None)


def device_lines(comparison: Comparison) -> list[str]:
    """The comparison for a person."""
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
    text = f"on {comparison.count:,}x {comparison.hardware}"
    if comparison.hosts == comparison.count:
        return text
    return f"{text} in {'one host' if comparison.hosts == 1 else f'{comparison.hosts:,} hosts'}"


def _started(outcome: Outcome, comparison: Comparison) -> str:
    """Where, and how often, the command is started."""
    if "--share" in outcome.command:
        each = comparison.count // comparison.hosts
        own = "a GPU of its own (CUDA_VISIBLE_DEVICES) and " if "--device cuda" in outcome.command else ""
        return ", on each host" if each == 1 else f", {each:,} times on each host, each with {own}its part of the cores"
    return ", on each host" if outcome.command.startswith("torchrun") else ""
