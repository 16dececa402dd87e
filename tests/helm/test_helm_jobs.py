"""Jobs that answer rows, here and through files; HELM itself is not needed."""

import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from thorough import quick_or

import batchgen
from batchgen.cli.commands import cli
from batchgen.core.errors import BatchgenError, InputError, JobStopped
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.helm.jobs import FILES, Jobs
from batchgen.helm.live import LiveEngine, live_engine
from batchgen.helm.rows import GENERATE, SCORE, Row

PROMPTS = ["The ferry left", "The captain's dog slept", "In 1987 the company", "When the storm came"]


def generate_row(prompt, max_tokens=6, **sampling):
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "top_p": 1.0, "stop": []} | sampling
    return Row(GENERATE, prompt, f"g {prompt!a} {sorted(sampling.items())}", sampling)


def score_row(*token_ids):
    return Row(SCORE, token_ids, f"s {token_ids}")


ROWS = [
    *(generate_row(prompt) for prompt in PROMPTS),
    generate_row(PROMPTS[0], 3),
    generate_row(PROMPTS[1], 9, temperature=0.9, stop=["e"]),
    *(score_row(5, 20, 30, 40, 50, 60, last) for last in (7, 8, 9)),
    score_row(5, 20, 31),
    score_row(9, 8),
]


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture(scope="module")
def expected(model):
    """By row id: text, finish reason and log-probabilities, from the engine row by row."""
    found = {}
    with batchgen.Engine(model, dtype="float32", cpu_memory="4GiB") as engine:
        for row in ROWS:
            if row.kind == GENERATE:
                (one,) = engine.generate([Request(row.prompt, SamplingParams(**row.sampling, logprobs=0), row.id)])
                (sample,) = one.samples
                found[row.id] = sample.text, sample.finish_reason, [p.chosen for p in sample.logprobs]
            else:
                (one,) = engine.score([ScoreRequest(row.prompt[:1], (row.prompt[1:],))])
                found[row.id] = None, None, [p.chosen for p in one.scores[0].tokens]
    return found


def options(model, **more):
    return {"model": model, "dtype": "float32", "cpu_memory": "4GiB", "progress": "none"} | more


def assert_answers(results, expected, rows=ROWS):
    for row in rows:
        result = results[row.id]
        text, reason, chosen = expected[row.id]
        assert result["error"] is None
        assert (result.get("text"), result.get("finish_reason")) == (text, reason)
        assert [p["token"] for p in result["logprobs"]] == [t.token for t in chosen]
        assert [p["logprob"] for p in result["logprobs"]] == pytest.approx([t.logprob for t in chosen], abs=1e-4)


def folders(folder):
    return sorted(path.name.split("-")[0] for path in folder.iterdir())


def said(capfd):
    """Lines on the screen that name a job."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("batchgen: ")]


def test_rows_are_a_job_a_kind_and_never_run_again(model, expected, tmp_path, capfd):
    jobs = Jobs(tmp_path, options(model))
    jobs.answer(ROWS)
    assert_answers(jobs.results, expected)
    assert folders(tmp_path) == [GENERATE, SCORE] and len(said(capfd)) == 2 and jobs.found == frozenset()
    timing = jobs.results.timing(ROWS[-1].id)
    assert timing.rows == 5 and timing.wall_s > 0  # prompts, though some of them share a row

    later = Jobs(tmp_path, options(model) | {"model": "/no/engine/can/be/loaded"})
    assert later.found == {row.id for row in ROWS}
    later.answer(ROWS[::-1])
    assert not said(capfd)
    assert_answers(later.results, expected)

    more = generate_row("Nobody slept")
    again = Jobs(tmp_path, options(model))
    again.answer([*ROWS, more])
    (line,) = said(capfd)
    assert "1 rows" in line
    assert again.results[more.id]["error"] is None and more.id not in again.found


@pytest.mark.parametrize("ranks", quick_or(["tensor_parallel"], ["tensor_parallel", "pipeline"]))
def test_a_job_may_be_run_by_several_processes(ranks, model, expected, tmp_path):
    # For two processes of the size of this one, which has many tests' memory.
    jobs = Jobs(tmp_path, options(model, cpu_memory="8GiB", **{ranks: 2}))
    jobs.answer(ROWS[:1])
    assert_answers(jobs.results, expected, ROWS[:1])
    (report,) = tmp_path.glob("*/report.json")
    assert len(json.loads(report.read_text())["processes"]) == 2


def test_prompts_that_are_half_the_same_are_scored_in_one_row(model, tmp_path):
    jobs = Jobs(tmp_path, options(model), FILES)
    with pytest.raises(JobStopped):
        jobs.answer(ROWS)
    (path,) = tmp_path.glob("score-*/requests.parquet")
    table = pq.read_table(path).to_pylist()
    assert [len(row["ids"]) for row in table] == [3, 1, 1]
    assert table[0]["context"] == [5] and table[0]["continuations"] == [
        [20, 30, 40, 50, 60, last] for last in (7, 8, 9)
    ]


def test_files_go_to_an_engine_elsewhere(model, expected, tmp_path, monkeypatch):
    jobs = Jobs(tmp_path / "here", options(model), FILES)
    with pytest.raises(JobStopped, match=r"batchgen run --config job\.toml") as stopped:
        jobs.answer(ROWS)
    assert stopped.value.exit_code == 3
    with pytest.raises(JobStopped):  # no more jobs for asking twice
        Jobs(tmp_path / "here", options(model), FILES).answer(ROWS)
    assert folders(tmp_path / "here") == [GENERATE, SCORE]
    os.rename(tmp_path / "here", tmp_path / "there")  # job.toml names no folder
    for job in (tmp_path / "there").iterdir():
        monkeypatch.chdir(job)
        assert CliRunner().invoke(cli, ["run", "--config", "job.toml"], catch_exceptions=False).exit_code == 0
        (job / "report.json").unlink()
    back = Jobs(tmp_path / "there", options("/no/model"), FILES)
    back.answer(ROWS)
    assert_answers(back.results, expected)
    assert back.results.timing(ROWS[0].id) is None


def test_a_program_of_another_environment(model, expected, tmp_path):
    program = tmp_path / "batchgen"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchgen "$@"\n')
    program.chmod(0o755)
    jobs = Jobs(tmp_path / "jobs", options(model), str(program))
    jobs.answer(ROWS[:2])
    assert_answers(jobs.results, expected, ROWS[:2])
    with pytest.raises(InputError, match="cannot start the engine"):
        Jobs(tmp_path / "none", options(model), str(tmp_path / "none")).answer(ROWS[:1])
    program.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(BatchgenError, match="exit code 7"):
        Jobs(tmp_path / "fails", options(model), str(program)).answer(ROWS[:1])


def test_what_was_begun_goes_on_also_where_more_is_asked_for(model, expected, tmp_path):
    first = Jobs(tmp_path, options(model, max_time=0.001))
    with pytest.raises(JobStopped, match="time limit"):
        first.answer(ROWS[:3])
    (begun,) = tmp_path.iterdir()
    assert (begun / "results.parquet.batchgen" / "manifest.json").exists()
    second = Jobs(tmp_path, options(model))
    second.answer(ROWS[:5])
    assert_answers(second.results, expected, ROWS[:5])
    assert pq.read_metadata(begun / "results.parquet").num_rows == 3
    assert sum(pq.read_metadata(p).num_rows for p in tmp_path.glob("*/results.parquet")) == 5


def test_jobs_of_other_rows_are_left_alone(model, tmp_path):
    with pytest.raises(JobStopped):
        Jobs(tmp_path, options(model), FILES).answer(ROWS[:3])
    jobs = Jobs(tmp_path, options(model))
    jobs.answer(ROWS[:1])
    assert len(list(tmp_path.glob("*/results.parquet"))) == 1


@pytest.mark.parametrize("spoil", ["other rows", "no table"])
def test_results_that_do_not_answer_are_refused(model, tmp_path, spoil):
    with pytest.raises(JobStopped):
        Jobs(tmp_path, options(model), FILES).answer(ROWS[:3])
    (job,) = tmp_path.iterdir()
    if spoil == "no table":
        (job / "results.parquet").write_text("nonsense")
    else:
        result = {"id": ["x"], "text": [""], "finish_reason": ["stop"], "logprobs": [None], "error": [None]}
        pq.write_table(pa.table(result), job / "results.parquet")
    with pytest.raises(InputError, match=r"results\.parquet"):
        Jobs(tmp_path, options(model), FILES)


def test_failed_rows_say_why(model, tmp_path):
    long = generate_row("The ferry " * 400)
    lone = generate_row("a lone surrogate \ud800")
    tokens = score_row(5, 9999)
    jobs = Jobs(tmp_path, options(model))
    jobs.answer([long, lone, tokens])
    assert "the context holds 512" in jobs.results[long.id]["error"]
    assert jobs.results[lone.id]["error"] is None
    assert "vocabulary" in jobs.results[tokens.id]["error"] and jobs.results[tokens.id]["logprobs"] is None


def test_chat_messages(model, tmp_path):
    messages = ({"role": "user", "content": "Which day?"},)
    row = Row(GENERATE, messages, "chat", {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "stop": []})
    jobs = Jobs(tmp_path, options(model))
    jobs.answer([row])
    with batchgen.Engine(model, dtype="float32", cpu_memory="4GiB") as engine:
        (one,) = engine.generate([Request(list(messages), SamplingParams(max_tokens=4))])
    assert jobs.results["chat"]["text"] == one.text


def test_a_live_engine_gives_the_same(model, expected):
    live = live_engine({"model": model, "dtype": "float32", "cpu_memory": "4GiB"})
    assert_answers(live.answer(ROWS), expected)
    assert live_engine({"cpu_memory": "4GiB", "dtype": "float32", "model": model}) is live
    assert live.answer([generate_row("x " * 600)])[generate_row("x " * 600).id]["error"]
    with pytest.raises(InputError, match="flush_interval is an option of jobs"):
        LiveEngine({"model": model, "flush_interval": "1s"})


def test_threads_share_a_live_engine(model, expected):
    from concurrent.futures import ThreadPoolExecutor

    live = live_engine({"model": model, "dtype": "float32", "cpu_memory": "4GiB"})
    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(lambda row: live.answer([row]), ROWS * 3))
    for row, results in zip(ROWS * 3, answered, strict=True):
        assert_answers(results, expected, [row])


def test_job_options_are_those_of_the_command_line(model, tmp_path, monkeypatch):
    with pytest.raises(JobStopped):
        Jobs(tmp_path, options(model, share_prefixes=False, max_num_seqs=3), FILES).answer(ROWS)
    monkeypatch.chdir(next(tmp_path.glob("generate-*")))
    said = CliRunner().invoke(cli, ["run", "--config", "job.toml", "--dry-run", "--json"], catch_exceptions=False)
    plan = json.loads(said.stdout[said.stdout.index("{") :])
    assert plan["rows"] == 6
    assert not plan["plan"]["policy"]["share_prefixes"] and plan["plan"]["policy"]["max_num_seqs"] == 3
