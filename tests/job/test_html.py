"""The pages of plans and runs: they are whole, need nothing else, and what rows say stays text."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import batchgen
from batchgen.cli import commands
from batchgen.core.errors import InputError
from batchgen.job.pages.charts import Bar, Span, bars, histogram, line, ticks, timeline
from batchgen.job.pages.html_page import escaped, page
from batchgen.job.pages.run_page import RunPage, rates_over_time

HOSTILE = '<script>alert(1)</script><img src="http://evil.example/x" onerror=alert(2)> & "quoted" \x00 {row}'
VOID = {"meta", "br"}
ALONE = {"rect", "line", "path", "polyline", "circle"}  # of SVG, which may close themselves
ADDRESSES = {"src", "href", "action", "data", "xlink:href", "srcset", "formaction"}


class Checked(HTMLParser):
    """Elements open and close in order; none of them runs or fetches anything."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tags = [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert tag not in ("script", "img", "link", "iframe", "object", "embed", "base")
        assert not [name for name, _ in attributes if name in ADDRESSES or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        assert tag in ALONE

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(self.text)


@pytest.fixture
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def rows(tmp_path):
    prompts = [HOSTILE, None, *(f"row {i} of many" for i in range(30))]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def run(model, rows, **options):
    given = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 8}
    if options.get("task") != "score":
        given["max_tokens"] = 3
    return batchgen.run(model, rows, rows.parent / "out.parquet", **{**given, **options})


def test_the_page_of_a_run(model, rows, tmp_path):
    report = run(model, rows, report_html=str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    found = Checked(text)
    assert "http://evil.example/x" in found.words and "<script>alert(1)</script>" in found.words  # as text
    assert "http" not in text.replace(escaped(HOSTILE), "").replace("http-equiv", "")
    assert "is null" in found.words and "row 29 of many" not in found.words[:50]
    for heading in ("Predicted and measured", "Throughput over time", "Lengths", "Errors by kind", "Sample rows"):
        assert heading in found.words
    assert text.count("<svg") == 7 + bool(report["answers"]) and found.words.count("of many") >= 15


def test_what_a_row_says_is_escaped_wherever_it_is_shown(model, rows, tmp_path, monkeypatch):
    """In answers, labels, tooltips, cells and the header."""
    report = run(model, rows)
    hostile = "<script>x</script>"
    report |= {
        "answers": [{"answer": hostile, "count": 7}], "host": hostile, "command": hostile, "model": hostile,
        "finish_reasons": {hostile: 3}, "cut_tokens": None, "errors": [{"error": hostile, "rows": 1}],
    }  # fmt: skip
    text = RunPage().render(report, None)
    found = Checked(text)
    assert "<script" not in text and found.words.count(hostile) >= 7


def test_the_page_of_a_run_says_when_where_and_with_what_and_counts_answers(model, rows, tmp_path):
    report = run(model, rows, report_html=str(tmp_path / "run.html"), ignore_eos=True)
    words = Checked((tmp_path / "run.html").read_text()).words
    assert report["host"] in words and report["command"] in words and report["model_sha256"][:16] in words
    assert report["started"][:10] in words and "31 of 31 answers were cut at 3 tokens" in words
    assert "The most frequent short answers of 31" in words or not report["answers"]


def test_a_long_label_of_a_bar_is_not_cut():
    chart = bars("b", [Bar("x" * 40, ((0, "part", 1.0),))], str)
    (x,) = (float(found) for found in re.findall(r'<text x="([0-9.]+)" y="16.0" text-anchor="end">', chart))
    assert x >= 40 * 6.5


def test_the_page_of_a_run_that_went_on_and_of_one_that_had_nothing_to_do(model, rows, tmp_path):
    html = tmp_path / "run.html"
    with pytest.raises(batchgen.BatchgenError):
        run(model, rows, on_error="fail", max_num_seqs=1, flush_interval="0.01s")
    report = run(model, rows, report_html=str(html))
    if report["rows_resumed"]:
        assert f"resumed with {report['rows_resumed']}" in Checked(html.read_text()).words
    assert run(model, rows, report_html=str(html))["state"] == "already complete"
    again = Checked(html.read_text()).words
    assert "already complete" in again and "Predicted" not in again and "is null" in again


def test_the_page_of_a_stopped_run(model, rows, tmp_path):
    assert run(model, rows, report_html=str(tmp_path / "run.html"), max_time="0.001s")["state"] == "stopped"
    assert "stopped" in Checked((tmp_path / "run.html").read_text()).words


def test_the_page_of_scores(model, rows, tmp_path):
    run(model, rows, task="score", choices=("yes", "no"), report_html=str(tmp_path / "run.html"))
    found = Checked((tmp_path / "run.html").read_text())
    assert "row 29 of many" in found.words or "row 28 of many" in found.words


@pytest.mark.parametrize("more", [["--what-if", "gpu-memory=48GiB"], ["--json"]])
def test_the_page_of_a_plan(model, tmp_path, more):
    html = tmp_path / "plan.html"
    sizes = ["--num-prompts", "40", "--input-len", "20", "--output-len", "8"]
    command = ["plan", "-m", model, "--hardware", "t4", *sizes, "--html", str(html), "--progress", "none", *more]
    result = CliRunner().invoke(commands.cli, command)
    assert result.exit_code == 0, result.output
    text = html.read_text()
    found = Checked(text)
    for heading in ("Where weights", "Lanes", "A steady sweep", "Latency and throughput", "What would help"):
        assert heading in found.words
    assert ("Plans side by side" in found.words) == ("--what-if" in more)
    assert "chosen" in found.words and "host to GPU" in found.words and "://" not in text


def test_files_of_pages(model, rows, tmp_path):
    for options, says in [
        ({"report_html": "-"}, "is no file"),
        ({"report_html": str(rows)}, "--report-html"),
        ({"report_html": str(tmp_path / "a"), "report": str(tmp_path / "a")}, "too"),
        ({"report_html": str(tmp_path / "none" / "a.html")}, "cannot be written"),
    ]:
        with pytest.raises(InputError, match=says):
            run(model, rows, **options)


def test_charts_of_nothing_of_one_and_of_odd_values():
    charts = [
        bars("b", [], str), bars("b", [Bar("<b>", ((0, "<i>", 0.0),), 0.0)], str), line("l", [], "x", "y"),
        line("l", [(0.0, 0.0)], "x", "y", dots=["<u>"], ring=(0.0, 0.0), marks=[(0.0, "<s>")]), timeline("t", {}, str),
        timeline("t", {"<lane>": [Span(1.0, 1.0, 0, "<x>")]}, str),
    ]  # fmt: skip
    found = Checked(page("<title>", ["\ud800 <line>"], charts))
    assert {"b", "i", "u", "s", "x", "lane"}.isdisjoint(found.tags) and "<line>" in found.words


def test_short_spans_become_one():
    many = [Span(i / 1000, (i + 0.5) / 1000, i % 2, "ab"[i % 2]) for i in range(100_000)]
    assert timeline("t", {"lane": many}, str).count("<rect") < 5000


def test_bins_ticks_and_rates():
    assert histogram({3: 2, 5: 1}) == [("3", 2.0), ("4", 0.0), ("5", 1.0)] and histogram({}) == []
    assert sum(count for _, count in histogram(dict.fromkeys(range(1000), 1))) == 1000
    assert len(histogram(dict.fromkeys(range(1000), 1))) <= 40
    for most in (1e-9, 0.3, 1.0, 7.0, 999.0, 1e12):
        assert 3 <= len(ticks(most)) <= 9 and ticks(most)[-1] <= most * 1.001
    assert ticks(0.0) == ticks(float("nan")) == [0.0]
    assert rates_over_time([(0.0, 0), (1.0, 10), (1.0, 12), (3.0, 30)]) == [(1.0, 10.0), (3.0, 9.0)]
    assert len(rates_over_time([(float(i), i) for i in range(5000)])) <= 121 and rates_over_time([]) == []


@pytest.mark.thorough
def test_a_browser_has_no_complaints(model, rows, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    run(model, rows, report_html=str(tmp_path / "run.html"))
    for dark in (0, 1):
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--window-size=1000,2000",
            f"--user-data-dir={tmp_path / 'browser'}", f"--blink-settings=preferredColorScheme={dark}",
            f"--screenshot={tmp_path / 'run.png'}", f"file://{tmp_path / 'run.html'}",
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
        assert "CONSOLE" not in said and (tmp_path / "run.png").stat().st_size > 10_000
        (tmp_path / "run.png").unlink()
