"""Sizes, durations, rates and the time left."""

import io
import logging

import pytest

from batchgen.core.errors import InputError
from batchgen.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds, parse_shard
from batchgen.job.progress import Counts, Progress, TokenClock, describe


@pytest.mark.parametrize(
    ("text", "value"),
    [("14GiB", 14 << 30), ("512 mib", 512 << 20), ("8GB", 8 * 10**9), ("1.5k", 1500), ("77", 77), ("2TiB", 2 << 40)],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("6h", 21600), ("1h30m", 5400), ("45s", 45), ("0.5m", 30), ("90", 90)])
def test_durations(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds, parse_shard])
@pytest.mark.parametrize("text", ["", "x", "-3GiB", "3 parsecs", "1/0", "2/2", "1h, then more"])
def test_nonsense_is_refused(parse, text):
    with pytest.raises(InputError, match=r"is not"):
        parse(text)


def test_formatting():
    assert [format_bytes(n) for n in (5, 2048, 3 << 30)] == ["5 B", "2.0 KiB", "3.0 GiB"]
    assert [format_seconds(n) for n in (3.21, 59, 200, 21900)] == ["3.2 s", "59 s", "3 min 20 s", "6 h 05 min"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_left_is_that_of_the_tokens_left():
    clock = Clock()
    tokens = TokenClock(clock)
    for second in range(1, 31):
        clock.now = float(second)
        tokens.update(1000 * second, 100 * second)
    # 10 rows took 33,000 tokens in 30 s; 20 more rows take 66,000: 60 s.
    counts = Counts(total_rows=35, resumed=5, done=10, prompt_tokens=30_000, generated_tokens=3_000)
    assert tokens.remaining_s(counts) == pytest.approx(60.0)
    assert tokens.rates() == pytest.approx((1000.0, 100.0))
    assert describe(counts, tokens) == "1,000 prompt + 100 output tokens/s, 5 resumed, 1 min 00 s left"


def test_rates_forget_what_is_long_past():
    clock = Clock()
    tokens = TokenClock(clock)
    for second in range(1, 101):
        clock.now = float(second)
        tokens.update(0, 10 * min(second, 50))
    assert tokens.rates() == (0.0, 0.0)


def test_plain_lines_when_not_a_terminal():
    clock = Clock()
    stream = io.StringIO()
    with Progress("auto", stream, clock) as progress:
        progress.start()
        for second in range(31):
            clock.now = float(second)
            progress.update(Counts(100, 10, second, 2, 50 * second, 5 * second))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("30 of 100 (30%) rows: 50 prompt + 5 output tokens/s, 2 failed, 10 resumed, ")
    assert "\r" not in stream.getvalue()


def test_none_is_silent():
    stream = io.StringIO()
    progress = Progress("none", stream)
    progress.say("x")
    progress.update(Counts(1))
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    clock, stream = Clock(), Terminal()
    with Progress("auto", stream, clock) as progress:
        progress.start()
        for second in range(5):
            clock.now = float(second)
            progress.update(Counts(100, 10, 7 * second, second, 1000 * second, 10 * second))
        progress.say("a line of its own")
    shown = stream.getvalue()
    assert "38/100 rows" in shown and "1,000 prompt + 10 output tokens/s, 4 failed, 10 resumed" in shown
    assert "a line of its own\n" in shown


class TestLogRecords:
    """Records of the package's loggers while a job's progress is shown."""

    logger = logging.getLogger("batchgen.somewhere")

    def shown(self, style, monkeypatch, level=None):
        if level is not None:
            monkeypatch.setenv("BATCHGEN_LOG", level)
        stream = io.StringIO()
        with Progress(style, stream):
            for name in ("debug", "info", "warning"):
                getattr(self.logger, name)("%s of it", name)
        return stream.getvalue().splitlines()

    def test_info_and_above_are_lines_of_the_progress(self, monkeypatch):
        assert self.shown("plain", monkeypatch) == ["info of it", "warning of it"]

    def test_the_environment_sets_another_level(self, monkeypatch):
        assert self.shown("plain", monkeypatch, "debug")[0] == "debug of it"
        assert self.shown("plain", monkeypatch, "WARNING") == ["warning of it"]
        with pytest.raises(InputError, match="BATCHGEN_LOG must be DEBUG, INFO, WARNING or ERROR, not 'loud'"):
            self.shown("plain", monkeypatch, "loud")

    def test_nothing_is_shown_without_progress(self, monkeypatch, capfd):
        assert self.shown("none", monkeypatch) == []
        assert capfd.readouterr().err == ""

    def test_the_innermost_of_nested_progresses_shows_a_record_once(self):
        outer, inner = io.StringIO(), io.StringIO()
        with Progress("plain", outer), Progress("plain", inner):
            self.logger.info("once")
        assert (outer.getvalue(), inner.getvalue()) == ("", "once\n")

    def test_other_loggers_and_settings_are_as_before_afterwards(self):
        package = logging.getLogger("batchgen")
        before = package.handlers, package.level, package.propagate
        with Progress("plain", io.StringIO()):
            assert not package.propagate
        assert (package.handlers, package.level, package.propagate) == before
