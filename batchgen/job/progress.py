"""The display of a running job: a bar on a terminal, log lines elsewhere, or nothing.

Lines come from the job itself (`Progress.say`) and from the package's loggers, which are shown while a `Progress` is
entered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TextIO

from batchgen.core.errors import InputError
from batchgen.core.screen import Screen, say
from batchgen.core.text import visible, without_credentials
from batchgen.core.units import format_seconds
from batchgen.job.log_format import LogFormat
from batchgen.job.options import STYLES
from batchgen.job.time_left import Estimate, Seen, TimeLeft

LOG_VARIABLE = "BATCHGEN_LOG"  # the least level of log records that are shown: DEBUG, INFO, WARNING or ERROR
_RATE_WINDOW_S = 20.0  # tokens/s are those of the last seconds
_PLAIN_EVERY_S = 10.0
_BAR_EVERY_S = 0.2
_LAYERS_EVERY_S = 2.0
_FIRST_FRAC = 0.03  # part of the job's time that has passed when the first estimate is noted
_ESTIMATE_EVERY_S = 0.5
_ESTIMATE_FRAC = 0.01  # the most of the time that estimates may take


@dataclass(frozen=True)
class Counts:
    """Numbers of rows and tokens of a running job so far.

    Attributes:
        total_rows: Rows of the job; None: unknown.
        resumed: Rows that earlier runs have finished.
        done: Rows that this run has finished, failed ones included.
        failed: Rows that failed in this run.
        prompt_tokens: Prompt tokens of rows that have started.
        generated_tokens: Generated tokens.
        others: Rows that other workers have finished since this run began.
        sweeps: Number of sweeps.
        seen: Counts from which the time left is estimated; None: there is no plan.
    """

    total_rows: int | None
    resumed: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    others: int = 0
    sweeps: int = 0
    seen: Seen | None = None

    @property
    def all_done(self) -> int:
        """Rows that are done, whoever has finished them."""
        return self.resumed + self.done + self.others


class TokenClock:
    """Rates of the last seconds, and the predicted time left of a job.

    With a plan, the time left is that of an `Estimate`. Without a plan, it comes from the tokens per row so far, as
    long rows tend to end last.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.restart()

    def restart(self, estimator: Estimate | None = None) -> None:
        """Forget all counts, which were of loading. estimator: of the time left; None: there is no plan."""
        self._estimator = estimator
        self._started_s = self._now()
        self._past: deque[tuple[float, int, int, int]] = deque([(self._started_s, 0, 0, 0)])
        self._left: TimeLeft | None = None
        self._left_at_s = self._next_s = self._started_s

    def update(self, counts: Counts) -> None:
        """Take the counts after a sweep."""
        now = self._now()
        if self._estimator is not None and counts.seen is not None:
            self._estimator.after_sweep(now - self._past[-1][0], counts.seen)
        self._past.append((now, counts.prompt_tokens, counts.generated_tokens, counts.done))
        while len(self._past) > 2 and self._past[1][0] < now - _RATE_WINDOW_S:
            self._past.popleft()

    def rates(self) -> tuple[float, float, float]:
        """Prompt tokens, generated tokens and finished rows per second, over the last seconds."""
        first, last = self._past[0], self._past[-1]
        elapsed = last[0] - first[0]
        if elapsed <= 0:
            return 0.0, 0.0, 0.0
        prompt, generated, rows = ((b - a) / elapsed for a, b in zip(first[1:], last[1:], strict=True))
        return prompt, generated, rows

    def time_left(self, counts: Counts) -> TimeLeft | None:
        """The predicted time until the job ends; None: unknown.

        Without a plan, each remaining row is taken to have as many tokens as the finished rows have on average. The
        rate is that of the whole run: a sweep may take seconds, so the rate of the last seconds varies too much.
        """
        if self._estimator is not None:
            return self._estimated() if counts.seen is not None else None
        tokens = counts.prompt_tokens + counts.generated_tokens
        rate = tokens / max(self._past[-1][0] - self._started_s, 1e-9)
        if counts.total_rows is None or counts.done == 0 or rate <= 0:
            return None
        expected = tokens / counts.done * (counts.total_rows - counts.resumed - counts.others)
        left_s = max(0.0, expected - tokens) / rate * counts.done / (counts.done + counts.others)
        return TimeLeft(left_s, False)

    def _estimated(self) -> TimeLeft:
        """The estimate, made anew where the last one is old enough, else counted down."""
        assert self._estimator is not None
        now = self._now()
        if self._left is None or now >= self._next_s:
            began_s = time.perf_counter()
            self._left, self._left_at_s = self._estimator.time_left(), now
            took_s = time.perf_counter() - began_s
            self._next_s = now + max(_ESTIMATE_EVERY_S, took_s / _ESTIMATE_FRAC)
        return TimeLeft(max(0.0, self._left.seconds - (now - self._left_at_s)), self._left.is_bound)


def describe(counts: Counts, clock: TokenClock, gone_s: float | None = None) -> str:
    """Text such as "3:12 gone, 48 s left, ends about 14:05, 1,204 prompt + 96 output tokens/s, 3 failed, 120 resumed".

    Args:
        counts: The job's counts.
        clock: The job's clock.
        gone_s: Seconds since the command started; None: the text does not say it.
    """
    prompt_rate, output_rate, _ = clock.rates()
    parts = [] if gone_s is None else [f"{_clock_text(gone_s)} gone"]
    left = clock.time_left(counts)
    if left is not None:
        at_most, about = ("at most ", "by") if left.is_bound else ("", "about")
        parts += [f"{at_most}{format_seconds(left.seconds)} left", f"ends {about} {_end_text(left.seconds)}"]
    output_text = f" + {output_rate:,.0f} output" if counts.generated_tokens else ""  # scoring makes none
    parts += [f"{prompt_rate:,.0f} prompt{output_text} tokens/s"]
    parts += [f"{counts.failed:,} failed"] if counts.failed else []
    parts += [f"{counts.resumed:,} resumed"] if counts.resumed else []
    parts += [f"{counts.others:,} by other workers"] if counts.others else []
    return ", ".join(parts)


def _clock_text(seconds: float) -> str:
    """A duration such as "3:12" or "1:03:12"."""
    minutes, secs = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{secs:02d}" if minutes >= 60 else f"{minutes}:{secs:02d}"


def _end_text(left_s: float) -> str:
    """The time of day in so many seconds, with the day of the week where it is another day."""
    now = datetime.now().astimezone()
    ends = now + timedelta(seconds=left_s)
    return f"{ends:%H:%M}" if ends.date() == now.date() else f"{ends:%a %H:%M}"


class _LogLines(logging.Handler):
    """Log records shown as lines of a `Progress`."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage(), level=record.levelname.lower(), logger=record.name)


@contextlib.contextmanager
def log_lines(say: Callable[..., None] | None) -> Iterator[None]:
    """Show the package's log records as lines while the block runs; handlers of the root logger do not get them.

    Args:
        say: Function that shows a line, as `Progress.say`; None: no line is shown, and the root logger's handlers get
            the records.

    Raises:
        InputError: $BATCHGEN_LOG is not the name of a level.
    """
    package = logging.getLogger("batchgen")
    handlers, level, propagate = package.handlers, package.level, package.propagate
    if say is None:
        package.handlers = [*handlers, logging.NullHandler()]  # without any handler Python would print warnings
    else:
        package.handlers = [*(other for other in handlers if not isinstance(other, _LogLines)), _LogLines(say)]
        package.propagate = False
        package.setLevel(_log_level())
    try:
        yield
    finally:
        package.handlers, package.propagate = handlers, propagate
        package.setLevel(level)


def _log_level() -> str:
    name = os.environ.get(LOG_VARIABLE, "").upper() or "INFO"
    if name not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise InputError(f"${LOG_VARIABLE} must be DEBUG, INFO, WARNING or ERROR, not {os.environ[LOG_VARIABLE]!r}")
    return name


class Progress:
    """Display of a job's `Counts` and of lines, on standard error; as a context manager also of log records.

    Attributes:
        estimated_s: Predicted seconds of the whole job, noted when 3 % of it had passed; None before that, or without a
            plan.
    """

    def __init__(
        self,
        style: str = "auto",
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        log_format: LogFormat | None = None,
    ) -> None:
        """Show nothing yet.

        Args:
            style: One of `STYLES`.
            stream: Stream on which lines are shown; None: standard error.
            now: Clock, in seconds.
            log_format: Form of lines that are no terminal's; None: they are shown as they are.

        Raises:
            InputError: There is no such style.
        """
        if style not in STYLES:
            raise InputError(f"--progress must be one of {', '.join(STYLES)}, not {style!r}")
        self._stream = Screen.over(stream or sys.stderr)
        self._format = log_format
        as_json = log_format is not None and log_format.kind == "json"
        self._terminal = style == "auto" and self._stream.isatty() and not as_json
        self._silent = style == "none"
        self._bar: Any = None  # tqdm's
        self._now = now
        self._clock = TokenClock(now)
        self._made_s = self._counted_since_s = self._shown_s = now()
        self.estimated_s: float | None = None
        self._log = contextlib.ExitStack()

    def start(self, estimator: Estimate | None = None) -> None:
        """Begin to count rates and the time left. estimator: of the time left; None: there is no plan."""
        self._clock.restart(estimator)
        self._counted_since_s = self._now()

    def rows_per_s(self) -> float:
        """Rows that this run has finished per second, over the last seconds."""
        return self._clock.rates()[2]

    def time_left(self, counts: Counts) -> TimeLeft | None:
        """The predicted time until the job ends; None: unknown."""
        return self._clock.time_left(counts)

    def say(self, line: str, *, level: str = "info", event: str = "message", **fields: Any) -> None:
        """Show a line, on a terminal above the bar. Control characters are made visible, credentials of URLs hidden.

        Args:
            line: The text.
            level: "debug", "info", "warning" or "error".
            event: Kind of the event, for logs in JSON.
            **fields: JSON values of the event, for logs in JSON.
        """
        if self._silent:
            return
        line = without_credentials(line)
        if self._format is not None and not self._terminal:
            line = self._format.line(line, level, event, **fields)
        if self._bar is not None:
            self._bar.write(visible(line), file=self._stream)
        else:
            say(line, self._stream)

    def update(self, counts: Counts) -> None:
        """Take new counts. A bar shows them at most a few times a second, plain lines every ten seconds."""
        self._clock.update(counts)
        now = self._now()
        if self.estimated_s is None and counts.seen is not None:
            left, gone_s = self._clock.time_left(counts), now - self._counted_since_s
            if left is not None and gone_s >= _FIRST_FRAC * (gone_s + left.seconds):
                self.estimated_s = now - self._made_s + left.seconds
        if self._silent or now - self._shown_s < (_BAR_EVERY_S if self._terminal else _PLAIN_EVERY_S):
            return
        self._shown_s = now
        self._show(counts)

    @contextlib.contextmanager
    def layers(self) -> Iterator[Callable[[int, int], None]]:
        """Yield a function that shows (layers loaded, layers in all), as a bar on a terminal or else as lines."""
        if self._terminal:
            from tqdm import tqdm

            with tqdm(unit="layer", dynamic_ncols=True, leave=False, file=self._stream) as bar:

                def draw(done: int, total: int) -> None:
                    bar.total = total
                    bar.update(done - bar.n)

                yield draw
            return
        said_s = self._now()

        def say(done: int, total: int) -> None:
            nonlocal said_s
            if self._now() - said_s >= _LAYERS_EVERY_S or done == total:
                said_s = self._now()
                self.say(f"{done:,} of {total:,} layers")

        yield say

    def _show(self, counts: Counts) -> None:
        rows = counts.all_done
        text = describe(counts, self._clock, self._now() - self._made_s)
        if not self._terminal:
            of = f" of {counts.total_rows:,} ({rows / counts.total_rows:.0%})" if counts.total_rows else ""
            self.say(f"{rows:,}{of} rows: {text}", event="progress", **self._fields(counts))
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=counts.total_rows,
                file=self._stream,
                dynamic_ncols=True,
                leave=False,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}"
                if counts.total_rows
                else "{n_fmt} rows{postfix}",
            )
        self._bar.n = rows
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()

    def _fields(self, counts: Counts) -> dict[str, Any]:
        left = self._clock.time_left(counts)
        prompt_rate, output_rate, row_rate = self._clock.rates()
        return {
            "rows": counts.total_rows,
            "rows_done": counts.all_done,
            "rows_failed": counts.failed,
            "prompt_tokens_per_s": round(prompt_rate, 1),
            "generated_tokens_per_s": round(output_rate, 1),
            "rows_per_s": round(row_rate, 3),
            "elapsed_s": round(self._now() - self._made_s, 1),
            "seconds_left": None if left is None else round(left.seconds, 1),
        }

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        self._log.enter_context(log_lines(None if self._silent else self.say))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()
        self.close()
