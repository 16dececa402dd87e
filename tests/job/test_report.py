"""The report and the summary of a run: when, where and by which command, finish reasons and answers."""

import json
import shlex
import socket
import time
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.request import SamplingParams
from batchgen.job.options import JobOptions
from batchgen.job.report import Origin, result_lines, summary
from batchgen.job.run import run_job
from batchgen.job.session import Session

OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 2, "max_tokens": 3}


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def rows(tmp_path):
    pq.write_table(pa.table({"prompt": ["one", "two", "one", "three", None, "two"]}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def run(model, rows, **more):
    return batchgen.run(model, rows, rows.with_name("out.parquet"), **(OPTIONS | {"ignore_eos": True} | more))


def counts(report):
    return {name: report[name] for name in ("finish_reasons", "cut_tokens", "answers", "answers_exact", "answered")}


def test_the_report_says_when_where_by_which_command_and_with_what_model(model, rows):
    before = datetime.now().astimezone()
    report = run(model, rows, seed=11)
    started, ended = (datetime.fromisoformat(report[name]) for name in ("started", "ended"))
    assert before - timedelta(seconds=1) <= started <= ended <= datetime.now().astimezone() + timedelta(seconds=1)
    assert started.utcoffset() is not None and report["host"] == socket.gethostname()
    words = shlex.split(report["command"])
    assert words[:2] == ["batchgen", "run"] and words[words.index("--seed") + 1] == "11" and str(rows) in words
    assert report["model"] in model and len(report["model_sha256"]) == 64
    assert report["versions"]["batchgen"] == batchgen.__version__
    line = next(line for line in summary(report) if report["host"] in line)
    assert report["model_sha256"][:12] in line and f"{started:%Y-%m-%d %H:%M:%S}" in line


def test_another_model_has_another_hash(model, tiny_models, rows):
    other = str(tiny_models("qwen2")[0])
    outputs = [rows.with_name(name) for name in ("a.parquet", "b.parquet", "c.parquet")]
    models = (model, model, other)
    hashes = [batchgen.run(*job, **OPTIONS)["model_sha256"] for job in zip(models, [rows] * 3, outputs, strict=True)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_credentials_of_the_input_are_not_in_the_command():
    options = JobOptions("demo", "s3://user:secret@bucket/in.jsonl", "https://hub.example/o.jsonl?sig=hidden")
    command = Origin.of(options, time.monotonic()).command
    assert "secret" not in command and "hidden" not in command and "bucket/in.jsonl" in command


def test_finish_reasons_and_answers_are_those_of_the_whole_output_also_when_it_is_complete(model, rows):
    report = run(model, rows)
    assert report["finish_reasons"] == {"length": 5} and report["cut_tokens"] == (3, 3)
    texts = [text for text in pq.read_table(rows.with_name("out.parquet"))["text"].to_pylist() if text is not None]
    listed = {one["answer"]: one["count"] for one in report["answers"]}
    assert listed == {text.strip(): texts.count(text) for text in texts if texts.count(text) > 1} and listed
    lines = summary(report)
    assert "5 of 5 answers were cut at 3 tokens: raise --max-tokens for whole ones" in lines
    assert any(line.startswith("answers: ") and line.endswith("others 1") for line in lines)
    again = run(model, rows)
    assert again["state"] == "already complete" and counts(again) == counts(report)


def test_counts_of_a_stopped_job_have_rows_of_earlier_runs_too(model, rows):
    with pytest.raises(batchgen.TooManyFailed) as stopped:
        run(model, rows, max_failed=0, flush_interval=0.01)
    report = stopped.value.report
    assert report["state"] == "stopped" and sum(report["finish_reasons"].values()) == report["rows_ok"]
    whole = run(model, rows)
    assert whole["rows_resumed"] and whole["finish_reasons"] == {"length": 5}


def test_counts_with_workers_have_the_rows_of_all(model, rows):
    report = run(model, rows, share=True)
    assert report["finish_reasons"] == {"length": 5} and report["answered"] == 5


def test_a_job_with_a_model_that_is_loaded_already_counts_its_own_work_alone(model, rows):
    """As `serve-batches` runs one job after the other."""
    session, reports = Session(), []
    for number in range(2):
        output = str(rows.parent / f"{number}.parquet")
        given = {**OPTIONS, "sampling": SamplingParams(max_tokens=OPTIONS["max_tokens"])}
        del given["max_tokens"]
        reports.append(run_job(JobOptions(model, str(rows), output, progress="none", chat=False, **given), session))
    session.close()
    assert session.loads == 1
    first, second = reports
    for name in ("prompt_tokens", "generated_tokens", "sweeps"):
        assert second[name] == first[name] > 0, name
    assert second["cached_prompt_tokens"] <= second["prompt_tokens"]
    assert all(second["busy_s"][lane] < second["wall_s"] for lane in second["busy_s"])


def test_choices_are_counted(model, rows):
    options = {name: value for name, value in OPTIONS.items() if name != "max_tokens"}
    report = batchgen.run(
        model, rows, rows.with_name("choices.parquet"), task="score", choices=[" yes", " no"], **options
    )
    assert sum(one["count"] for one in report["answers"]) >= 4 and report["finish_reasons"] == {}
    assert {one["answer"] for one in report["answers"]} <= {"yes", "no"}


def said(**report):
    nothing = {"finish_reasons": {}, "cut_tokens": None, "answers": [], "answers_exact": True, "answered": 0}
    return result_lines(nothing | report)


def test_only_cut_texts_are_said_of_finish_reasons():
    assert said(finish_reasons={"stop": 60}) == []
    lines = said(finish_reasons={"length": 52, "stop": 8}, cut_tokens=(256, 256))
    assert lines == ["52 of 60 answers were cut at 256 tokens: raise --max-tokens for whole ones"]
    (of_steps,) = said(finish_reasons={"length": 2}, cut_tokens=(40, 40), limits_of="steps")
    assert of_steps == "2 of 2 answers were cut at 40 tokens: raise max-tokens of the step for whole ones"
    assert "cut at 12 to 256 tokens" in said(finish_reasons={"length": 2}, cut_tokens=(12, 256))[0]


def test_counts_that_are_lower_bounds_are_said_to_be():
    answers = [{"answer": "yes", "count": 1200}, {"answer": "", "count": 3}]
    assert said(answers=answers, answered=1210) == ["answers: 'yes' 1,200, '' 3, others 7"]
    assert said(answers=answers, answered=1210, answers_exact=False) == ["answers: 'yes' at least 1,200, '' at least 3"]


def test_failed_lines_of_an_openai_batch_are_told_by_its_file_of_errors(model, tmp_path):
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "max_tokens": 2}}
    lines = [line, line | {"custom_id": "2", "body": line["body"] | {"prompt": "a"}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    report = batchgen.run(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", dtype="float32", cpu_memory="4GiB")
    assert report["rows_failed"] == 1
    assert f"{tmp_path / 'out.errors.jsonl'} tells why rows failed; --retry-failed runs just those again" in summary(
        report
    )
