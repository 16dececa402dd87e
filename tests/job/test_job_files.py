"""A command that would write into what it reads is refused with one line, before anything is written or removed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import batchgen
from batchgen.cli.commands import cli
from batchgen.core.errors import InputError
from batchgen.dataset.paths import InputPaths
from batchgen.job.files import check_files
from batchgen.job.option import AT_FILE, TEXT_OF_FILE
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions
from batchgen.job.report import write_report
from batchgen.lmeval.jobs import Workplace
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model

TABLE = pa.table({"prompt": ["one", "two"]})
LINES = '{"prompt": "one"}\n'
BATCH = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "one"}}\n'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with inputs of several kinds, which is the working directory too."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.parquet", "data/a.parquet", "data/b.parquet", "old.parquet.batchgen/parts/part-000000.parquet"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE, name)
    Path("old.parquet").write_bytes(Path("x.parquet").read_bytes())
    Path("x.jsonl").write_text(LINES)
    Path("y.errors.jsonl").write_text(BATCH)
    Path("plan.json").write_text("{}")
    Path("template.txt").write_text("{{ prompt }}")
    Path("schema.json").write_text("{}")
    Path("job.toml").write_text("seed = 1")
    Path("schema.toml").write_text('json_schema = "schema.json"')
    Path("elsewhere").mkdir()
    os.symlink("x.parquet", "link.parquet")
    os.symlink("data", "link-to-data")
    os.link("x.parquet", "hard.parquet")
    os.symlink("../elsewhere", "data/link-out")
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    datasets.Dataset.from_dict({"prompt": ["one"]}).save_to_disk("saved")
    return tmp_path


def contents(folder: Path) -> dict:
    """All names below a folder, what the files hold and where links lead."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


JOB = ["-i", "x.parquet", "-o", "new.parquet"]


def absolute(name):
    return str(Path(name).absolute())


REFUSED = {
    "the input": (dict(input="x.parquet", output="x.parquet"), "--output x.parquet is a file of the input"),
    "as another spelling": (dict(input="x.parquet", output="data/../x.parquet"), "is a file of the input"),
    "relative and absolute": (lambda: dict(input="x.parquet", output=absolute("x.parquet")), "is a file of the input"),
    "a link to the input": (dict(input="x.parquet", output="link.parquet"), "is a file of the input"),
    "the input by a link": (dict(input="link.parquet", output="x.parquet"), "is a file of the input"),
    "the same inode": (dict(input="x.parquet", output="hard.parquet"), "is a file of the input"),
    "through a folder's link": (
        dict(input="data/a.parquet", output="link-to-data/a.parquet"),
        "is a file of the input",
    ),
    "in the input folder": (dict(input="data", output="data/new.parquet"), "lies in the input data"),
    "of another format there": (dict(input="data", output="data/new.jsonl"), "lies in the input data"),
    "deeper": (
        lambda: os.mkdir("data/deep") or dict(input="data", output="data/deep/new.parquet"),
        "lies in the input data",
    ),
    "by a link to the folder": (dict(input="data", output="link-to-data/new.parquet"), "lies in the input data"),
    "the folder by its link": (
        dict(input="link-to-data/", output="data/new.parquet"),
        "lies in the input link-to-data/",
    ),
    "here": (dict(input=".", output="new.parquet"), "lies in the input ."),
    "a saved dataset": (dict(input="saved", output="saved/new.arrow"), "lies in the input saved"),
    "one of several": (dict(input="data/*.parquet", output="data/b.parquet"), "is a file of the input"),
    "matched when it is there": (
        dict(input="data/*.parquet", output="data/new.parquet"),
        r"matches the input data/\*\.parquet",
    ),
    "matched by a link": (dict(input="data/*.parquet", output="link-to-data/new.parquet"), "matches the input"),
    "matched behind a link": (dict(input="data/*/*.parquet", output="elsewhere/new.parquet"), "matches the input"),
    "matched at any depth": (dict(input="**/*.jsonl", output="data/new.jsonl"), "matches the input"),
    "parts as the input": (
        dict(input="old.parquet.batchgen/parts/part-000000.parquet", output="old.parquet"),
        "where --output keeps its progress",
    ),
    "the run directory": (
        dict(input="old.parquet.batchgen/parts", output="old.parquet"),
        "where --output keeps its progress",
    ),
    "parts by a glob": (
        dict(input="old.parquet.batchgen/*/*", output="old.parquet"),
        "where --output keeps its progress",
    ),
    "the trace": (
        dict(input="x.parquet", output="new.parquet", trace="x.parquet"),
        "--trace x.parquet is a file of the input",
    ),
    "the report": (
        dict(input="x.jsonl", output="new.parquet", report="link-to-data/../x.jsonl"),
        "--report .* is a file of the input",
    ),
    "the report on its way": (
        dict(input="r.tmp", output="new.parquet", report="r", input_format="jsonl"),
        "--report's r.tmp is a file of the input",
    ),
    "a trace in the folder": (dict(input="data", output="new.parquet", trace="data/t.json"), "lies in the input data"),
    "a report in the run directory": (
        dict(input="x.parquet", output="old.parquet", report="old.parquet.batchgen/manifest.json"),
        "keeps its progress",
    ),
    "report and output": (dict(input="x.parquet", output="new.jsonl", report="new.jsonl"), "file of --output too"),
    "trace and report": (dict(input="x.parquet", output="new.parquet", report="r", trace="r"), "file of --report too"),
    "the plan": (
        dict(input="x.parquet", output="new.parquet", report="plan.json", plan="plan.json"),
        "the file of --plan",
    ),
    "the template": (
        dict(input="x.parquet", output="new.parquet", trace="template.txt", prompt_template="@template.txt"),
        "--prompt-template",
    ),
    "the model": (dict(input="x.parquet", output="new.parquet", report="model/config.json"), "the file of --model"),
    "the profile": (
        dict(input="x.parquet", output="new.parquet", report="plan.json", hardware="plan.json"),
        "the file of --hardware",
    ),
    "a batch's errors": (
        dict(input="y.errors.jsonl", output="y.jsonl"),
        "--output's errors y.errors.jsonl is a file of the input",
    ),
    "a dataset's own file": (
        lambda: dict(input=datasets.load_from_disk("saved"), output="saved/data-00000-of-00001.arrow"),
        "is a file of the input",
    ),
    "a dataset by its link": (
        lambda: (
            os.symlink("saved", "s")
            or dict(input=datasets.load_from_disk("s"), output="saved/data-00000-of-00001.arrow")
        ),
        "is a file of the input",
    ),
    "a stream of a dataset": (
        lambda: dict(
            input=datasets.load_from_disk("saved").to_iterable_dataset(), output="saved/data-00000-of-00001.arrow"
        ),
        "is a file of the input",
    ),
    "a stream of a file": (
        lambda: dict(input=stream_of("x.parquet").map(dict).take(1), output="x.parquet"),
        "is a file of the input",
    ),
}


def stream_of(name):
    return datasets.load_dataset("parquet", data_files=absolute(name), streaming=True, split="train")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(here, case):
    options, message = REFUSED[case]
    options = dict(options() if callable(options) else options)
    if options["input"] == "r.tmp":
        Path("r.tmp").write_text(LINES)
    before = contents(here)
    for mode in ({}, {"overwrite": True}, {"retry_failed": True}):
        with pytest.raises(InputError, match=message) as refused:
            batchgen.run("model", **options, **mode)
        assert "\n" not in str(refused.value)
        assert contents(here) == before


ALLOWED = [
    dict(input="x.parquet", output="data/new.parquet"),
    dict(input="data", output="new.parquet"),
    dict(input="data/*.parquet", output="data/new.jsonl"),
    dict(input="data/[ab].parquet", output="data/new.parquet"),
    dict(input="data/*.parquet", output="data/.new.parquet"),
    dict(input="*/*.csv", output="data/new.jsonl"),
    dict(input="old.parquet", output="new.parquet"),
    dict(input="data/a.parquet", output="data/b.parquet"),
    dict(input="x.errors.jsonl", output="x.jsonl.parquet"),
    dict(input="nowhere/*.parquet", output="new.parquet"),
    dict(input="org/name", output="new.parquet"),
    dict(input="x.parquet", output="model/new.parquet", report="-", trace="model/trace.json"),
    dict(input="x.parquet", output="new.parquet", report="/dev/null", trace="/dev/null"),
    dict(input="x.parquet", output="new.parquet", report="/dev/null", read_before=(("--json-schema", "/dev/null"),)),
]


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_allowed(here, options):
    check_files(JobOptions("model", **options))


def test_the_input_on_the_command_line_stays(here):
    before = contents(here)
    for more in ([], ["--overwrite"], ["--retry-failed"]):
        done = CliRunner().invoke(cli, ["run", "-m", "model", "-i", "x.parquet", "-o", "x.parquet", *more])
        assert isinstance(done.exception, InputError) and "is a file of the input" in str(done.exception)
    assert contents(here) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "-i", "x.parquet", "--trace", "x.parquet"], "--trace x.parquet is a file of the input"),
        (["plan", "-i", "x.parquet", "-o", "hard.parquet"], "-o hard.parquet is a file of the input"),
        (["plan", "-i", "data", "-o", "data/plan.json"], "lies in the input data"),
        (["plan", "--num-prompts", "1", "-o", "model/config.json"], "the file of --model"),
        (["plan", "--num-prompts", "1", "--hardware", "plan.json", "-o", "plan.json"], "the file of --hardware"),
        (["bench", "--plan", "plan.json", "--report", "plan.json"], "the file of --plan"),
        (["bench", "--trace", "model/config.json"], "the file of --model"),
        (["run", *JOB, "--report", "schema.json", "--json-schema", "schema.json"], "the file of --json-schema"),
        (["run", *JOB, "--trace", "schema.json", "--json-schema", "data/../schema.json"], "the file of --json-schema"),
        (["run", *JOB, "--report", "job.toml", "--config", "job.toml"], "the file of --config"),
        (["run", "-i", "x.parquet", "-o", "job.toml", "--config", "job.toml"], "the file of --config"),
        (["run", *JOB, "--report", "schema.json", "--config", "schema.toml"], "the file of --json-schema"),
        (["plan", "--num-prompts", "1", "-o", "job.toml", "--config", "job.toml"], "the file of --config"),
        (["bench", "--trace", "job.toml", "--config", "job.toml"], "the file of --config"),
    ],
)
def test_other_commands(here, arguments, message):
    before = contents(here)
    done = CliRunner().invoke(cli, [*arguments, "-m", "model"])
    assert isinstance(done.exception, InputError), done.output
    assert message in str(done.exception) and contents(here) == before


def test_the_profile_that_the_environment_names_is_read_too(here, monkeypatch):
    monkeypatch.setenv("BATCHGEN_HARDWARE", "plan.json")
    with pytest.raises(InputError, match=r"--report plan.json is the file of \$BATCHGEN_HARDWARE"):
        batchgen.run("model", "x.parquet", "new.parquet", report="plan.json")


def test_a_report_to_a_device_goes_through_it():
    """And does not take its place, as it would a file's."""
    reader, device = os.openpty()
    name = os.ttyname(device)
    check_files(JobOptions("model", None, None, report=name, trace=name))
    write_report({"rows": 1}, name)
    assert json.loads(os.read(reader, 1000)) == {"rows": 1}
    assert Path(name).is_char_device()
    os.close(reader)
    os.close(device)


def test_every_option_that_names_a_file_is_known(here):
    """By what the options say of themselves: one that is read is not written over."""
    for option in options_of("run"):
        if option.reads in (None, TEXT_OF_FILE) or option.name == "input":
            continue
        Path("read").write_text("{}")
        job = JobOptions("model", None, None, report="read")
        with pytest.raises(InputError, match=f"--report read is the file of {option.flag}"):
            check_files(replace(job, **{option.name: ("@" if option.reads == AT_FILE else "") + "read"}))


def test_a_dataset_returned_by_a_job_cannot_be_its_own_output(here):
    dataset = datasets.load_from_disk("saved")
    with pytest.raises(InputError, match="is a file of the input"):
        batchgen.run("model", dataset, "saved/data-00000-of-00001.arrow", overwrite=True)


def test_the_requests_of_an_evaluation_are_not_replaced(here):
    """Options of a job reach it through lm_eval and HELM as well."""
    place = Workplace("model", {"trace": absolute("work/kind/requests.parquet")}, {}, here / "work")
    digest = place._digest("kind", TABLE, {})
    requests = here / "work" / f"kind-{digest}" / "requests.parquet"
    place = Workplace("model", {"trace": str(requests)}, {}, here / "work")
    with pytest.raises(InputError, match=r"--trace .*requests\.parquet is a file of the input"):
        place.run("kind", TABLE, [])
    assert pq.read_table(requests).equals(TABLE)


def test_a_store_is_not_made_of_itself(tiny_models, tmp_path):
    model = resolve_model(str(tiny_models("llama")[0]))
    store = tmp_path / "store"
    convert(model, store, dtype="float32")
    own = resolve_model(str(store))
    os.symlink("store", tmp_path / "link")
    before = contents(tmp_path)
    for target in ("store", "link", "store/tokenizer", "link/deeper", "."):
        with pytest.raises(InputError, match="give another directory"):
            convert(own, tmp_path / target, dtype="float32", overwrite=True)
    with pytest.raises(InputError, match="is the model itself"):
        convert(model, model.path / "..", dtype="float32") if model.path.is_symlink() else convert(
            model, model.path, dtype="float32"
        )
    assert contents(tmp_path) == before


def test_a_pattern_says_what_glob_would_find(tmp_path, monkeypatch):
    """Every file that glob finds matches, and would if it were not there yet; no other does."""
    monkeypatch.chdir(tmp_path)
    names = [
        "a/b/c.txt",
        "a/b/d/c.txt",
        "a/.h/c.txt",
        "a/c.txt",
        "c.txt",
        ".c.txt",
        "a/b/d/e/x1.txt",
        "a-b/c.md",
        "a/[z].txt",
    ]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    patterns = [
        "*",
        "*.txt",
        "**/*.txt",
        "**",
        "a/**",
        "a/**/c.txt",
        "*/c.txt",
        "a/*/*",
        ".*",
        "a/.h/*",
        "a/[[]z].txt",
        "?/b/**/x[0-9].*",
        "./a/*",
    ]
    for pattern in [*patterns, *(absolute(p) for p in patterns)]:
        found = set(InputPaths.of(pattern).files)
        found = {os.path.relpath(path) for path in found}
        for name in names:
            os.rename(name, "away")
            matches = InputPaths.of(pattern).includes(name) is not None
            os.rename("away", name)
            assert matches == (name in found), (pattern, name)
