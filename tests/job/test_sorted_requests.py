"""Rows of inputs that are larger than what waits: sorted by their prompts on disk, and run so."""

import gc
import itertools
import json
import random
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

import batchgen
from batchgen.cli import commands
from batchgen.core.errors import BatchgenError
from batchgen.core.request import ChatOptions, Request, SamplingParams, ScoreRequest
from batchgen.engine import prompt_order
from batchgen.job import run as run_module
from batchgen.job import shared, sorted_requests
from batchgen.job.sorted_requests import NoSpace, SortedRequests, in_order_of_texts, text_of
from batchgen.share.worker import Worker

SAMPLING = SamplingParams(max_tokens=3)
WINDOW = 64


def requests(count, seed=0):
    rng = random.Random(seed)
    for row in range(count):
        yield Request(f"Subject {rng.randrange(count // 4 + 1)} and {rng.random()}", SAMPLING, row, row=row)


@pytest.mark.parametrize("run_bytes", [300, 3000, 1 << 30])  # more runs than are merged at once, several, one
def test_requests_come_in_the_order_of_their_texts_however_many_runs_there_are(tmp_path, run_bytes):
    given = list(requests(500))
    ordered = SortedRequests(iter(given), tmp_path / "sorted", run_bytes)
    wanted = sorted(given, key=lambda request: request.prompt)
    assert list(ordered.read()) == wanted
    assert list(ordered.rows) == [request.row for request in wanted]
    ordered.close()
    assert not (tmp_path / "sorted").exists()


def test_any_range_of_the_order_is_read_alone(tmp_path):
    ordered = SortedRequests(requests(700), tmp_path / "sorted", 5000)
    for start, stop in ((0, 1), (250, 270), (255, 600), (699, 700), (700, 900), (3, 3)):
        assert [request.row for request in ordered.read(start, stop)] == list(ordered.rows[start:stop])
    ordered.close()


def test_parameters_that_requests_have_in_common_stay_one_value(tmp_path):
    ordered = SortedRequests(requests(50), tmp_path / "sorted", 1000)
    assert {id(request.sampling) for request in ordered.read()} == {id(SAMPLING)}
    ordered.close()


def test_every_kind_of_request_is_sorted_and_stays_as_it_was(tmp_path):
    tools = ChatOptions(tools=({"type": "function", "function": {"name": "f"}},))
    given = [
        Request("text \ud800", SamplingParams(temperature=0.5, seed=3), "a", row=0),
        Request([5, 70_000], row=1),
        Request([{"role": "user", "content": "Hé"}], row=2, chat=tools),
        Request("", error="no prompt", row=3),
        Request("first", more_prompts=("second",), row=4),
        ScoreRequest("context", ("one", (2, 3)), row=5),
        ScoreRequest("", ("the whole",), row=6),
        ScoreRequest("", (), error="no context", row=7),
        Request([5, -1], row=8),  # it fails by itself, when its turn comes
        Request([1 << 40], row=9),
        ScoreRequest([1 << 64], ((2, 3),), row=10),
    ]
    ordered = SortedRequests(iter(given), tmp_path / "sorted")
    assert sorted(ordered.read(), key=lambda request: request.row) == given
    assert list(map(text_of, ordered.read())) == sorted(map(text_of, given))
    ordered.close()


def test_the_shared_part_of_texts_is_that_of_neighbours(tmp_path):
    given = [Request(prompt, row=row) for row, prompt in enumerate(["abcd", "xyz", "abxx", "abcd"])]
    ordered = SortedRequests(iter(given), tmp_path / "sorted")
    assert ordered.shared_part == pytest.approx((4 + 2) / 15)
    ordered.close()


@pytest.fixture
def few_objects():
    """Python looks for garbage as often as in a new process, whatever other tests have left in this one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_requests, "_CHUNK_ROWS", 4)
    peaks = []
    for count in (1000, 4000):
        tracemalloc.start()
        ordered = SortedRequests(requests(count), tmp_path / "sorted", 32 << 10)
        assert sum(1 for _ in ordered.read()) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        ordered.close()
    assert peaks[1] < 1.3 * peaks[0], peaks


def test_few_rows_are_not_sorted(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_requests, "MOST_REQUESTS", WINDOW)
    given = list(requests(WINDOW))
    assert list(in_order_of_texts(lambda: iter(given), tmp_path / "sorted")) == given
    more = list(requests(WINDOW + 1))
    ordered = list(in_order_of_texts(lambda: iter(more), tmp_path / "sorted"))
    assert ordered == sorted(more, key=lambda request: request.prompt)
    assert not (tmp_path / "sorted").exists()


def test_without_space_on_the_disk_rows_start_in_input_order(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sorted_requests, "MOST_REQUESTS", WINDOW)
    monkeypatch.setattr(sorted_requests, "_FREE_BYTES", 1 << 62)
    given = list(requests(2 * WINDOW))
    with pytest.raises(NoSpace, match="nearly full"):
        SortedRequests(iter(given), tmp_path / "sorted")
    assert list(in_order_of_texts(lambda: iter(given), tmp_path / "sorted")) == given
    assert "rows start in the order of the input" in caplog.text
    assert not (tmp_path / "sorted").exists()


@pytest.fixture
def small_window(monkeypatch):
    """The fixture makes few rows wait, and a row's sorting free, so that a job of few rows is like one of many."""
    for module in (prompt_order, sorted_requests, shared):
        monkeypatch.setattr(module, "MOST_REQUESTS", WINDOW)
    monkeypatch.setattr(prompt_order.PromptOrder.__init__, "__defaults__", (WINDOW,))
    monkeypatch.setattr(sorted_requests, "_SORT_S", 0.0)


def table(path, subjects=40, rows_of_each=6):
    """Rows of subjects, each far from the others of its subject."""
    rng = random.Random(3)
    words = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "winter", "islands", "slate"]
    texts = [f"{k} " + " ".join(rng.choices(words, k=30)) for k in range(subjects)]
    rows = [f"{text}. {k} {rng.choice(words)}" for k in range(rows_of_each) for text in texts]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": rows}), path)
    else:
        path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return len(rows)


def run(model, source, output, *options):
    report = output.with_suffix(".report")
    code, _, said = invoke(
        "run", "-m", model, "-i", source, "-o", output, "--max-tokens", 3, "--dtype", "float32",
        "--max-num-seqs", 4, "--progress", "plain", "--report", report, *options,
    )  # fmt: skip
    return code, json.loads(report.read_text()) if report.exists() else None, said


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_job_larger_than_what_waits_computes_far_prefixes_once_and_writes_the_same_output(
    suffix, tiny_models, tmp_path, small_window
):
    model, source = tiny_models("llama")[0], tmp_path / f"in{suffix}"
    count = table(source)
    code, report, said = run(model, source, tmp_path / f"sorted{suffix}")
    assert code == 0 and f"{count} rows are sorted by their prompts" in said, said
    code, plain, said = run(model, source, tmp_path / f"plain{suffix}", "--no-enable-prefix-caching")
    assert code == 0 and "sorted" not in said, said
    assert (tmp_path / f"sorted{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()
    assert report["cached_prompt_tokens"] > 0.6 * report["prompt_tokens"] and not plain["cached_prompt_tokens"]
    assert not list(tmp_path.glob("**/sorted.tmp"))


def test_a_job_that_was_begun_on_fewer_rows_sorts_the_rest(tiny_models, tmp_path, small_window):
    model, source = tiny_models("llama")[0], tmp_path / "in.parquet"
    count = table(source)
    assert run(model, source, tmp_path / "begun.parquet", "--limit", 60)[0] == 0
    code, report, said = run(model, source, tmp_path / "begun.parquet")
    assert code == 0 and report["rows_resumed"] == 60 and f"{count - 60} rows are sorted" in said, said
    assert run(model, source, tmp_path / "whole.parquet")[0] == 0
    assert (tmp_path / "begun.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_rows_of_a_stream_are_not_read_to_its_end_before_the_first_one_runs(
    tiny_models, tmp_path, small_window, monkeypatch
):
    datasets = pytest.importorskip("datasets")
    numbers, make_result = itertools.count(), run_module._row_result

    def rows():
        for number in range(4000):
            yield {"prompt": f"row {number}"}
        raise AssertionError("the stream was read too far")

    def stop_early(*args):
        if next(numbers) == 20:
            raise BatchgenError("cut short")
        return make_result(*args)

    monkeypatch.setattr(run_module, "_row_result", stop_early)
    stream = datasets.IterableDataset.from_generator(rows, datasets.Features({"prompt": datasets.Value("string")}))
    with pytest.raises(BatchgenError, match="cut short"):
        batchgen.run(
            tiny_models("llama")[0], stream, tmp_path / "out.jsonl", max_tokens=3, dtype="float32", max_num_seqs=4,
        )  # fmt: skip


def test_workers_take_ranges_of_the_sorted_rows(tiny_models, tmp_path, small_window, monkeypatch):
    model, source, output = tiny_models("llama")[0], tmp_path / "in.parquet", tmp_path / "shared.parquet"
    count = table(source)
    assert run(model, source, tmp_path / "alone.parquet")[0] == 0
    claimed = []
    claim_range = Worker.claim_range
    monkeypatch.setattr(
        Worker, "claim_range", lambda self, ahead: [claimed.append(rows := claim_range(self, ahead)), rows][1]
    )
    assert run(model, source, output, "--share", "--max-time", "0.001s")[0] == 3
    code, _, said = run(model, source, output, "--share")
    assert code == 0 and f"{count} rows are sorted" in said, said
    assert output.read_bytes() == (tmp_path / "alone.parquet").read_bytes()
    rows = [row for of_range in claimed if of_range for row in of_range]
    prompts = pq.read_table(source)["prompt"].to_pylist()
    assert sorted(rows) == list(range(count)) and [prompts[row] for row in rows] == sorted(prompts)


def test_a_worker_follows_the_order_that_the_first_one_has_recorded(tiny_models, tmp_path, small_window, monkeypatch):
    model, source, output = tiny_models("llama")[0], tmp_path / "in.parquet", tmp_path / "shared.parquet"
    table(source)
    monkeypatch.setattr(sorted_requests, "_SORT_S", 1e9)
    monkeypatch.setattr(Worker, "claim_range", lambda self, ahead: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, source, output, "--share")
    monkeypatch.undo()
    code, _, said = run(model, source, output, "--share")
    assert code == 0 and "sorted" not in said, said


def test_a_job_that_is_cut_short_leaves_whole_groups_of_prompts_done(tiny_models, tmp_path, small_window, monkeypatch):
    model, source, output = tiny_models("llama")[0], tmp_path / "in.parquet", tmp_path / "out.parquet"
    table(source, subjects=40, rows_of_each=8)
    make_result, numbers = run_module._row_result, itertools.count()

    def stop_at_last(*args):
        if next(numbers) == 150:
            raise BatchgenError("cut short")
        return make_result(*args)

    monkeypatch.setattr(run_module, "_row_result", stop_at_last)
    assert run(model, source, output)[0] == 1
    parts = sorted((tmp_path / "out.parquet.batchgen" / "parts").glob("*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part)["row"].to_pylist()]
    groups = Counter(row % 40 for row in rows)
    assert len(rows) == 150 and sum(count < 8 for count in groups.values()) <= 3


def test_rows_that_fail_at_once_end_a_sorted_job_only_if_they_come_first_in_the_input(
    tiny_models, tmp_path, small_window
):
    model, source = tiny_models("llama")[0], tmp_path / "in.jsonl"
    rows = [f"{k} ferry" if k < 100 or k % 2 else None for k in range(200)]
    source.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    for name, options in (("alone", ()), ("shared", ("--share",))):
        code, report, said = run(model, source, tmp_path / f"{name}.jsonl", *options)
        assert code == 0 and report["rows_failed"] == 50 and "sorted" in said, said
    rows[:100] = [None] * 100
    source.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    code, _, said = run(model, source, tmp_path / "first.jsonl")
    assert code == 4 and "the first 100 rows all failed" in said, said


@pytest.mark.parametrize("share", [(), ("--share",)])
def test_a_job_that_fails_leaves_no_sorted_rows(share, tiny_models, tmp_path, small_window, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model, source, output = tiny_models("llama")[0], tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [None if k == 3 else f"{k} ferry" for k in range(500)]
    source.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    with pytest.raises(BatchgenError) as caught:  # which keeps what was under way, as a report of it does
        commands.cli.main(
            ["run", "-m", str(model), "-i", str(source), "-o", str(output), "--on-error", "fail", *share],
            standalone_mode=False,
        )
    assert "row 3" in str(caught.value)
    assert not list(tmp_path.glob("**/sorted.tmp")) and not list((tmp_path / "temporary").glob("*sorted*"))


@pytest.mark.parametrize("share", [(), ("--share",)])
def test_an_interrupt_leaves_no_sorted_rows(share, tiny_models, tmp_path, small_window, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model, source = tiny_models("llama")[0], tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{k} ferry"}) + "\n" for k in range(3000)))
    saves, there = [], []
    monkeypatch.setattr(run_module, "keep", saves.append)

    def interrupted(*args):
        for save in ((lambda: ""), *saves):  # as the process ends
            save()
            there.append([*tmp_path.glob("**/sorted.tmp"), *temporary.glob("*sorted*")])
        raise BatchgenError("interrupted")

    monkeypatch.setattr(run_module, "_row_result", interrupted)
    assert run(model, source, tmp_path / "out.jsonl", *share)[0] == 1
    before, after = there
    assert before and not after


def test_a_job_that_ends_while_it_sorts_stops_sorting(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_requests, "MOST_REQUESTS", WINDOW)
    stops = itertools.chain([False] * 3, itertools.repeat(True))
    assert not list(in_order_of_texts(lambda: requests(5000), tmp_path / "sorted", lambda: next(stops)))
    assert not (tmp_path / "sorted").exists()
