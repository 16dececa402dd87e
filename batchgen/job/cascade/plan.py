"""`batchgen plan --cascade`: the time of a cascade for several shares of rows that are passed on, and what pays.

Nobody knows the share before the sample is answered. So the plan has the time for several shares, and the share up to
which the cascade is faster than the large model alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.text import without_credentials
from batchgen.core.units import format_seconds
from batchgen.job.cascade.bound import Target
from batchgen.job.checks import check_options
from batchgen.job.command_options import PlanOptions
from batchgen.job.plan import predicted_s
from batchgen.job.progress import Progress
from batchgen.job.source import open_input

_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the rows beside the sample


@dataclass(frozen=True)
class CascadePlan:
    """The predicted time of a cascade.

    Attributes:
        rows: Number of rows.
        sampled_rows: Most rows of the sample.
        small_s: Seconds of the small model's job.
        sample_s: Seconds of the large model's job over the sample.
        rest_s: Seconds of the large model's job over other rows, by the share of these that are passed on.
        large_alone_s: Seconds of the large model's job over all rows.
    """

    rows: int
    sampled_rows: int
    small_s: float
    sample_s: float
    rest_s: dict[float, float]
    large_alone_s: float

    def total_s(self, share: float) -> float:
        """Seconds of the cascade. share: a key of `rest_s`, or 0."""
        return self.small_s + self.sample_s + (self.rest_s[share] if share else 0.0)

    @property
    def break_even(self) -> float:
        """The share of the other rows up to which a cascade is faster than the large model alone, 0 to 1."""
        before, left_s = 0.0, self.large_alone_s - self.total_s(0.0)
        for share, seconds in self.rest_s.items():
            if seconds > left_s:
                earlier_s = self.rest_s.get(before, 0.0)
                return max(0.0, before + (share - before) * (left_s - earlier_s) / (seconds - earlier_s))
            before = share
        return 1.0


def cascade_plan_lines(options: PlanOptions) -> list[str]:
    """The lines that `batchgen plan --cascade` prints. Raises InputError."""
    check_options(options.job)
    for flag, given in {
        "--what-if": options.what_if,
        "--devices": options.devices,
        "--compare": options.compare,
        "--explain": options.explain,
        "--frontier": options.frontier,
        "--html": options.html,
        "-o": options.plan_file,
        "--max-block-latency": options.max_block_latency,
    }.items():
        if given:
            raise InputError(f"{flag} is for the plan of one model: leave out --cascade, or {flag}")
    with Progress(options.job.progress):
        plan = _plan(options)
    return [json.dumps(asdict(plan), indent=2)] if options.as_json else _lines(options, plan)


def _plan(options: PlanOptions) -> CascadePlan:
    job = replace(options.job, cascade=None)
    small = replace(job, model=str(options.job.cascade), lora=None, chat_template=None)
    rows = max(1, open_input(job).count_rows()) if job.input is not None else options.num_prompts or 1
    (small_s,) = predicted_s(replace(options, job=small), [1.0])
    share = 1.0 if job.agree_on is None else 0.0  # nobody knows it before: as a rare choice has
    draws = options.job.cascade_sample or Target(job.agree, job.confidence).default_draws(rows, share)
    sampled = min(rows, math.ceil(rows * (1.0 - math.exp(-draws / rows))))  # some rows are drawn several times
    others = 1.0 - sampled / rows
    shares = [sampled / rows, *(share * others for share in _SHARES), 1.0]
    sample_s, *rest_s, alone_s = predicted_s(replace(options, job=job), shares)
    return CascadePlan(rows, sampled, small_s, sample_s, dict(zip(_SHARES, rest_s, strict=True)), alone_s)


def _lines(options: PlanOptions, plan: CascadePlan) -> list[str]:
    job = options.job
    small, large = without_credentials(str(job.cascade)), without_credentials(job.model)
    totals = ", ".join(f"{share:.0%}: {format_seconds(plan.total_s(share))}" for share in plan.rest_s)
    worth = (
        f"a cascade is faster where it passes on less than {plan.break_even:.0%} of them"
        if plan.break_even > 0
        else "no cascade of these two is faster"
    )
    about = "of all answers" if job.agree_on is None else f"of {job.agree_on!r} (recall and precision)"
    return [
        f"{small} before {large}: at least {job.agree:g} {about} are those of {large}, with confidence"
        f" {job.confidence:g}",
        f"{small} over {plan.rows:,} rows: {format_seconds(plan.small_s)}; {large} over a sample of"
        f" {plan.sampled_rows:,} rows: {format_seconds(plan.sample_s)}",
        f"in all, by the share of the other rows that are passed on: {totals}",
        f"{large} alone: {format_seconds(plan.large_alone_s)}; {worth}",
    ]
