"""The page of a run: `batchgen run --report-html`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.core.plan import Plan
from batchgen.core.text import visible
from batchgen.core.units import format_bytes, format_seconds
from batchgen.engine.parts import EngineStats
from batchgen.job.pages.charts import Bar, bars, columns, histogram, line
from batchgen.job.pages.finished_rows import FinishedRows, finished_rows
from batchgen.job.pages.html_page import COUNT, FAILED, MEASURED, PREDICTED, legend, note, page, section, table
from batchgen.job.pages.plan_page import placement, placement_heading
from batchgen.job.report import result_lines
from batchgen.job.source import RequestSource
from batchgen.planner.explanation import LANE_NAMES

_MOST_MOMENTS = 2000  # beyond these every other one is dropped
_SHOWN_MOMENTS = 120
_LABEL_CHARS = 24


class RunPage:
    """The HTML page of a run, which records the run's tokens over time."""

    def __init__(self) -> None:
        self._started_s = 0.0
        self._moments: list[tuple[float, int]] = []  # seconds since the first sweep, tokens so far
        self._sweep_s: list[tuple[int, float]] = []  # after how many sweeps each of them was
        self._every = 1
        self._rows = FinishedRows()

    def after_sweep(self, stats: EngineStats) -> None:
        """Record the number of tokens so far. stats: the engine's running totals."""
        if stats.sweeps % self._every:
            return
        if not self._moments:
            self._started_s = time.monotonic()
        now_s = time.monotonic() - self._started_s
        self._moments.append((now_s, stats.prompt_tokens + stats.generated_tokens))
        self._sweep_s.append((stats.sweeps, now_s))
        if len(self._moments) > _MOST_MOMENTS:
            self._moments, self._sweep_s, self._every = self._moments[::2], self._sweep_s[::2], 2 * self._every

    def read_rows(self, parts_dir: Path, source: RequestSource, task: str) -> None:
        """Read the finished rows from a run directory, before its parts are deleted.

        Args:
            parts_dir: Directory of the parts.
            source: Input of the rows.
            task: A task of `job.options.TASKS`.
        """
        self._rows = finished_rows(parts_dir, source, task)

    def render(self, report: Mapping[str, Any], plan: Plan | None) -> str:
        """The page, as HTML text.

        Args:
            report: The run's report.
            plan: The run's plan; None: no row was left to run.
        """
        sections = [section("Run", table([], _origin(report)))]
        if plan is not None:
            sections.append(section("Predicted and measured", *_predicted_and_measured(report)))
            sections.append(section("Throughput over time", *self._throughput(report)))
            sections.append(section(placement_heading(plan), *placement(plan)))
        sections.append(section("Answers", *_answers(report)))
        sections.append(section("Lengths", *_lengths(self._rows)))
        sections.append(section("Errors by kind", *_errors(report)))
        sections.append(section("Sample rows", *_sample(self._rows)))
        return page(f"Run: {Path(str(report['output'])).name}", _summary(report, plan), sections)

    def _throughput(self, report: Mapping[str, Any]) -> list[str]:
        rates = rates_over_time(self._moments)
        if not rates:
            return [note("No sweep was run.")]
        marks = [(self._seconds_at(change["sweep"]), _change(change)) for change in report["adaptations"]]
        if report["rows_resumed"]:
            marks.insert(0, (0.0, f"resumed with {report['rows_resumed']:,} rows of earlier runs"))
        chart = line("Tokens per second over time", rates, "s since the first sweep", "tokens/s", marks=marks)
        listed = [[format_seconds(at), text] for at, text in marks]
        return [chart, table(["after", "what happened"], listed) if listed else note("Nothing was resumed or adapted.")]

    def _seconds_at(self, sweep: int) -> float:
        return next((at for number, at in self._sweep_s if number >= sweep), self._sweep_s[-1][1])


def rates_over_time(moments: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """(seconds, tokens per second since the previous moment) at some moments of a run.

    Args:
        moments: (seconds, tokens so far), both rising.
    """
    step = max(1, -(-len(moments) // _SHOWN_MOMENTS))
    kept = [*moments[:-1:step], *moments[-1:]]
    pairs = itertools.pairwise(kept)
    return [(t1, max(0, n1 - n0) / (t1 - t0)) for (t0, n0), (t1, n1) in pairs if t1 > t0]


def _summary(report: Mapping[str, Any], plan: Plan | None) -> list[str]:
    lines = [
        f"{report['state']}: {report['rows_ok']:,} rows ok, {report['rows_failed']:,} failed,"
        f" {report['rows_resumed']:,} of them from earlier runs"
    ]
    if plan is not None:
        times = f"{format_seconds(report['wall_s'])}, predicted {format_seconds(plan.prediction.total_s)}"
        lines.append(
            f"{plan.model} in {plan.dtype}: {report['prompt_tokens']:,} prompt tokens,"
            f" {report['generated_tokens']:,} generated in {times};"
            f" peak memory {format_bytes(report['peak_bytes']['cpu'])}"
        )
    return lines


def _origin(report: Mapping[str, Any]) -> list[list[object]]:
    """Rows of a table that say when, where, by which command and with what model a job ran."""
    started, ended = (datetime.fromisoformat(report[name]) for name in ("started", "ended"))
    return [
        ["started", f"{started:%Y-%m-%d %H:%M:%S %Z}"],
        ["ended", f"{ended:%Y-%m-%d %H:%M:%S %Z}"],
        ["host", report["host"]],
        ["model", f"{report['model']} (sha256 {report['model_sha256'][:16]})"],
        ["version", f"batchgen {report['versions']['batchgen']}"],
        ["output", report["output"]],
        ["command", report["command"]],
    ]


def _answers(report: Mapping[str, Any]) -> list[str]:
    """A table of the answers' finish reasons, and a chart of the most frequent short ones."""
    parts = []
    if reasons := report["finish_reasons"]:
        total = sum(reasons.values())
        cells = [[reason, f"{count:,}", f"{count / total:.0%}"] for reason, count in reasons.items()]
        parts.append(table(["finish reason", "answers", "part"], cells))
    parts += [note(line) for line in result_lines({**report, "answers": []})]
    if answers := report["answers"]:
        rows = [Bar(_short(one["answer"]), ((COUNT, one["answer"], one["count"]),)) for one in answers]
        about = "" if report["answers_exact"] else " Counts are lower bounds."
        parts.append(note(f"The most frequent short answers of {report['answered']:,}.{about}"))
        parts.append(bars("The most frequent answers", rows, lambda value: f"{value:,.0f}"))
    return parts or [note("No answers were counted.")]


def _short(text: str) -> str:
    """A text short enough for the label of a bar."""
    text = visible(text)
    return (text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…") or "(empty)"


def _predicted_and_measured(report: Mapping[str, Any]) -> list[str]:
    """A chart with the predicted and the measured seconds of each lane, and of the whole run."""
    predicted, measured = report["predicted"], dict(report["busy_s"])
    measured["compute"] += measured["sampling"]
    pairs = [("whole run", predicted["total_s"], report["wall_s"])]
    pairs += [
        (LANE_NAMES[lane], predicted["lane_s"].get(lane, 0.0), measured[lane])
        for lane in LANE_NAMES
        if lane in measured
    ]
    shown = [pair for pair in pairs if pair[1] > 0 or pair[2] > 0]
    rows = [
        Bar(f"{name}, {what}" if what == "predicted" else what, ((colour, what, seconds),))
        for name, *values in shown
        for colour, what, seconds in zip((PREDICTED, MEASURED), ("predicted", "measured"), values, strict=True)
    ]
    stalled = [[LANE_NAMES[lane], format_seconds(s)] for lane, s in report["stalled_s"].items() if s > 0]
    return [
        bars("Predicted and measured busy time of each lane", rows, format_seconds),
        legend([(PREDICTED, "predicted"), (MEASURED, "measured")]),
        table(["compute waited for", "time"], stalled) if stalled else note("Compute waited for no other lane."),
    ]


def _lengths(rows: FinishedRows) -> list[str]:
    if not rows.prompt_lens:
        return [note("No part has finished rows: the output has them all.")]
    return [
        columns("Prompts by length", histogram(rows.prompt_lens), "prompt, tokens", "rows", COUNT),
        columns("Outputs by length", histogram(rows.output_lens), "generated or scored, tokens", "samples", COUNT),
    ]


def _errors(report: Mapping[str, Any]) -> list[str]:
    if not report["errors"]:
        return [note("No row failed.")]
    kinds = [Bar(f"kind {i}", ((FAILED, kind["error"], kind["rows"]),)) for i, kind in enumerate(report["errors"], 1)]
    listed = [[f"kind {i}", kind["rows"], kind["error"]] for i, kind in enumerate(report["errors"], 1)]
    return [
        bars("Failed rows by kind of error", kinds, lambda value: f"{value:,.0f}"),
        table(["", "rows", "error"], listed),
    ]


def _sample(rows: FinishedRows) -> list[str]:
    if not rows.sample:
        return [note("No part has finished rows.")]
    cells = [
        [f"{row.row:,}", row.prompt, row.result if row.error is None else f"failed: {row.error}"] for row in rows.sample
    ]
    return [note("Of the first 10,000 rows."), table(["row", "prompt", "result"], cells)]


def _change(change: Mapping[str, Any]) -> str:
    return f"{change['what']} {change['before']:,} to {change['after']:,}: {change['why']}"
