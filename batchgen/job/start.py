"""The start of a command's job: an ordinary one, a cascade of two models, or one with an adapter for each row."""

from __future__ import annotations

from typing import Any

from batchgen.job.command_options import PlanOptions
from batchgen.job.options import JobOptions


def start_job(options: JobOptions) -> dict[str, Any]:
    """Run a job, or resume it; returns its report.

    Raises:
        BatchgenError: The job cannot be run or completed.
        TooManyFailed: More rows failed than `options.max_failed` allows; its `report` is the report.
    """
    if options.cascade is not None:
        from batchgen.job.cascade.run import run_cascade

        return run_cascade(options)
    if options.lora_column is not None:
        from batchgen.job.adapters import run_adapters

        return run_adapters(options)
    from batchgen.job.run import run_job

    return run_job(options)


def summary_of(options: JobOptions, report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run` prints at its end. report: what `start_job` returns."""
    if options.cascade is not None:
        from batchgen.job.cascade.run import cascade_summary

        return cascade_summary(report)
    if options.lora_column is not None:
        from batchgen.job.adapters import adapters_summary

        return adapters_summary(report)
    from batchgen.job.report import summary

    return summary(report)


def plan_lines(options: PlanOptions) -> list[str]:
    """The lines that `batchgen plan` prints. Raises InputError."""
    if options.job.cascade is not None:
        from batchgen.job.cascade.plan import cascade_plan_lines

        return cascade_plan_lines(options)
    from batchgen.job.plan import run_plan

    return run_plan(options)
