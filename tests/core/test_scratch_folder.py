"""Temporary folders of processes that end, are killed, and still run."""

import os
import signal
import subprocess
import sys

import pytest

from batchgen.core.scratch_folder import ScratchFolder

_OWNER = """
import sys
from batchgen.core.scratch_folder import ScratchFolder
folder = ScratchFolder("trial")
(folder.path / "file").write_text("content")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def _owner():
    """A process with a folder."""
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


def _others(tmp_path, folder):
    return [path for path in tmp_path.iterdir() if path != folder.path]


def test_a_folder_is_gone_after_close_and_at_the_end_of_its_process(tmp_path):
    folder = ScratchFolder("trial")
    (folder.path / "file").write_text("content")
    folder.close()
    process = _owner()
    assert len(list(tmp_path.iterdir())) == 1
    process.communicate()
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []


def test_a_folder_in_another_one_takes_the_place_of_those_of_killed_processes_there(tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    with ScratchFolder("trial", parent) as folder:
        assert folder.parent == parent
        running, in_tmp = ScratchFolder("trial", parent), ScratchFolder("trial")
    leftover = parent / "batchgen-trial-killed"
    leftover.mkdir()
    (leftover / "file").write_text("content")
    with ScratchFolder("trial", parent) as folder:
        assert set(parent.iterdir()) == {folder, running.path} and in_tmp.path.exists()


def test_a_folder_of_a_killed_process_is_deleted_by_the_next_of_its_kind_and_one_in_use_is_not(tmp_path):
    killed, running = _owner(), _owner()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    other_kind = ScratchFolder("other")
    assert len(_others(tmp_path, other_kind)) == 2
    folder = ScratchFolder("trial")
    left = [path for path in _others(tmp_path, folder) if path != other_kind.path]
    assert [(path / "file").read_text() for path in left] == ["content"]
    running.communicate()
    killed.communicate()


def test_folders_of_other_users_and_links_are_left_alone(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / "batchgen-trial-link").symlink_to(target)
    theirs = tmp_path / "batchgen-trial-theirs"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
    else:
        (theirs / "lock").mkdir()
    folder = ScratchFolder("trial")
    assert set(_others(tmp_path, folder)) == {target, tmp_path / "batchgen-trial-link", theirs}
