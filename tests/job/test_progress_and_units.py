"""Sizes, durations, rates and the time left."""

import io
import json
import logging
import re
from datetime import datetime

import pytest

from batchgen.core.errors import InputError
from batchgen.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds, parse_shard
from batchgen.job.log_format import LogFormat
from batchgen.job.progress import Counts, Progress, TokenClock, describe
from batchgen.job.time_left import Seen, TimeLeft


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
    assert [format_seconds(3600 * n) for n in (71.5, 72, 222.2)] == ["71 h 30 min", "3 days 0 h", "9 days 6 h"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_left_is_that_of_the_tokens_left():
    clock = Clock()
    tokens = TokenClock(clock)
    for second in range(1, 31):
        clock.now = float(second)
        tokens.update(Counts(35, prompt_tokens=1000 * second, generated_tokens=100 * second, done=second))
    # 10 rows took 33,000 tokens in 30 s; 20 more rows take 66,000: 60 s.
    counts = Counts(total_rows=35, resumed=5, done=10, prompt_tokens=30_000, generated_tokens=3_000)
    assert tokens.time_left(counts) == TimeLeft(pytest.approx(60.0), False)
    assert tokens.rates() == pytest.approx((1000.0, 100.0, 1.0))
    told = describe(counts, tokens, gone_s=192.0)
    assert re.fullmatch(
        r"3:12 gone, 1 min 00 s left, ends about (\w{3} )?\d\d:\d\d, 1,000 prompt \+ 100 output tokens/s, 5 resumed",
        told,
    )


def test_a_time_left_that_is_a_bound_is_said_to_be_one():
    class Longest:
        def after_sweep(self, seconds, seen):
            pass

        def time_left(self):
            return TimeLeft(90000.0, True)

    tokens = TokenClock(Clock())
    tokens.restart(Longest())
    told = describe(Counts(10, seen=Seen()), tokens, gone_s=3792.0)
    assert re.match(r"1:03:12 gone, at most 25 h 00 min left, ends by [A-Z][a-z]{2} \d\d:\d\d, ", told)


def test_an_estimate_is_counted_down_until_the_next_one():
    class Estimate:
        made = 0

        def after_sweep(self, seconds, seen):
            pass

        def time_left(self):
            self.made += 1
            return TimeLeft(100.0, False)

    clock, estimate = Clock(), Estimate()
    tokens = TokenClock(clock)
    tokens.restart(estimate)
    assert [tokens.time_left(Counts(10, seen=Seen())).seconds for clock.now in (0.0, 0.2, 0.4)] == [100.0, 99.8, 99.6]
    clock.now = 1000.0
    assert estimate.made == 1 and tokens.time_left(Counts(10, seen=Seen())).seconds == 100.0


def test_rates_forget_what_is_long_past():
    clock = Clock()
    tokens = TokenClock(clock)
    for second in range(1, 101):
        clock.now = float(second)
        tokens.update(Counts(100, generated_tokens=10 * min(second, 50)))
    assert tokens.rates() == (0.0, 0.0, 0.0)


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
    assert re.match(
        r"30 of 100 \(30%\) rows: 0:20 gone, .* left, ends about .*\d, 50 prompt \+ 5 output tokens/s", lines[1]
    )
    assert lines[1].endswith(", 2 failed, 10 resumed")
    assert "\r" not in stream.getvalue()


class TestLogs:
    """Lines where standard error is no terminal."""

    def shown(self, kind):
        clock, stream = Clock(), io.StringIO()
        with Progress("auto", stream, clock, LogFormat(kind, "out.parquet")) as progress:
            progress.start()
            progress.say("planned \x1b[2J", event="plan", rows=3)
            logging.getLogger("batchgen.somewhere").warning("odd")
            clock.now = 10.0
            progress.update(Counts(100, 10, 20, 2, 500, 50))
        return stream.getvalue().splitlines()

    def test_lines_have_the_time_and_the_name_of_the_output(self):
        lines = self.shown("text")
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d out\.parquet: ", line) for line in lines)
        assert lines[0].endswith(r": planned \x1b[2J") and lines[1].endswith(": odd") and "30 of 100" in lines[2]

    def test_each_line_is_a_json_object_with_time_level_and_event(self):
        plan, odd, progress = map(json.loads, self.shown("json"))
        assert (plan["event"], plan["level"], plan["rows"], plan["message"]) == ("plan", "info", 3, "planned \x1b[2J")
        assert (odd["level"], odd["logger"], odd["message"]) == ("warning", "batchgen.somewhere", "odd")
        assert progress["event"] == "progress" and (progress["rows_done"], progress["rows"]) == (30, 100)
        assert progress["output"] == "out.parquet" and progress["elapsed_s"] == 10.0
        assert all(datetime.fromisoformat(one["time"]).tzinfo for one in (plan, odd, progress))

    def test_a_terminal_shows_lines_as_they_are_but_not_as_json(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        streams = {kind: Terminal() for kind in ("text", "json")}
        for kind, stream in streams.items():
            with Progress("auto", stream, log_format=LogFormat(kind, "out")) as progress:
                progress.say("a line")
        assert streams["text"].getvalue() == "a line\n"
        assert json.loads(streams["json"].getvalue())["message"] == "a line"


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
    assert "38/100 rows, 0:04 gone, " in shown and "1,000 prompt + 10 output tokens/s, 4 failed, 10 resumed" in shown
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
