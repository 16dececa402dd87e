"""Where other users may write too, nothing of theirs is followed, written to or believed.

Another user is one that this process takes itself not to be: so the tests hold for root and for everybody else.
"""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from batchgen.core import private_files
from batchgen.core.atomic_file import write_atomically
from batchgen.core.cores import take_cores
from batchgen.core.direct_io import DirectFile, aligned_buffer
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.private_files import (
    NotPrivate,
    open_regular,
    open_unnamed,
    private_folder,
    why_not_private,
    why_untrusted,
)


@pytest.fixture
def victim(tmp_path):
    """A file of the user's that others want overwritten."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def somebody_else(monkeypatch):
    """This process is another user than the one who has made what is there."""
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 4321)
    if os.getuid() == 0:  # what root has made anybody trusts: here it is not root's
        monkeypatch.setattr(private_files, "_TRUSTED_BESIDE", ())


def test_a_lock_is_not_taken_through_a_link(tmp_path, victim):
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(NotPrivate, match="it is a link"):
        lock_file(tmp_path / "lock")
    assert victim.read_text() == "precious"


def test_a_lock_that_is_another_name_of_a_file_leaves_it_as_it_is(tmp_path, victim):
    os.link(victim, tmp_path / "lock")
    os.close(lock_file(tmp_path / "lock"))
    assert victim.read_text() == "precious"


def test_nothing_is_written_into_a_lock_of_another_user(tmp_path, victim, somebody_else):
    descriptor = lock_file(victim)
    assert victim.read_text() == "precious"
    with pytest.raises(LockHeld, match="precious"):
        lock_file(victim)
    os.close(descriptor)


def test_a_named_pipe_for_a_lock_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(NotPrivate, match="it is no regular file"):
        lock_file(tmp_path / "lock")


def test_locks_are_this_users_to_read(tmp_path):
    os.close(lock_file(tmp_path / "lock"))
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"new"])
def test_a_temporary_file_is_not_written_through_a_link(tmp_path, victim, content):
    (tmp_path / "out.json.tmp").symlink_to(victim)
    write_atomically(tmp_path / "out.json", content)
    assert victim.read_text() == "precious" and (tmp_path / "out.json").read_bytes() == content


@pytest.mark.parametrize("tmpfile", [True, False])
def test_an_unnamed_file_holds_what_is_written_and_has_no_name(tmp_path, monkeypatch, tmpfile):
    if not tmpfile:
        monkeypatch.delattr(private_files.os, "O_TMPFILE")
    with contextlib.closing(DirectFile(tmp_path, size_bytes=8192)) as file:
        assert not list(tmp_path.iterdir())
        status = os.fstat(file._fd)
        assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) & 0o077 == 0
        memory = memoryview(aligned_buffer(4096))
        memory[:5] = b"hello"
        file.write([(4096, memory)])
        found = memoryview(aligned_buffer(4096))
        file.read([(4096, found)])
        assert bytes(found[:5]) == b"hello"


@pytest.mark.parametrize("tmpfile", [True, False])
def test_a_process_that_is_killed_while_it_makes_a_file_leaves_none(tmp_path, tmpfile):
    """It is killed as it asks for the file's space, which takes the longest."""
    code = textwrap.dedent(
        f"""
        import os, signal
        if not {tmpfile}:
            del os.O_TMPFILE
        from batchgen.core.direct_io import DirectFile
        os.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        DirectFile({str(tmp_path)!r}, size_bytes=1 << 20)
        """
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_filesystem_without_unnamed_files_is_written_to_all_the_same(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *mode, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(private_files.os, "open", refusing)
    descriptor = open_unnamed(tmp_path)
    assert os.pwrite(descriptor, b"x", 0) == 1 and not list(tmp_path.iterdir())
    os.close(descriptor)


def test_a_file_is_not_opened_by_a_link(tmp_path, victim):
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(NotPrivate, match="it is a link"):
        open_regular(tmp_path / "link", os.O_RDONLY)


def test_a_folder_of_ones_own(tmp_path, victim):
    made = private_folder(tmp_path / "own")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700 and private_folder(made) == made
    made.chmod(0o777)
    with pytest.raises(NotPrivate, match="every user may write to it"):
        private_folder(made)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(NotPrivate, match="it is no folder"):
        private_folder(tmp_path / "link")
    with pytest.raises(NotPrivate, match="it is no folder"):
        private_folder(victim)


def test_a_folder_of_another_user_is_not_ones_own(tmp_path, somebody_else):
    with pytest.raises(NotPrivate, match="it belongs to another user"):
        private_folder(tmp_path)


def status_of(mode, uid, gid):
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "members", "reason"),
    [
        (0o700, 1000, (), None),
        (0o755, 0, (), None),  # the system's
        (0o755, 1001, (), "it belongs to another user"),
        (0o777, 1000, (), "every user may write to it"),
        (0o1777, 1000, (), "every user may write to it"),
        (0o775, 1000, ("me",), None),  # a umask of 0002, and a group for each user
        (0o775, 1000, ("me", "root"), None),
        (0o775, 1000, ("me", "you"), "its group may write to it"),
    ],
)
def test_who_may_have_written(monkeypatch, mode, uid, members, reason):
    class Named:
        def __init__(self, name, gid, members=()):
            self.pw_name, self.pw_gid, self.gr_mem = name, gid, list(members)

    monkeypatch.setattr(private_files.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(private_files.pwd, "getpwuid", lambda uid: Named("me", 1000))
    monkeypatch.setattr(private_files.pwd, "getpwall", lambda: [Named("me", 1000), Named("you", 1001)])
    monkeypatch.setattr(private_files.grp, "getgrgid", lambda gid: Named("group", gid, members))
    assert why_not_private(status_of(stat.S_IFDIR | mode, uid, 1000)) == reason


def test_what_lies_in_a_folder_is_trusted_as_far_as_all_above_it(tmp_path):
    path = tmp_path / "profiles" / "one.json"
    path.parent.mkdir(mode=0o700)
    path.write_text("{}")
    path.chmod(0o600)
    assert why_untrusted(path, tmp_path) is None and why_untrusted(tmp_path / "none", tmp_path) is None
    path.chmod(0o666)
    assert why_untrusted(path, tmp_path) == "every user may write to it"
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert why_untrusted(path, tmp_path) == f"{path.parent}: every user may write to it"


def test_cores_are_not_taken_by_files_of_another_user(tmp_path, victim):
    folder = tmp_path / "cores"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "turn").symlink_to(victim)
    assert take_cores(1, folder) == ()
    assert victim.read_text() == "precious"


def test_no_module_makes_a_value_of_a_pickle():
    """Code comes out of none: neither from a socket, nor from a file."""
    package = Path(private_files.__file__).parents[1]
    words = ("import pickle", "cloudpickle", "torch.load", "import shelve", "import marshal", "joblib", "import dill")
    users = {path.name: word for path in package.rglob("*.py") for word in words if word in path.read_text()}
    # Rows go to the process that renders templates, over a pipe that its parent alone can write to; nothing comes back
    # so.
    assert users.keys() == {"templates.py", "template_process.py"}
    assert "pickle.load" not in (package / "core/templates.py").read_text()
