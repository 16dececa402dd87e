"""The display of a running job: a bar on a terminal, plain lines elsewhere, or nothing.

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
from typing import Any, TextIO

from batchgen.core.errors import InputError
from batchgen.core.screen import Screen, say
from batchgen.core.text import visible, without_credentials
from batchgen.core.units import format_seconds
from batchgen.job.eta import Expected, Seen, progress_of, remaining_s
from batchgen.job.options import STYLES

LOG_VARIABLE = "BATCHGEN_LOG"  # the least level of log records that are shown: DEBUG, INFO, WARNING or ERROR
_RATE_WINDOW_S = 20.0  # tokens/s are those of the last seconds
_PLAIN_EVERY_S = 10.0
_BAR_EVERY_S = 0.2
_LAYERS_EVERY_S = 2.0
_FIRST_FRAC = 0.03  # part of the work that is done when the first estimate is noted


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
        computed_tokens: Tokens that went through the layers.
        finished_tokens: Generated tokens of rows that are done.
        repeated: Number of the done rows that got a duplicate's result.
        others: Rows that other workers have finished since this run began.
    """

    total_rows: int | None
    resumed: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    finished_tokens: int = 0
    repeated: int = 0
    others: int = 0


class TokenClock:
    """Token rates of the last seconds, and the predicted time left of a job.

    With a plan, the time left comes from its predicted stages. Without a plan, it comes from the tokens per row so far,
    as long rows tend to end last.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.restart()

    def restart(self, expected: Expected | None = None) -> None:
        """Forget all counts, which were of loading. expected: the plan's prediction; None: there is no plan."""
        self._expected = expected
        self._started_s = self._now()
        self._past: deque[tuple[float, int, int]] = deque([(self._started_s, 0, 0)])

    def update(self, prompt_tokens: int, generated_tokens: int) -> None:
        now = self._now()
        self._past.append((now, prompt_tokens, generated_tokens))
        while len(self._past) > 2 and self._past[1][0] < now - _RATE_WINDOW_S:
            self._past.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt tokens per second and generated tokens per second, over the last seconds."""
        (t0, p0, g0), (t1, p1, g1) = self._past[0], self._past[-1]
        elapsed = t1 - t0
        return ((p1 - p0) / elapsed, (g1 - g0) / elapsed) if elapsed > 0 else (0.0, 0.0)

    def remaining_s(self, counts: Counts) -> float | None:
        """Predicted seconds until the job ends; None: unknown.

        Without a plan, each remaining row is taken to have as many tokens as the finished rows have on average. The
        rate is that of the whole run: a sweep may take seconds, so the rate of the last seconds varies too much.
        """
        if self._expected is not None and counts.computed_tokens:
            return remaining_s(self._expected, self._seen(counts))
        tokens = counts.prompt_tokens + counts.generated_tokens
        rate = tokens / max(self._past[-1][0] - self._started_s, 1e-9)
        if counts.total_rows is None or counts.done == 0 or rate <= 0:
            return None
        expected = tokens / counts.done * (counts.total_rows - counts.resumed - counts.others)
        return max(0.0, expected - tokens) / rate * counts.done / (counts.done + counts.others)

    def done_frac(self, counts: Counts) -> float:
        """Part of the job's predicted seconds that is done, 0 to 1; 0 without a plan."""
        if self._expected is None:
            return 0.0
        done_s, left_s = progress_of(self._expected, self._seen(counts))
        return done_s / (done_s + left_s) if done_s else 0.0

    def _seen(self, counts: Counts) -> Seen:
        elapsed_s = self._past[-1][0] - self._started_s
        tokens = counts.computed_tokens, counts.generated_tokens, counts.finished_tokens
        return Seen(elapsed_s, counts.done, *tokens, counts.repeated)


def describe(counts: Counts, clock: TokenClock) -> str:
    """Text such as "1,204 prompt + 96 output tokens/s, 3 failed, 120 resumed, 48 s left"."""
    prompt_rate, output_rate = clock.rates()
    output_text = f" + {output_rate:,.0f} output" if counts.generated_tokens else ""  # scoring makes none
    parts = [f"{prompt_rate:,.0f} prompt{output_text} tokens/s"]
    parts += [f"{counts.failed:,} failed"] if counts.failed else []
    parts += [f"{counts.resumed:,} resumed"] if counts.resumed else []
    parts += [f"{counts.others:,} by other workers"] if counts.others else []
    left_s = clock.remaining_s(counts)
    if left_s is not None:
        parts.append(f"{format_seconds(left_s)} left")
    return ", ".join(parts)


class _LogLines(logging.Handler):
    """Log records shown as lines of a `Progress`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextlib.contextmanager
def log_lines(say: Callable[[str], None] | None) -> Iterator[None]:
    """Show the package's log records as lines while the block runs; handlers of the root logger do not get them.

    Args:
        say: Function that shows a line; None: no line is shown, and the root logger's handlers get the records.

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
        estimated_s: Predicted seconds of the whole job, noted when 3 % of it were done; None before, or without a plan.
    """

    def __init__(
        self, style: str = "auto", stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        if style not in STYLES:
            raise InputError(f"--progress must be one of {', '.join(STYLES)}, not {style!r}")
        self._stream = Screen.over(stream or sys.stderr)
        self._terminal = style == "auto" and self._stream.isatty()
        self._silent = style == "none"
        self._bar: Any = None  # tqdm's
        self._now = now
        self._clock = TokenClock(now)
        self._made_s = self._shown_s = now()
        self.estimated_s: float | None = None
        self._log = contextlib.ExitStack()

    def start(self, expected: Expected | None = None) -> None:
        """Begin to count token rates and the time left. expected: the plan's prediction; None: there is no plan."""
        self._clock.restart(expected)

    def say(self, line: str) -> None:
        """Show a line, on a terminal above the bar. Control characters are made visible, credentials of URLs hidden."""
        if self._silent:
            return
        line = without_credentials(line)
        if self._bar is not None:
            self._bar.write(visible(line), file=self._stream)
        else:
            say(line, self._stream)

    def update(self, counts: Counts) -> None:
        """Take new counts. A bar shows them at most a few times a second, plain lines every ten seconds."""
        self._clock.update(counts.prompt_tokens, counts.generated_tokens)
        now = self._now()
        if self.estimated_s is None and self._clock.done_frac(counts) >= _FIRST_FRAC:
            left_s = self._clock.remaining_s(counts)
            self.estimated_s = None if left_s is None else now - self._made_s + left_s
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
        rows = counts.resumed + counts.done + counts.others
        if not self._terminal:
            of = f" of {counts.total_rows:,} ({rows / counts.total_rows:.0%})" if counts.total_rows else ""
            self.say(f"{rows:,}{of} rows: {describe(counts, self._clock)}")
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
        self._bar.set_postfix_str(describe(counts, self._clock), refresh=False)
        self._bar.refresh()

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
