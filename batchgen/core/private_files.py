"""Files and folders where other users may write too.

What other users put there is neither followed, nor written to, nor believed.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

_UNNAMED_REFUSED = (
    errno.EOPNOTSUPP,
    errno.EISDIR,
    errno.ENOENT,
    errno.EINVAL,
)  # by filesystems without O_TMPFILE, and old kernels
_TRIES = 100
_TRUSTED_BESIDE = (0,)  # users that everybody trusts: root, who may write everywhere anyway


class NotPrivate(OSError):
    """Refusal of a path that another user may have tampered with; `strerror` is the reason, `filename` the path."""

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(errno.EPERM, reason, str(path))


def why_not_private(status: os.stat_result) -> str | None:
    """The reason why a file or folder may hold what another user has put there, from its stat; None: it cannot.

    Only this user and root can have written to it then.
    """
    if status.st_uid not in (os.geteuid(), *_TRUSTED_BESIDE):
        return "it belongs to another user"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return "its group may write to it"
    return None


def _is_own_group(gid: int) -> bool:
    """Tell whether a group has no member but this user and root.

    Many systems give each user such a group, and a umask of 0002.
    """
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        members = set(grp.getgrgid(gid).gr_mem) | {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    except KeyError:  # a user or group without a name, as in containers: nobody else is known
        return gid == os.getegid()
    return members <= {name, "root"}


def private_folder(path: Path) -> Path:
    """A folder that only this user can write to, made with mode 0700 where it does not exist.

    Raises:
        NotPrivate: It is a link, or another user's, or others may write to it.
        OSError: It cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise NotPrivate("it is no folder", path) from None
        if reason := why_not_private(status):
            raise NotPrivate(reason, path) from None
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            path.chmod(status.st_mode & 0o755)
    return path


def runtime_folder() -> Path:
    """This user's folder on this machine for files that live as long as a process.

    Raises:
        OSError: It cannot be made, or is not this user's alone.
    """
    return private_folder(Path(tempfile.gettempdir(), f"batchgen-{os.geteuid()}"))


def open_regular(path: Path | str, flags: int) -> int:
    """Open a regular file as os.open does, but never by a link; one that is made is this user's alone.

    Raises OSError, of which NotPrivate is one.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # a named pipe would make it wait
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate("it is a link", Path(path)) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotPrivate("it is no regular file", Path(path))


def is_ours_alone(status: os.stat_result) -> bool:
    """Tell whether an open file is this user's and has no other name by which it may be somebody else's file."""
    return status.st_uid == os.geteuid() and status.st_nlink <= 1


def why_untrusted(path: Path, root: Path) -> str | None:
    """The reason why what a folder keeps at a path may have been put there by another user; None: it cannot.

    Args:
        path: The path of a file or folder in `root`, or `root` itself. A path where nothing is, is nobody's.
        root: The folder. Whoever can change what lies above it is trusted.
    """
    levels = [
        root.joinpath(*path.relative_to(root).parts[:count]) for count in range(len(path.relative_to(root).parts) + 1)
    ]
    for level in levels:
        try:
            link, status = os.lstat(level), os.stat(level)
        except OSError:
            return None  # whoever reads it finds out why
        reason = (
            "it belongs to another user"
            if link.st_uid not in (os.geteuid(), *_TRUSTED_BESIDE)
            else why_not_private(status)
        )
        if reason is not None:
            return reason if level == path else f"{level}: {reason}"
    return None


def open_unnamed(directory: Path, flags: int = 0) -> int:
    """Open a new file without a name in a folder, to be read and written.

    Nobody else can open it, and it ends with its descriptor. Where the filesystem has no such files, it has a random
    name
    for an instant.

    Args:
        directory: The folder, which decides the filesystem.
        flags: Further flags of os.open, such as O_DIRECT.

    Raises:
        OSError: It cannot be made.
    """
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | flags, 0o600)
        except OSError as error:
            if error.errno not in _UNNAMED_REFUSED:
                raise
    # EINVAL is also what a filesystem without direct I/O says: then this raises it, too.
    for _ in range(_TRIES):
        path = directory / f".batchgen-{os.urandom(8).hex()}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | flags, 0o600)
        except FileExistsError:
            continue
        except OSError:
            # Where direct I/O is refused, the kernel has made the file all the same.
            path.unlink(missing_ok=True)
            raise
        path.unlink()
        return descriptor
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
