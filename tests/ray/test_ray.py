"""`batchgen.ray` on a local cluster; skipped where Ray is not installed."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
import batchgen.ray
import batchgen.ray.ids as ids_module
from batchgen.core.errors import InputError

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


def test_a_job_over_two_actors_and_its_rerun(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    table = pa.table({"prompt": ["quay " * (i % 7 + 1) for i in range(64)], "id": range(64)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=16)
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 4, "max_tokens": 5, "id_column": "id"}
    batchgen.run(path, tmp_path / "in.parquet", tmp_path / "out.parquet", offload_dir=tmp_path, **options)

    def job(**more):
        out = tmp_path / "out"
        return batchgen.ray.run(
            path, str(tmp_path / "in.parquet"), out, batch_size=16, concurrency=2, **{**options, **more}
        )

    assert job() == {"rows": 64, "rows_resumed": 0}
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    gone = pq.read_metadata(parts[0]).num_rows
    parts[0].unlink()
    assert job() == {"rows": 64, "rows_resumed": 64 - gone}
    with pytest.raises(InputError, match="made with other settings"):
        job(max_tokens=6)
    made = pa.concat_tables(pq.read_table(part) for part in (tmp_path / "out").glob("part-*.parquet")).sort_by("id")
    expected = pq.read_table(tmp_path / "out.parquet")
    assert made.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [f"row {i % 40}" for i in range(48)],
            r"^column 'id' has 'row \d+' in 2 rows: give an id_column whose values differ$",
        ),
        ([*range(47), None], "^column 'id' has rows without a value: give an id_column that all rows have$"),
    ],
)  # fmt: skip
def test_ids_are_looked_at_before_anything_is_run(ids, message, tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    (tmp_path / "in").mkdir()
    for first in range(0, 48, 16):  # equal ones are in different blocks
        table = pa.table({"prompt": ["quay"] * 16, "id": ids[first : first + 16]})
        pq.write_table(table, tmp_path / "in" / f"{first}.parquet")
    with pytest.raises(InputError, match=message):
        batchgen.ray.run(path, str(tmp_path / "in"), tmp_path / "out", id_column="id", plan=False)
    assert not list((tmp_path / "out").glob("part-*"))


def test_an_input_without_rows(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "id": pa.array([], pa.int64())}), tmp_path / "in.parquet"
    )
    found = batchgen.ray.run(path, str(tmp_path / "in.parquet"), tmp_path / "out", id_column="id", plan=False)
    assert found == {"rows": 0, "rows_resumed": 0}


def test_ids_whose_hashes_are_equal_may_differ(tmp_path, monkeypatch):
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "in.parquet")
    monkeypatch.setattr(ids_module, "_repeated", lambda values: values)  # as if each were that of another id, too
    assert ids_module.check_ids(str(tmp_path / "in.parquet"), "id") == 3


def test_what_is_refused_in_an_actor_is_one_line(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    pq.write_table(pa.table({"prompt": ["quay"], "id": [1]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="question") as refused:
        batchgen.ray.run(
            path, str(tmp_path / "in.parquet"), tmp_path / "out", id_column="id", prompt_column="question", plan=False
        )
    assert "\n" not in str(refused.value)


def test_a_processor_in_place_of_vllms(tiny_models):
    path, _ = tiny_models("llama")
    config = batchgen.ray.ProcessorConfig(
        str(path), {"dtype": "float32", "cpu_memory": "4GiB"}, batch_size=8, should_continue_on_error=True
    )
    processor = batchgen.ray.build_processor(
        config,
        preprocess=lambda row: {
            "prompt": "quay " * row["id"] if row["id"] else None,
            "sampling_params": {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True},
        },
        postprocess=lambda row: {"id": row["id"], "count": row["num_generated_tokens"]},
    )
    rows = sorted(processor(ray.data.range(20)).take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(20))
    assert all(row["count"] == 3 and row["__inference_error__"] == "" for row in rows[1:])
    assert "neither prompt nor messages" in rows[0]["__inference_error__"]
