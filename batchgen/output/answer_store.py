"""Answers that several jobs share, in an SQLite database: bytes by key, within a limit of size.

Several processes of one machine may use a database at once, and be killed at any moment: it has a write-ahead log.
Every answer has a checksum, and one that is damaged is not there. Whatever fails, a job goes on without the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from batchgen.core.errors import BatchgenError, InputError

logger = logging.getLogger(__name__)
T = TypeVar("T")

DATABASE = "answers.sqlite"
_VERSION = 1
_BUSY_S = 30.0  # while other processes write
_USED_S = 3600  # a use is noted once within so many seconds, so that reading seldom writes
_MOST_IN_QUERY = 500
_KEPT_FRAC = 0.9  # of the limit, when answers have been removed
_LEAST_BYTES = 1 << 20
_COMPRESSED_FROM_BYTES = 400
_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, used INTEGER NOT NULL, answer BLOB NOT NULL);
    CREATE INDEX IF NOT EXISTS by_use ON answers (used);
    PRAGMA user_version = {_VERSION};
"""


class AnswerStore:
    """A database of answers in a directory. Any thread may call its methods.

    Where the directory is missing, it is made, with mode 0700. The database is this user's to read and write. The
    methods raise nothing: after the first failure, which is said in one line, the store finds and keeps nothing.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Open the database, or make it.

        Args:
            folder: The directory.
            most_bytes: Limit of the database in bytes; the answers that were used longest ago go first.

        Raises:
            InputError: The directory cannot be made, or the limit is too small.
        """
        if most_bytes < _LEAST_BYTES:
            raise InputError("--cache-size must be at least 1MiB")
        self._path, self._most_bytes = folder / DATABASE, most_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--cache {folder} cannot be made ({error.strerror}): give another directory") from error
        self._guarded(self._open, None)

    def get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Look answers up, and note their use; those that are not there are left out."""
        wanted = list(dict.fromkeys(keys))
        return self._guarded(lambda database: self._get(database, wanted), {})

    def put(self, answers: Mapping[bytes, bytes]) -> None:
        """Keep answers, by key. Others are removed where the limit is reached."""
        if answers:
            self._guarded(lambda database: self._put(database, answers), None)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            database, self._database = self._database, None
            if database is not None:
                with contextlib.suppress(sqlite3.Error):
                    database.close()

    def _guarded(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """The result of a piece of work; `otherwise` where the store fails now or has failed before."""
        with self._lock:
            try:
                if work == self._open:
                    self._database = self._connect()
                return otherwise if self._database is None else work(self._database)
            except (sqlite3.Error, OSError, BatchgenError) as error:
                logger.warning("%s", self._said(error))
                if self._database is not None:
                    with contextlib.suppress(sqlite3.Error):
                        self._database.close()
                self._database = None
                return otherwise

    def _said(self, error: Exception) -> str:
        """The line that says why the job goes on without the store."""
        fix = ""
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            fix = f"; remove {self._path} to begin another"
        return f"the cache {self._path.parent} is not used from here on ({error}){fix}"

    def _connect(self) -> sqlite3.Connection:
        # SQLite gives its log the permissions of the database, which is made with this user's alone.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        return sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)

    def _open(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last answers, and nothing else
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            database.executescript(_SCHEMA)
        elif version != _VERSION:
            raise BatchgenError(f"{DATABASE} has another format")

    def _get(self, database: sqlite3.Connection, keys: list[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        now, stale = int(time.time()), []
        for start in range(0, len(keys), _MOST_IN_QUERY):
            some = keys[start : start + _MOST_IN_QUERY]
            marks = ",".join("?" * len(some))
            for key, used, answer in database.execute(
                f"SELECT key, used, answer FROM answers WHERE key IN ({marks})", some
            ):
                if (content := _unpacked(key, answer)) is not None:
                    found[key] = content
                    if abs(now - used) > _USED_S:
                        stale.append((now, key))
        if stale:
            with _transaction(database):
                database.executemany("UPDATE answers SET used = ? WHERE key = ?", stale)
        return found

    def _put(self, database: sqlite3.Connection, answers: Mapping[bytes, bytes]) -> None:
        now = int(time.time())
        rows = [(key, now, _packed(key, answer)) for key, answer in answers.items()]
        with _transaction(database):
            database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)
            if _size_bytes(database) > self._most_bytes:
                self._evict(database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """Remove the answers that were used longest ago."""
        while (size_bytes := _size_bytes(database)) > _KEPT_FRAC * self._most_bytes:
            count = database.execute("SELECT count(*) FROM answers").fetchone()[0]
            excess = 1 - _KEPT_FRAC * self._most_bytes / size_bytes
            database.execute(
                "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY used LIMIT ?)",
                (int(count * excess) + 1,),
            )
            if count <= 1:
                return


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection):  # type: ignore[no-untyped-def]
    """Run the block in a transaction that has the right to write from its beginning."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _size_bytes(database: sqlite3.Connection) -> int:
    """Bytes of a database's pages in use."""
    pages, free, page_bytes = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page_bytes)


def _packed(key: bytes, answer: bytes) -> bytes:
    """An answer with a checksum of it and its key, compressed where it is long."""
    check = zlib.crc32(answer, zlib.crc32(key)).to_bytes(4, "little")
    long = len(answer) >= _COMPRESSED_FROM_BYTES
    return check + (b"z" + zlib.compress(answer, 1) if long else b"-" + answer)


def _unpacked(key: bytes, packed: bytes) -> bytes | None:
    """The answer in what `_packed` has made; None where it is damaged."""
    try:
        answer = zlib.decompress(packed[5:]) if packed[4:5] == b"z" else packed[5:]
    except (zlib.error, TypeError):
        return None
    return answer if zlib.crc32(answer, zlib.crc32(key)).to_bytes(4, "little") == packed[:4] else None
