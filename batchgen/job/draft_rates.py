"""Rates of drafts, measured in a job and kept for the next plan of a job with the same model and the same prompts."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from batchgen.core.draft_rates import UNKNOWN_RATES, DraftRates
from batchgen.core.request import GRAMMARS
from batchgen.job.job import Job
from batchgen.job.kept_values import keep_value, kept_value

_FOLDER = "drafts"


def expected_drafts(job: Job) -> DraftRates | None:
    """The rates of drafts that a job is planned with; None: nothing is drafted."""
    options = job.options
    if options.task != "generate" or options.drafts == 0:
        return None
    rates = kept_value(DraftRates, _FOLDER, _key_of(job), "rates of drafts in") or UNKNOWN_RATES
    return replace(rates, most=options.drafts)


def keep_drafts(job: Job, rates: DraftRates | None) -> None:
    """Keep the rates that a job has measured; errors of the disk are ignored.

    Args:
        job: The job.
        rates: The rates; None: too few drafts were judged.
    """
    if rates is not None and job.files.kind != "dummy":
        keep_value(rates, _FOLDER, _key_of(job))


def _key_of(job: Job) -> Any:
    """The key of jobs whose answers resemble one another: those of a model with the same prompts and grammar."""
    options, sampling = job.options, asdict(job.options.sampling)
    grammar = [repr(sampling[name]) for name in GRAMMARS]
    given = options.prompt_template or options.prompt_column or options.messages_column
    return [str(job.files.path.resolve()), given or str(options.input), *grammar]
