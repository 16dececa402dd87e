"""Every command and every piece of Python that a page shows runs, on the files that a reader would have.

A command that cannot run in a test is in `ELSEWHERE`, with the reason and the test that runs what it stands for; that
its options and the files that it names are there is checked here. A new command of a page is run, or this fails until
it is listed.
"""

import contextlib
import json
import re
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke
from doc_commands import PAGES, ROOT, commands_of, inline_of, python_of

import batchgen
from batchgen.cli.commands import cli

# (the beginning of a command, why it is not run here and what runs it)
ELSEWHERE = {
    "make ": "it installs, or runs all tests: .ci/run does",
    "pip ": "it installs",
    "python3 -m venv cuda-venv": "it makes the environment of the next two",
    "cuda-venv/bin/pip install ": "it installs torch's CUDA build, of gigabytes",
    "docker ": "it needs a builder: .ci/run builds where one is, tests/test_packaging.py checks the Dockerfile",
    "export BATCHGEN_SECRET_FILE=": "several hosts: tests/distributed/test_strangers.py has such files",
    "torchrun ": "several hosts: tests/engine/test_tensor_parallel.py and tests/job/test_pipeline_job.py do it",
    "batchgen run --tensor-parallel 2 -m MODEL": "two processes: test_commands_that_take_longer, by make test-all",
    "batchgen run --model M --input data.parquet --output out.parquet --pipeline 2": "likewise",
    "batchgen plan -m recipes/throughput/shapes/opt-30b": "a search of 15 s: make test-all runs it",
    "batchgen bench ": "a model of gigabytes: tests/job/test_bench.py runs small ones",
    "python -m batchgen.lmeval ": "evaluations of minutes: tests/lmeval/test_lmeval.py runs such ones",
    "python recipes/helm/run.py ": "it needs HELM: tests/helm/ runs it by make helm-check",
    "python recipes/data_wrangling/run.py ": "tests/integration/test_recipes.py runs it, with a tiny model",
    "batchgen run --model demo --input recipes/data_wrangling/fodors_zagats_test.parquet": "likewise, as in run.py",
    "python recipes/data_wrangling/score.py out/fodors_zagats.parquet": "likewise",
    "python tests/support/played_card.py ": "it needs torch's CUDA build: tests/engine/test_played_card.py runs it",
    "recipes/nightly/nightly.sh ": "tests/integration/test_nightly.py runs it",
    "python benchmarks/": "it measures for minutes; its own numbers are committed",
    "python docs/draw_ladder.py": "it writes pages: tests/test_docs.py compares them with what it makes",
    "batchgen serve-batches ": "it does not end: tests/serve/test_serve.py runs the page's command",
    "export OPENAI_BASE_URL=": "it is for the shell of a client: tests/serve/test_serve.py has one",
    "mkdir -p ~/nightly/": "it changes the home directory",
    "cp ~/batchgen/": "it changes the home directory",
    "systemctl --user ": "it changes the machine: tests/integration/test_nightly.py does what the units say",
    "journalctl --user ": "likewise",
    "loginctl ": "likewise",
}
PYTHON_ELSEWHERE = {
    "import ray\n": "it needs Ray: tests/ray/ runs it where that is installed",
    "from batchgen.ray import ProcessorConfig": "likewise",
}
TEXTS = ["The ferry left at six.", "Two plus two is four."]
COLUMNS = {
    "README.md": {"text": TEXTS},
    "docs/getting_started.md": {"text": TEXTS},
    "docs/steps.md": {"text": TEXTS},
    "docs/scoring.md": {
        "q": ["Is it late?", "Is it so?"], "answers": [["yes", "no"], ["no", "never"]], "a": ["rain", "snow"],
        "b": ["wet", "dry"],
        "text": TEXTS,
    },
    "docs/embeddings.md": {"text": TEXTS, "query": TEXTS, "document": TEXTS[::-1]},
}  # fmt: skip
# Further files that a page speaks of, with their columns.
TABLES = {
    "docs/tasks/classification.md": {"reviews.parquet": {"review": TEXTS}},
    "docs/tasks/extraction.md": {"mails.parquet": {"mail": TEXTS}},
    "docs/tasks/judging.md": {"answers.parquet": {"question": TEXTS, "answer": TEXTS}},
    "docs/tasks/matching.md": {"pairs.parquet": {"a": TEXTS, "b": TEXTS}},
    "docs/cascades.md": {"pairs.parquet": {"a": TEXTS, "b": TEXTS}},
    "docs/tasks/evaluation.md": {
        "questions.parquet": {"question": TEXTS, "options": [["yes", "no"], ["3", "4"]], "expected": TEXTS},
    },
}
# Files that commands of a page write, for its Python.
MADE = {"docs/tasks/evaluation.md": {"answered.parquet": {"text": TEXTS, "expected": TEXTS}}}
BATCH_LINE = {
    "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}  # fmt: skip
# What pages write in place of a directory that a reader has.
PLACES = {"/shared/": "shared/", "/fast/disk": "fast_disk"}


def reason(command):
    """Why a command is not run here; None: it is."""
    return next((why for begin, why in ELSEWHERE.items() if command.text.startswith(begin.rstrip())), None)


def runs_here(page):
    return [command for command in commands_of(page) if reason(command) is None]


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """The models that pages name: a tiny one, and as `demo` a tiny GGUF."""
    from tiny_gguf import write_tiny_gguf
    from transformers import AutoTokenizer

    path, model = tiny_models("llama")
    demo = tmp_path_factory.mktemp("demo") / "demo.gguf"
    write_tiny_gguf(model, demo, tokenizer=AutoTokenizer.from_pretrained(path))
    return path, demo


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Models of vectors by the names that pages give them: an encoder, a classifier, a cross-encoder."""
    from tiny_encoders import make_encoder

    models = {"E": ("BertModel", {}), "C": ("LlamaForSequenceClassification", {"num_labels": 3})}
    models["R"] = "BertForSequenceClassification", {"num_labels": 1}
    paths = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, (kind, fields) in models.items():
        make_encoder(kind, paths[name], **fields)
    return paths


@pytest.fixture
def reader(models, encoders, tmp_path, monkeypatch):
    """The folder that a reader of a page is in, with what the page tells him to have, and the checkout's recipes."""
    path, demo = models
    monkeypatch.setattr("batchgen.models.files.demo_file", lambda: demo)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("M", "MODEL", "llama-3.2-3b"):
        Path(name).symlink_to(path)
    for name, folder in encoders.items():
        Path(name).symlink_to(folder)
    Path("recipes").symlink_to(ROOT / "recipes")
    Path("fast_disk").mkdir()
    Path("shared").mkdir()

    def at(page):
        columns = COLUMNS.get(page, {"prompt": TEXTS, "question": TEXTS})
        for name in ("data.parquet", "in.parquet", "shared/data.parquet"):
            pq.write_table(pa.table(columns), name)
        for name, columns in TABLES.get(page, {}).items():
            pq.write_table(pa.table(columns), name)
        Path("batch.jsonl").write_text(json.dumps(BATCH_LINE) + "\n")
        text = (ROOT / page).read_text()
        for name, content in re.findall(r"(?:in|with) `(\w+\.json|\w+\.lark)`.*?```\w+\n(.*?)```", text, re.DOTALL):
            Path(name).write_text(content)
        for name, job_file in re.findall(r"```toml\n# (\S+)\n(.*?)```", text, re.DOTALL):
            Path(name).write_text(job_file)
        return tmp_path

    return at


def placed(word):
    """A word of a command with the directories that a page makes up within the reader's folder."""
    for place, here in PLACES.items():
        word = word.replace(place, here)
    return word


@pytest.mark.parametrize("page", [page for page in PAGES if runs_here(page)])
def test_commands_of_a_page_run_one_after_the_other(page, reader):
    reader(page)
    for command in runs_here(page):
        program, *arguments = command.words
        assert program == "batchgen", f"{command.id}: run it here, or say in ELSEWHERE what does"
        code, _, said = invoke(*map(placed, arguments))
        assert code == 0, f"{command.id}: {said}"


def test_the_first_command_gives_a_file_with_all_columns_and_the_answers(reader):
    reader("README.md")
    (command,) = runs_here("README.md")
    assert command.text == "batchgen run --model M --input data.parquet"
    assert invoke(*command.words[1:])[0] == 0
    table = pq.read_table("data.out.parquet")
    assert table.column("text").to_pylist() == TEXTS and len(table.column("gen_text").to_pylist()) == len(TEXTS)
    assert all(name in (ROOT / "README.md").read_text() for name in ("gen_text", "data.out.parquet"))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("page", ["docs/many_workers.md", "docs/pipeline.md", "docs/planning.md"])
def test_commands_that_take_longer(page, reader):
    reader(page)
    for command in commands_of(page):
        if command.words[:2] in (["batchgen", "run"], ["batchgen", "plan"]) and reason(command):
            code, _, said = invoke(*command.words[1:])
            assert code == 0, f"{command.id}: {said}"


@pytest.mark.parametrize("command", [c for page in PAGES for c in commands_of(page) if reason(c)], ids=lambda c: c.id)
def test_what_is_run_elsewhere_names_options_and_files_that_are_there(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word.replace("~/batchgen/", "") for word in command.words]
    if words[0] == "batchgen" or "-m batchgen run" in command.text:
        _parsed(words[words.index("batchgen") + 1 :])
    if words[0] == "make":
        _target(words[1])
    if words[0] == "pip" and (extras := re.findall(r"\.\[(\w+)\]", command.text)):
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    for word in words:
        if word.startswith(("recipes/", "benchmarks/", "docs/", "tests/")):
            assert list(ROOT.glob(word)), f"{word} is not in the tree"


def test_every_reason_is_of_a_command():
    commands = [command.text for page in PAGES for command in commands_of(page)]
    for begin in ELSEWHERE:
        assert any(text.startswith(begin.rstrip()) for text in commands), f"no page has {begin!r} any more"
    for test in re.findall(r"tests/[\w/]+(?:\.py)?", " ".join([*ELSEWHERE.values(), *PYTHON_ELSEWHERE.values()])):
        assert (ROOT / test).exists(), test


@pytest.mark.parametrize("page", [page for page in PAGES if inline_of(page)])
def test_options_that_sentences_name_exist(page):
    for code in inline_of(page):
        name, *words = code.split()[1:]
        known = {
            option for parameter in cli.commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("-")} <= known, f"{page}: {code}"


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_python_of_a_page_runs(page, reader, models):
    """On what its sentences speak of: an engine, rows."""
    reader(page)
    for name, columns in MADE.get(page, {}).items():
        pq.write_table(pa.table(columns), name)
    with contextlib.ExitStack() as stack:
        names = {"batchgen": batchgen}
        for block in python_of(page):
            compile(block, page, "exec")
            if any(block.startswith(begin) for begin in PYTHON_ELSEWHERE):
                continue
            if re.search(r"\brows\b", block):
                names["rows"] = pytest.importorskip("datasets").Dataset.from_dict({"q": TEXTS})
            if "engine" in block and "Engine(" not in block:
                names["engine"] = stack.enter_context(batchgen.Engine(str(models[0])))
            exec(block, names)


def _parsed(words):
    """The values that click makes of a command of batchgen's: options, their values and the job file."""
    name, *arguments = words
    try:
        cli.commands[name].make_context(name, arguments)
    except click.ClickException as error:
        raise AssertionError(f"{' '.join(words)}: {error.format_message()}") from error


def _target(name):
    pattern = "|".join((re.escape(name), re.escape(name.partition("-")[0]) + "-%"))
    assert re.search(rf"^(?:[\w%-]+ )*(?:{pattern})(?: [\w%-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE), name
