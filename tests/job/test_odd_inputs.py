"""Whole jobs over inputs that a scheduler may meet: empty ones, and lines that are no rows."""

import json
import shutil
import tempfile

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from command_line import invoke
from tiny_tokenizers import make_tiny_sentencepiece_tokenizer

from batchgen.dataset.storage import file_system

GENERATED = ["text", "finish_reason", "prompt_tokens", "generated_tokens", "error"]


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


def run(model, source, output, *args):
    return invoke("run", "-m", model, "-i", source, "-o", output, "--max-tokens", 3, "--progress", "none", *args)


def write_empty(path):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    else:
        path.write_text("prompt\n" if path.suffix == ".csv" else "")
    return path


def columns_of(path):
    if path.suffix == ".parquet":
        return pq.read_schema(path).names
    if path.suffix == ".arrow":
        return pa.ipc.open_stream(path).read_all().column_names
    if path.suffix == ".csv":
        return pa_csv.read_csv(path).column_names
    assert path.read_bytes() == b""
    return None


@pytest.mark.parametrize("given", [".parquet", ".csv", ".jsonl"])
def test_an_input_without_rows_gives_an_output_without_rows(model, tmp_path, given):
    source = write_empty(tmp_path / f"in{given}")
    own = [] if given == ".jsonl" else ["prompt"]
    for wanted in (".parquet", ".csv", ".jsonl", ".arrow"):
        output = tmp_path / f"out{wanted}"
        for _ in range(2):
            code, stdout, stderr = run(model, source, output)
            assert (code, stderr) == (0, ""), stderr
            assert "0 rows ok, 0 failed" in stdout
        assert columns_of(output) in (None, own + GENERATED)
    if given == ".parquet":  # as pandas writes columns without values
        pq.write_table(pa.table({"prompt": pa.nulls(0)}), source)
        assert run(model, source, tmp_path / "untyped.parquet")[0] == 0
    score = tmp_path / "score.parquet"
    assert invoke("run", "-m", model, "-i", source, "-o", score, "--task", "score", "--progress", "none")[0] == 0
    assert columns_of(score) == [*own, "logprob", "num_tokens", "perplexity", "prompt_tokens", "error"]
    assert run(model, source, tmp_path / "dry.jsonl", "--dry-run", "--shard", "1/2")[0] == 0
    code, _, stderr = invoke("plan", "-m", model, "-i", source)
    assert code == 2 and "has no rows" in stderr and "\n" not in stderr


def test_bad_lines_come_out_as_failed_rows(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "The ferry"}\n{"prompt": \n{"prompt": "left"}\n')
    code, _, stderr = run(model, source, output)
    assert code == 2 and "line 2" in stderr and "\n" not in stderr and not output.exists()
    assert run(model, source, output, "--on-bad-line", "skip")[0] == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "line 2" in rows[1]["error"] and rows[1]["error"].endswith('{"prompt":') and rows[1]["prompt"] is None
    code, _, stderr = run(model, source, tmp_path / "b.jsonl", "--on-bad-line", "skip", "--on-error", "fail")
    assert code == 1 and "line 2" in stderr


def test_bad_lines_of_a_batch_go_to_its_errors(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "prompt": "The ferry", "max_tokens": 3}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    source.write_text(f"{line}\nnot JSON\n")
    assert run(model, source, output)[0] == 2
    assert run(model, source, output, "--on-bad-line", "skip")[0] == 0
    assert [json.loads(text)["custom_id"] for text in output.read_text().splitlines()] == ["a"]
    (error,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert error["custom_id"] is None and "line 2" in error["error"]["message"]
    assert "not JSON" in error["error"]["message"]


def test_standard_input(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    text = "".join(json.dumps({"prompt": f"The ferry left at {i}"}) + "\n" for i in range(3))
    (tmp_path / "in.jsonl").write_text(text)
    arguments = ["--max-tokens", 3, "--progress", "none", "--dtype", "float32"]
    for name, source in (("a", tmp_path / "in.jsonl"), ("b", "-"), ("b", "-")):
        code, stdout, stderr = invoke(
            "run", "-m", model, "-i", source, "-o", tmp_path / f"{name}.jsonl", *arguments, stdin=text
        )
        assert code == 0, stderr
    assert "already complete" in stdout, "the same rows were piped in"
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text() != ""
    code, _, stderr = invoke(
        "run", "-m", model, "-i", "-", "-o", tmp_path / "b.jsonl", *arguments, stdin=text.replace("left", "came")
    )
    assert code == 2 and "made of another input: stdin.jsonl has changed" in stderr
    table = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["The ferry"]}), table)
    piped = table.getvalue().to_pybytes()
    options = ["-i", "-", "--input-format", "parquet", "-o", tmp_path / "c.jsonl"]
    assert invoke("run", "-m", model, *options, *arguments, stdin=piped)[0] == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_urls_as_inputs(model, tmp_path):
    system, folder = file_system("memory://odd_inputs")
    system.pipe(f"{folder}/kind=a/rows.jsonl", b'{"prompt": "The ferry"}\n')
    system.pipe(f"{folder}/kind=b/rows.jsonl", b'{"prompt": "left"}\n')
    assert run(model, "memory://odd_inputs", tmp_path / "out.jsonl")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["prompt"], row["error"]) for row in rows] == [
        ("a", "The ferry", None),
        ("b", "left", None),
    ]


@pytest.fixture
def rows_of_jsonl(tmp_path, monkeypatch):
    """Four rows, one of which fails; and a cache directory for the test alone."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("The ferry", "left", "", "at six")))
    return source


def test_standard_output(model, tmp_path, rows_of_jsonl):
    arguments = ["--dtype", "float32"]
    assert run(model, rows_of_jsonl, tmp_path / "out.jsonl", *arguments)[0] == 0
    for said in ("3 rows ok, 1 failed", "already complete"):
        code, stdout, stderr = run(model, rows_of_jsonl, "-", *arguments)
        assert code == 0 and said in stderr
        assert stdout == (tmp_path / "out.jsonl").read_text()
    same_name = tmp_path / "named.jsonl"
    same_name.write_text('{"prompt": "a", "my_text": "b"}\n')
    code, stdout, stderr = run(model, same_name, "-", *arguments, "--output-prefix", "my_")
    assert (code, stdout) == (2, "") and "--output-prefix" in stderr and "plan" not in stderr, "before any row is run"
    code, stdout, stderr = run(model, rows_of_jsonl, "-", "--report", "-")
    assert (code, stdout) == (2, "") and "standard output" in stderr


def test_urls_as_outputs(model, tmp_path, rows_of_jsonl, monkeypatch):
    url, arguments = f"memory://outputs/{tmp_path.name}/out.parquet", ["--dtype", "float32"]
    system, inner = file_system(url)
    here = tmp_path / "out.parquet"
    assert run(model, rows_of_jsonl, here, *arguments)[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(type(system), "put_file", lambda *args, **kwargs: 1 / 0)
        code, _, stderr = run(model, rows_of_jsonl, url, *arguments)
        assert code == 1 and url in stderr and "same command" in stderr and not system.exists(inner)
    code, stdout, _ = run(model, rows_of_jsonl, url, *arguments)
    assert code == 0 and "already complete" in stdout and url in stdout
    assert system.cat(inner) == here.read_bytes()
    assert invoke("status", url)[:2] == (0, invoke("status", here)[1])
    made = system.info(inner)["created"]
    assert (
        run(model, rows_of_jsonl, url, *arguments)[0] == 0 and system.info(inner)["created"] == made
    )  # not copied again
    system.pipe(inner, b"somebody's")
    code, _, stderr = run(model, rows_of_jsonl, url, *arguments)
    assert code == 2 and f"{url} was changed since this job wrote it" in stderr and system.cat(inner) == b"somebody's"
    system.rm(inner)
    assert run(model, rows_of_jsonl, url, *arguments)[0] == 0 and system.cat(inner) == here.read_bytes()
    system.pipe(inner, b"somebody's")
    assert run(model, rows_of_jsonl, url, *arguments, "--overwrite")[0] == 0 and system.cat(inner) == here.read_bytes()
    code, _, stderr = run(model, rows_of_jsonl, url, *arguments, "--temperature", 1)
    assert code == 2 and "made with other settings" in stderr
    folder = url.rpartition("/")[0]
    system.pipe(file_system(f"{folder}/in.jsonl")[1], rows_of_jsonl.read_bytes())
    for source, output in [
        (f"{folder}/in.jsonl", f"{folder}/in.jsonl"), (folder, f"{folder}/more/out.jsonl"),
        (f"{folder}/*.jsonl", f"{folder}/x.jsonl"),
        (rows_of_jsonl, f"file://{rows_of_jsonl}"), (rows_of_jsonl.parent, f"file://{rows_of_jsonl.parent}/out.jsonl"),
    ]:  # fmt: skip
        code, _, stderr = run(model, source, output, *arguments, "--overwrite")
        assert code == 2 and "is a part of the input" in stderr
    other = url.replace("/out.", "/other.")
    system.pipe(file_system(other)[1], b"somebody's")
    code, _, stderr = run(model, rows_of_jsonl, other, *arguments)
    assert code == 2 and "exists and is not the output" in stderr
    code, _, stderr = run(model, rows_of_jsonl, "abc://x/out.jsonl", *arguments)
    assert code == 2 and "abc://x/out.jsonl cannot be reached" in stderr


def answers_of(model, folder, bodies):
    """Of completions in an OpenAI batch: (body or None, error or None) of each."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "max_tokens": 6} | body,
        }
        for i, body in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(model, source, output, "--dtype", "float32", "--overwrite")[0] == 0
    found = {}
    for path in (output, folder / "out.errors.jsonl"):
        for answer in map(json.loads, path.read_text().splitlines()):
            found[int(answer["custom_id"])] = answer["response"]["body"], answer["error"]
    return [found[i] for i in range(len(bodies))]


def test_several_prompts_of_a_completion_are_answered_in_order(model, tmp_path):
    texts, ids = ["The ferry left", "onions " * 40], [5, 6, 7, 8]
    several, sampled, again, *alone = answers_of(
        model,
        tmp_path,
        [
            {"prompt": [*texts, ids], "temperature": 0},
            *({"prompt": texts, "n": 2, "temperature": 1.5, "seed": 3, "logprobs": 0} for _ in range(2)),
            *({"prompt": prompt, "temperature": 0} for prompt in (*texts, ids)),
            {"prompt": [*texts, "onions " * 900], "temperature": 0},
        ],
    )
    choices = several[0]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == [body["choices"][0]["text"] for body, _ in alone[:3]]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert several[0]["usage"][count] == sum(body["usage"][count] for body, _ in alone[:3])
    drawn = [choice["text"] for choice in sampled[0]["choices"]]
    assert len(drawn) == 4 and len(set(drawn)) > 1
    assert len(again[0]["choices"]) == 4
    assert "context holds" in alone[3][1]["message"], "a prompt that does not fit fails its line"


def test_penalties_and_biases_of_a_batch(model, tmp_path):
    prompt = {"prompt": "The ferry left", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    plain, biased, banned, unlike, outside = answers_of(
        model,
        tmp_path,
        [
            prompt,
            {**prompt, "logit_bias": {"100": 100}},
            {**prompt, "logit_bias": {"100": 100}, "presence_penalty": 2, "frequency_penalty": 2},
            {**prompt, "logit_bias": {"100": 3}, "frequency_penalty": 2},
            {**prompt, "logit_bias": {"999999": 1}},
        ],
    )
    tokens = biased[0]["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == 12 and len(set(tokens)) == 1, "the same token every time"
    assert plain[0]["choices"][0]["text"] not in (biased[0]["choices"][0]["text"], "")
    assert banned[0]["choices"][0]["text"] and unlike[0]["choices"][0]["text"]
    assert "logit_bias" in outside[1]["message"]


def test_prompts_that_begin_twice_are_told_of_once(model, tmp_path):
    """The tokenizer puts the beginning-of-text token before each prompt, and some begin with it."""
    shutil.copytree(model, tmp_path / "model")
    make_tiny_sentencepiece_tokenizer(tmp_path / "model")
    told = []
    for number, prompts in enumerate((["<s>one", "<s>two", "three"], ["one", "two"])):
        source = tmp_path / f"{number}.jsonl"
        source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        output = tmp_path / f"out{number}.jsonl"
        code, _, stderr = run(
            tmp_path / "model", source, output, "--no-chat", "--progress", "plain", "--hardware", "zen4"
        )
        assert code == 0, stderr
        told.append(stderr.count("its tokenizer puts another before it"))
    assert told == [1, 0]
