"""Rates of drafts and of forced tokens, measured in a job and kept for the next plan of one with the same prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from batchgen.core.draft_rates import MOST_DRAFTS, NO_RATES, UNKNOWN_RATES, DraftRates
from batchgen.core.request import GRAMMARS
from batchgen.job.job import Job
from batchgen.job.kept_values import keep_value, kept_value

_FOLDER, _FORCED_FOLDER = "drafts", "forced"
_DRAFTS_IN, _FORCED_IN = "rates of drafts in", "the rate of forced tokens in"


@dataclass(frozen=True)
class _Forced:
    """Tokens that a decoding step has beside its sampled one, as the grammar allows no others: the mean."""

    per_step: float


def expected_drafts(job: Job) -> DraftRates | None:
    """The rates of drafts and forced tokens that a job is planned with; None: there are none."""
    options = job.options
    if options.task != "generate":
        return None
    # The stages of a pipeline have other sequences in flight meanwhile, and sample all tokens.
    forced = kept_value(_Forced, _FORCED_FOLDER, _key_of(job), _FORCED_IN) if options.pipeline <= 1 else None
    if options.drafts == 0:
        return replace(NO_RATES, most=0, forced=forced.per_step) if forced else None
    rates = kept_value(DraftRates, _FOLDER, _key_of(job), _DRAFTS_IN)
    if options.drafts is None:
        rates = replace(rates or NO_RATES, most=MOST_DRAFTS, only_while_streaming=True)
    else:
        rates = replace(rates or UNKNOWN_RATES, most=options.drafts)
    return rates if forced is None else replace(rates, forced=forced.per_step)


def keep_drafts(job: Job, rates: DraftRates | None, forced: float | None) -> None:
    """Keep the rates that a job has measured; errors of the disk are ignored.

    Args:
        job: The job.
        rates: The rates of drafts; None: too few drafts were judged.
        forced: Tokens of a step that grammars forced, in a job in which these take no sweep; None: nobody knows.
    """
    if job.files.kind == "dummy":
        return
    if rates is not None:
        keep_value(rates, _FOLDER, _key_of(job))
    if forced:
        keep_value(_Forced(forced), _FORCED_FOLDER, _key_of(job))


def _key_of(job: Job) -> Any:
    """The key of jobs whose answers resemble one another: those of a model with the same prompts and grammar."""
    options, sampling = job.options, asdict(job.options.sampling)
    grammar = [repr(sampling[name]) for name in GRAMMARS]
    prompts = [options.prompt_template]
    if options.prompt_template is None:  # columns have the same names in inputs of any kind
        prompts = [str(options.input), options.prompt_column, options.messages_column]
    return [str(job.files.path.resolve()), *prompts, *grammar]
