"""The directory of a batch endpoint: uploaded files, and batches with their outputs.

A batch and its output are written whole or not at all, so that a server that was killed goes on with what it has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.core.atomic_file import storage_error, write_atomically
from batchgen.core.errors import InputError, one_line
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.private_files import why_untrusted
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.output.run_directory import errors_path, run_directory

logger = logging.getLogger(__name__)

ENDED = ("completed", "failed", "cancelled")
WITHOUT_JOB = ("completed", "cancelled")  # batches that need what their jobs have written no longer
_KEY = "api_key"
_OUTPUT = "batch_output"  # purpose of a file that a batch has written
_FILE_ID, _BATCH_ID = re.compile("file-[0-9a-f]{24}"), re.compile("batch_[0-9a-f]{24}")


@dataclass(frozen=True)
class StoredFile:
    """A file that was uploaded, or that a batch has written.

    Attributes:
        id: Its id, "file-" and 24 hexadecimal digits.
        filename: Its name, as the client gave it.
        purpose: "batch" or "batch_output".
        created_at: Time at which it was written, in seconds since 1970.
        size_bytes: Its size.
    """

    id: str
    filename: str
    purpose: str
    created_at: int
    size_bytes: int

    def to_openai(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True)
class Batch:
    """A batch.

    Attributes:
        id: Its id, "batch_" and 24 hexadecimal digits.
        input_file_id: Id of the file of its requests.
        endpoint: Endpoint that all its requests are for.
        completion_window: Time within which the client wants it, which decides nothing.
        created_at: Time at which it was made, in seconds since 1970.
        metadata: Values that the client gave.
        status: "validating" (it waits), "in_progress", "cancelling", or one of `ENDED`.
        times: Time of each further status, by its name.
        total, completed, failed: Numbers of its requests.
        output_file_id, error_file_id: Ids of the files of answers and of requests that failed; None: there is none.
        error: The reason why it failed; None: it has not.
        devices_lost: Number of times that a GPU could be used no longer while it ran.
    """

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    status: str = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str | None = None
    devices_lost: int = 0

    def becomes(self, status: str, **changes: Any) -> Batch:
        """The batch in another status, from now on."""
        times = {**self.times, f"{status}_at": int(time.time())}
        return replace(self, status=status, times=times, **changes)

    def to_openai(self) -> dict[str, Any]:
        """The batch object of OpenAI's API."""
        errors = None if self.error is None else {"object": "list", "data": [{"code": "failed", "message": self.error}]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{f"{status}_at": self.times.get(f"{status}_at") for status in ("in_progress", "cancelling", *ENDED)},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": dict(self.metadata),
        }


class Storage:
    """The directory of a batch endpoint, which one server at a time may have.

    Any thread may call its methods, but only one at a time changes a batch.
    """

    def __init__(self, directory: Path) -> None:
        """Open a directory, which is made if it is not there.

        Args:
            directory: The directory. Only this user may write to it.

        Raises:
            InputError: Another server has it, or another user can write to it.
            BatchgenError: It cannot be written.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if reason := why_untrusted(directory, directory):
                raise InputError(f"--directory {directory} is not used, as {reason}: give another one")
            for name in ("files", "batches", "chats"):
                (directory / name).mkdir(mode=0o700, exist_ok=True)
            self._lock = lock_file(directory / "lock")
        except LockHeld as error:
            raise InputError(f"{error.holder} serves --directory {directory}: stop it, or give another one") from error
        except OSError as error:
            raise storage_error(error, f"write --directory {directory}") from error
        self._directory = directory
        self._broken: set[Path] = set()  # that a warning has named
        self.key_path = directory / _KEY
        self.chats = directory / "chats"  # of requests that are gathered, for as long as they run
        self._ended: dict[str, Batch] = {}  # which change no more, and are not read again and again
        for stale in self.chats.iterdir():
            shutil.rmtree(stale, ignore_errors=True)
        self._remove_remains()

    def close(self) -> None:
        """Let another server have the directory."""
        os.close(self._lock)

    def key(self) -> str:
        """The key that clients have to give: that of the directory, which is made if it is not there.

        Raises:
            InputError: The file has no key, or others may read it.
            BatchgenError: It cannot be written.
        """
        path = self.key_path
        if not path.exists():
            try:
                write_atomically(path, f"sk-{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
            except OSError as error:
                raise storage_error(error, f"write --directory {self._directory}") from error
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise InputError(f"{path} is not this user's alone: remove it, and a new key is made")
        key = path.read_text(errors="replace").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise InputError(f"{path} has no key: remove it, and a new one is made")
        return key

    def new_file_path(self) -> tuple[str, Path]:
        """The id of a new file, and the path that it is to be written to before `add_file`."""
        file_id = f"file-{_new_digits()}"
        return file_id, self.content_path(file_id)

    def content_path(self, file_id: str) -> Path:
        return self._directory / "files" / f"{file_id}.jsonl"

    def add_file(self, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Register a file whose content is at `content_path`."""
        size = self.content_path(file_id).stat().st_size
        stored = StoredFile(file_id, filename, purpose, int(time.time()), size)
        write_atomically(self._of_file(file_id), json.dumps(asdict(stored)).encode())
        return stored

    def file(self, file_id: str) -> StoredFile | None:
        """A file by its id; None: there is none."""
        return self._read(self._of_file(file_id), StoredFile) if _FILE_ID.fullmatch(file_id) else None

    def files(self) -> list[StoredFile]:
        """All files, the newest first."""
        found = (self.file(path.stem) for path in (self._directory / "files").glob("*.json"))
        return sorted((one for one in found if one), key=lambda one: one.id, reverse=True)

    def remove_file(self, file_id: str) -> None:
        self._of_file(file_id).unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)

    def add_batch(
        self, input_file_id: str, endpoint: str, completion_window: str, metadata: Mapping[str, str]
    ) -> Batch:
        """Make a batch, which waits for its turn."""
        batch_id = f"batch_{_new_digits()}"
        folder = self._directory / "batches" / batch_id
        folder.mkdir(mode=0o700)
        batch = Batch(batch_id, input_file_id, endpoint, completion_window, time.time_ns() // 10**9, metadata)
        try:
            self.put(batch)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return batch

    def put(self, batch: Batch) -> None:
        """Keep the state of a batch."""
        write_atomically(self._of_batch(batch.id), json.dumps(asdict(batch)).encode())
        if batch.status in ENDED:
            self._ended[batch.id] = batch

    def batch(self, batch_id: str) -> Batch | None:
        """A batch by its id; None: there is none."""
        if batch_id in self._ended or not _BATCH_ID.fullmatch(batch_id):
            return self._ended.get(batch_id)
        batch: Batch | None = self._read(self._of_batch(batch_id), Batch)
        if batch is not None and batch.status in ENDED:
            self._ended[batch_id] = batch
        return batch

    def batches(self) -> list[Batch]:
        """All batches, the newest first."""
        found = (self.batch(path.name) for path in (self._directory / "batches").iterdir())
        return sorted((one for one in found if one), key=lambda one: one.id, reverse=True)

    def waiting(self) -> Iterator[Batch]:
        """The batches that have not ended, the oldest first."""
        return (batch for batch in reversed(self.batches()) if batch.status not in ENDED)

    def output_path(self, batch_id: str) -> Path:
        """The path to which the job of a batch writes its answers."""
        return self._directory / "batches" / batch_id / "output.jsonl"

    def keep_outputs(self, batch: Batch) -> Batch:
        """Make files of what the job of a batch has written; returns the batch with their ids.

        Those of an attempt that a kill or a full disk has ended are removed first.
        """
        self._remove_outputs(batch.id)
        output = self.output_path(batch.id)
        ids: dict[str, Any] = {}
        for name, path in (("output_file_id", output), ("error_file_id", errors_path(output))):
            if path.exists() and path.stat().st_size:
                file_id, target = self.new_file_path()
                try:
                    _link_or_copy(path, target)  # not moved: killed here, the job of the batch is found complete again
                    self.add_file(file_id, f"{batch.id}_{path.name}", _OUTPUT)
                except BaseException:
                    self.remove_file(file_id)
                    raise
                ids[name] = file_id
        return replace(batch, **ids)

    def discard(self, batch_id: str) -> None:
        """Remove all that a batch has written."""
        self._remove_outputs(batch_id)
        self.remove_job(batch_id)

    def _remove_outputs(self, batch_id: str) -> None:
        for file in self.files():
            if file.purpose == _OUTPUT and file.filename.startswith(f"{batch_id}_"):
                self.remove_file(file.id)

    def remove_job(self, batch_id: str) -> None:
        """Remove what the job of a batch has written, which its files keep or nobody wants."""
        output = self.output_path(batch_id)
        for path in (output, errors_path(output)):
            path.unlink(missing_ok=True)
        shutil.rmtree(run_directory(output), ignore_errors=True)

    def _remove_remains(self) -> None:
        """Remove what a server that was killed has left of what it was writing or removing."""
        files, batches = self._directory / "files", self._directory / "batches"
        for unfinished in (*files.glob("*.tmp"), *batches.glob("*/batch.json.tmp")):
            unfinished.unlink()
        for content in files.glob("*.jsonl"):
            if not self._of_file(content.stem).exists():
                content.unlink()
        for folder in batches.iterdir():
            if not self._of_batch(folder.name).exists():
                shutil.rmtree(folder, ignore_errors=True)
        for batch in self.batches():
            if batch.status in WITHOUT_JOB:
                self.remove_job(batch.id)

    def _read(self, path: Path, kind: type) -> Any:
        """The value of a file of the directory; None: it is not there, or is broken and left alone."""
        try:
            return read_typed(kind, parse_json(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            if path not in self._broken:
                self._broken.add(path)
                logger.warning("%s is broken, and left out: %s", path, one_line(error))
            return None

    def _of_file(self, file_id: str) -> Path:
        return self._directory / "files" / f"{file_id}.json"

    def _of_batch(self, batch_id: str) -> Path:
        return self._directory / "batches" / batch_id / "batch.json"


def _new_digits() -> str:
    """The 24 hexadecimal digits of a new id; later ones are greater."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the filesystem has no hard links
        shutil.copyfile(source, target)
