"""Files of every format open with the code of this commit (README.md: how they were made)."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
import batchgen.profiler.cache as profile_cache
from batchgen.core.errors import InputError
from batchgen.core.hardware import read_profile
from batchgen.core.plan import Plan
from batchgen.core.request import SamplingParams
from batchgen.helm.jobs import Jobs
from batchgen.helm.rows import GENERATE, SCORE, Row, wanted
from batchgen.job.plan import describe_profile
from batchgen.lmeval.jobs import Workplace
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.store.weight_store import open_store

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "batchgen"
EXACT = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 2}
OPTIONS = {
    "generate": {
        "max_tokens": 6,
        "temperature": 0.8,
        "seed": 7,
        "n": 2,
        "logprobs": 1,
        "id_column": "id",
        "chat": False,
    },
    "score": {"task": "score", "choices": [" yes", " no", " onions"], "chat": False},
    "openai": {},
}
PROMPTS = [prompt for prompt in pq.read_table(HERE / "run_directory" / "rows.parquet")["prompt"].to_pylist() if prompt]
# Every module that writes files: the folder here that has some, or why there is none.
WRITERS = {
    "core/atomic_file.py": "for the others",
    "core/cores.py": "locks: one while a process looks for cores, one for each core that it has",
    "core/file_lock.py": "who holds a lock, for messages: in the locks of run_directory and weight_store",
    "core/private_files.py": "files without a name, which end with their descriptor; and for the others",
    "distributed/meeting.py": "where rank 0 listens and a secret, deleted when all ranks have come",
    "helm/jobs.py": "helm_jobs",
    "job/destination.py": "what was copied to a URL, by its digest, beside the manifest",
    "job/files.py": ("plan", "hardware_profile"),
    "job/cascade/run.py": "the draws of a cascade, in the folder of its jobs, which their input and options identify",
    "job/joint/jobs.py": "what the jobs of one output were asked for and their reports, in a folder of their own",
    "job/joint/rows.py": "inputs of these jobs: Parquet",
    "job/kept_values.py": "what a plan may do without: of another version it counts as not there",
    "job/snapshot.py": "the state of a running job, which a reader of another version takes for unknown",
    "job/standard_input.py": "a copy of what was piped in, deleted with the job",
    "job/sorted_requests.py": "sorted requests, deleted with the job",
    "lmeval/jobs.py": "run_directory, in folders whose names are checked",
    "models/convert.py": "weight_store",
    "models/downloads.py": "a download, which has a hash",
    "models/tokenizers/gguf_process.py": "what transformers reads, for loading.py",
    "models/tokenizers/loading.py": "what transformers reads, kept by its version",
    "models/tokenizers/tokenizer_config.py": "what transformers reads, for loading.py",
    "output/answer_store.py": "answers that a job may do without: those of another version are not there",
    "output/formats.py": "outputs: Parquet, JSON lines, CSV, Arrow",
    "output/manifest.py": "run_directory",
    "output/partials.py": "run_directory: tokens of unfinished rows, which a run may do without",
    "output/parts.py": "run_directory",
    "output/run_directory.py": ("run_directory", "outputs"),
    "hf_datasets.py": "a pickled function, which `datasets` hashes and does not keep",
    "profiler/cache.py": "hardware_profile",
    "profiler/machine_record.py": "what a plan may do without: of another version it counts as not there",
    "profiler/overheads.py": "a temporary model",
    "ray/generate.py": "a copy of an actor, which has its options alone",
    "ray/job.py": "outputs: Parquet",
    "serve/endpoint.py": "what clients upload",
    "serve/storage.py": "serve",
    "serve/worker.py": "requests of chats, deleted with their job",
    "share/files.py": "for the others",
    "share/part_store.py": "run_directory",
    "share/run.py": "what workers of one version agree on while a job runs",
    "schedule/trace.py": "a timeline, for a browser",
}
# core/screen.py opens descriptors by their numbers, which is no file of ours.
WRITES = re.compile(
    r"writ(e|ten)_atomically\(|staged\(Path|with staged\(|replace_durably\(|os\.(replace|rename)\("
    r"|\.write_(text|bytes)\("
    r"|\bopen\((?!\d)[^)]*\"[wx]|os\.O_CREAT|pq\.(write_table|ParquetWriter)|def __getstate__"
)


def test_every_format_has_files_and_a_check():
    writers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if WRITES.search(path.read_text())}
    assert writers == set(WRITERS), "a module that writes files belongs into WRITERS, and its format into a folder here"
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and not path.name.startswith("__")} - {"model"}
    named = {name for value in WRITERS.values() for name in ([value] if isinstance(value, str) else value)}
    assert folders <= named
    checks = "".join(name for name in globals() if name.startswith("test_"))
    assert all(folder in checks for folder in folders)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the model and whatever else is asked for, in which the test runs."""
    shutil.copytree(HERE / "model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def take_run(folder, source, output):
    """A run directory of a job that writes `output`, as it would be beside it."""
    shutil.copytree(source, folder / f"{output}.batchgen")


def assert_equal_rows(table, expected):
    """The same values; log-probabilities to within rounding."""
    assert table.schema.equals(expected.schema)

    def compare(value, other):
        if isinstance(other, float):
            assert value == pytest.approx(other, abs=1e-4)
        elif isinstance(other, list):
            assert len(value) == len(other)
            for pair in zip(value, other, strict=True):
                compare(*pair)
        elif isinstance(other, dict):
            compare(list(value.values()), list(other.values()))
        else:
            assert value == other

    compare(table.to_pylist(), expected.to_pylist())


@pytest.mark.parametrize("name", ["generate", "score"])
def test_half_finished_run_directory_goes_on(folder, name):
    files = HERE / "run_directory"
    shutil.copy(files / "rows.parquet", folder)
    take_run(folder, files / f"{name}-run", f"{name}.parquet")
    report = batchgen.run("model", "rows.parquet", f"{name}.parquet", **EXACT, **OPTIONS[name])
    assert report["rows_resumed"] == 4 and (report["rows_ok"], report["rows_failed"]) == (8, 1)
    assert_equal_rows(pq.read_table(f"{name}.parquet"), pq.read_table(files / f"{name}.parquet"))
    batchgen.run("model", "rows.parquet", "whole.parquet", **EXACT, **OPTIONS[name])
    assert_equal_rows(pq.read_table(f"{name}.parquet"), pq.read_table("whole.parquet"))


def test_a_run_directory_of_another_version_is_refused_in_one_line_and_kept(folder):
    files = HERE / "run_directory"
    shutil.copy(files / "rows.parquet", folder)
    take_run(folder, files / "generate-run", "generate.parquet")
    (path,) = folder.glob("generate.parquet.batchgen/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 1}))
    kept = {file: file.read_bytes() for file in path.parent.rglob("*.parquet")}
    with pytest.raises(InputError, match=r"^[^\n]* in a format that this version does not read: [^\n]*$"):
        batchgen.run("model", "rows.parquet", "generate.parquet", **EXACT, **OPTIONS["generate"])
    assert kept and kept == {file: file.read_bytes() for file in path.parent.rglob("*.parquet")}


def test_finished_run_directory_with_failed_rows_of_an_openai_batch(folder):
    files = HERE / "run_directory"
    for file in ("batch.jsonl", "openai.jsonl", "openai.errors.jsonl"):
        shutil.copy(files / file, folder)
    take_run(folder, files / "openai-run", "openai.jsonl")
    report = batchgen.run("model", "batch.jsonl", "openai.jsonl", **EXACT)
    assert report["state"] == "already complete" and report["rows_failed"] == 1
    report = batchgen.run("model", "batch.jsonl", "openai.jsonl", retry_failed=True, **EXACT)
    assert (report["rows_resumed"], report["rows_failed"]) == (8, 1)
    for file in ("openai.jsonl", "openai.errors.jsonl"):
        assert (folder / file).read_bytes() == (files / file).read_bytes()


def test_outputs_without_a_name_are_found_again(folder, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(folder / "cache"))
    shutil.copy(HERE / "run_directory" / "rows.parquet", folder)
    (output,) = (HERE / "outputs").glob("*.arrow")
    (folder / "cache" / "outputs").mkdir(parents=True)
    shutil.copy(output, folder / "cache" / "outputs")
    take_run(folder, HERE / "outputs" / "run", f"cache/outputs/{output.name}")
    table = batchgen.run("model", "rows.parquet", max_tokens=6, chat=False, report="report.json", **EXACT)
    report = json.loads(Path("report.json").read_text())
    assert report["state"] == "already complete" and Path(report["output"]).name == output.name
    assert table.num_rows == 9


def unpack(folder, name):
    with zipfile.ZipFile(HERE / "weight_store" / f"{name}.zip") as archive:
        archive.extractall(folder)


@pytest.mark.parametrize("name", ["float32", "int4", "int8"])
def test_weight_store_generates_the_same_tokens(folder, name):
    unpack(folder, name)
    expected = json.loads((HERE / "weight_store" / "tokens.json").read_text())[name]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    with batchgen.Engine(name, dtype="float32", cpu_memory="4GiB", sampling=sampling) as engine:
        found = sorted(engine.generate(PROMPTS), key=lambda completion: completion.index)
    assert [list(completion.samples[0].token_ids) for completion in found] == expected


def test_unfinished_weight_store_is_finished(folder):
    for name in ("unfinished", "int4"):
        unpack(folder, name)
    kept = (folder / "unfinished" / "layer-00000.safetensors").stat().st_mtime_ns
    convert(resolve_model("model"), Path("unfinished"), dtype="float32", weights="int4")
    assert (folder / "unfinished" / "layer-00000.safetensors").stat().st_mtime_ns == kept
    assert not (folder / "unfinished" / "manifest.partial.json").exists()
    assert (folder / "unfinished" / "head.safetensors").read_bytes() == (
        folder / "int4" / "head.safetensors"
    ).read_bytes()


def test_weight_store_of_an_unknown_version_is_refused_in_one_line(folder):
    unpack(folder, "float32")
    path = folder / "float32" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(
        InputError, match=r"^\S*manifest.json is of format version 2, this batchgen reads 1: convert [^\n]*$"
    ):
        open_store(folder / "float32")


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("emulated", "emulated:gpu-memory=34MiB")])
def test_plan_is_run(folder, name, device):
    shutil.copy(HERE / "run_directory" / "rows.parquet", folder)
    path = HERE / "plan" / f"{name}.json"
    values = json.loads(path.read_text())
    assert json.loads(json.dumps(Plan.from_json(values).to_json())) == values
    options = {"dtype": "float32", "max_tokens": 6, "cpu_memory": "4GiB"}
    report = batchgen.run("model", "rows.parquet", "planned.parquet", plan=str(path), device=device, **options)
    assert report["rows_ok"] == 8
    batchgen.run("model", "rows.parquet", "plain.parquet", **options)
    assert_equal_rows(pq.read_table("planned.parquet"), pq.read_table("plain.parquet"))


def test_hardware_profile_is_read_and_planned_with(folder):
    path = HERE / "hardware_profile" / "profile.json"
    profile = read_profile(path)
    assert json.loads(json.dumps(profile.to_json())) == json.loads(path.read_text())
    assert describe_profile(profile)[0] == profile.name
    shutil.copy(HERE / "run_directory" / "rows.parquet", folder)
    report = batchgen.run(
        "model", "rows.parquet", "out.parquet", hardware=str(path), max_tokens=2, dtype="float32", cpu_memory="4GiB"
    )
    assert report["rows_ok"] == 8


def test_kept_hardware_profile_is_not_measured_again(folder, monkeypatch, logged):
    monkeypatch.setattr(profile_cache, "identity", lambda device: {"device": device, "cpu": "a CPU", "cores": 2})
    monkeypatch.setattr(profile_cache, "measure", pytest.fail)
    config = read_config(resolve_model("model"))
    (kept,) = (HERE / "hardware_profile" / "profiles").iterdir()
    assert profile_cache.profile_path(HERE / "hardware_profile", "cpu", Path("/"), config, ["float32"]) == kept
    before = kept.read_bytes()
    wanted = profile_cache.Wanted("cpu", ("float32",), ("int4",), ("int5",), config)
    profile = profile_cache.load_or_measure(
        wanted, cache_dir=HERE / "hardware_profile", offload_dir=Path("/"), refresh=False
    )
    assert kept.read_bytes() == before and not logged
    assert set(profile.measured["sweep_factors"]["float32"]) >= {"gemm_few", "gemm_many", "elementwise"}
    assert profile.measured["pulse_s"]["float32"] > 0 and profile.compute.expand_bytes_per_s > 0


def test_helm_jobs_are_known_and_go_on(folder):
    shutil.copytree(HERE / "helm_jobs", folder / "jobs")
    names = {path.name for path in (folder / "jobs").iterdir()}
    jobs = Jobs(folder / "jobs", {"model": "model", "dtype": "float32", "cpu_memory": "4GiB", "progress": "none"})
    assert jobs.found == {"g0", "g1"} and jobs.results.timing("g0").rows == 2
    sampling = {"max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "stop": []}
    generated = [Row(GENERATE, prompt, f"g{i}", sampling) for i, prompt in enumerate(PROMPTS[:2])]
    scored = [Row(SCORE, (5, 20, 30, 40, last), f"s{last}") for last in (7, 8, 9)]
    jobs.answer([*generated, *scored])
    assert {path.name for path in (folder / "jobs").iterdir()} == names
    afresh = Jobs(folder / "again", {"model": "model", "dtype": "float32", "cpu_memory": "4GiB", "progress": "none"})
    afresh.answer([*generated, *scored])
    assert {path.name for path in (folder / "again").iterdir()} == names
    for row in generated:
        assert jobs.results[row.id]["text"] == afresh.results[row.id]["text"]
    for row in scored:
        assert [p["token_id"] for p in jobs.results[row.id]["logprobs"]] == list(row.prompt[1:])


def test_row_ids_of_helm_jobs_do_not_change():
    request = {
        "prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 8, "embedding": False, "num_completions": 1,
        "top_k_per_token": 1, "stop_sequences": [], "echo_prompt": True, "top_p": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "random": None, "messages": None, "multimodal_prompt": None,
        "image_generation_parameters": None, "response_format": None,
    }  # fmt: skip
    letters = SimpleNamespace(encode=lambda text: [0, *map(ord, text)], decode=lambda ids: "".join(map(chr, ids)))
    drawn = request | {"echo_prompt": False, "temperature": 0.5, "random": "7", "num_completions": 2}
    ids = [row.id for fields in (request, drawn) for row in wanted(SimpleNamespace(**fields), letters, False).rows]
    assert ids == [
        "93f8228ac981919ae1981211f576c74c", "08b9caf34e791b468a4a4167e2dfad82",
        "aebe21b7f42594ce2aadd1ceb08d83f3", "4ddf77f32e6b508341306e7ae4a6e8fb",
    ]  # fmt: skip


def test_folders_of_evaluations_do_not_change_their_names(tmp_path):
    place = Workplace("model", {}, {"batchgen": "0.1.0", "model": {"name": "é"}, "dtype": "float32"}, tmp_path)
    prompts = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    rows = pa.table({"prompt": prompts, "sampling": ["{}", '{"n": 1}']})
    assert place._digest("generate_until", rows, {"max_tokens": 4}) == "bd7d050a9159fab91be5ff12"
