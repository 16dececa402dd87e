"""Cascades: the promise holds for any confidences, and no row is lost, wherever a job stops."""

import errno
import json
import math
import os
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke
from thorough import covering, quick_or
from tiny_models import make_tiny_model

import batchgen
from batchgen.core import atomic_file
from batchgen.core.errors import BatchgenError, InputError, TooManyFailed
from batchgen.job.cascade import bound
from batchgen.job.cascade.answers import AnswerColumns
from batchgen.job.cascade.bound import OneChoice, Target, choose_threshold, draw_rows, is_below
from batchgen.job.cascade.plan import CascadePlan
from batchgen.job.cascade.run import cascade_summary
from batchgen.job.joint import jobs as joint_jobs

SEEDS = 200
TARGET = Target(agree=0.95, confidence=0.95)


def _calibrated(rng, rows):
    """Confidences of which each is the probability that the models agree."""
    confidences = rng.beta(6, 1, rows)
    return confidences, rng.random(rows) > confidences


def _unrelated(rng, rows):
    """Confidences that say nothing about agreement, which is a little too rare."""
    return rng.random(rows), rng.random(rows) < 0.06


def _overconfident(rng, rows):
    """Confidences that are highest where the models differ."""
    differs = rng.random(rows) < 0.08
    return np.where(differs, 0.99, rng.random(rows) * 0.98), differs


def _few_values(rng, rows):
    """Confidences of five values, with too many differences in the rows of the second-lowest one."""
    confidences = rng.integers(1, 6, rows) / 5
    return confidences, rng.random(rows) < np.where(confidences == 0.4, 0.4, 0.01)


PLANTED = [_calibrated, _unrelated, _overconfident, _few_values]


def _broken(planted):
    """The number of draws, of two hundred, that break the promise."""
    rows, broken = 4000, 0
    confidences, differs = planted(np.random.default_rng(1), rows)
    for seed in range(SEEDS):
        draws = draw_rows(confidences, TARGET.default_draws(rows), seed)
        threshold = choose_threshold(confidences, draws, differs[draws.rows], TARGET)
        kept = confidences >= threshold.least_confidence
        broken += np.mean(kept & differs) > 1 - TARGET.agree
    return broken


@pytest.mark.parametrize("planted", PLANTED)
def test_the_promise_is_broken_in_at_most_five_percent_of_two_hundred_draws(planted):
    assert _broken(planted) <= 0.05 * SEEDS


@pytest.mark.parametrize("planted", [_calibrated, _unrelated])
def test_a_threshold_by_the_mean_of_the_sample_alone_would_break_the_promise(planted, monkeypatch):
    monkeypatch.setattr(bound, "is_below", lambda losses, mean, error, most: losses.mean() <= mean)
    assert _broken(planted) > 0.05 * SEEDS


def _rare_choice(rng, rows):
    """Confidences, and of each row whether the small and the large model answer with a rare choice."""
    chance = rng.beta(0.15, 0.9, rows)
    small = chance > 0.5
    return np.where(small, chance, 1 - chance), small, rng.random(rows) < chance


def _rare_choice_that_the_small_model_misses(rng, rows):
    """As confident where it misses a rare choice as elsewhere."""
    large = rng.random(rows) < 0.08
    small = large & (rng.random(rows) < 0.85)
    return rng.uniform(0.5, 1.0, rows), small, large


@pytest.mark.parametrize(
    ("planted", "least_kept"), [(_rare_choice, 0.2), (_rare_choice_that_the_small_model_misses, 0.0)]
)
def test_a_promise_about_a_choice_holds_for_its_recall_and_its_precision(planted, least_kept):
    rows, target = quick_or(5000, 20_000), Target(agree=0.9, confidence=0.95)
    confidences, small, large = planted(np.random.default_rng(6), rows)
    broken, of_all, saved = 0, 0, []
    for seed in range(SEEDS):
        draws = draw_rows(confidences, target.default_draws(rows, small.mean()), seed, small)
        choice = OneChoice(small[draws.rows], large[draws.rows])
        threshold = choose_threshold(confidences, draws, (small != large)[draws.rows], target, choice)
        kept = confidences >= threshold.least_confidence
        output = np.where(kept, small, large)
        right = np.sum(output & large)
        broken += right < target.agree * np.sum(large) or right < target.agree * np.sum(output)
        saved.append(kept.mean())
        if seed == 0:
            assert threshold.recall_estimate == pytest.approx(right / np.sum(large), abs=0.06)
            assert threshold.precision_estimate == pytest.approx(right / np.sum(output), abs=0.06)
            everywhere = choose_threshold(confidences, draws, (small != large)[draws.rows], target)
            output = np.where(confidences >= everywhere.least_confidence, small, large)
            of_all = np.sum(output & large) / np.sum(large)
    assert broken <= 0.05 * SEEDS
    assert np.mean(saved) > least_kept
    assert of_all < target.agree  # which a promise about all answers does not keep


def test_most_of_the_rows_that_may_be_kept_are_kept():
    rows = 20_000
    confidences, differs = _calibrated(np.random.default_rng(2), rows)
    by_confidence = np.cumsum(differs[np.argsort(-confidences)]) / rows
    possible = np.mean(by_confidence <= 1 - TARGET.agree)
    draws = draw_rows(confidences, TARGET.default_draws(rows), seed=0)
    threshold = choose_threshold(confidences, draws, differs[draws.rows], TARGET)
    assert threshold.kept_share > 0.7 * possible
    assert threshold.agree_estimate == pytest.approx(
        1 - np.mean(differs & (confidences >= threshold.least_confidence)), abs=0.02
    )


def test_models_that_always_agree_pass_nothing_on_and_models_that_never_agree_everything():
    confidences = np.random.default_rng(3).random(1000)
    draws = draw_rows(confidences, 240, seed=0)
    assert choose_threshold(confidences, draws, np.zeros(240, bool), TARGET).kept_share == 1.0
    nothing = choose_threshold(confidences, draws, np.ones(240, bool), TARGET)
    assert nothing.kept_share <= 1 - TARGET.agree  # these few may all be wrong


def test_a_test_of_a_mean_is_wrong_as_rarely_as_it_says():
    rng = np.random.default_rng(4)
    wrong = sum(is_below((rng.random(400) < 0.051).astype(float), 0.05, 0.05, 1.0) for _ in range(1000))
    right = sum(is_below((rng.random(400) < 0.01).astype(float), 0.05, 0.05, 1.0) for _ in range(100))
    assert wrong <= 50 and right >= 95


def test_weights_of_draws_give_the_mean_over_all_rows():
    rng = np.random.default_rng(5)
    confidences = rng.random(50_000)
    confidences[::7] = -1.0  # rows without an answer
    values = rng.random(50_000)
    draws = draw_rows(confidences, 200_000, seed=1)
    assert np.mean(draws.weights * values[draws.rows]) == pytest.approx(values.mean(), rel=0.01)
    assert draws.weights.max() <= draws.most_weight <= 2.0


@pytest.mark.parametrize("at_once", [1, 107, 1 << 16])
def test_rows_are_drawn_until_all_are_drawn_and_more_draws_begin_with_the_same_ones(monkeypatch, at_once):
    monkeypatch.setattr(bound, "_DRAWS_AT_ONCE", at_once)
    confidences = np.random.default_rng(7).random(100)
    draws = draw_rows(confidences, 10**12, seed=3)
    *before, last = draws.rows.tolist()
    assert set(before) == set(range(100)) - {last}
    for count in (1, 20, len(before), len(draws.rows), len(draws.rows) + 5):
        fewer = draw_rows(confidences, count, seed=3)
        assert fewer.rows.tolist() == draws.rows[:count].tolist()
        assert fewer.weights.tolist() == draws.weights[:count].tolist()


def test_a_test_of_a_mean_says_the_same_however_many_draws_it_takes_at_once(monkeypatch):
    rng = np.random.default_rng(8)
    losses = [(rng.random(size) < chance) * rng.random(size) * 2 for size in (1, 8, 200, 600) for chance in (0, 0.05)]
    said = []
    for at_once in (1, 7, 1 << 16):
        monkeypatch.setattr(bound, "_DRAWS_AT_ONCE", at_once)
        said.append([is_below(each, 0.05, 0.05, 2.0) for each in losses])
    assert said[0] == said[1] == said[2] and len(set(said[0])) == 2


def test_json_answers_agree_in_values_not_in_their_spelling():
    columns = AnswerColumns("", scores=False, is_json=True, within=1.0)
    (answer, same, near, other) = columns.answers(
        pa.table(
            {
                "text": ['{"a": 3, "b": "x"}', '{"b":"x","a":3}', '{"a": 4, "b": "x"}', '{"a": 3, "b": "y"}'],
                "error": pa.nulls(4, pa.string()),
            }
        )
    )
    assert columns.agree(answer, same) and columns.agree(answer, near) and not columns.agree(answer, other)
    assert not replace(columns, within=0.0).agree(answer, near)


@pytest.mark.parametrize(
    ("answer", "other", "agrees"),
    [
        ("1" + "0" * 400, "1.5", False),
        ("1" + "0" * 400, "1" + "0" * 400, True),
        ("9" * 5000, "9" * 5000, True),  # as texts: Python reads no such number
        ("1e999", "1e999", True),
        ("1e999", "-1e999", False),
        ("[" * 700 + "]" * 700, "[" * 700 + " ]" + "]" * 699, False),  # as texts
        ("[" * 200 + "]" * 200, "[" * 200 + " ]" + "]" * 199, True),
        ("[" * 100_000, "[" * 100_000, True),
    ],
    ids=lambda value: str(value)[:8],
)
def test_json_answers_of_any_size_and_depth_are_compared(answer, other, agrees):
    columns = AnswerColumns("", scores=False, is_json=True, within=1.0)
    answers = columns.answers(pa.table({"text": [answer, other], "error": pa.nulls(2, pa.string())}))
    assert columns.agree(*answers) is agrees


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model("llama", folder / "small", seed=1)
    make_tiny_model("llama", folder / "large", seed=2)
    return str(folder / "small"), str(folder / "large")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table({"id": list(range(60)), "question": [f"Row {i * 7919} is it so?" for i in range(60)]})
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


SCORED = {"task": "score", "choices": ["yes", "no"], "prompt_column": "question", "dtype": "float32"}
STOPPED = SCORED | {"agree": 0.6, "cascade_sample": 20}
GENERATED = {"choices": ["yes", "no"], "prompt_column": "question", "dtype": "float32"}


@pytest.mark.parametrize("options", [SCORED, GENERATED])
def test_each_row_has_the_answer_of_the_model_that_the_output_names(models, rows, tmp_path, options):
    small, large = models
    options = options | {"cascade_sample": 20}
    report = batchgen.run(large, rows, tmp_path / "out.parquet", cascade=small, agree=0.6, **options)
    del options["cascade_sample"]
    alone = [batchgen.run(model, rows, tmp_path / f"{i}.parquet", **options) for i, model in enumerate(models)]
    assert {one["state"] for one in (report, *alone)} == {"complete"}
    answer = "choice" if "task" in options else "text"
    output = pq.read_table(tmp_path / "out.parquet")
    by_model = {name: pq.read_table(tmp_path / f"{i}.parquet") for i, name in enumerate(models)}
    assert output["id"].to_pylist() == list(range(60))
    assert ("logprobs" in output.column_names) == ("task" in options)
    names = output["answered_by"].to_pylist()
    assert set(names) == set(models)
    for row, name in enumerate(names):
        assert output[answer][row] == by_model[name][answer][row]
    of = report["cascade"]
    assert of["large_rows"] == names.count(large) and of["rows_saved"] == names.count(small)
    confidences = np.array(output["confidence"].to_pylist())
    kept = [confidences[row] for row, name in enumerate(names) if name == small]
    assert min(kept) >= of["least_confidence"]
    agreeing = sum(a == b for a, b in zip(output[answer], by_model[large][answer], strict=True))
    assert agreeing >= 0.6 * 60


@pytest.mark.parametrize("shard", [None, "1/2"])
def test_a_row_has_the_sample_that_each_model_alone_would_have_drawn(models, rows, tmp_path, shard):
    options = GENERATED | {"temperature": 1.0, "seed": 5, "shard": shard}
    batchgen.run(models[1], rows, tmp_path / "out.parquet", cascade=models[0], cascade_sample=10, **options)
    texts = {}
    for number, model in enumerate(models):
        batchgen.run(model, rows, tmp_path / f"{number}.parquet", **options)
        texts[model] = pq.read_table(tmp_path / f"{number}.parquet")["text"].to_pylist()
    output = pq.read_table(tmp_path / "out.parquet")
    names = output["answered_by"].to_pylist()
    assert output["text"].to_pylist() == [texts[name][row] for row, name in enumerate(names)]
    assert len({text for row, text in enumerate(texts[models[1]]) if names[row] == models[1]}) == 2


def test_a_cascade_of_a_model_with_itself_passes_on_the_sample_alone(models, rows, tmp_path):
    report = batchgen.run(models[0], rows, tmp_path / "out.jsonl", cascade=models[0], cascade_sample=200, **SCORED)
    of = report["cascade"]
    assert of["agree_estimate"] == 1.0 and of["large_rows"] == of["sampled_rows"] < 60


@pytest.fixture(scope="module")
def whole(models, rows, tmp_path_factory):
    """The output of a cascade that nothing has stopped."""
    output = tmp_path_factory.mktemp("whole") / "out.parquet"
    batchgen.run(models[1], rows, output, cascade=models[0], **STOPPED)
    return output


@pytest.mark.parametrize("stopped_in", [1, 2, 3, 4])
def test_an_interrupted_cascade_goes_on_to_the_same_output(models, rows, whole, tmp_path, monkeypatch, stopped_in):
    small, large = models
    options = STOPPED | {"cascade": small}
    begun, run_job = [], joint_jobs.run_job

    def stopping(job, *rest):
        begun.append(job)
        if len(begun) == stopped_in:
            raise KeyboardInterrupt
        return run_job(job, *rest)

    def stopping_in_the_output(file, schema, batches):
        file.write(b"begun")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(joint_jobs, "run_job", stopping)
        patch.setattr(joint_jobs, "FORMATS", {".parquet": stopping_in_the_output})
        batchgen.run(large, rows, tmp_path / "out.parquet", **options)
    assert not (tmp_path / "out.parquet").exists() and len(begun) == min(stopped_in, 3)
    report = batchgen.run(large, rows, tmp_path / "out.parquet", **options)
    assert (tmp_path / "out.parquet").read_bytes() == whole.read_bytes()
    assert report["cascade"]["rows_saved"] > 0
    again = batchgen.run(large, rows, tmp_path / "out.parquet", **options)
    assert again["state"] == "already complete" and again["rows"] == 60


@pytest.mark.parametrize("full_at", ["draws.json", "sample", "rest", "out.parquet"])
def test_a_disk_that_is_full_while_jobs_share_an_output_is_said_of_the_output(
    models, rows, whole, tmp_path, monkeypatch, full_at
):
    output, options = tmp_path / "out.parquet", STOPPED | {"cascade": models[0]}
    real = atomic_file.staged

    @contextmanager
    def filling(path, *rest):
        with real(path, *rest) as file:
            yield file
            if path.name.startswith(full_at) and path.name.endswith((".json.tmp", ".parquet.tmp")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does, without a name

    with monkeypatch.context() as patch, pytest.raises(BatchgenError) as full:
        patch.setattr(atomic_file, "staged", filling)
        batchgen.run(models[1], rows, output, **options)
    said = f"cannot write {output}: No space left on device: free space and run the same command again"
    assert str(full.value) == said and not list(tmp_path.rglob("*.tmp"))
    batchgen.run(models[1], rows, output, **options)
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("draws", "agrees"),
    covering(product([20, None], [(0.2, 0.6), (0.6, 0.2), (0.2, 0.6, 0.2, 0.5)]), 3, "another promise"),
)
def test_another_promise_reuses_the_answers_of_the_small_model_and_of_the_sample(models, rows, tmp_path, draws, agrees):
    small, large = models
    options = SCORED | {"cascade": small, "cascade_sample": draws}
    reports = [batchgen.run(large, rows, tmp_path / "out.parquet", agree=agree, **options) for agree in agrees]
    assert len({report["cascade"]["large_s"] for report in reports}) > 1
    assert reports[-1]["jobs"]["small"]["state"] == "already complete"
    answered = [{name: job for name, job in each["jobs"].items() if name.startswith("sample")} for each in reports]
    for before, after in pairwise(answered):
        assert set(before) <= set(after) and {after[name]["state"] for name in before} == {"already complete"}
    of, names = reports[-1]["cascade"], pq.read_table(tmp_path / "out.parquet")["answered_by"].to_pylist()
    assert of["agree"] == agrees[-1] and names.count(large) == of["large_rows"]
    assert of["sampled_rows"] == sum(job["rows"] for job in answered[-1].values())
    most = draws or max(Target(each, 0.95).default_draws(60) for each in agrees)
    assert of["draws"] == most or (of["draws"] < most and of["sampled_rows"] == 60)


def test_a_sample_of_far_more_draws_than_rows_has_all_rows_and_is_taken_again(models, rows, tmp_path):
    options = SCORED | {"cascade": models[0], "cascade_sample": 10**12}
    for agree, state in ((0.5, "complete"), (0.9, "already complete")):
        report = batchgen.run(models[1], rows, tmp_path / "out.parquet", agree=agree, **options)
        (sample,) = (job for name, job in report["jobs"].items() if name.startswith("sample"))
        assert report["cascade"]["sampled_rows"] == sample["rows"] == 60 and sample["state"] == state


def test_another_choice_of_a_promise_has_a_sample_of_its_own(models, rows, tmp_path):
    options = SCORED | {"cascade": models[0], "cascade_sample": 10, "agree": 0.2}
    for choice in ("yes", "no"):
        report = batchgen.run(models[1], rows, tmp_path / "out.parquet", agree_on=choice, **options)
        assert report["jobs"]["small"]["state"] == ("complete" if choice == "yes" else "already complete")
        batchgen.run(models[1], rows, tmp_path / f"{choice}.parquet", agree_on=choice, **options)
        assert pq.read_table(tmp_path / "out.parquet") == pq.read_table(tmp_path / f"{choice}.parquet")


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("questions", [[None] * 3, ["?", *[None] * 120]])
def test_a_small_model_that_answers_few_rows_stops_no_cascade(models, tmp_path, questions, limit):
    pq.write_table(pa.table({"question": pa.array(questions, pa.string())}), tmp_path / "rows.parquet")
    options = SCORED | {"cascade": models[0], "max_failed": limit}
    failed = questions.count(None)
    if failed < len(questions) and limit is None:
        report = batchgen.run(models[1], tmp_path / "rows.parquet", tmp_path / "out.parquet", **options)
    else:
        with pytest.raises(TooManyFailed) as stopped:
            batchgen.run(models[1], tmp_path / "rows.parquet", tmp_path / "out.parquet", **options)
        report = stopped.value.report
    assert report["rows_failed"] == failed and report["cascade"]["rows_saved"] == 0
    assert len(cascade_summary(report)) > 3
    assert pq.read_table(tmp_path / "out.parquet").num_rows == len(questions)


@pytest.mark.parametrize("limit", [None, 5])
def test_a_line_that_is_no_row_fails_in_a_cascade_as_it_does_alone(models, tmp_path, limit):
    lines = [json.dumps({"question": f"Is it {i}?"}) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(["{broken", *lines[:3], "[]", *lines[3:]]))
    options = {"prompt_template": "Row: {{ question }}", "choices": ["yes", "no"], "dtype": "float32"}
    options |= {"on_bad_line": "skip", "limit": limit}
    batchgen.run(models[1], tmp_path / "rows.jsonl", tmp_path / "alone.parquet", **options)
    report = batchgen.run(models[1], tmp_path / "rows.jsonl", tmp_path / "out.parquet", cascade=models[0], **options)
    alone, output = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("alone", "out"))
    assert output["error"].to_pylist() == alone["error"].to_pylist() and report["rows_failed"] == 2
    assert [error is not None for error in output["error"].to_pylist()] == [i in (0, 4) for i in range(len(output))]


def test_rows_that_the_small_model_cannot_answer_go_to_the_large_one(models, tmp_path):
    texts = ["Is it so?", None, "Is it late?", "yes?"]
    pq.write_table(pa.table({"question": texts}), tmp_path / "rows.parquet")
    options = SCORED | {"cascade": models[0], "cascade_sample": 100}
    report = batchgen.run(models[1], tmp_path / "rows.parquet", tmp_path / "out.parquet", **options)
    output = pq.read_table(tmp_path / "out.parquet")
    assert report["rows_failed"] == 1 and report["rows_ok"] == 3
    assert output["answered_by"][1].as_py() == models[1] and output["error"][1].as_py()
    assert output["confidence"][1].as_py() is None


def test_rows_that_the_large_model_cannot_answer_fail_alone(models, tmp_path):
    texts = [f"Is it {i}?" for i in range(40)] + [None]  # no model answers the last one, which is in no sample
    pq.write_table(pa.table({"question": texts}), tmp_path / "rows.parquet")
    options = SCORED | {"cascade": models[0], "cascade_sample": 20, "agree": 0.2}
    report = batchgen.run(models[0], tmp_path / "rows.parquet", tmp_path / "out.parquet", **options)
    assert report["rows_failed"] == 1 and report["rows_ok"] == 40
    (rest,) = (job for name, job in report["jobs"].items() if name.startswith("rest"))
    assert rest["rows_failed"] == rest["rows"] == 1


def test_a_deadline_stops_a_cascade_and_the_next_run_goes_on(models, rows, tmp_path):
    options = SCORED | {"cascade": models[0], "cascade_sample": 20}
    stopped = batchgen.run(models[1], rows, tmp_path / "out.parquet", max_time=0.001, **options)
    assert stopped["state"] == "stopped" and not (tmp_path / "out.parquet").exists()
    assert batchgen.run(models[1], rows, tmp_path / "out.parquet", **options)["state"] == "complete"


def test_the_status_of_a_cascade_is_that_of_its_jobs(models, rows, tmp_path):
    output = tmp_path / "out.parquet"
    batchgen.run(models[1], rows, output, cascade=models[0], cascade_sample=20, **SCORED)
    code, _, message = invoke("status", output)
    assert code == 2 and f"{output}.jobs" in message
    code, stdout, _ = invoke("status", f"{output}.jobs/small.parquet")
    assert code == 0 and "60 rows ok" in stdout


def test_a_cascade_without_an_output_gives_a_table(models, rows):
    table = batchgen.run(models[1], str(rows), cascade=models[0], cascade_sample=20, **SCORED)
    assert len(table) == 60 and {"choice", "answered_by", "confidence"} <= set(table.column_names)


def test_a_column_of_the_input_keeps_the_name_that_a_column_about_the_models_would_have(models, rows, tmp_path):
    given = pq.read_table(rows)
    for name in ("confidence", "cascade_answered_by"):
        given = given.append_column(name, pa.array([f"own {row}" for row in range(len(given))]))
    pq.write_table(given, tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    batchgen.run(models[1], tmp_path / "in.parquet", output, cascade=models[0], cascade_sample=20, **SCORED)
    table = pq.read_table(output)
    assert table.select(given.column_names).equals(given)
    assert set(table["cascade2_answered_by"].to_pylist()) <= set(models) and "cascade2_confidence" in table.column_names


@pytest.mark.parametrize("name", ["logprobs", "reasoning", "text"])
def test_a_column_of_the_input_that_one_model_would_name_alike_gives_both_models_a_prefix(models, rows, tmp_path, name):
    given = pq.read_table(rows).append_column(name, pa.array(["own"] * 60))
    pq.write_table(given, tmp_path / "in.parquet")
    options = GENERATED | {"cascade": models[0], "cascade_sample": 20}
    batchgen.run(models[1], tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.select(given.column_names).equals(given)
    assert set(table["gen_text"].to_pylist()) <= {"yes", "no"} and "text" not in {*table.column_names} - {name}


def test_an_output_of_another_job_is_not_replaced(models, rows, tmp_path):
    (tmp_path / "out.parquet").write_bytes(b"precious")
    with pytest.raises(InputError, match="is not the output of this job"):
        batchgen.run(models[1], rows, tmp_path / "out.parquet", cascade=models[0], **SCORED)
    assert (tmp_path / "out.parquet").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "question"}, "free texts rarely agree"),
        ({"task": "score", "prompt_column": "question"}, "a score of a whole text is none"),
        (SCORED | {"agree": 1.0}, "--agree must be above 0 and below 1"),
        (GENERATED | {"n": 2, "temperature": 1.0}, "-n does not go with --cascade"),
        (SCORED | {"agree_on": "maybe"}, "--agree-on must be one of --choices"),
        ({"task": "rerank", "prompt_column": "question", "pair_column": "id"}, "--cascade is for --task generate and"),
    ],
)
def test_a_cascade_that_cannot_keep_a_promise_is_refused(models, rows, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        batchgen.run(models[1], rows, tmp_path / "out.parquet", cascade=models[0], **options)


def test_the_command_says_what_was_passed_on_promised_and_saved(models, rows, tmp_path):
    command = ["run", "-m", models[1], "--cascade", models[0], "-i", str(rows), "--prompt-column", "question"]
    command += ["--task", "score", "--choices", "yes", "--choices", "no", "--agree", "0.6", "--cascade-sample", "20"]
    report_file = tmp_path / "report.json"
    code, stdout, _ = invoke(*command, "--report", report_file, "-o", tmp_path / "out.parquet")
    of = json.loads(report_file.read_text())["cascade"]
    assert code == 0
    assert f"answered {of['large_rows']:,} of 60 rows" in stdout
    assert "at least 0.6 of all answers" in stdout
    assert "saved" in stdout or "cost" in stdout
    assert math.isfinite(of["large_alone_s"])


@pytest.mark.parametrize("options", [SCORED, GENERATED])
def test_a_promise_about_a_choice_is_one_about_its_rows(models, rows, tmp_path, options):
    small, large = models
    options = options | {"agree": 0.5, "cascade_sample": 400}
    report = batchgen.run(large, rows, tmp_path / "out.parquet", cascade=small, agree_on="yes", **options)
    of = report["cascade"]
    assert of["agree_on"] == "yes" and 0.0 <= of["recall_estimate"] <= 1.0 and 0.0 <= of["precision_estimate"] <= 1.0
    plain = {name: value for name, value in options.items() if name not in ("agree", "cascade_sample")}
    batchgen.run(large, rows, tmp_path / "large.parquet", **plain)
    answer = "choice" if "task" in options else "text"
    output, wanted = (pq.read_table(tmp_path / f"{name}.parquet")[answer].to_pylist() for name in ("out", "large"))
    right = sum(a == b == "yes" for a, b in zip(output, wanted, strict=True))
    assert right >= 0.5 * wanted.count("yes") and right >= 0.5 * output.count("yes")


def test_a_plan_says_up_to_which_share_a_cascade_pays():
    plan = CascadePlan(1000, 200, small_s=10.0, sample_s=20.0, rest_s={0.5: 40.0, 1.0: 80.0}, large_alone_s=100.0)
    assert plan.break_even == pytest.approx(0.875)  # 10 + 20 + 80 * 0.875 = 100
    assert plan.total_s(0.5) == 70.0
    assert replace(plan, large_alone_s=200.0).break_even == 1.0
    assert replace(plan, large_alone_s=30.0).break_even == 0.0


def test_the_plan_of_a_cascade_has_the_time_of_both_models(models, rows):
    command = ["plan", "-m", models[1], "--cascade", models[0], "-i", rows, "--prompt-column", "question"]
    command += ["--task", "score", "--choices", "yes", "--choices", "no", "--progress", "none"]
    code, stdout, _ = invoke(*command, "--json")
    plan = json.loads(stdout)
    assert code == 0 and plan["rows"] == 60 and 0 < plan["sampled_rows"] <= 60
    assert plan["small_s"] > 0 and plan["large_alone_s"] > 0
    code, stdout, _ = invoke(*command)
    assert code == 0 and "alone:" in stdout and "by the share of the other rows" in stdout
    code, _, message = invoke(*command, "--frontier")
    assert code == 2 and "--frontier is for the plan of one model" in message
