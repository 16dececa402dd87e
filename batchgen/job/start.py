"""The start of a command's job: an ordinary one, a cascade of two models, or one with an adapter for each row.

Which of them it is decides what is imported. That takes a second, so each function here gives another one, and a
process of batchgen's own may import it in its own way (`batchgen.core.imports`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchgen.job.command_options import PlanOptions
from batchgen.job.options import JobOptions


def runner_of(options: JobOptions) -> Callable[[JobOptions], dict[str, Any]]:
    """The function that runs a job, or resumes it, and returns its report.

    It raises BatchgenError where the job cannot be run or completed, and TooManyFailed, whose `report` is the report,
    where more rows failed than `options.max_failed` allows.
    """
    if options.cascade is not None:
        from batchgen.job.cascade.run import run_cascade

        return run_cascade
    if options.lora_column is not None:
        from batchgen.job.adapters import run_adapters

        return run_adapters
    from batchgen.job.run import run_job

    return run_job


def summary_of(options: JobOptions, report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run` prints at its end. report: what the job's function returns."""
    if options.cascade is not None:
        from batchgen.job.cascade.run import cascade_summary

        return cascade_summary(report)
    if options.lora_column is not None:
        from batchgen.job.adapters import adapters_summary

        return adapters_summary(report)
    from batchgen.job.report import summary

    return summary(report)


def planner_of(options: JobOptions) -> Callable[[PlanOptions], list[str]]:
    """The function that gives the lines that `batchgen plan` prints. It raises InputError."""
    if options.cascade is not None:
        from batchgen.job.cascade.plan import cascade_plan_lines

        return cascade_plan_lines
    from batchgen.job.plan import run_plan

    return run_plan
