"""What is wrong with an output, a budget or an option is said before the libraries that take seconds are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.core.file_lock import lock_file

# Runs commands one after the other in one process, since starting Python is most of the time.
_RUN = """
import json, sys
from click.testing import CliRunner
from batchgen.cli.commands import cli
for arguments in json.loads(sys.argv[1]):
    error = CliRunner().invoke(cli, arguments).exception
    loaded = [m for m in ("torch", "transformers") if m in sys.modules]
    print(json.dumps([getattr(error, "exit_code", None), str(error), loaded]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By what is wrong, [exit code, message, libraries that were imported]."""
    folder = tmp_path_factory.mktemp("early")
    rows = folder / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    (folder / "foreign.parquet").write_bytes(b"somebody's")
    (folder / "held.parquet.batchgen").mkdir()
    (folder / "dir.parquet").mkdir()
    lock = lock_file(folder / "held.parquet.batchgen" / "lock")

    def command(output, *more):
        return ["run", "-m", "demo", "-i", str(rows), "-o", str(folder / output), "--progress", "none", *more]

    cases = {
        "no folder": command("none/out.parquet"),
        "foreign": command("foreign.parquet"),
        "held": command("held.parquet"),
        "format": command("out.xyz"),
        "folder": command("dir.parquet"),
        "budget": command("out.parquet", "--cpu-memory", "10MiB"),
        "contradiction": command("out.parquet", "--overwrite", "--retry-failed"),
        "limit": command("out.parquet", "--max-failed", "some"),
        "another machine": command("out.parquet", "--hardware", "h100"),
        "no machine": command("out.parquet", "--hardware", "tpu"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(list(cases.values()))], capture_output=True, text=True, check=True
    )
    os.close(lock)
    assert sorted(Path(folder).iterdir()) == [
        folder / "dir.parquet",
        folder / "foreign.parquet",
        folder / "held.parquet.batchgen",
        rows,
    ]
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    "case, code, says",
    [
        ("no folder", 2, "mkdir -p"), ("foreign", 2, "not the output of this job"), ("held", 1, "process"),
        ("format", 2, ".parquet"),
        ("folder", 2, "directory"), ("budget", 2, "--cpu-memory 10MiB"), ("contradiction", 2, "--retry-failed"),
        ("limit", 2, "--max-failed"),
        ("another machine", 2, "h100 has a GPU, jobs run on the CPU here"),
        ("no machine", 2, "--hardware tpu: no such"),
    ],
)  # fmt: skip
def test_said_at_once(told, case, code, says):
    exit_code, message, imported = told[case]
    assert exit_code == code and says in message and "\n" not in message
    assert imported == []


def test_who_holds_an_output_is_named(told):
    assert str(os.getpid()) in told["held"][1]


# Ends where the first library is imported that takes seconds: what is on the screen by then is what counts.
_FIRST = """
import io, os, sys
class Libraries:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            print(sys.stderr.loaded, sys.stderr.getvalue().splitlines()[:1], flush=True)
            os._exit(0)
sys.meta_path.insert(0, Libraries())
class Screen(io.StringIO):
    loaded = None
    def isatty(self):
        return "--report" not in sys.argv  # the others are on a terminal
    def write(self, text):
        if self.loaded is None and text.strip():
            self.loaded = [m for m in ("torch", "transformers") if m in sys.modules]
        return super().write(text)
sys.stderr = Screen()
from batchgen.cli.commands import cli
cli.main(sys.argv[1:], standalone_mode=False)
"""


@pytest.mark.parametrize(
    ("style", "shown"), [("auto", "in.jsonl"), ("plain", "in.jsonl"), ("none", "None []"), ("log", "None []")]
)
def test_something_is_on_the_screen_before_what_takes_seconds_is_imported(tmp_path, style, shown):
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    arguments = ["run", "-m", str(tmp_path), "-i", str(rows), "-o", str(tmp_path / "out.parquet"), "--progress"]
    arguments += ["auto", "--report", str(tmp_path / "report.json")] if style == "log" else [style]
    done = subprocess.run([sys.executable, "-c", _FIRST, *arguments], capture_output=True, text=True, check=True)
    assert shown in done.stdout and ("[] ['batchgen" in done.stdout) == (shown == "in.jsonl")
