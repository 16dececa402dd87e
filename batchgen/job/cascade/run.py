"""`batchgen run --cascade`: jobs of a small and of a large model whose answers make one output.

In order: the small model answers all rows; the large one answers a random sample; the sample gives the threshold on the
small model's confidence; the large one answers the other rows below it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import write_atomically
from batchgen.core.text import without_credentials
from batchgen.core.units import format_seconds
from batchgen.job.cascade.answers import AnswerColumns
from batchgen.job.cascade.bound import Bools, Draws, Floats, OneChoice, Target, Threshold, choose_threshold, draw_rows
from batchgen.job.joint.jobs import (
    Jobs,
    files_of,
    joint_summary,
    one_of_several,
    over_rows,
    read_json,
    run_jobs,
    write_output,
)
from batchgen.job.joint.rows import (
    Merged,
    Part,
    Rows,
    bad_rows,
    column,
    errors_among,
    first_row,
    merged,
    rows_at,
    tables,
    write_rows,
)
from batchgen.job.options import JobOptions
from batchgen.job.run import run_job
from batchgen.job.source import generated_columns, open_input
from batchgen.output.join import output_prefix

_OF_MODELS = {"answered_by": pa.string(), "confidence": pa.float64()}  # columns about the two models
SMALL, SAMPLE, REST = "small", "sample", "rest"  # names of jobs, the last two with a digest of their rows


@dataclass(frozen=True)
class _Small:
    """The answers of the small model.

    Attributes:
        path: Its job's output.
        columns: The columns of answers.
        of_input: Names of the input's columns.
        confidences: Its confidence in each row. [rows]
        chosen: True for each row to which it gives the choice that the promise is about; None: all rows. [rows]
        bad: The errors of invalid lines of the input, by the line's row.
        first_row: Number of the first row in the whole input.
    """

    path: Path
    columns: AnswerColumns
    of_input: tuple[str, ...]
    confidences: Floats
    chosen: Bools | None
    bad: dict[int, str]
    first_row: int

    @property
    def input_schema(self) -> pa.Schema:
        """The input's columns."""
        return pa.schema([field for field in pq.read_schema(self.path) if field.name in set(self.of_input)])


def run_cascade(options: JobOptions) -> dict[str, Any]:
    """Run a cascade, or resume it; returns the report. Raises what `run_jobs` raises."""
    if options.dry_run:
        return run_job(_small_options(options))
    return run_jobs(options, _run, "--cascade")


def _run(jobs: Jobs) -> dict[str, Any]:
    """Run all jobs and write the output; returns what the report says of them."""
    options = replace(jobs.options, output_prefix=_prefix(jobs.options))
    jobs = replace(jobs, options=options)
    small = _small(jobs)
    rows = len(small.confidences)
    if not rows:
        return _written(jobs, small, [], Threshold(math.inf, 0.0, 1.0), Draws(np.empty(0, np.int64), np.empty(0), 0.0))
    draws, drawn = _draws(jobs, small)
    sample = np.unique(draws.rows)
    parts = [_large(jobs, small, SAMPLE, each) for each in drawn]
    differs, choice = _compared(jobs, small, parts, draws)
    threshold = choose_threshold(small.confidences, draws, differs, Target(options.agree, options.confidence), choice)
    below = np.setdiff1d(np.flatnonzero(small.confidences < threshold.least_confidence), sample)
    jobs.say(_threshold_line(threshold, rows, len(below), len(sample)))
    if len(below):
        parts.append(_large(jobs, small, REST, below))
    return _written(jobs, small, parts, threshold, draws)


def _prefix(options: JobOptions) -> str:
    """The prefix of the answers' columns, where the input may have a name that only one of the models gives a column.

    Raises:
        InputError: The input already has a name with the prefix that the user chose.
    """
    if options.task != "generate":
        return options.output_prefix
    columns = replace(generated_columns(_small_options(options)), reasoning=options.reasoning_column)
    return output_prefix(open_input(options).schema, columns, options.output_prefix)


def _small(jobs: Jobs) -> _Small:
    """Run the small model's job."""
    path = jobs.run(SMALL, _small_options(jobs.options))
    added = jobs.reports[SMALL]["output_columns"]
    columns = AnswerColumns.of(jobs.options, added)
    confidences = np.concatenate([np.empty(0), *(columns.confidences(table) for _, table in tables(path))])
    wanted, chosen = _wanted(jobs.options), None
    if wanted is not None:
        answers = (answer == wanted for _, table in tables(path) for answer in columns.answers(table))
        chosen = np.fromiter(answers, bool)
    of_input = tuple(name for name in pq.read_schema(path).names if name not in set(added))
    dataset = open_input(jobs.options)
    bad = bad_rows(dataset) if jobs.options.on_bad_line == "skip" else {}
    return _Small(path, columns, of_input, confidences, chosen, bad, first_row(dataset))


def _wanted(options: JobOptions) -> Any:
    """The answer that the promise is about, as `AnswerColumns.answers` gives it; None: the promise is about all."""
    if options.agree_on is None:
        return None
    return options.choices.index(options.agree_on) if options.task == "score" else options.agree_on


def _small_options(options: JobOptions) -> JobOptions:
    """The options of the small model's job, whose log-probabilities give its confidence."""
    sampling = options.sampling
    if options.task == "generate" and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    model = str(options.cascade)
    alone = replace(one_of_several(options), model=model, lora=None, chat_template=None, sampling=sampling)
    return replace(alone, on_error="record", max_failed="100%")  # the large model answers where it fails


def _large(jobs: Jobs, small: _Small, kind: str, rows: Rows) -> Part:
    """Run a job of the large model over some rows. kind: `SAMPLE` or `REST`."""
    name = f"{kind}-{hashlib.sha256(rows.tobytes()).hexdigest()[:8]}"
    given = jobs.input_of(name)
    of_input, numbers = rows_at(small.path, rows), small.first_row + rows
    write_rows(given, small.input_schema, of_input, numbers, errors_among(small.bad, rows))
    return Part(rows, jobs.run(name, over_rows(jobs.options, given)))


def _draws(jobs: Jobs, small: _Small) -> tuple[Draws, list[Rows]]:
    """The sample, and its rows in the order in which they came into it.

    Another promise takes the draws of those before it, and adds to them where it needs more: more draws of one seed
    begin with the same ones.
    """
    options, path, confidences = jobs.options, jobs.directory / "draws.json", small.confidences
    share = 1.0 if small.chosen is None else float(small.chosen.mean())
    count = options.cascade_sample or Target(options.agree, options.confidence).default_draws(len(confidences), share)
    asked = {"seed": options.sampling.seed, "rows": len(confidences), "agree_on": options.agree_on}
    kept = read_json(path)
    counts = kept["counts"] if kept is not None and kept["asked"] == asked else []
    if not counts or counts[-1] < count:
        draws = draw_rows(confidences, count, options.sampling.seed, small.chosen)
        begun = counts and kept["rows"] == draws.rows[: counts[-1]].tolist()
        kept = {
            "asked": asked,
            "counts": sorted({*(counts if begun else ()), len(draws.rows)}),
            "rows": draws.rows.tolist(),
            "weights": draws.weights.tolist(),
            "most_weight": draws.most_weight,
        }
        write_atomically(path, json.dumps(kept).encode())
    draws = Draws(np.array(kept["rows"], np.int64), np.array(kept["weights"]), kept["most_weight"])
    known: Rows = np.empty(0, np.int64)
    drawn = []
    for stop in kept["counts"]:
        drawn.append(np.setdiff1d(draws.rows[:stop], known))
        known = np.union1d(known, drawn[-1])
    return draws, [rows for rows in drawn if len(rows)]


def _compared(jobs: Jobs, small: _Small, large: list[Part], draws: Draws) -> tuple[Bools, OneChoice | None]:
    """Compare the two models' answers to the sample.

    Returns:
        An array [draws], True where the answers differ, or one of them is missing; and the draws of the choice that the
        promise is about.
    """
    columns, wanted = small.columns, _wanted(jobs.options)
    rows = np.concatenate([part.rows for part in large])
    agree, is_wanted = [], []
    for part in large:
        of_large = [answer for _, table in tables(part.path) for answer in columns.answers(table)]
        of_small = (answer for table in rows_at(small.path, part.rows) for answer in columns.answers(table))
        agree += [columns.agree(*answers) for answers in zip(of_small, of_large, strict=True)]
        is_wanted += [answer == wanted for answer in of_large]
    order = np.argsort(rows)
    at = order[np.searchsorted(rows, draws.rows, sorter=order)]
    differs = ~np.array(agree, bool)[at]
    if small.chosen is None:
        return differs, None
    return differs, OneChoice(small.chosen[draws.rows], np.array(is_wanted, bool)[at])


def _threshold_line(threshold: Threshold, rows: int, below: int, sample: int) -> str:
    if threshold.least_confidence == math.inf:
        return f"cascade: the sample does not show that enough answers agree, so all {rows:,} rows are passed on"
    return (
        f"cascade: answers of confidence {threshold.least_confidence:.4g} and more are kept; {below:,} of {rows:,} rows"
        f" are passed on, beside the sample of {sample:,}"
    )


def _written(jobs: Jobs, small: _Small, large: list[Part], threshold: Threshold, draws: Draws) -> dict[str, Any]:
    """Write the output; returns what the report says of it."""
    prefix, types = small.columns.prefix, jobs.added_columns()
    if jobs.options.task == "generate" and jobs.options.sampling.logprobs is None:
        types.pop(prefix + "logprobs", None)
    models = _model_columns(jobs, prefix, {*small.of_input, *types})
    added = types | models
    schema = pa.schema([*small.input_schema, *(pa.field(name, kind) for name, kind in added.items())])

    def about(rows: int) -> dict[str, Any]:
        return {"output_columns": list(added), "cascade": _of_cascade(jobs, large, threshold, draws, rows)}

    asked = {"files": files_of([small.path, *(part.path for part in large)]), "threshold": repr(threshold)}
    batches = _batches(jobs, small, large, types, schema)
    return write_output(jobs, asked, schema, batches, prefix + "error", about)


def _model_columns(jobs: Jobs, prefix: str, taken: Collection[str]) -> dict[str, pa.DataType]:
    """Type of each column about the two models, by a name that no other column has.

    Args:
        jobs: The jobs.
        prefix: The prefix of the answers' columns.
        taken: Names of the columns of the input, and of the answers.
    """
    longer = (f"{prefix}cascade{number}_" for number in ("", *range(2, len(taken) + 3)))
    free = next(each for each in (prefix, *longer) if not any(each + name in taken for name in _OF_MODELS))
    columns = {free + name: kind for name, kind in _OF_MODELS.items()}
    if free != prefix:
        before = next(prefix + name for name in _OF_MODELS if prefix + name in taken)
        jobs.say(f"a column is named {before} already: what is said of the models is in {' and '.join(columns)}")
    return columns


def _batches(
    jobs: Jobs, small: _Small, large: Sequence[Part], types: dict[str, pa.DataType], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the output. types: of the columns of answers, by name."""
    names = str(jobs.options.cascade), jobs.options.model
    for each in merged(tables(small.path), large):
        of_input = [column(each.rows, name, schema.field(name).type) for name in small.of_input]
        answers = [_either(each, name, kind) for name, kind in types.items()]
        by = np.full(len(each.rows), names[0], object)
        by[each.at] = names[1]
        certain = small.columns.confidences(each.rows)
        models = [pa.array(by, pa.string()), pa.array(certain, pa.float64(), mask=certain < 0.0)]
        yield pa.RecordBatch.from_arrays([*of_input, *answers, *models], schema=schema)


def _either(rows: Merged, name: str, kind: pa.DataType) -> pa.Array:
    """A column of answers: those of the large model where it has answered, and else those of the small one."""
    of_small = column(rows.rows, name, kind)
    if rows.results is None:
        return of_small
    places = np.arange(len(rows.rows))
    places[rows.at] = len(rows.rows) + np.arange(len(rows.at))
    return pa.concat_arrays([of_small, column(rows.results, name, kind)]).take(pa.array(places))


def _of_cascade(jobs: Jobs, large: list[Part], threshold: Threshold, draws: Draws, rows: int) -> dict[str, Any]:
    """The part of a report about the two models, as JSON values; times are those of all runs."""
    options, times = jobs.options, jobs.times()
    of_large = sum(len(part.rows) for part in large)
    runs = [times[part.path.stem] for part in large if part.path.stem in times]
    large_s, large_rows = sum(run["wall_s"] for run in runs), sum(run["rows"] for run in runs)
    alone_s = large_s / large_rows * rows if large_rows else None
    small_s = times.get(SMALL, {}).get("wall_s", 0.0)
    least = threshold.least_confidence
    return {
        "small": without_credentials(str(options.cascade)),
        "large": without_credentials(options.model),
        "agree": options.agree,
        "confidence": options.confidence,
        "agree_on": options.agree_on,
        **asdict(threshold),
        "least_confidence": None if least == math.inf else least,
        "draws": len(draws.rows),
        "sampled_rows": len(np.unique(draws.rows)),
        "large_rows": of_large,
        "passed_share": of_large / rows if rows else 0.0,
        "rows_saved": rows - of_large,
        "small_s": small_s,
        "large_s": large_s,
        "large_alone_s": alone_s,
        "saved_s": None if alone_s is None else alone_s - small_s - large_s,
    }


def cascade_summary(report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run --cascade` prints at its end. report: the report of the run."""
    return joint_summary(report, [] if report["state"] == "stopped" else _about(report["rows"], report["cascade"]))


def _about(rows: int, of: dict[str, Any]) -> list[str]:
    """Lines about a cascade. of: its part of the report."""
    kept = "" if of["least_confidence"] is None else f", from a confidence of {of['least_confidence']:.4g} on"
    lines = [
        f"{of['large']} answered {of['large_rows']:,} of {rows:,} rows ({of['passed_share']:.1%}), of them"
        f" {of['sampled_rows']:,} as the sample; {of['small']} the other {of['rows_saved']:,}",
        f"{_promise(of)}, with confidence {of['confidence']:.4g}; the sample says {_estimates(of)}{kept}",
    ]
    if of["saved_s"] is not None:
        saved, alone = of["saved_s"], format_seconds(of["large_alone_s"])
        verb = "saved" if saved >= 0 else "cost"
        lines.append(f"{verb} {format_seconds(abs(saved))} of the {alone} that {of['large']} alone would take")
    return lines


def _promise(of: dict[str, Any]) -> str:
    if of["agree_on"] is None:
        return f"at least {of['agree']:.4g} of all answers are those of {of['large']}"
    return f"recall and precision of {of['agree_on']!r} are at least {of['agree']:.4g} of {of['large']}'s answers"


def _estimates(of: dict[str, Any]) -> str:
    if of["agree_on"] is None:
        return f"{of['agree_estimate']:.4f}"
    return f"{of['recall_estimate']:.4f} and {of['precision_estimate']:.4f}"
