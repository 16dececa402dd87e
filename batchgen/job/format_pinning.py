"""The formats of weights and KV that a run keeps where `--quality` leaves them open.

They are those of the output's earlier rows, or else those that the plan chooses. From then on the job is one whose
options name these formats, so its fingerprint has them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batchgen.core.quality import EXACT, KV_LOSSES, WEIGHT_LOSSES, allowed
from batchgen.job.earlier_rows import earlier_fingerprint
from batchgen.job.job import USUAL_FORMATS, Job


def leaves_formats_open(job: Job) -> bool:
    """True if the plan chooses formats of weights or KV that decide the results."""
    return len(list(_open_pairs(job))) > 1


def in_formats(job: Job, weight_format: str, kv_format: str) -> Job:
    """The job with options that name its formats, as far as these were open.

    Args:
        job: The job.
        weight_format: The format of the layers' weights.
        kv_format: The format of KV.
    """
    options = job.options
    is_chosen = weight_format in job.open_weights
    named = replace(
        job,
        options=replace(
            options,
            weights=weight_format if is_chosen else options.weights,
            kv_cache_dtype=kv_format if kv_format in job.open_kv else options.kv_cache_dtype,
            quality=EXACT,
        ),
        native_format=None if is_chosen else job.native_format,
        open_weights=(),
        open_kv=(),
    )
    if "budgets" in vars(job):  # the free memory that the plan is for
        vars(named)["budgets"] = job.budgets
    return named


def possible_jobs(job: Job) -> Iterator[Job]:
    """The job in each pair of formats that its plan may choose."""
    for weight_format, kv_format in _open_pairs(job):
        yield in_formats(job, weight_format, kv_format)


def job_of_output(job: Job, output: Path) -> Job | None:
    """The job in the formats of the rows that an output has; None where it has none, or none in formats that are open.

    Args:
        job: The job.
        output: The output file.
    """
    fingerprint = earlier_fingerprint(output)
    if fingerprint is None:
        return None
    formats = fingerprint.get("formats", USUAL_FORMATS)
    return next((possible for possible in possible_jobs(job) if possible.deciding_formats == formats), None)


def _open_pairs(job: Job) -> Iterator[tuple[str, str]]:
    """Formats of weights and of KV that the quality allows, where "" is the format of the options."""
    quality = job.options.quality
    for weights in ("", *allowed(job.open_weights, WEIGHT_LOSSES, quality)):
        for kv in ("", *allowed(job.open_kv, KV_LOSSES, quality)):
            yield weights, kv
