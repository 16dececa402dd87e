"""`--attention-budget`: what it changes of a job, its plan and its report, and what it refuses."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.errors import InputError

PROMPTS = [[random.Random(i).randrange(4, 250) for _ in range(n)] for i, n in enumerate((5, 200, 310, 120))]


@pytest.fixture
def job(tiny_models, tmp_path):
    """Runs prompts through a model; its output may be gone on with."""
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")

    def go(output="out.parquet", family="llama", layers=4, **options):
        path, _ = tiny_models(family, num_hidden_layers=layers)
        given = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 12, "ignore_eos": True, "chat": False}
        given |= {"offload_dir": tmp_path, "prompt_column": "prompt"}
        report = batchgen.run(path, tmp_path / "in.parquet", tmp_path / output, **(given | options))
        return pq.read_table(tmp_path / output).to_pylist(), report

    return go


def test_a_budget_changes_long_rows_alone_and_is_in_the_report(job):
    dense, before = job(logprobs=0)
    chosen, after = job("chosen.parquet", logprobs=0, attention_budget="10%")
    assert before["policy"]["attention_budget"] == "all" and after["policy"]["attention_budget"] == "10%"
    assert chosen[0] == dense[0] and chosen[2]["logprobs"] != dense[2]["logprobs"]
    assert after["memory"]["parts"]["cpu"]["KV"] > before["memory"]["parts"]["cpu"]["KV"]


def test_rows_are_not_gone_on_with_under_another_budget(job):
    job()
    with pytest.raises(InputError, match="formats"):
        job(attention_budget="10%")


def test_answers_under_another_budget_are_not_taken_from_the_cache(job, tmp_path):
    job(cache=tmp_path / "cache")
    assert job("again.parquet", cache=tmp_path / "cache")[1]["rows_cached"] == len(PROMPTS)
    assert job("chosen.parquet", cache=tmp_path / "cache", attention_budget="10%")[1]["rows_cached"] == 0


def test_what_cannot_be_done_is_refused(job):
    with pytest.raises(InputError, match="--attention-budget 10%: no layer of this model"):
        job(layers=2, attention_budget="10%")
    with pytest.raises(InputError, match="--attention-budget often: give all, a share such as 10%"):
        job(attention_budget="often")
    for flag in ("tensor_parallel", "pipeline"):
        with pytest.raises(InputError, match="needs the whole model in one process"):
            job(attention_budget="10%", **{flag: 2})


def test_a_budget_that_makes_drafts_impossible_is_named(job, capfd):
    job("budget.parquet", drafts=4, progress="plain", attention_budget="10%")
    assert "--drafts has no effect: --attention-budget is 10%" in capfd.readouterr().err
    job("states.parquet", drafts=4, progress="plain", family="qwen3_5")
    job("plain.parquet", drafts=4, progress="plain")
    assert "no effect" not in capfd.readouterr().err
