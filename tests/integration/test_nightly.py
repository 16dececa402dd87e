"""The nightly recipe: its systemd units and cron line, and the script they start."""

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
NIGHTLY = ROOT / "recipes" / "nightly"
NAMES = ["2024-05-01.parquet", "2024-05-02.parquet"]
ROWS = 40


def unit(name, home):
    """A unit's sections, with %h as systemd has it for a user."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str
    parser.read_string((NIGHTLY / name).read_text().replace("%h", str(home)))
    return parser


@pytest.fixture
def home(tmp_path):
    """A home directory with batchgen in it as the README says, and two files in the inbox."""
    home = tmp_path / "home"
    (home / "batchgen" / ".venv" / "bin").mkdir(parents=True)
    (home / "batchgen" / ".venv" / "bin" / "batchgen").symlink_to(Path(sys.executable).with_name("batchgen"))
    (home / "batchgen" / "recipes").symlink_to(ROOT / "recipes")
    inbox = home / "nightly" / "inbox"
    inbox.mkdir(parents=True)
    for name, rows in zip(NAMES, (2, ROWS), strict=True):
        columns = {"name": "kokomo", "addr": "6333 w. third st.", "phone": "213/933-0773", "type": "american"}
        table = pa.table({k: [v] * rows for k, v in columns.items()} | {"n": range(rows)})
        pq.write_table(table, inbox / name)
    return home


@pytest.fixture
def start(home, tiny_models):
    """Starts the very command of the unit, with a tiny model; a deadline in seconds replaces that of the unit."""
    model = tiny_models("llama", max_position_embeddings=8192)[0]
    service = unit("batchgen-nightly.service", home)["Service"]
    command = shlex.split(service["ExecStart"])
    name, _, value = service["Environment"].partition("=")
    environment = {**os.environ, "HOME": str(home), name: value}
    options = ["--model", model, "--dtype", "float32", "--cpu-memory", "4GiB", "--flush-interval", "0.2s"]
    # A column of its own for every row's prompt: no answer is there before the row was run.
    options += ["--prompt-template", "{{ n }} {{ name }}", "--ignore-eos", "--max-num-seqs", "4"]

    def start(seconds, *more, command=command):
        arguments = [*command[:-1], str(seconds), *map(str, options), *more]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def finish(process):
    """(exit code, what was printed)."""
    printed, _ = process.communicate()
    return process.returncode, printed


def report(home, name):
    return json.loads((home / "nightly" / "outbox" / f"{name}.parquet.report.json").read_text())


# What the script does with the outcome of a file, told by a stand-in for batchgen.

STAND_IN = """#!/bin/sh
all=$*
while [ $# -gt 0 ]; do
    case $1 in --input) input=$2 ;; --output) output=$2 ;; --max-time) left=$2 ;; esac
    shift
done
echo "$(basename "$input") ${left%s} $all" >>"$HOME/calls"
. "$HOME/acts/$(basename "$input")"
"""
DONE = 'touch "$output"'
UNTIL_TOLD = """trap 'sleep 0.2; {then}' TERM; touch "$HOME/begun"; while true; do sleep 0.05; done"""


@pytest.fixture
def script(home):
    """A function that starts the script with a stand-in, which does for each file what its act (shell code) says."""
    program = home / "batchgen" / ".venv" / "bin" / "batchgen"
    program.unlink()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    service = unit("batchgen-nightly.service", home)["Service"]
    *command, _ = shlex.split(service["ExecStart"])
    name, _, value = service["Environment"].partition("=")
    environment = {**os.environ, "HOME": str(home), name: value}
    (home / "acts").mkdir()

    def script(acts, seconds=600):
        (home / "calls").write_text("")
        for name, act in zip(NAMES, acts, strict=True):
            (home / "acts" / name).write_text(act)
        return subprocess.Popen(
            [*command, str(seconds), "--more", "options"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return script


def called(home):
    """The files that batchgen was started for, in order."""
    return [line.split()[0] for line in (home / "calls").read_text().splitlines()]


def test_every_file_in_order_with_the_time_that_is_left(home, script):
    assert finish(script([f"sleep 1.1; {DONE}", DONE], 500)) == (0, "")
    assert called(home) == NAMES
    lines = [line.split() for line in (home / "calls").read_text().splitlines()]
    assert 500 >= int(lines[0][1]) > int(lines[1][1]) > 0
    outbox, recipe = home / "nightly" / "outbox", home / "batchgen" / "recipes" / "nightly"
    assert lines[0][2:] == shlex.split(
        f"run --config {recipe.resolve()}/job.toml --input {home}/nightly/inbox/{NAMES[0]} "
        f"--output {outbox}/{NAMES[0]} "
        f"--max-time {lines[0][1]}s --report {outbox}/2024-05-01.parquet.report.json --progress plain --more options"
    )
    assert finish(script(["exit 1", "exit 1"])) == (0, "") and called(home) == [], "nothing was left to do"


def test_the_time_is_over(home, script):
    assert finish(script([DONE, DONE], 0))[0] == 3 and called(home) == []
    assert finish(script(["exit 3", DONE]))[0] == 3 and called(home) == NAMES[:1]
    assert finish(script([DONE, DONE]))[0] == 0 and called(home) == NAMES


@pytest.mark.parametrize(("then", "code"), [("exit 130", 130), ("exit 1", 130), (f"{DONE}; exit 0", 130)])
def test_asked_to_stop_the_job_is_asked_and_waited_for(home, script, then, code):
    process = script([UNTIL_TOLD.format(then=f"touch {home}/saved; {then}"), DONE])
    while not (home / "begun").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.terminate()
    assert finish(process)[0] == code
    assert (home / "saved").exists() and called(home) == NAMES[:1]


@pytest.mark.parametrize(
    ("codes", "code"),
    [((2, 0), 2), ((1, 0), 1), ((2, 1), 1), ((1, 2), 1), ((130, 0), 130), ((4, 0), 4), ((4, 3), 4), ((1, 3), 3)],
)
def test_a_file_that_fails_does_not_stop_the_others(home, script, codes, code):
    """But one that was interrupted does."""
    assert finish(script([f"exit {c}" if c else DONE for c in codes]))[0] == code
    assert called(home) == NAMES[: 1 if 130 in codes else 2]


def test_a_file_with_failed_rows_ends_every_night_with_4_until_its_job_succeeds(home, script):
    failing = f"{DONE}; exit 4"
    said = f"nightly: the job of {home}/nightly/inbox/{NAMES[0]} ended with exit code 4\n"
    assert finish(script([failing, DONE])) == (4, said)
    assert finish(script([failing, "exit 1"])) == (4, said) and called(home) == NAMES[:1]
    assert finish(script([DONE, "exit 1"])) == (0, "") and called(home) == NAMES[:1]
    assert finish(script(["exit 1", "exit 1"])) == (0, "") and called(home) == [], "nothing was left to do"


def test_files_of_other_kinds_in_the_inbox_are_named_and_the_others_are_run(home, script):
    inbox = home / "nightly" / "inbox"
    (inbox / "2024-05-01.xlsx").write_text("")
    (inbox / ".2024-05-03.parquet.Xa8").write_text("")
    for name in ("a.jsonl", "a.csv"):
        (inbox / name).write_text("")
        (home / "acts").joinpath(name).write_text(DONE)
    code, printed = finish(script([DONE, DONE]))
    assert code == 2 and called(home) == [*NAMES, "a.csv", "a.jsonl"]
    (line,) = printed.splitlines()
    assert line == f"nightly: {inbox}/2024-05-01.xlsx is not run: it is no .parquet, .jsonl or .csv file"


# Real jobs.


@pytest.mark.slow
def test_stopped_by_systemd_then_resumed(home, start):
    """SIGTERM goes to the script alone (KillMode=mixed). Done, there is nothing to do."""
    assert unit("batchgen-nightly.service", home)["Service"]["KillMode"] == "mixed"
    process = start(600, "--max-tokens", "40")
    outbox = home / "nightly" / "outbox"
    parts = outbox / "2024-05-02.parquet.batchgen" / "parts"
    while not list(parts.glob("part-*.parquet")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.terminate()
    code, printed = finish(process)
    assert code == 130, printed
    safe = sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*.parquet"))
    assert 0 < safe < ROWS
    code, printed = finish(start(600, "--max-tokens", "40"))
    assert code == 0, printed
    assert report(home, "2024-05-02")["rows_resumed"] == safe and report(home, "2024-05-02")["rows_ok"] == ROWS
    assert [pq.read_metadata(outbox / name).num_rows for name in NAMES] == [2, ROWS]
    assert "city_text" in pq.read_schema(outbox / "2024-05-02.parquet").names
    written = {path: path.stat().st_mtime_ns for path in outbox.glob("*.parquet")}
    assert finish(start(600, "--max-tokens", "40"))[0] == 0
    assert written == {path: path.stat().st_mtime_ns for path in outbox.glob("*.parquet")}


@pytest.mark.slow
@pytest.mark.thorough
def test_stopped_by_the_deadline_then_complete(home, start):
    code, printed = finish(start(1))
    assert code == 3, printed
    outbox = home / "nightly" / "outbox"
    assert not list(outbox.glob("*.parquet"))
    code, printed = finish(start(600, "--max-tokens", "4"))
    assert code == 0, printed
    assert [pq.read_metadata(outbox / name).num_rows for name in NAMES] == [2, ROWS]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wrong_file_does_not_stop_the_others(home, start):
    (home / "nightly" / "inbox" / NAMES[0]).write_text("not a table")
    code, printed = finish(start(600, "--max-tokens", "2"))
    assert code == 2 and NAMES[0] in printed
    assert pq.read_metadata(home / "nightly" / "outbox" / NAMES[1]).num_rows == ROWS


# The units.


def test_wrong_arguments(home, start):
    script = str(NIGHTLY / "nightly.sh")
    code, printed = finish(start(1, command=[script, str(home / "nowhere"), str(home / "outbox"), "1"]))
    assert code == 2 and "no directory" in printed
    done = subprocess.run([script], capture_output=True, text=True)
    assert done.returncode == 2 and "nightly.sh INBOX OUTBOX MAX_SECONDS" in done.stderr


def test_the_service_acts_on_every_exit_code(home):
    service = unit("batchgen-nightly.service", home)["Service"]
    assert service["SuccessExitStatus"].split() == ["3", "130"]
    assert service["RestartPreventExitStatus"].split() == ["2", "4"] and service["Restart"] == "on-failure"
    assert os.access(shlex.split(service["ExecStart"])[0], os.X_OK)
    timer = unit("batchgen-nightly.timer", home)
    assert timer["Timer"]["OnCalendar"] == "*-*-* 22:00:00" and timer["Install"]["WantedBy"] == "timers.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(home, tmp_path):
    for name in ("batchgen-nightly.service", "batchgen-nightly.timer"):
        (tmp_path / name).write_text((NIGHTLY / name).read_text().replace("%h", str(home)))
    units = [str(tmp_path / name) for name in ("batchgen-nightly.service", "batchgen-nightly.timer")]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    about = [line for line in done.stderr.splitlines() if "batchgen" in line]
    assert done.returncode == 0 and about == [], done.stderr
    calendar = subprocess.run(["systemd-analyze", "calendar", "*-*-* 22:00:00"], capture_output=True, text=True)
    assert calendar.returncode == 0 and "22:00:00" in calendar.stdout
    (tmp_path / "batchgen-nightly.service").write_text("[Service]\nExecStart=/nowhere/nightly.sh\nRestart=perhaps\n")
    wrong = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    assert "perhaps" in wrong.stderr  # it would have noticed


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_the_cron_line(home):
    (line,) = [x for x in (NIGHTLY / "crontab").read_text().splitlines() if x and not x.startswith("#")]
    assert line.split()[:5] == ["0", "22", "*", "*", "*"] and "%" not in line
    command = line.split(maxsplit=5)[5]
    stub = home / "batchgen" / ".venv" / "bin" / "batchgen"
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}  # cron gives little more
    for code, mail in ((0, False), (3, False), (130, False), (1, True), (2, True), (4, True)):
        stub.unlink()
        stub.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
        stub.chmod(0o755)
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True)
        assert done.returncode == (code if mail else 0) and bool(done.stdout) == mail and done.stderr == ""
    log = (home / "nightly" / "log").read_text()
    assert "--max-time 21600s" in log and "2024-05-02.parquet" in log
