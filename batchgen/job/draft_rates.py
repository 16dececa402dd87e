"""Rates of drafts, measured in a job and kept for the next plan of a job with the same model and the same prompts."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from batchgen.core.draft_rates import MOST_DRAFTS, NO_RATES, UNKNOWN_RATES, DraftRates
from batchgen.core.request import GRAMMARS
from batchgen.job.job import Job
from batchgen.job.kept_values import keep_value, kept_value

_FOLDER = "drafts"


def expected_drafts(job: Job) -> DraftRates | None:
    """The rates of drafts that a job is planned with; None: nothing is drafted."""
    options = job.options
    if options.task != "generate" or options.drafts == 0:
        return None
    rates = kept_value(DraftRates, _FOLDER, _key_of(job), "rates of drafts in")
    if options.drafts is None:
        return replace(rates or NO_RATES, most=MOST_DRAFTS, only_while_streaming=True)
    return replace(rates or UNKNOWN_RATES, most=options.drafts)


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
    prompts = [options.prompt_template]
    if options.prompt_template is None:  # columns have the same names in inputs of any kind
        prompts = [str(options.input), options.prompt_column, options.messages_column]
    return [str(job.files.path.resolve()), *prompts, *grammar]
