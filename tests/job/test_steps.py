"""Jobs with several steps: rows go through prompts and filters, in one run, with one model."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

import batchgen
import batchgen.job.run as run_module
from batchgen.core.errors import InputError
from batchgen.core.request import Completion, Sample
from batchgen.job.options import JobOptions
from batchgen.job.report import summary
from batchgen.job.row_flow import RowFlow
from batchgen.job.status import output_status
from batchgen.job.step_source import open_rows
from batchgen.job.step_tables import steps_of
from batchgen.output.part_writer import PartWriter
from batchgen.output.row_map import DoneRows
from batchgen.output.row_result import RowResult

OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "ignore_eos": True, "max_tokens": 6, "chat": False}
TEXTS = [f"{i} kites over the bay" + " and more" * (i % 5) for i in range(40)]
DRAFT = {"name": "draft", "prompt_template": "Say: {{ text }}"}
EVEN = {"name": "even", "filter": "n % 2 == 0"}
JUDGE = {"name": "judge", "prompt-template": "{{ draft_text }} is good: {{ text }}", "max-tokens": 3}


@pytest.fixture
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": TEXTS, "n": range(len(TEXTS))}), path)
    return path


def columns(path):
    return pq.read_table(path).to_pydict()


def test_steps_give_what_jobs_one_after_the_other_give(model, rows, tmp_path):
    batchgen.run(model, rows, tmp_path / "out.parquet", steps=[DRAFT, JUDGE], **OPTIONS)
    out = columns(tmp_path / "out.parquet")
    batchgen.run(
        model, rows, tmp_path / "1.parquet", prompt_template="Say: {{ text }}", output_prefix="draft_", **OPTIONS
    )
    batchgen.run(
        model, tmp_path / "1.parquet", tmp_path / "2.parquet",
        prompt_template="{{ draft_text }} is good: {{ text }}", output_prefix="judge_", **{**OPTIONS, "max_tokens": 3},
    )  # fmt: skip
    assert out == columns(tmp_path / "2.parquet")


def test_a_row_that_a_filter_drops_is_kept_with_nulls_in_later_steps(model, rows, tmp_path):
    report = batchgen.run(model, rows, tmp_path / "out.parquet", steps=[DRAFT, EVEN, JUDGE], **OPTIONS)
    out = columns(tmp_path / "out.parquet")
    assert out["text"] == TEXTS and None not in out["draft_text"]
    assert out["even"] == [n % 2 == 0 for n in range(len(TEXTS))]
    assert [text is None for text in out["judge_text"]] == [n % 2 == 1 for n in range(len(TEXTS))]
    assert [n is None for n in out["judge_generated_tokens"]] == [n % 2 == 1 for n in range(len(TEXTS))]
    assert (report["rows"], report["rows_ok"], report["rows_failed"]) == (len(TEXTS), len(TEXTS), 0)


def test_a_filter_may_come_first_or_last_and_may_keep_nothing(model, rows, tmp_path):
    never = {"name": "never", "filter": "n < 0"}
    batchgen.run(model, rows, tmp_path / "first.parquet", steps=[never, DRAFT], **OPTIONS)
    assert columns(tmp_path / "first.parquet")["draft_text"] == [None] * len(TEXTS)
    answered = {"name": "answered", "filter": "draft_text | length > 0"}
    batchgen.run(model, rows, tmp_path / "last.parquet", steps=[DRAFT, answered], **OPTIONS)
    last = columns(tmp_path / "last.parquet")
    assert last["answered"] == [len(text) > 0 for text in last["draft_text"]]


def test_a_row_that_fails_in_a_step_fails_once_and_is_run_again_from_there(model, tmp_path):
    pq.write_table(pa.table({"text": ["a", None, "c"], "n": [0, 1, 2]}), tmp_path / "in.parquet")
    steps = [{"name": "draft", "prompt_column": "text"}, EVEN, JUDGE]
    call = (model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    report = batchgen.run(*call, steps=steps, **OPTIONS)
    out = columns(tmp_path / "out.parquet")
    assert (report["rows_ok"], report["rows_failed"]) == (2, 1)
    assert [error["rows"] for error in report["errors"]] == [1]
    assert out["draft_error"][1] == out["judge_error"][1] == "step draft: column 'text' is null"
    assert out["even"] == [True, None, True] and out["judge_text"][1] is None and out["judge_text"][2] is not None
    again = batchgen.run(*call, steps=steps, retry_failed=True, **OPTIONS)
    assert again["rows_resumed"] == 2 and again["rows_failed"] == 1
    assert columns(tmp_path / "out.parquet") == out


def test_a_stopped_job_goes_on_with_the_step_that_is_next(model, rows, tmp_path, monkeypatch):
    steps = [DRAFT, EVEN, JUDGE]
    sampled = {**OPTIONS, "temperature": 1.0, "flush_interval": 0.001, "max_num_seqs": 4}
    batchgen.run(model, rows, tmp_path / "whole.parquet", steps=steps, **sampled)
    add, results = PartWriter.add, []

    def stopping(writer, number, result):
        add(writer, number, result)
        results.append(number)
        if len(results) in (11, 23, 24, 60):
            raise KeyboardInterrupt

    monkeypatch.setattr(PartWriter, "add", stopping)
    call = (model, rows, tmp_path / "out.parquet")
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            batchgen.run(*call, steps=steps, **sampled)
    report = batchgen.run(*call, steps=steps, **sampled)
    assert report["rows_ok"] == len(TEXTS) and len(results) < len(TEXTS) * len(steps) + 4 * 3 * 8
    assert columns(tmp_path / "out.parquet") == columns(tmp_path / "whole.parquet")


def test_a_job_file_has_steps_with_files_beside_it(model, rows, tmp_path, monkeypatch):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "judge.jinja").write_text("{{ draft_text }} is good: {{ text }}\n")
    (folder / "job.toml").write_text(
        'max-tokens = 6\ndtype = "float32"\nignore-eos = true\ncpu-memory = "4GiB"\nprogress = "none"\nchat = false\n'
        '[[step]]\nname = "draft"\nprompt-template = "Say: {{ text }}"\n'
        '[[step]]\nname = "judge"\nprompt-template = "@judge.jinja"\nmax-tokens = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    code, _, said = invoke("run", "-m", model, "--config", "job/job.toml", "-i", rows, "-o", "cli.parquet")
    assert code == 0, said
    batchgen.run(model, rows, tmp_path / "python.parquet", steps=[DRAFT, JUDGE], **OPTIONS)
    assert columns("cli.parquet") == columns("python.parquet")
    code, out, said = invoke("plan", "-m", model, "--config", "job/job.toml", "-i", rows, "--json")
    assert code == 0, said
    assert json.loads(out)["workload"]["num_seqs"] == 2 * len(TEXTS)


def test_bad_lines_and_inputs_without_rows_go_through_steps(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "n": 0}\nbroken\n{"text": "b", "n": 2}\n')
    report = batchgen.run(
        model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", steps=[DRAFT, EVEN, JUDGE], on_bad_line="skip", **OPTIONS
    )
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert report["rows_failed"] == 1 and "line 2" in lines[1]["judge_error"] and lines[2]["judge_text"] is not None
    (tmp_path / "none.jsonl").write_text("")
    report = batchgen.run(model, tmp_path / "none.jsonl", tmp_path / "none.parquet", steps=[DRAFT, EVEN], **OPTIONS)
    assert report["rows"] == 0 and "even" in pq.read_schema(tmp_path / "none.parquet").names


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"name": "a", "prompt-templat": "x"}], "did you mean prompt-template"),
        ([{"prompt-template": "x"}], "step 1 needs a name"),
        ([DRAFT, DRAFT], "two steps have the name 'draft'"),
        ([EVEN], "no step generates"),
        ([{"name": "a", "filter": "n", "max-tokens": 3}, DRAFT], "one Jinja expression"),
        ([{"name": "a", "model": "other"}], "'model' is no option of a step"),
        (["draft"], "must be a table"),
    ],
)
def test_tables_that_are_no_steps_are_refused_in_one_line(tables, message):
    with pytest.raises(InputError, match=message) as error:
        steps_of(tables)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([DRAFT, {"name": "b", "prompt_template": "{{ draft_txt }}"}], "step b: .*'draft_txt' is not a column"),
        ([{"name": "b", "prompt_template": "{{ draft_text }}"}, DRAFT], "step b: .*'draft_text' is not a column"),
        ([{"name": "a", "filter": "n >"}, DRAFT], "step a: filter, line 1: "),
        ([{"name": "n", "filter": "n > 1"}, DRAFT], "step n adds a column n, which the input has: rename the step"),
        ([DRAFT, {"name": "draft_text", "filter": "n"}, JUDGE], "column draft_text, which step draft has"),
    ],
)
def test_steps_that_read_what_is_not_there_are_refused_before_anything_runs(steps, message, model, rows, tmp_path):
    with pytest.raises(InputError, match=message):
        batchgen.run(model, rows, tmp_path / "out.parquet", steps=steps, **OPTIONS)
    assert not (tmp_path / "out.parquet.batchgen").exists()


def test_a_row_that_fails_in_the_last_filter_has_its_error(model, tmp_path):
    pq.write_table(pa.table({"text": ["a", "b", "c"], "n": [1, None, 20]}), tmp_path / "in.parquet")
    call = (model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    report = batchgen.run(*call, steps=[DRAFT, {"name": "few", "filter": "n + 1 < 9"}], **OPTIONS)
    out = columns(tmp_path / "out.parquet")
    assert report["rows_failed"] == 1 and out["few"] == [True, None, False]
    assert out["few_error"][0] is out["few_error"][2] is None and "step few: filter: TypeError" in out["few_error"][1]
    assert out["draft_error"] == [None] * 3
    assert "the few_error column tells why rows failed; --retry-failed runs just those again" in summary(report)


def test_status_counts_rows_and_not_their_results(model, tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a", None, "c", None], "n": [0, 1, 2, 3]}), tmp_path / "in.parquet")
    call = (model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    options = {**OPTIONS, "steps": [{"name": "draft", "prompt_column": "text"}, EVEN, JUDGE]}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module.Run, "finish", interrupted)
        batchgen.run(*call, **options)
    stopped = output_status(tmp_path / "out.parquet")
    assert (stopped["rows"], stopped["rows_ok"], stopped["rows_failed"], stopped["rows_left"]) == (4, 2, 2, 0)
    batchgen.run(*call, **options)
    complete = output_status(tmp_path / "out.parquet")
    for status in (stopped, complete):
        assert status["errors"] == [{"error": "step draft: column 'text' is null", "rows": 2}]


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_later_step_reads_token_ids(model, rows, tmp_path):
    counted = {"name": "counted", "filter": "draft_token_ids | length == draft_generated_tokens"}
    batchgen.run(model, rows, tmp_path / "out.parquet", steps=[DRAFT, counted], token_ids=True, **OPTIONS)
    assert columns(tmp_path / "out.parquet")["counted"] == [True] * len(TEXTS)


def test_only_answers_are_counted_as_cached(model, rows, tmp_path):
    options = {"steps": [DRAFT, EVEN, JUDGE], "cache": tmp_path / "cache", **OPTIONS}
    first = batchgen.run(model, rows, tmp_path / "1.parquet", **options)
    second = batchgen.run(model, rows, tmp_path / "2.parquet", **options)
    assert (first["rows_cached"], first["generated_tokens"] > 0) == (0, True)
    assert (second["rows_cached"], second["generated_tokens"]) == (len(TEXTS) * 3 // 2, 0)
    assert columns(tmp_path / "1.parquet") == columns(tmp_path / "2.parquet")


@pytest.mark.timeout(120)
def test_identical_prompts_of_a_step_are_computed_once(model, tmp_path):
    texts = ["a", "b"] * 100
    pq.write_table(pa.table({"text": texts, "n": [*range(200)]}), tmp_path / "in.parquet")
    options = {"steps": [DRAFT, EVEN, JUDGE], "max_num_seqs": 2, **OPTIONS}
    report = batchgen.run(model, tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    out = columns(tmp_path / "out.parquet")
    assert [len({(t, j) for t, j in zip(texts, out[name], strict=True)}) for name in ("draft_text", "judge_text")] == [
        2,
        2,
    ]
    assert (report["generated_tokens"], report["rows_repeated"]) == (6 + 6 + 3, 198 + 99)
    assert "297 prompts repeat others and were not computed again" in summary(report)


def test_what_steps_do_not_go_with_is_refused(model, rows, tmp_path):
    for options in ({"task": "score"}, {"share": True}, {"output_prefix": "a_"}):
        with pytest.raises(InputError, match="does not go with steps"):
            batchgen.run(model, rows, tmp_path / "out.parquet", steps=[DRAFT], **options)


def test_rows_whose_answers_have_come_go_on_before_new_rows_begin(tmp_path):
    count = 300
    pq.write_table(pa.table({"text": ["a"] * count}), tmp_path / "in.parquet")
    options = JobOptions("m", tmp_path / "in.parquet", None, steps=steps_of([DRAFT, JUDGE]))
    (tmp_path / "parts").mkdir()
    flow = RowFlow(open_rows(options), DoneRows(2), tmp_path / "parts", lambda: False)

    class Engine:
        """An engine that answers a request when the next one is asked for."""

        def __init__(self):
            self.order, self._requests = [], flow.requests()

        def __iter__(self):
            for request in self._requests:
                if request is not None:
                    self.order.append(request.row)
                    yield Completion(
                        0, request.id, 1, (Sample(f"answer {request.row}", (1,), "stop"),), row=request.row
                    )

        def close(self):
            pass

    engine = Engine()
    results = list(flow.results(engine))
    assert sorted(result.row for result in results) == list(range(2 * count))
    begun, most = 0, 0  # rows that have a draft and are not judged
    for row in engine.order:
        begun += 1 if row % 2 == 0 else -1
        most = max(most, begun)
    assert most <= count / 2


def test_rows_that_a_filter_drops_come_out_before_all_are_read(tmp_path):
    count = 8000
    pq.write_table(pa.table({"text": ["a"] * count, "n": [1] * count}), tmp_path / "in.parquet")
    (tmp_path / "parts").mkdir()
    options = JobOptions("m", tmp_path / "in.parquet", None, steps=steps_of([EVEN, DRAFT]))
    flow = RowFlow(open_rows(options), DoneRows(2), tmp_path / "parts", lambda: False)
    asked = []

    class Engine:
        """An engine in which every request fails at once."""

        def __iter__(self):
            for request in flow.requests():
                if request is not None:
                    asked.append(request)
                    yield Completion(0, "", 0, error=request.error, row=request.row)

        def close(self):
            pass

    results = flow.results(Engine())
    first = next(results)
    assert first.row == 0 and len(asked) == 1
    assert sorted([first.row, *(result.row for result in results)]) == list(range(2 * count))


def test_a_row_whose_error_alone_was_written_fails_in_its_later_steps(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "n": [0]}), tmp_path / "in.parquet")
    (tmp_path / "parts").mkdir()
    done = DoneRows(3)
    with PartWriter(tmp_path / "parts", done) as writer:
        writer.add(0, RowResult((), (), 4, (), error="step draft: it is too long"))
    options = JobOptions("m", tmp_path / "in.parquet", None, steps=steps_of([DRAFT, EVEN, JUDGE]))
    flow = RowFlow(open_rows(options), done, tmp_path / "parts", lambda: False)
    assert next(flow.requests()) is None

    class Idle(list):
        def close(self):
            pass

    results = [(result.row, result.error) for result in flow.results(Idle())]
    assert results == [(1, "step draft: it is too long"), (2, "step draft: it is too long")]


def test_a_dry_run_shows_what_the_first_step_asks(model, rows, tmp_path):
    job = ["run", "-m", model, "-i", rows, "-o", tmp_path / "out.parquet", "--no-chat", "--dry-run"]
    for first, asked in (("max-tokens = 3", "up to 3 generated"), ('choices = ["yes", "no"]', "one of 2 choices")):
        steps = f'[[step]]\nname = "first"\nprompt-template = "Say: {{{{ text }}}}"\n{first}\n'
        (tmp_path / "steps.toml").write_text(steps)
        code, said, _ = invoke(*job, "--config", tmp_path / "steps.toml")
        assert code == 0 and asked in said
