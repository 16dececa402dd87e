"""The screen is not the job: a job whose terminal, pipe or log takes nothing goes on to its end."""

import errno
import json
import os
import shutil
import signal
import sys

import pytest
from another_user import another_user, open_folder
from lost_streams import full, gone

from batchgen.cli import main

ROWS = 5


@pytest.fixture
def job(tiny_models, tmp_path):
    """The arguments of a job of which the last row fails; its output is `tmp_path / "out.jsonl"`."""
    prompts = [f"Row {i}." for i in range(ROWS - 1)] + [""]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    model, output = tiny_models("llama")[0], tmp_path / "out.jsonl"
    return ["run", "-m", str(model), "-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--max-tokens", "2"]


@pytest.fixture
def command(monkeypatch, capfd):
    """The exit code of the command in this process, with other streams."""

    def run(arguments, **streams):
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, "argv", ["batchgen", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # main() puts others in their place
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGINT, handler)  # main() leaves the one of a process that is about to end
        return ended.value.code

    return run


@pytest.mark.parametrize("make", [gone, full, lambda: None], ids=["reader gone", "full", "closed"])
@pytest.mark.parametrize("names", [("stderr",), ("stdout",), ("stdout", "stderr")], ids="+".join)
def test_a_job_goes_on_without_its_screen(command, job, tmp_path, make, names):
    assert command(job, **{name: make() for name in names}) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == ROWS and [row["error"] for row in rows].count(None) == ROWS - 1


def test_the_exit_code_is_that_of_the_rows_fate(command, job):
    assert command([*job, "--max-failed", "0"], stderr=gone(), stdout=full()) == 4


def test_what_a_command_was_run_for_is_missed(command, job, tmp_path, capfd):
    plan = ["plan", *job[1:5]]
    assert command(plan, stdout=gone()) == 0, "its reader has seen enough"
    assert capfd.readouterr().err == ""
    for arguments in (plan, ["--help"], ["plan", "--help"]):
        assert command(arguments, stdout=full()) == 1
        assert capfd.readouterr().err == "batchgen: cannot write standard output: No space left on device\n"


def test_a_report_on_standard_output_does_not_decide_of_the_rows(command, job, tmp_path, capfd):
    report = [*job, "--report", "-", "--report-html", tmp_path / "r.html", "--progress", "none"]
    assert command([*report, "--max-failed", "0"], stdout=gone()) == 4
    assert (tmp_path / "r.html").exists()
    capfd.readouterr()
    assert command(report, stdout=full()) == 1
    assert capfd.readouterr().err == (
        "batchgen: --report - cannot be written (No space left on device): give a file with room for it\n"
    )


def test_an_output_on_a_closed_standard_output_is_refused_before_any_row(command, job, capfd, tmp_path):
    job[job.index("-o") + 1] = "-"
    with open(tmp_path / "in.jsonl") as read:
        assert command(job, stdout=read) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("batchgen: --output - is standard output, which is closed: give a file")


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202eevil\x9b31m"


def test_words_of_rows_files_and_arguments_act_on_no_terminal(command, job, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / f"in{HOSTILE}.jsonl"
    source.write_text(json.dumps({"prompt": HOSTILE, HOSTILE: 1}) + "\n")
    model, ours = job[2], ["--max-tokens", "2"]
    page = tmp_path / "r.html"
    for arguments in (
        ["run", "-m", model, "-i", source, "-o", f"{HOSTILE}.jsonl", "--dry-run", *ours],
        ["run", "-m", model, "-i", source, "-o", f"{HOSTILE}.jsonl", "--report-html", page, *ours],
        ["run", "-m", model, "-i", source, "-o", f"{HOSTILE}.jsonl", "--report", "-", *ours],
        ["run", "-m", model, "-i", source, "-o", "x.jsonl", "--prompt-column", f"no{HOSTILE}", *ours],
        ["run", "-m", model, "-i", source, "-o", "y.jsonl", "--prompt-template", "{{ raise(prompt) }}", *ours],
        ["run", "-m", model, "-i", source, "-o", "z.jsonl", "--prompt-template", "{{ prompt * prompt }}", *ours],
        ["run", "-m", f"./{HOSTILE}", "-i", source, "-o", "x.jsonl"],
        ["plan", "-m", model, "-i", source, "--hardware", HOSTILE],
        ["status", f"{HOSTILE}.jsonl"],
        ["status", HOSTILE],
        [HOSTILE],
        ["run", f"--{HOSTILE}"],
        ["profile", "--dtype", HOSTILE],
    ):
        command(arguments)
        shown = "".join(capfd.readouterr())
        assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}, arguments
        assert shown
    assert not set(page.read_text()) & {"\x1b", "\x07", "\x9b", "\u202e"}


# ---- what this user may not open


def test_a_job_file_that_may_not_be_read_is_named(command, capfd):
    with open_folder() as folder:
        (folder / "job.toml").write_text("")
        assert command(["run", "--config", folder / "job.toml"]) == 2  # imports what it needs
        (folder / "job.toml").chmod(0)
        capfd.readouterr()
        with another_user():
            assert command(["run", "--config", folder / "job.toml"]) == 2
        assert capfd.readouterr().err == f"batchgen: --config {folder}/job.toml: Permission denied\n"


@pytest.mark.parametrize(
    "name", [".", "out.jsonl.batchgen", "out.jsonl.batchgen/manifest.json", "out.jsonl.batchgen/lock"]
)
def test_a_run_directory_that_may_not_be_read_is_named_in_one_line(command, job, capfd, name):
    with open_folder() as folder:
        output = folder / "out.jsonl"
        job[job.index("-o") + 1] = str(output)
        assert command([*job, "--limit", "3", "--max-time", "0s"]) == 3
        assert command(["status", output]) == 0
        (folder / name).chmod(0)
        capfd.readouterr()
        with another_user():
            codes = command(job), command(["status", output])
        lines = capfd.readouterr().err.splitlines()
        assert codes == ((2, 2) if name != "out.jsonl.batchgen/lock" else (2, 0))
        assert len(lines) == sum(code != 0 for code in codes)
        assert all("Permission denied" in line and "have its owner give you access" in line for line in lines), lines


@pytest.mark.parametrize("option", ["--report", "--report-html", "--trace", "-o"])
def test_a_file_in_a_directory_that_may_not_be_opened_is_refused_before_any_row(command, job, option, capfd):
    with open_folder() as folder:
        job[job.index("-o") + 1] = str(folder / "out.jsonl")
        # The tests' own folder is its owner's alone.
        job[job.index("-m") + 1] = shutil.copytree(job[job.index("-m") + 1], folder / "model")
        job[job.index("-i") + 1] = shutil.copy(job[job.index("-i") + 1], folder / "in.jsonl")
        (folder / "model").chmod(0o755)
        assert command([*job, "--dry-run"]) == 0  # imports what it needs
        (folder / "shut").mkdir()
        (folder / "shut").chmod(0)
        capfd.readouterr()
        with another_user():
            assert command([*job, option, folder / "shut" / "file.jsonl"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert str(folder / "shut") in line and "Permission denied" in line


def test_an_error_of_a_file_that_nobody_foresaw_is_one_line(command, monkeypatch, capfd):
    def fail(*of):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/file")

    monkeypatch.setattr("batchgen.job.destination.local_output", fail)
    assert command(["status", "out.jsonl"]) == 1
    assert capfd.readouterr().err == "batchgen: some/file: Input/output error\n"
