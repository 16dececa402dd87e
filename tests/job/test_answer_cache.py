"""`--cache`: a job takes from earlier jobs the answers that it would compute, and no others."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.job.run as run_module
from batchgen import run
from batchgen.core.errors import InputError
from batchgen.output.answer_store import DATABASE

PROMPTS = [" ".join(["quay"] * (i + 1)) for i in range(10)]


@pytest.fixture
def job(tiny_models, tmp_path, capsys):
    """Runs prompts in an output of their own: the rows of the output, the report, and what was said."""
    count = 0

    def go(prompts=tuple(PROMPTS), family="llama", **options):
        nonlocal count
        count += 1
        table = {"prompt": pa.array(prompts, pa.string()), "key": [f"k{p}" for p in prompts]}
        pq.write_table(pa.table(table), tmp_path / f"{count}.parquet")
        path, _ = tiny_models(family)
        common = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 6, "cache": tmp_path / "cache"}
        given = common | {"prompt_column": "prompt", "offload_dir": tmp_path, "progress": "plain"} | options
        report = run(path, tmp_path / f"{count}.parquet", tmp_path / f"out{count}.parquet", **given)
        return pq.read_table(tmp_path / f"out{count}.parquet").to_pylist(), report, capsys.readouterr().err

    return go


@pytest.fixture
def no_model(monkeypatch):
    """No engine can be loaded, and nothing can be planned."""

    def refuse(*args, **kwargs):
        raise AssertionError("the model is loaded")

    def apply():
        monkeypatch.setattr(run_module, "load_engine", refuse)
        monkeypatch.setattr(run_module, "make_plan", refuse)

    return apply


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "n": 3, "seed": 2},
        {"logprobs": 2, "stop": ["q"]},
        {"prompt_logprobs": 1},
        {"regex": "[ab]{2,4}"},
    ],
    ids=["greedy", "drawn", "logprobs", "log-probabilities of prompts", "structured"],
)
def test_a_job_whose_answers_are_known_loads_no_model(options, job, no_model):
    if "regex" in options:
        pytest.importorskip("llguidance")
    wanted, first, _ = job(**options)
    assert first["rows_cached"] == 0
    no_model()
    found, report, said = job(**options)
    assert found == wanted
    assert report["state"] == "complete" and report["rows_cached"] == 10 and report["generated_tokens"] == 0
    assert "cache: 10 rows are known, 0 have to be computed" in said


def test_only_changed_prompts_are_computed(job):
    before, _, _ = job()
    changed = [*PROMPTS[:3], "another prompt", *PROMPTS[4:]]
    after, report, said = job(changed)
    assert report["rows_cached"] == 9 and report["generated_tokens"] <= 6
    assert [row["text"] for i, row in enumerate(after) if i != 3] == [
        row["text"] for i, row in enumerate(before) if i != 3
    ]
    assert "plan: 1 sequences" in said
    assert after[3]["text"] == job(changed, cache=None)[0][3]["text"]


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 5},
        {"repetition_penalty": 1.4},
        {"family": "qwen2"},
        {"kv_cache_dtype": "int8"},
        {"weights": "int8"},
        {"dtype": "bfloat16"},
        {"logprobs": 0},
        {"stop": ["a"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_answers_changes_their_keys(change, job):
    job(PROMPTS[:3])
    assert job(PROMPTS[:3], **change)[1]["rows_cached"] == 0


@pytest.mark.parametrize("change", [{"seed": 4}, {"max_num_seqs": 2}, {"max_model_len": 100}, {"output_prefix": "x_"}])
def test_what_changes_no_greedy_answer_changes_no_key(change, job):
    job(PROMPTS[:3])
    assert job(PROMPTS[:3], **change)[1]["rows_cached"] == 3


def test_drawn_answers_belong_to_their_rows(job):
    drawn = {"temperature": 1.0, "max_tokens": 4}
    job(PROMPTS[:4], **drawn)
    assert job(PROMPTS[1:4], **drawn)[1]["rows_cached"] == 0, "other numbers of rows draw other tokens"
    assert job(PROMPTS[:4], **drawn, seed=1)[1]["rows_cached"] == 0
    job(PROMPTS[:4], id_column="key", **drawn)
    alone = job(PROMPTS[1:4], id_column="key", cache=None, **drawn)[0]
    found, report, _ = job(PROMPTS[1:4], id_column="key", **drawn)
    assert report["rows_cached"] == 3 and found == alone


def test_greedy_answers_belong_to_no_row(job):
    job()
    assert job(PROMPTS[::-1])[1]["rows_cached"] == 10


def test_identical_rows_are_computed_once_and_found_together(job):
    rows = [PROMPTS[0]] * 5 + [PROMPTS[1]]
    _, first, _ = job(rows)
    assert first["rows_repeated"] == 4 and first["rows_cached"] == 0
    _, second, _ = job(rows)
    assert second["rows_repeated"] == 0 and second["rows_cached"] == 6


def test_rows_that_fail_are_not_in_the_cache(job):
    rows = [PROMPTS[0], None, "", PROMPTS[1]]
    _, first, _ = job(rows)
    found, second, _ = job(rows)
    assert first["rows_failed"] == second["rows_failed"] == 2 and second["rows_cached"] == 2
    assert [row["error"] is None for row in found] == [True, False, False, True]


def test_workers_share_a_cache(job):
    wanted, _, _ = job()
    found, report, _ = job(share=True)
    assert found == wanted and report["rows_cached"] == 10 and report["generated_tokens"] == 0


def test_a_stopped_job_finds_its_own_answers_and_those_of_others(job, tmp_path):
    job(PROMPTS[:5])
    found, report, _ = job(PROMPTS)
    assert report["rows_cached"] == 5
    assert found == job(PROMPTS, cache=None)[0]


def test_a_damaged_cache_does_not_end_a_job(job, tmp_path):
    wanted, _, _ = job()
    (tmp_path / "cache" / DATABASE).write_bytes(b"nothing" * 4000)
    found, report, said = job()
    assert found == wanted and report["rows_cached"] == 0 and report["rows_ok"] == 10
    assert sum("is not used from here on" in line for line in said.splitlines()) == 1


def test_the_summary_says_how_many_rows_are_from_the_cache(job):
    from batchgen.job.report import summary

    job(PROMPTS[:8])
    report = job()[1]
    assert "8 of 10 rows from the cache" in summary(report)
    json.dumps(report)


def test_scoring_has_no_cache(job):
    with pytest.raises(InputError, match="--cache has no meaning with --task score"):
        job(task="score", choices=["a", "b"], max_tokens=256)
