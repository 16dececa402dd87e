"""A stranger's first commands: a model and an input, and nothing else."""

import json
import shlex
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

import batchgen

TEXTS = ["The ferry left at six.", "Two plus two is four."]
FEW = ["--max-tokens", 3, "--dtype", "float32", "--progress", "plain"]


@pytest.fixture(scope="module")
def model(tiny_models):
    """A tiny model whose tokenizer has a chat template."""
    return str(tiny_models("llama")[0])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chatted(model, texts=TEXTS, **sampling):
    with batchgen.Engine(model, dtype="float32", sampling=batchgen.SamplingParams(max_tokens=3, **sampling)) as engine:
        requests = [[{"role": "user", "content": text}] for text in texts]
        completions = engine.generate(map(batchgen.Request, requests))
        return [c.text for c in sorted(completions, key=lambda c: c.index)]


def test_a_table_with_text_is_answered_beside_it_in_the_models_chat_template(model):
    pq.write_table(pa.table({"text": TEXTS, "label": [0, 1]}), "data.parquet")
    code, stdout, stderr = invoke("run", "--model", model, "--input", "data.parquet", *FEW)
    assert code == 0, stderr
    assert stderr.splitlines()[0] == "output: data.out.parquet"
    assert "output: data.out.parquet" in stdout.splitlines()
    assert "prompts: the column text, in the model's chat template (--no-chat: " in stderr
    table = pq.read_table("data.out.parquet")
    assert table["text"].to_pylist() == TEXTS and table["gen_text"].to_pylist() == chatted(model)


def test_a_csv_with_one_column_of_text(model, here):
    (here / "in.csv").write_text("id,remark\n1,The ferry\n2,Rain\n")
    code, _, stderr = invoke("run", "--model", model, "--input", "in.csv", "--no-chat", *FEW)
    assert code == 0 and "chat template" not in stderr, stderr
    assert (here / "in.out.csv").read_text().startswith('"id","remark","text",')


def test_columns_that_might_all_be_the_prompt_get_a_command_to_copy(model, here):
    (here / "in.jsonl").write_text('{"question": "Is it late?", "context": "It is six."}\n')
    code, _, message = invoke("run", "--model", model, "--input", "in.jsonl", "--max-tokens", 3)
    assert code == 2 and len(message.splitlines()) == 1 and "question, context hold text" in message
    command = message.partition("as in: batchgen ")[2]
    template = r"'{{ question }}\n{{ context }}'"
    assert command == f"run --model {model} --input in.jsonl --prompt-template {template} --max-tokens 3"
    code, stdout, stderr = invoke(*shlex.split(command), "--dry-run")
    assert code == 0 and "user\nIs it late?\nIt is six.<|im_end|>" in stdout, stderr


def test_a_glob_of_a_second_night_leaves_out_what_the_first_has_written(model, here):
    for name in ("a", "b"):
        (here / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
        assert invoke("run", "--model", model, "--input", f"{name}.jsonl", *FEW)[0] == 0
    code, _, stderr = invoke("run", "--model", model, "--input", "*.jsonl", *FEW)
    assert code == 0 and "left out: a.out.jsonl and 1 more" in stderr, stderr
    (output,) = here.glob(f"{here.name}.out.jsonl")
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["a", "b"]
    again = invoke("run", "--model", model, "--input", "*.jsonl", *FEW)
    assert again[0] == 0 and "already complete" in again[1]


def test_standard_input_is_answered_on_standard_output(model):
    code, stdout, _ = invoke("run", "--model", model, "--input", "-", *FEW, stdin='{"prompt": "The ferry"}\n')
    assert code == 0
    (row,) = map(json.loads, stdout.splitlines())
    assert row["prompt"] == "The ferry" and row["text"] == chatted(model, ["The ferry"])[0]


def test_a_file_of_somebody_else_where_the_output_would_be_stays(model, here):
    (here / "in.jsonl").write_text('{"prompt": "a"}\n')
    (here / "in.out.jsonl").write_text("mine")
    code, _, message = invoke("run", "--model", model, "--input", "in.jsonl", *FEW)
    assert code == 2 and "in.out.jsonl exists and is not the output of this job" in message
    assert (here / "in.out.jsonl").read_text() == "mine"


def test_another_prompt_on_the_same_input_is_told_to_take_another_output(model, here):
    (here / "in.jsonl").write_text('{"prompt": "a"}\n')
    assert invoke("run", "--model", model, "--input", "in.jsonl", *FEW)[0] == 0
    code, _, message = invoke("run", "--model", model, "--input", "in.jsonl", *FEW, "--system", "Be brief.")
    assert code == 2 and "prompt.system_prompt was null" in message and "another --output" in message


def test_the_choice_has_no_space_that_was_typed_for_its_tokens(model, here):
    (here / "in.jsonl").write_text('{"prompt": "Is it late?", "own": [" maybe", " no"]}\n')
    for i, choices in enumerate((["--choices", " yes", "--choices", " no"], ["--choices-column", "own"])):
        output = f"{i}.jsonl"
        code, _, stderr = invoke(
            "run", "--model", model, "--input", "in.jsonl", "--output", output, "--task", "score", *choices, "--no-chat"
        )
        assert code == 0, stderr
        row = json.loads((here / output).read_text())
        assert row["choice"] == [["yes", "no"], ["maybe", "no"]][i][row["choice_index"]]


# Typed text


@pytest.fixture
def rows(here):
    (here / "in.jsonl").write_text('{"q": "a"}\n')
    return "in.jsonl"


def prompt_of(model, rows, *options):
    code, stdout, message = invoke(
        "run", "--model", model, "--input", rows, "--no-chat", *options, "--dry-run", "--json"
    )
    assert code == 0, message
    return json.loads(stdout)


def test_a_typed_n_is_a_newline_and_one_in_a_file_is_what_it_is(model, rows, here):
    assert prompt_of(model, rows, "--prompt-template", r"{{ q }}\n\tb\\nc")["first_prompt"] == "a\n\tb\\nc"
    (here / "p.jinja").write_text(r"{{ q }}\n")
    assert prompt_of(model, rows, "--prompt-template", "@p.jinja")["first_prompt"] == r"a\n"
    (here / "job.toml").write_text("prompt-template = '{{ q }}\\n'\nstop = ['\\n']\n")
    report = prompt_of(model, rows, "--config", "job.toml")
    assert report["first_prompt"] == r"a\n" and report["sampling"]["stop"] == [r"\n"]
    assert prompt_of(model, rows, "--stop", r"\n", "--stop", r"\\n")["sampling"]["stop"] == ["\n", r"\n"]


@pytest.mark.parametrize("flag", ["-n", "--n"])
def test_samples_by_either_flag(model, rows, flag):
    assert prompt_of(model, rows, flag, "2", "--temperature", "1")["sampling"]["n"] == 2


# The chat template


@pytest.fixture(scope="module")
def base_model(tiny_models, tmp_path_factory):
    """The tiny model without its chat template."""
    path = shutil.copytree(tiny_models("llama")[0], tmp_path_factory.mktemp("base") / "base")
    for name in ("chat_template.jinja", "chat_template.json"):
        (path / name).unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def dry_run(model, rows, *options):
    code, stdout, said = invoke(
        "run", "--model", model, "--input", rows, *options, "--dry-run", "--json", "--progress", "plain"
    )
    return (json.loads(stdout)["first_prompt"], said) if code == 0 else (code, said)


def test_a_model_without_a_template_gets_plain_text_and_says_so(base_model, rows):
    prompt, said = dry_run(base_model, rows)
    assert prompt == "a" and "prompts: the column q, as plain text: the model has no chat template" in said
    for option in (["--chat"], ["--system", "Be brief."], ["--chat-template-kwargs", '{"x": 1}']):
        code, said = dry_run(base_model, rows, *option)
        assert code == 2 and "the model has no chat template: give one with --chat-template" in said


def test_a_template_of_a_file_replaces_the_models(model, base_model, rows, here):
    (here / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]")
    for given in (model, base_model):
        assert dry_run(given, rows, "--chat-template", "t.jinja")[0] == "[user] a [answer]"
        prompt, _ = dry_run(given, rows, "--chat-template", "t.jinja", "--system", "Be brief.")
        assert prompt == "[system] Be brief. [user] a [answer]"
    code, said = dry_run(model, rows, "--chat-template", "t.jinja", "--no-chat")
    assert code == 2 and "--chat-template" in said and "leave" in said


def test_another_template_is_another_job(model, rows, here):
    def run(*options):
        return invoke("run", "--model", model, "--input", rows, *FEW, *options)

    (here / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]")
    assert run()[0] == 0
    for options, changed in (
        (["--no-chat"], "prompt.chat was true, now false"),
        (["--chat-template", "t.jinja"], "tokenizer"),
    ):
        code, _, message = run(*options)
        assert code == 2 and changed in message
    assert run("--chat")[0] == 0  # what it was


def test_a_template_that_reads_no_messages_is_not_taken_by_itself(base_model, rows, tmp_path):
    model = shutil.copytree(base_model, tmp_path / "constant")
    (model / "chat_template.jinja").write_text("constant")
    assert dry_run(model, rows)[0] == "a"


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--hardware", "h100")])
def test_a_job_that_is_refused_at_once_names_no_output(model, here, monkeypatch, options):
    monkeypatch.setattr("batchgen.core.device.why_no_cuda", lambda: "there is none")
    (here / "in.jsonl").write_text('{"text": "Rain"}\n')
    code, _, stderr = invoke("run", "--model", model, "--input", "in.jsonl", *options)
    assert code == 2 and len(stderr.splitlines()) == 1, stderr
