"""`MapFunction`, for `Dataset.map` of the library `datasets`."""

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.fingerprint import Hasher
from questions import FEATURES, OPTIONS, QUESTIONS, rows

import batchgen
from batchgen.core.errors import InputError


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(rows(), features=FEATURES, split="test")


@pytest.fixture(scope="module")
def expected(model):
    """What each question is answered, by the engine alone."""
    with batchgen.Engine(model, dtype="float32", cpu_memory="4GiB") as engine:
        asked = [batchgen.Request(q or "", batchgen.SamplingParams(max_tokens=5)) for q in QUESTIONS]
        return [c.text for c in sorted(engine.generate(asked), key=lambda c: c.index)]


# ---- a function for Dataset.map


def test_map_gives_what_a_job_gives(model, table, expected):
    with batchgen.MapFunction(model, prompt_column="q", **OPTIONS) as answer:
        answers = table.map(answer, batched=True, batch_size=5)
    assert answers["text"][:] == [text or "" for text in expected]
    assert answers["error"][:3] == ["", "", "column 'q' is null"] and answers.features["kind"] == FEATURES["kind"]
    assert set(answers["finish_reason"]) == {"length", "error"} | ({"stop"} & set(answers["finish_reason"]))


def test_errors_that_come_late_do_not_stop_a_map(model):
    """`datasets` takes the type of a column from the first batch: one of nulls only could hold nothing later."""
    late = datasets.Dataset.from_dict({"q": ["The ferry"] * 8 + [None, ""]})
    early = datasets.Dataset.from_dict({"q": [None, ""] + ["The ferry"] * 8})
    mode = {"batched": True, "batch_size": 2, "writer_batch_size": 2, "with_indices": True}
    for more in ({}, {"n": 2, "temperature": 1.0}):
        with batchgen.MapFunction(model, prompt_column="q", **OPTIONS, **more) as answer:
            fine, failed = late.map(answer, **mode), early.map(answer, **mode)
        nothing = ["", ""] if more else ""
        assert (
            fine["error"][-2:] == ["column 'q' is null", "the prompt is empty"] and fine["text"][-2:] == [nothing] * 2
        )
        assert failed["text"][:2] == [nothing] * 2 and all(failed["text"][2:]) and not any(failed["error"][2:])
    with batchgen.MapFunction(model, prompt_column="q", logprobs=1, output_prefix="a_", **OPTIONS) as answer:
        failed = early.map(answer, features=answer.features(early.features), **mode)
    assert failed["a_logprobs"][0] == [] and failed["a_error"][0] == "column 'q' is null"
    assert failed["a_logprobs"][2][0].keys() == {"token", "token_id", "logprob", "top"}
    assert failed.features["a_prompt_tokens"] == datasets.Value("int32")


def test_map_over_streams_formats_templates_and_messages(model, expected):
    few = datasets.Dataset.from_dict({"q": QUESTIONS[:2], "n": [1, 2], "m": [[{"role": "user", "content": "Hi"}]] * 2})
    with batchgen.MapFunction(model, prompt_template="{{ q }}", **OPTIONS) as answer:
        assert [r["text"] for r in few.to_iterable_dataset().map(answer, batched=True)] == expected[:2]
        numpy = few.with_format("numpy").map(answer, batched=True)
        assert list(numpy.with_format(None)["text"]) == expected[:2]
        arrow = few.with_format("arrow").map(answer, batched=True).with_format(None)
        assert arrow["text"][:] == expected[:2]
    with batchgen.MapFunction(model, messages_column="m", output_prefix="chat_", **OPTIONS) as answer:
        answers = few.map(answer, batched=True)
        assert answers["chat_text"][0] == answers["chat_text"][1] and answers["chat_prompt_tokens"][0] > 5


def test_draws_belong_to_rows(model):
    data = datasets.Dataset.from_dict({"q": ["The ferry"] * 6, "id": [f"r{i}" for i in range(6)]})
    sampled = {"prompt_column": "q", "temperature": 1.0, "n": 2, **OPTIONS}
    with batchgen.MapFunction(model, **sampled) as answer:
        with pytest.raises(InputError, match=r"id_column.*with_indices"):
            data.map(answer, batched=True)
        one = data.map(answer, batched=True, batch_size=6, with_indices=True)["text"][:]
        two = data.map(answer, batched=True, batch_size=2, with_indices=True)["text"][:]
    assert one == two and len({tuple(texts) for texts in one}) > 3
    with batchgen.MapFunction(model, id_column="id", **sampled) as answer:
        named = data.map(answer, batched=True, batch_size=4)["text"][:]
    assert named != one and len({tuple(texts) for texts in named}) > 3


def test_bad_use_is_refused_before_the_model_loads(model, monkeypatch):
    def engine(*args, **kwargs):
        raise AssertionError("loaded")

    monkeypatch.setattr("batchgen.engine.engine.Engine.__init__", engine)
    data = datasets.Dataset.from_dict(
        {"q": ["a"], "n": [1], "not_text": ["b"], "m": [[{"role": "user", "content": "Hi"}]]}
    )
    with pytest.raises(TypeError, match="max_token'"):
        batchgen.MapFunction(model, max_token=3)
    with pytest.raises(InputError, match="exclude each other"):
        batchgen.MapFunction(model, prompt_column="q", prompt_template="{{ q }}")
    for options, mode, complaint in [
        ({"prompt_column": "x"}, {"batched": True}, "no such column"),
        ({"prompt_column": "n"}, {"batched": True}, "not text"),
        ({"prompt_template": "{{ qq }}"}, {"batched": True}, "did you mean 'q'"),
        ({"prompt_column": "q", "output_prefix": "not_"}, {"batched": True}, "named not_text already"),
        ({"prompt_column": "q"}, {}, "batched=True"),
        ({"prompt_template": "{{ q }}"}, {}, "batched=True"),
        ({"messages_column": "m"}, {}, "must be lists of"),
        ({"prompt_column": "q"}, {"batched": True, "input_columns": ["q"]}, "input_columns"),
    ]:
        with pytest.raises(InputError, match=complaint):
            data.map(batchgen.MapFunction(model, **options), **mode)


def test_the_engine_is_loaded_once_and_closed(model, monkeypatch):
    events = []
    init, close = batchgen.Engine.__init__, batchgen.Engine.close
    monkeypatch.setattr(batchgen.Engine, "__init__", lambda *a, **k: (events.append("load"), init(*a, **k))[1])
    monkeypatch.setattr(batchgen.Engine, "close", lambda self: (events.append("close"), close(self))[1])
    data = datasets.Dataset.from_dict({"q": ["a ferry"] * 4})
    answer = batchgen.MapFunction(model, prompt_column="q", **OPTIONS)
    Hasher.hash(answer)
    assert events == []
    data.map(answer, batched=True, batch_size=2)
    data.map(answer, batched=True, batch_size=3)
    assert events == ["load"]
    answer.close()
    answer.close()
    assert events == ["load", "close"]
    data.map(answer, batched=True)
    del answer  # nobody closed it
    assert events == ["load", "close", "load", "close"]


def test_pickling_leaves_the_engine_behind(model):
    answer = batchgen.MapFunction(model, prompt_template="{{ q }}", stop=["x"], **OPTIONS)
    batch = {"q": ["The ferry left", "A restaurant"]}
    answers = answer(batch)
    for twin in (pickle.loads(pickle.dumps(answer)), copy.copy(answer)):
        assert len(pickle.dumps(twin)) < 5000
        assert Hasher.hash(twin) == Hasher.hash(answer)
        assert twin(batch) == answers
        twin.close()
    answer.close()


def test_a_fork_of_a_process_that_has_an_engine_is_refused(model):
    """It would wait for threads that it does not have."""
    answer = batchgen.MapFunction(model, prompt_column="q", **OPTIONS)
    batch = {"q": ["The ferry left"]}
    answers = answer(batch)

    def child(pipe):
        for call in (lambda: answer(batch), lambda: batchgen.Engine(model)):
            try:
                call()
            except batchgen.BatchgenError as error:
                pipe.send(str(error))
        answer.close()

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    for _ in range(2):
        assert here.poll(100) and "forked from" in here.recv()
    process.join()
    assert answer(batch) == answers  # and its end took nothing from the parent
    answer.close()


# ---- the fingerprint


def test_hashes_tell_options_and_models_apart(model, tiny_models, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ q }}")
    variants = [
        {"prompt_column": "q"},
        {"prompt_column": "p"},
        {"messages_column": "q"},
        {"prompt_column": "q", "chat": True},
        {"prompt_column": "q", "max_tokens": 7},
        {"prompt_column": "q", "stop": ["a"]},
        {"prompt_column": "q", "seed": 1},
        {"prompt_column": "q", "id_column": "id"},
        {"prompt_column": "q", "output_prefix": "x_"},
        {"prompt_column": "q", "dtype": "float32"},
        {"prompt_column": "q", "max_model_len": 100},
        {"prompt_template": "{{ q }}!"},
        {"prompt_template": "{{ q }}"},
    ]
    hashes = [Hasher.hash(batchgen.MapFunction(model, **v)) for v in variants]
    assert len(set(hashes)) == len(variants)
    assert hashes == [Hasher.hash(batchgen.MapFunction(model, **v)) for v in variants]
    assert Hasher.hash(batchgen.MapFunction(model, prompt_template=f"@{template}")) == hashes[-1]
    others = [tiny_models("opt")[0], tiny_models("llama", seed=1)[0]]
    assert len({hashes[0], *(Hasher.hash(batchgen.MapFunction(str(m), prompt_column="q")) for m in others)}) == 3


def test_a_model_whose_weights_changed_has_another_hash(tmp_path):
    from tiny_models import make_tiny_model

    make_tiny_model("llama", tmp_path / "m")
    before = Hasher.hash(batchgen.MapFunction(tmp_path / "m", prompt_column="q"))
    make_tiny_model("llama", tmp_path / "m", seed=5)
    assert Hasher.hash(batchgen.MapFunction(tmp_path / "m", prompt_column="q")) != before


MAP = """
import json, sys
import batchgen, datasets
from datasets.fingerprint import Hasher

model, saved, questions, options = sys.argv[1:]

def refuse(*args, **kwargs):
    raise AssertionError("the model was loaded")

import batchgen.engine.engine
load, batchgen.engine.engine.Engine.__init__ = batchgen.engine.engine.Engine.__init__, refuse
answer = batchgen.MapFunction(model, prompt_template="{{ q }}:", max_tokens=4, dtype="float32", cpu_memory="4GiB")
rows = datasets.load_from_disk(saved).map(answer, batched=True, batch_size=3)
found = [Hasher.hash(answer), rows["text"][:], rows._fingerprint]
batchgen.engine.engine.Engine.__init__ = load
answer = batchgen.MapFunction(model, prompt_column="q", **json.loads(options))
rows = datasets.Dataset.from_dict({"q": json.loads(questions)}).map(answer, batched=True, num_proc=2)
print(json.dumps([found, rows["text"][:]]))
"""


@pytest.mark.slow
def test_a_second_process_hits_the_cache_of_map_and_maps_with_several_processes(model, expected, tmp_path):
    """Python's own hashes differ in it, and no model was loaded in it when `map` starts others."""
    datasets.Dataset.from_dict({"q": ["The ferry", "A cook", "Winter", "Onions"]}).save_to_disk(tmp_path / "saved")
    answer = batchgen.MapFunction(model, prompt_template="{{ q }}:", max_tokens=4, dtype="float32", cpu_memory="4GiB")
    rows = datasets.load_from_disk(tmp_path / "saved").map(answer, batched=True, batch_size=3)
    first = [Hasher.hash(answer), rows["text"][:], rows._fingerprint]
    answer.close()
    assert len(first[1]) == 4
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    command = [sys.executable, "-c", MAP, model, str(tmp_path / "saved"), json.dumps(QUESTIONS), json.dumps(OPTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    again, texts = json.loads(done.stdout.splitlines()[-1])
    assert again == first and texts == [text or "" for text in expected]


def test_state_is_text(model):
    """What hashes is one JSON text: no order of sets, no addresses."""
    answer = batchgen.MapFunction(model, prompt_column="q", stop=["b", "a"])
    state = json.loads(answer.__getstate__()["json"])
    assert state["sampling"]["stop"] == ["b", "a"] and state["prompts"]["column"] == "q"


def test_arrow_is_a_format_of_jobs(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"q": q, "n": i}) + "\n" for i, q in enumerate(QUESTIONS)))
    report = batchgen.run(model, str(source), tmp_path / "out.arrow", prompt_column="q", **OPTIONS)
    batchgen.run(model, str(source), tmp_path / "out.parquet", prompt_column="q", **OPTIONS)
    with pa.memory_map(str(tmp_path / "out.arrow")) as file:
        read = pa.ipc.open_stream(file).read_all()
    assert read.equals(pq.read_table(tmp_path / "out.parquet"))
    assert report["rows"] == read.num_rows == len(QUESTIONS)
