"""Adapters as a column: each row has the answer of its own adapter, and no row is lost."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke
from lora_adapters import save_adapter
from tiny_models import make_tiny_model

import batchgen
from batchgen.core.errors import InputError
from batchgen.job.joint import jobs as joint_jobs

OPTIONS = {"prompt_column": "prompt", "max_tokens": 6, "ignore_eos": True, "dtype": "float32"}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model and two adapters of it."""
    folder = tmp_path_factory.mktemp("adapted")
    model = make_tiny_model("llama", folder / "base")
    adapters = [folder / "first", folder / "second"]
    for seed, path in enumerate(adapters):
        save_adapter(model, path, seed, target_modules=MODULES)
    return folder / "base", *map(str, adapters)


@pytest.fixture
def rows(adapted, tmp_path):
    _, first, second = adapted
    names = [first, None, second, second, "", first, first]
    prompts = [[5 + i * 7 % 400 for i in range(length)] for length in (3, 20, 9, 33, 4, 11, 8)]
    pq.write_table(pa.table({"n": range(7), "prompt": prompts, "adapter": names}), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def alone(adapted, rows, tmp_path):
    """The texts of all rows by each adapter, and by the model alone."""
    base, *adapters = adapted
    texts = {}
    for number, adapter in enumerate([*adapters, None]):
        output = tmp_path / f"alone-{number}.parquet"
        batchgen.run(str(base), rows, output, lora=adapter, **OPTIONS)
        texts[adapter] = pq.read_table(output)["text"].to_pylist()
    return texts


def test_each_row_has_the_text_of_its_own_adapter(adapted, rows, tmp_path):
    base, first, second = adapted
    report = batchgen.run(str(base), rows, tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
    output = pq.read_table(tmp_path / "out.parquet")
    by_adapter = alone(adapted, rows, tmp_path)
    names = [name or None for name in output["adapter"].to_pylist()]
    assert output["text"].to_pylist() == [by_adapter[name][row] for row, name in enumerate(names)]
    assert len({texts[0] for texts in by_adapter.values()}) == 3  # the adapters differ
    assert output["n"].to_pylist() == list(range(7)) and report["rows_ok"] == 7
    counts = {each["adapter"]: each["rows"] for each in report["adapters"]}
    assert counts == {first: 3, None: 2, second: 2}


@pytest.mark.parametrize(
    "options", [{}, {"shard": "1/2"}, {"prompt_template": "{{ row }}"}, {"id_column": "id"}], ids=str
)
def test_a_row_has_the_same_sample_whichever_rows_are_beside_it(adapted, tmp_path, options):
    base, *adapters = adapted
    ids = pa.array([str(row) if row != 7 else None for row in range(12)])
    table = pa.table({"prompt": ["same"] * 12, "id": ids, "adapter": [None, *adapters] * 4})
    options = OPTIONS | {"temperature": 1.0, "seed": 3, **options}
    if "prompt_template" in options:
        del options["prompt_column"]
    texts = {}
    for adapter in (None, *adapters):
        batchgen.run(base, table, tmp_path / f"{len(texts)}.parquet", lora=adapter, **options)
        texts[adapter] = pq.read_table(tmp_path / f"{len(texts)}.parquet")["text"].to_pylist()
    batchgen.run(base, table, tmp_path / "out.parquet", lora_column="adapter", **options)
    output = pq.read_table(tmp_path / "out.parquet")
    assert output.column_names[:4] == ["prompt", "id", "adapter", "text"]
    names = output["adapter"].to_pylist()
    assert output["text"].to_pylist() == [texts[name][row] for row, name in enumerate(names)]
    assert len(set(texts[None])) > 3  # draws differ from row to row


@pytest.mark.parametrize("stopped_in", [1, 2, 3])
def test_an_interrupted_job_goes_on_to_the_same_output(adapted, rows, tmp_path, monkeypatch, stopped_in):
    options = OPTIONS | {"lora_column": "adapter"}
    batchgen.run(str(adapted[0]), rows, tmp_path / "whole.jsonl", **options)
    begun, run_job = [], joint_jobs.run_job

    def stopping(job, *rest):
        begun.append(job)
        if len(begun) == stopped_in:
            raise KeyboardInterrupt
        return run_job(job, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(joint_jobs, "run_job", stopping)
        batchgen.run(str(adapted[0]), rows, tmp_path / "out.jsonl", **options)
    report = batchgen.run(str(adapted[0]), rows, tmp_path / "out.jsonl", **options)
    states = [job["state"] for job in report["jobs"].values()]
    assert states == ["already complete"] * (stopped_in - 1) + ["complete"] * (4 - stopped_in)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_adapter_all_of_whose_rows_fail_takes_no_other_row_with_it(adapted, tmp_path):
    base, first, _ = adapted
    names = pa.array([None, first, None]).dictionary_encode()  # as a categorical column is
    table = pa.table({"prompt": [[5, 6], None, [7, 8, 9]], "adapter": names})
    report = batchgen.run(base, table, tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
    output = pq.read_table(tmp_path / "out.parquet")
    assert report["rows_failed"] == 1 and output["text"].is_valid().to_pylist() == [True, False, True]


def test_an_input_without_rows_has_the_columns_of_an_output(adapted, rows, tmp_path):
    base, none = adapted[0], pq.read_table(rows).slice(0, 0)
    batchgen.run(base, none, tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
    assert pq.read_table(tmp_path / "out.parquet")["text"].to_pylist() == []


def test_a_shard_has_the_adapters_of_its_own_rows(adapted, rows, tmp_path):
    base = str(adapted[0])
    for shard in range(2):
        batchgen.run(base, rows, tmp_path / f"{shard}.parquet", lora_column="adapter", shard=f"{shard}/2", **OPTIONS)
    batchgen.run(base, rows, tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
    shards = pa.concat_tables([pq.read_table(tmp_path / f"{shard}.parquet") for shard in range(2)])
    assert shards["text"].to_pylist() == pq.read_table(tmp_path / "out.parquet")["text"].to_pylist()


def test_a_wrong_adapter_or_column_is_refused_before_the_first_row(adapted, rows, tmp_path):
    base = str(adapted[0])
    with pytest.raises(InputError, match="has no column nothing"):
        batchgen.run(base, rows, tmp_path / "out.parquet", lora_column="nothing", **OPTIONS)
    with pytest.raises(InputError, match="it has the adapters' directories, as texts"):
        batchgen.run(base, rows, tmp_path / "out.parquet", lora_column="n", **OPTIONS)
    table = pq.read_table(rows).set_column(2, "adapter", pa.array([adapted[1]] * 6 + [str(tmp_path / "none")]))
    pq.write_table(table, tmp_path / "wrong.parquet")
    with pytest.raises(InputError, match="adapter_config"):
        batchgen.run(base, tmp_path / "wrong.parquet", tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
    assert not (tmp_path / "out.parquet").exists()


def test_an_adapter_of_another_model_is_refused_before_the_first_job(adapted, tmp_path):
    base, first, _ = adapted
    wider = make_tiny_model("llama", tmp_path / "wider", hidden_size=128)
    deeper = make_tiny_model("llama", tmp_path / "deeper", num_hidden_layers=9)
    for name, model in (("of-wider", wider), ("of-deeper", deeper)):
        save_adapter(model, tmp_path / name, target_modules=MODULES)
        pq.write_table(
            pa.table({"prompt": ["a", "b", "c"], "adapter": [None, first, str(tmp_path / name)]}),
            tmp_path / "in.parquet",
        )
        with pytest.raises(InputError, match=rf"{name}.* changes|tensor .* in .*{name}"):
            batchgen.run(base, tmp_path / "in.parquet", tmp_path / "out.parquet", lora_column="adapter", **OPTIONS)
        assert not list((tmp_path / "out.parquet.jobs").glob("*.parquet"))


def test_a_store_with_an_adapter_gives_the_texts_of_the_model_with_it(adapted, rows, tmp_path):
    base, first, _ = adapted
    command = ["convert", "-m", base, "--lora", first, "-o", tmp_path / "store", "--dtype", "float32"]
    code, _, message = invoke(*command, "--progress", "none")
    assert code == 0, message
    batchgen.run(str(tmp_path / "store"), rows, tmp_path / "out.parquet", **OPTIONS)
    texts = pq.read_table(tmp_path / "out.parquet")["text"].to_pylist()
    assert texts == alone(adapted, rows, tmp_path)[first]


@pytest.mark.parametrize("options", [{}, {"limit": 5}, {"shard": "1/2"}])
def test_a_line_that_is_no_row_fails_and_is_not_answered(adapted, tmp_path, options):
    base, first, _ = adapted
    lines = [json.dumps({"question": f"Is it {i}?", "adapter": first if i % 2 else None}) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(["{broken", *lines[:3], "[]", *lines[3:]]))
    options = {"prompt_template": "Row: {{ question }}", "max_tokens": 2, "on_bad_line": "skip", **options}
    batchgen.run(base, tmp_path / "rows.jsonl", tmp_path / "alone.parquet", **options)
    batchgen.run(base, tmp_path / "rows.jsonl", tmp_path / "out.parquet", lora_column="adapter", **options)
    alone, output = (pq.read_table(tmp_path / f"{name}.parquet")["error"].to_pylist() for name in ("alone", "out"))
    assert output == alone and any(output) and not all(output)
