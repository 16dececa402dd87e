"""Files and folders in places where other users may write too, such as /tmp.

Files of other users are not trusted: they are not read, links are not followed, and nothing is written to them.
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
    """Refusal of a path that another user may have changed.

    Attributes:
        strerror: The reason of the refusal.
        filename: The path.
    """

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(errno.EPERM, reason, str(path))


def why_not_private(status: os.stat_result) -> str | None:
    """The reason why another user may have written to a file or folder; None: only this user and root can have.

    Args:
        status: The stat of the file or folder.
    """
    if status.st_uid not in (os.geteuid(), *_TRUSTED_BESIDE):
        return "it belongs to another user"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return "its group may write to it"
    return None


def _is_own_group(gid: int) -> bool:
    """True where a group has no member but this user and root, as where a system gives each user a group.

    A umask of 0002 is usual on such systems.
    """
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        members = set(grp.getgrgid(gid).gr_mem) | {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    except KeyError:  # a user or group without a name, as in containers: nobody else is known
        return gid == os.getegid()
    return members <= {name, "root"}


def private_folder(path: Path) -> Path:
    """Create a folder with mode 0700, or check that only this user can write to an existing one; gives its path.

    Raises:
        NotPrivate: The path is a link, belongs to another user, or is writable for others.
        OSError: The folder cannot be created.
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
    """This user's folder on this machine for files that are needed as long as a process runs, such as sockets.

    Raises:
        OSError: The folder cannot be created, or another user can write to it.
    """
    return private_folder(Path(tempfile.gettempdir(), f"batchgen-{os.geteuid()}"))


def open_regular(path: Path | str, flags: int) -> int:
    """Open a regular file like `os.open`, but do not follow a symbolic link; gives its descriptor.

    A new file can be read and written by this user alone.

    Raises:
        NotPrivate: The path is a symbolic link, or not a regular file.
        OSError: The file cannot be opened.
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
    """True where an open file belongs to this user and has one hard link, so that it is no file of another folder."""
    return status.st_uid == os.geteuid() and status.st_nlink <= 1


def why_untrusted(path: Path, root: Path) -> str | None:
    """The reason why another user may have written a path inside a folder; None: only this user and root can have.

    Args:
        path: The path of a file or folder in `root`, or `root` itself. A path that does not exist is trusted.
        root: The folder. Its parent folders are trusted.
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
    """Create a file without a name, open for reading and writing; gives its descriptor.

    No other process can open the file, and it disappears when its descriptor is closed. Where the filesystem does not
    support unnamed files, the file has a random name for an instant.

    Args:
        directory: The folder whose filesystem has the file.
        flags: Further flags of os.open, such as O_DIRECT.

    Raises:
        OSError: The file cannot be created.
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
