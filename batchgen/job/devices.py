"""`plan --devices`: what a job would take on several devices, by each way of using them, and the fastest one.

A way that there is to use devices together is a row of `ALTERNATIVES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.units import format_seconds
from batchgen.job.planning import Case, plan_case
from batchgen.job.workload import EstimatedWorkload
from batchgen.planner.explain import aligned

# Times this close are equal: then fewer devices are the better choice.
_TIE = 1.02
_MOST = 100_000


@dataclass(frozen=True)
class Devices:
    """So many devices of one kind, each a machine of its own as its profile has it. hardware: its name; None: that of the plan."""

    count: int
    hardware: str | None = None

    @classmethod
    def parse(cls, text: str) -> Devices:
        """Of "2x t4", or "2". Raises InputError."""
        parts = re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\S.*?)\s*)?", text)
        if parts is None or not 1 <= int(parts[1]) <= _MOST:
            raise InputError(f"--devices {text!r}: give how many and of what, as in '2x t4', or how many")
        return cls(int(parts[1]), parts[2])


@dataclass(frozen=True)
class Alternative:
    """A way to use devices for one job.

    Attributes:
        name: As text and JSON have it, the number of devices in place of {}.
        words: How a job is started so.
        plan: The plan of one of its processes, for a job on one device as it is given, its workload and the number of devices. Raises InputError where
            there is none.
    """

    name: str
    words: str
    plan: Callable[[Case, EstimatedWorkload, int], Plan]


@dataclass(frozen=True)
class Outcome:
    """What a job would take by one way. seconds, total_tokens_per_s: of the whole job; None where it cannot be, for the reason given."""

    name: str
    words: str
    seconds: float | None = None
    total_tokens_per_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The ways beside each other. recommended: the fastest one's name; None where no way fits."""

    count: int
    hardware: str
    recommended: str | None
    outcomes: tuple[Outcome, ...]

    def to_json(self) -> dict[str, Any]:
        """As the plan's JSON has it under "devices"."""
        return asdict(self)


def _one(case: Case, estimated: EstimatedWorkload, count: int) -> Plan:
    return plan_case(case, estimated)[0]


def _workers(case: Case, estimated: EstimatedWorkload, count: int) -> Plan:
    """Of a worker with its part of the rows: it reads the model and computes shared prefixes as the others do."""
    if count == 1:
        raise InputError("there is one device")
    sequences = math.ceil(estimated.workload.num_seqs / count)
    return plan_case(case, estimated._replace(workload=replace(estimated.workload, num_seqs=sequences)))[0]


ALTERNATIVES = (
    Alternative("one worker", "on one of the devices", _one),
    Alternative("{} workers", "one on each, of one output (--share)", _workers),
)


def compare_devices(case: Case, estimated: EstimatedWorkload, devices: Devices) -> Comparison:
    """Plan a job for each way of using devices.

    Args:
        case: The job, and one of the devices.
        estimated: Its workload.
        devices: How many there are.
    """
    workload = estimated.workload
    outputs = workload.output_len.mean if workload.task == "generate" else 0.0
    tokens = workload.num_seqs * (workload.prompt_len.mean + outputs)
    outcomes = []
    for way in ALTERNATIVES:
        name = way.name.format(f"{devices.count:,}")
        try:
            seconds = way.plan(case, estimated, devices.count).prediction.total_s
            outcomes.append(Outcome(name, way.words, seconds, tokens / seconds))
        except InputError as error:
            outcomes.append(Outcome(name, way.words, reason=str(error)))
    return Comparison(devices.count, case.hardware.name, _fastest(outcomes), tuple(outcomes))


def _fastest(outcomes: list[Outcome]) -> str | None:
    """The first of those that are not slower than any other."""
    fastest = min((o.seconds for o in outcomes if o.seconds is not None), default=math.inf)
    return next((o.name for o in outcomes if o.seconds is not None and o.seconds <= _TIE * fastest), None)


def device_lines(comparison: Comparison) -> list[str]:
    """The comparison for a person."""
    rows = [[f"on {comparison.count:,}x {comparison.hardware}", "time", "tokens/s", ""]]
    for outcome in comparison.outcomes:
        time = "-" if outcome.seconds is None else format_seconds(outcome.seconds)
        rate = "-" if outcome.total_tokens_per_s is None else f"{outcome.total_tokens_per_s:,.0f}"
        words = f"{outcome.words}: {outcome.reason}" if outcome.reason else outcome.words
        rows.append(
            [outcome.name, time, rate, words + (" <- fastest" if outcome.name == comparison.recommended else "")]
        )
    return aligned(rows)
