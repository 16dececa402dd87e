"""The identity of an input's files by name, size and content, and checks that they are unchanged or only grew."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.core.errors import InputError
from batchgen.core.text import without_credentials
from batchgen.core.units import format_bytes
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.source import naming
from batchgen.dataset.storage import content_tag, is_compressed, is_url, open_raw, version

# Files above this are told by XXH3 of 128 bits, which is as fast as memory; the others by SHA-256.
_SHA256_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Clocks of file systems tick this often at the least: what is written within a tick may not show in a file's times.
_CLOCK_TICK_NS = 20_000_000
# A file that is written to all the time is compared for this part of the time.
_COMPARING_SHARE = 0.05
_TRIES = 5
_DESCRIBED = 2  # changed files that a message describes one by one


@dataclass
class _File:
    """The state of one file of an input.

    Attributes:
        path: Path or URL of the file.
        size_bytes: Size in bytes.
        stamp: The value of `_stamp` when the digest was computed.
        digest: Digest of the content by algorithm.
        next_s: Value of time.monotonic() from which on the file may be compared again.
    """

    path: str
    size_bytes: int
    stamp: Any = None
    digest: dict[str, str] = field(default_factory=dict)
    next_s: float = 0.0


class InputFiles:
    """The files of one input, with their identity and checks for changes.

    Sizes are read when the object is created; lines that are appended later are not part of this input.

    Args:
        paths: Local paths or URLs, in the order in which they are read.
        partitions: Columns of the files' partition directories.
        may_get_lines: True for text files, to which lines may be appended.
        details: Function from a path to further JSON values that identify the file; None: there are none.
    """

    def __init__(
        self,
        paths: list[str],
        partitions: Partitions | None = None,
        *,
        may_get_lines: bool = False,
        details: Callable[[str], dict[str, Any]] | None = None,
    ) -> None:
        self._details = details
        self._files = {path: _File(path, _size_of(path)) for path in paths}
        self._partitions = partitions or Partitions()
        self._may_get_lines = may_get_lines

    def identity(self) -> dict[str, Any]:
        """The JSON values that identify the files by name, size and content, wherever they lie.

        All bytes of the files are hashed. A file whose size, times and inode are unchanged since the last call is not
        read again.
        """
        identity: dict[str, Any] = {"files": [self._of_file(file) for file in self._files.values()]}
        if self._partitions.fields:
            identity["partitions"] = [self._partitions.row(path) for path in self._files]
        return identity

    def check(self, path: str) -> None:
        """Raise InputError where a local file has changed since `identity` was called.

        Appended lines are no change. Readers call this method after they have read from the file and before they use
        the data.
        """
        file = self._files[path]
        if not is_url(path) and time.monotonic() >= file.next_s:
            self._check(file)

    def check_all(self) -> None:
        """Check all files for changes, also those at URLs and those that were compared lately. Raises InputError."""
        for file in self._files.values():
            self._check(file)

    def _check(self, file: _File) -> None:
        if not file.digest:
            return
        with naming(file.path):
            if file.stamp is not None and _stamp(file.path) == file.stamp:
                return
        before, started_s = file.digest, time.monotonic()
        self._find_digest(file)
        now_s = time.monotonic()
        if file.digest == before:
            file.next_s = now_s + (now_s - started_s) / _COMPARING_SHARE
        else:
            file.digest, file.stamp = before, None  # it stays wrong, however often somebody asks
            raise InputError(
                f"{file.path} was changed while the job ran: put back what it was and run the same command again, "
                "or start anew with --overwrite"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def begin_with(self, now: dict[str, Any], was: dict[str, Any]) -> bool:
        """True where the files start with all rows of an earlier state of the input.

        That is so where files with later names were added, or lines were appended to the last file.

        Args:
            now: The identity of the files now.
            was: The earlier identity.
        """
        old, new = was["files"], now["files"]
        if len(old) > len(new) or old[:-1] != new[: len(old) - 1]:
            return False
        if was.get("partitions", []) != now.get("partitions", [])[: len(old)]:
            return False
        last = len(old) - 1
        return old[last] == new[last] or (self._may_get_lines and _got_lines(list(self._files)[last], old[last]))

    def _of_file(self, file: _File) -> dict[str, Any]:
        with naming(file.path):
            if not file.digest or file.stamp is None or _stamp(file.path) != file.stamp:
                self._find_digest(file)
        details = self._details(file.path) if self._details else {}
        return {"name": _name(file.path), "size_bytes": file.size_bytes, **file.digest, **details}

    def _find_digest(self, file: _File) -> None:
        """Compute the digest of a file's current content. Raises InputError where the file keeps changing meanwhile."""
        for _ in range(_TRIES):
            with naming(file.path):
                before, stamp = file.digest, _settled_stamp(file.path)
                file.digest = self._digest(file)
                file.stamp = _stamp(file.path)
            if file.stamp == stamp or file.digest == before:  # the latter: it was appended to
                return
        raise InputError(f"{file.path} is written to while it is read: wait until it is whole, or read a copy of it")

    def _digest(self, file: _File) -> dict[str, str]:
        """The digest of a file's content by algorithm.

        For a file at a URL that is not a text file, the filesystem's tag of the content is used where there is one. All
        other files are hashed.
        """
        if is_url(file.path) and not self._may_get_lines and (tag := content_tag(file.path)) is not None:
            return {"version": tag}
        with open_raw(file.path) as opened:
            read_bytes = file.size_bytes if self._may_get_lines else opened.seek(0, os.SEEK_END)
            return _content_digest(opened, read_bytes, _algorithm(file.size_bytes))


def describe_files(
    was: list[dict[str, Any]], now: list[dict[str, Any]], begins_alike: Callable[[dict[str, Any]], bool | None]
) -> str:
    """The text on how the files of an input differ from an earlier state of the input.

    Args:
        was: The `files` of the earlier identity.
        now: The `files` of the identity now.
        begins_alike: Function that tells, from the earlier identity of a file, whether the file now begins with the
            same rows; None: that is not known.
    """
    before, after = ({file["name"]: file for file in files} for files in (was, now))
    if len(before) < len(was) or len(after) < len(now):  # of several directories
        return f"its {len(now):,} files are not the {len(was):,} files that they were"
    changed = [name for name in after if name in before and after[name] != before[name]]
    texts = [_describe_file(before[name], after[name], begins_alike) for name in changed[:_DESCRIBED]]
    for names, fate in (
        (changed[_DESCRIBED:], "changed"),
        (after.keys() - before, "new"),
        (before.keys() - after, "gone"),
    ):
        if names:
            others = f" and {len(names) - 1:,} more files" if len(names) > 1 else ""
            texts.append(f"{min(names)}{others} {'are' if others else 'is'} {fate}")
    return "; ".join(texts) or "its files are read in another order"


def _describe_file(
    was: dict[str, Any], now: dict[str, Any], begins_alike: Callable[[dict[str, Any]], bool | None]
) -> str:
    name, rows_was, rows_now = now["name"], was.get("rows"), now.get("rows")
    if rows_was is None or rows_now is None:
        sizes = (format_bytes(file["size_bytes"]) for file in (was, now))
        return "{} has changed ({} before, {} now)".format(name, *sizes)
    if rows_was == rows_now:
        return f"{name} has other values in its {rows_now:,} rows"
    alike = begins_alike(was) if rows_now > rows_was else None
    if alike:
        return (
            f"{name} has grown from {rows_was:,} to {rows_now:,} rows and begins with the same ones (a file of its kind"
            " is read as a whole: the new rows alone, in a file of their own, are a job of their own)"
        )
    begin = ", and begins with other ones" if alike is False else ""
    return f"{name} has {rows_now:,} rows, {rows_was:,} before{begin}"


def _got_lines(path: str, was: dict[str, Any]) -> bool:
    """True where a file has its earlier content followed by whole lines; False for compressed files.

    Args:
        path: The path of the file.
        was: The file's earlier identity.
    """
    size_bytes = was["size_bytes"]
    algorithm = _algorithm(size_bytes)
    with naming(path), open_raw(path) as file:
        if _name(path) != was["name"] or is_compressed(file) or file.seek(0, os.SEEK_END) < size_bytes:
            return False
        file.seek(max(0, size_bytes - 1))
        before, after = file.read(min(1, size_bytes)), file.read(1)
        is_line = before in b"\n" or after in b"\r\n"
        return is_line and _content_digest(file, size_bytes, algorithm)[algorithm] == was.get(algorithm)


def _name(path: str) -> str:
    return Path(without_credentials(path)).name


def _size_of(path: str) -> int:
    with naming(path), open_raw(path) as file:
        return file.seek(0, os.SEEK_END)


def _algorithm(size_bytes: int) -> str:
    return "sha256" if size_bytes <= _SHA256_BYTES else "xxh3_128"


def _content_digest(file: BinaryIO, size_bytes: int, algorithm: str) -> dict[str, str]:
    """The hash of the first `size_bytes` bytes of a file, as {algorithm: hexadecimal digits}."""
    digest: Any = hashlib.sha256()
    if algorithm != "sha256":
        import xxhash  # not everywhere that a job of small files runs

        digest = xxhash.xxh3_128()
    file.seek(0)
    left = size_bytes
    while block := file.read(min(_BLOCK_BYTES, left)):
        digest.update(block)
        left -= len(block)
    return {algorithm: digest.hexdigest()}


def _stamp(path: str) -> Any:
    """A value that changes when a file is written to, found without reading the file; None where there is none."""
    if is_url(path):
        found_version = version(path)
        return found_version if found_version.partition(" ")[2] else None
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _settled_stamp(path: str) -> Any:
    """The stamp of a file, taken at least one clock tick after the last write, so that any later write changes it."""
    if not is_url(path):
        age_ns = time.time_ns() - os.stat(path).st_ctime_ns
        if 0 <= age_ns < _CLOCK_TICK_NS:
            time.sleep((_CLOCK_TICK_NS - age_ns) / 1e9)
    return _stamp(path)
