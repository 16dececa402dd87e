"""What a job's shapes run on: recorded with its rows, the same when it is resumed, and told."""

import json

import pytest
from click.testing import CliRunner

import batchgen
from batchgen.cli import commands
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.kernel_choice import KernelChoice, Measured
from batchgen.job import kernels as module
from batchgen.job.kernels import kernels_here, kernels_of_rows
from batchgen.job.planning import read_plan
from batchgen.models.files import read_config, resolve_model
from batchgen.ops.instruction_set import instruction_set
from batchgen.output.manifest import Manifest
from batchgen.planner.explain import kernel_headline, kernel_lines
from batchgen.profiler.shipped import shipped_profile

CHOICE = KernelChoice(
    {
        "64x64 bfloat16": Measured(
            "scalar", {"scalar": {"16 tokens": 5e9}, "torch": {"16 tokens": 9e9}}, {"torch": "why"},
        ),
        "96x64 bfloat16": Measured("amx_plain"),
    },
    {"4/2 heads of 16 bfloat16": Measured("scalar")},
    "scalar",
)  # fmt: skip


class TestHere:
    def test_what_is_there_stays(self, logged):
        assert kernels_here(CHOICE) == CHOICE and not logged

    def test_what_is_missing_runs_on_the_first_set_and_is_logged(self, logged):
        other = KernelChoice({**CHOICE.linear, "8x8 float32": Measured("mmx")}, CHOICE.attention, "3dnow")
        made = kernels_here(other)
        assert made.names() == CHOICE.names() and made.default == instruction_set()
        assert len(logged) == 1 and "3dnow, mmx" in logged[0] and instruction_set() in logged[0]

    def test_nothing_chosen_is_the_process_set_by_name(self):
        assert kernels_here(KernelChoice()) == KernelChoice(default=instruction_set())

    def test_one_set_for_all_where_the_environment_says_so(self, monkeypatch):
        monkeypatch.setattr(module, "forced_instruction_set", lambda: "scalar")
        assert kernels_here(CHOICE) == KernelChoice(default="scalar")


class TestResumed:
    def test_recorded_kernels_that_are_here_are_used_again(self, logged):
        assert kernels_of_rows(CHOICE) == CHOICE and not logged

    def test_recorded_kernels_that_are_missing_are_logged(self, monkeypatch, logged):
        kernels_of_rows(KernelChoice({"8x8 float32": Measured("mmx")}))
        assert "mmx" in logged[0] and "round differently" in logged[1]
        monkeypatch.setattr(module, "forced_instruction_set", lambda: "amx_plain")
        kernels_of_rows(CHOICE)
        assert len(logged) == 3 and "round differently" in logged[2]


def test_a_line_and_a_table():
    assert kernel_headline(CHOICE) == "kernels: scalar, but 96x64 bfloat16 on amx_plain"
    assert kernel_headline(KernelChoice(default="avx2")) == "kernels: avx2"
    lines = kernel_lines(CHOICE)
    assert len(lines) == 4 and "16 tokens 5.0" in lines[1] and "torch: why" in lines[1]


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


def profile_of(model, path, isa):
    """A machine's profile in which every shape runs on one set."""
    keys = read_config(resolve_model(model)).kernel_keys("bfloat16")
    chosen = {key: Measured(isa, {isa: {"16 tokens": 3e9}}) for key in keys}
    attention = {keys[-1]: chosen.pop(keys[-1])}
    values = shipped_profile("zen4").to_json() | {"kernels": KernelChoice(chosen, attention, "scalar").to_json()}
    assert HardwareProfile.from_json(json.loads(json.dumps(values))).to_json() == values
    path.write_text(json.dumps(values))
    return str(path)


def isas(report):
    return {own["isa"] for table in ("linear", "attention") for own in report["kernels"][table].values()}


def test_a_resumed_job_runs_on_what_its_rows_were_made_with(model, tmp_path):
    rows = [{"prompt": f"The ferry left at {i}"} for i in range(40)]
    rows[30]["prompt"] = None  # where on_error="fail" stops
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = (profile_of(model, tmp_path / f"{isa}.json", isa) for isa in ("amx_plain", "avx512_bf16_plain"))
    options = {"dtype": "bfloat16", "max_tokens": 2, "cpu_memory": "4GiB", "max_num_seqs": 4}
    output = tmp_path / "out.jsonl"
    with pytest.raises(BatchgenError, match="row 30"):
        batchgen.run(model, str(table), output, hardware=first, on_error="fail", **options)
    report = batchgen.run(model, str(table), output, hardware=second, **options)
    assert report["rows_resumed"] > 0 and isas(report) == {"amx_plain"}
    assert report["kernels"]["unavailable"] == {} or "amx" in report["kernels"]["unavailable"]
    manifest = json.loads((tmp_path / "out.jsonl.batchgen" / "manifest.json").read_text())
    assert isas(manifest) == {"amx_plain"}
    again = batchgen.run(model, str(table), tmp_path / "new.jsonl", hardware=second, **options)
    assert isas(again) == {"avx512_bf16_plain"}, "another job has no rows yet"


def test_the_plan_says_which(model, tmp_path):
    profile = profile_of(model, tmp_path / "p.json", "amx_plain")
    arguments = ["plan", "-m", model, "--hardware", profile, "--dtype", "bfloat16", "--num-prompts", "8"]
    arguments += ["--input-len", "20", "--output-len", "4"]
    said = CliRunner().invoke(commands.cli, [*arguments, "--json"])
    plan = json.loads(said.stdout)
    assert isas(plan) == {"amx_plain"}
    said = CliRunner().invoke(commands.cli, [*arguments, "--explain"])
    assert "amx_plain  16 tokens 3.0" in said.stdout


@pytest.mark.parametrize("table", ["default", "attention"])
def test_a_file_that_has_torch_attend_is_refused_before_the_job(table, model, tmp_path):
    """Not in its middle: torch has linear layers alone."""
    profile = profile_of(model, tmp_path / "profile.json", "scalar")
    arguments = [
        "plan",
        "-m",
        model,
        "--hardware",
        profile,
        "--dtype",
        "bfloat16",
        "--num-prompts",
        "4",
        "--input-len",
        "20",
    ]
    arguments += ["--output-len", "4", "-o", str(tmp_path / "plan.json")]
    assert CliRunner().invoke(commands.cli, arguments).exit_code == 0
    kernels = json.loads((tmp_path / "plan.json").read_text())["kernels"]
    Manifest({}, kernels=KernelChoice.from_json(kernels)).write(tmp_path / "manifest.json")
    on_torch = (
        {"default": "torch"} if table == "default" else {table: {key: {"isa": "torch"} for key in kernels[table]}}
    )
    for path in tmp_path.glob("*.json"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"kernels": values["kernels"] | on_torch}))
    refused = CliRunner().invoke(commands.cli, arguments).exception
    assert isinstance(refused, InputError) and "must name an instruction set" in str(refused)
    with pytest.raises(InputError, match="must name an instruction set"):
        read_plan(str(tmp_path / "plan.json"))
    with pytest.raises(InputError, match=r"manifest\.json is damaged.*: start again with --overwrite"):
        Manifest.read(tmp_path / "manifest.json")


def test_an_instruction_set_that_cannot_be_used_is_told_once(model, tmp_path, monkeypatch, capsys):
    from batchgen.job import run as job_run

    reason = {"amx": "the kernel refused permission for tile registers"}
    monkeypatch.setattr(job_run, "unavailable", lambda: reason)
    monkeypatch.setattr(module, "unavailable", lambda: reason)
    table = tmp_path / "rows.jsonl"
    table.write_text('{"prompt": "a"}\n')
    options = {"dtype": "float32", "max_tokens": 1, "cpu_memory": "4GiB", "progress": "plain"}
    report = batchgen.run(model, str(table), tmp_path / "out.jsonl", **options)
    assert report["kernels"]["unavailable"] == reason
    said = capsys.readouterr().err
    assert said.count("amx is not used: the kernel refused permission for tile registers") == 1
    assert f"kernels: {instruction_set()}" in said
