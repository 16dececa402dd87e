"""`batchgen.ray.Generate`, without Ray."""

import asyncio
import errno
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import run
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.request import Completion, Request, Sample, SamplingParams
from batchgen.ops.instruction_set import num_threads
from batchgen.ray import Generate
from batchgen.ray.ids import ids_done, without_ids
from batchgen.ray.job import GenerateParts, calls_at_once, refusal_in, rows_of_batch, write_part
from batchgen.ray.loading import load_stream
from batchgen.ray.plans import machine_kind, plan_here
from batchgen.ray.share import share_of
from batchgen.ray.stream import EngineStream


class FakeEngine:
    """Answers the last of what it has first, when it is told that there may be no more for a while."""

    closed = False

    def generate(self, requests):
        held = []
        for request in requests:
            if request is None:
                yield from [self.answer(r) for r in reversed(held)]
                held = []
            else:
                held.append(request)

    def answer(self, request):
        if request.prompt == "break":
            raise ValueError("broken")
        sample = Sample(request.prompt, (1, 2), "stop")
        return Completion(0, request.id, 3, (sample,), row=request.row)

    def close(self):
        self.closed = True


def texts(future: Future):
    return [completion.text for completion in future.result(20)]


def test_batches_that_overlap_get_their_own_rows_in_order():
    engine = FakeEngine()
    stream = EngineStream(engine)
    futures = [stream.submit([Request(f"{batch}{i}") for i in range(batch)]) for batch in range(5)]
    assert [texts(future) for future in futures] == [[f"{b}{i}" for i in range(b)] for b in range(5)]
    stream.close()
    assert engine.closed
    with pytest.raises(ValueError, match="closed"):
        stream.submit([Request("late")]).result(20)


def test_what_the_engine_raises_comes_to_all_who_wait():
    stream = EngineStream(FakeEngine())
    future = stream.submit([Request("fine"), Request("break")])
    for late in (future, stream.submit([Request("late")])):
        with pytest.raises(ValueError, match="broken"):
            late.result(20)


def test_an_actor_takes_its_share_of_the_machine():
    node = {"CPU": 16.0, "memory": float(64 << 30)}
    assert share_of({"CPU": 4.0}, node, 100 << 30) == (4, 16 << 30)
    assert share_of({"CPU": 4.0}, node, 10 << 30) == (4, 10 << 30)
    assert share_of({"CPU": 4.0, "memory": 8 << 30}, node, 100 << 30) == (4, 8 << 30)
    assert share_of({"CPU": 0.5}, node, 100 << 30) == (1, 2 << 30)
    assert share_of({}, {"CPU": 1.0}, 100) == (1, 100)


ON_ITS_CORE = """
import os, sys
from pathlib import Path
from batchgen.core.cores import take_cores
from batchgen.core.request import Request, SamplingParams
from batchgen.ray.loading import load_stream
taken = take_cores(1, Path(sys.argv[2]))
stream = load_stream(sys.argv[1], SamplingParams(max_tokens=2), {"dtype": "float32", "cpu_memory": "4GiB"})
(completion,) = stream.submit([Request("quay")]).result(300)
assert completion.error is None, completion.error
import torch
torch.set_num_threads(2)
torch.rand(600, 600) @ torch.rand(600, 600)
where = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
print(len(where), all(cores == set(taken) for cores in where))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not keep threads to cores")
def test_no_thread_of_an_engine_leaves_its_cores(tiny_models, tmp_path):
    """Those of lanes, of the kernels' pool and of torch, of which there are more than cores here."""
    path, _ = tiny_models("llama")
    threads = {**os.environ, "BATCHGEN_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", ON_ITS_CORE, str(path), str(tmp_path / "cores")]
    done = subprocess.run(command, capture_output=True, text=True, env=threads)
    assert done.returncode == 0, done.stderr
    count, kept = done.stdout.split()[-2:]
    assert int(count) > 3 and kept == "True"


def test_an_actor_has_as_many_batches_as_keep_its_engine_busy():
    plans = {kind: {"policy": {"max_num_seqs": seqs}} for kind, seqs in (("a", 64), ("b", 512))}
    assert calls_at_once(plans, {}, 64) == 1 + 10
    assert calls_at_once({}, {"max_num_seqs": 8}, 64) == 1 + 1
    assert calls_at_once({"a": plans["a"]}, {"n": 4, "max_num_seqs": 64}, 16) == 1 + 2


def test_a_batch_has_many_rows_where_these_are_short():
    def plan(rows_per_s):
        return {
            "kind": {"workload": {"num_seqs": 500}, "prediction": {"startup_s": 5.0, "total_s": 5.0 + 500 / rows_per_s}}
        }

    assert rows_of_batch(10_000, 2, {}) == rows_of_batch(10_000, 2, plan(1)) == 78
    assert rows_of_batch(10_000, 2, plan(200)) == 200
    assert rows_of_batch(1_000, 2, plan(200)) == 31, "each actor has some batches"
    assert rows_of_batch(10**6, 2, plan(1e4)) == 256
    assert rows_of_batch(10, 2, plan(1e4)) == 16


def test_what_batchgen_refuses_in_a_task_is_found_in_what_ray_makes_of_it():
    refused, wrapped, other = InputError("no column"), RuntimeError("in a task"), ValueError("else")
    wrapped.cause = other
    other.__cause__ = refused
    assert refusal_in(wrapped) is refused
    assert refusal_in(ValueError("else")) is None
    as_text = refusal_in(RuntimeError("in a task\nbatchgen.core.errors.InputError: no column\nabove: the cause"))
    assert type(as_text) is InputError and str(as_text) == "no column"


def test_actors_on_machines_of_one_kind_run_by_the_plan_that_one_of_them_made(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    pq.write_table(pa.table({"prompt": ["quay quay"] * 9}), tmp_path / "in.parquet")
    options = {"dtype": "float32", "max_tokens": 5}
    plan = plan_here(str(path), str(tmp_path / "in.parquet"), options, 4 << 30, 9)
    engine_options = {"dtype": "float32", "cpu_memory": "4GiB"}
    kind = machine_kind("auto", num_threads())
    assert kind != machine_kind("auto", num_threads() + 1)
    stream = load_stream(path, SamplingParams(max_tokens=5), engine_options, {kind: plan})
    try:
        assert stream.engine.policy.max_num_seqs == plan["policy"]["max_num_seqs"]
        (completion,) = stream.submit([Request("quay")]).result(60)
        assert completion.error is None
    finally:
        stream.close()


def test_options_that_mean_nothing():
    with pytest.raises(TypeError, match="no option 'prompt_colum'"):
        Generate("demo", prompt_colum="x")
    with pytest.raises(InputError, match="give an id_column"):
        Generate("demo", temperature=1.0)


def test_parts_and_the_rows_that_are_left(tmp_path):
    assert len(ids_done(tmp_path, "id")) == 0
    table = pa.table({"id": ["a", "b", "c"]})
    for _ in range(2):  # Ray may run a task again
        write_part(table.slice(0, 2), str(tmp_path), "id")
    assert ids_done(tmp_path, "id").to_pylist() == ["a", "b"]
    assert without_ids(table, ids_done(tmp_path, "id"), "id").to_pylist() == [{"id": "c"}]
    write_part(table.slice(0, 0), str(tmp_path), "id")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_jobs_actors_write_what_they_generate(tiny_models, tmp_path, monkeypatch):
    path, _ = tiny_models("llama")
    table = pa.table({"prompt": ["quay", "quay quay", None], "id": [3, 4, 5]})
    actor = GenerateParts(str(tmp_path), "id", model=str(path), dtype="float32", cpu_memory="4GiB", max_tokens=5)
    assert asyncio.run(actor(table)).to_pylist() == [{"rows": 3}]
    assert sorted(ids_done(tmp_path, "id").to_pylist()) == [3, 4, 5]

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("batchgen.ray.job.write_atomically", full)
    with pytest.raises(BatchgenError, match=r"^cannot write .*No space left on device: free space and run the same"):
        asyncio.run(actor(table))
    actor.close()


def test_rows_are_those_of_a_job(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    table = pa.table({"prompt": [None if i == 5 else "quay " * (i + 1) for i in range(12)], "i": range(12)})
    pq.write_table(table, tmp_path / "in.parquet")
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 4, "max_tokens": 5}
    run(path, tmp_path / "in.parquet", tmp_path / "out.parquet", offload_dir=tmp_path, **options)
    generate = pickle.loads(pickle.dumps(Generate(path, **options)))

    async def both():
        return await asyncio.gather(*(generate(table.slice(i, 4)) for i in (0, 4, 8)), generate(table.slice(0, 0)))

    try:
        batches = asyncio.run(both())
    finally:
        generate.close()
    assert pa.concat_tables(batches).equals(pq.read_table(tmp_path / "out.parquet").replace_schema_metadata(None))
