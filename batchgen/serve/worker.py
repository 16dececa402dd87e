"""The work of a batch endpoint: batches and gathered chats are jobs of `batchgen run`, one after the other.

It runs in the main thread, so that an interrupt ends a job as it ends any other: finished rows are kept.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.core.atomic_file import is_full
from batchgen.core.card_errors import card_failure
from batchgen.core.digest import json_sha256
from batchgen.core.errors import BatchgenError, InputError, OtherSettings, TooManyFailed, reason_of
from batchgen.core.interrupts import keep
from batchgen.dataset.readers.json import looks_like_openai
from batchgen.job.options import JobOptions
from batchgen.job.run import run_job
from batchgen.job.session import Session
from batchgen.job.snapshot import SNAPSHOT_FILE
from batchgen.output.run_directory import errors_path, run_directory
from batchgen.serve.storage import ENDED, WITHOUT_JOB, Batch, Storage

logger = logging.getLogger(__name__)

_SETTLED_S = 0.05  # without a further chat: those that are there are run
_MOST_GATHERED_S = 1.0
_MOST_CHATS = 4096  # in a job
_TURN_S = 10.0  # that a batch has before it makes way for chats
_RETRY_S = 10.0  # until a batch is tried again that a full disk has stopped
_KEPT = "batches go on when it is started again"
_MOST_DEVICES_LOST = 2  # while a batch runs, before it is taken for the reason


@dataclass(frozen=True)
class Chat:
    """A request that a client waits for.

    Attributes:
        url: Its endpoint, "/v1/chat/completions" or "/v1/completions".
        body: Its body.
        answer: Function that takes the status and the body of the answer. Any thread may call it.
        wanted: Function that tells whether the client still waits.
    """

    url: str
    body: dict[str, Any]
    answer: Callable[[int, dict[str, Any]], None]
    wanted: Callable[[], bool]

    @cached_property
    def row_id(self) -> str:
        """The id by which random draws are keyed: with a seed the same request has the same answer, without one not."""
        return secrets.token_hex(12) if self.body.get("seed") is None else json_sha256([self.url, self.body])[:24]


class Worker:
    """Runs batches and chats.

    `add_chat`, `add_batch`, `cancel` and `close` may be called from any thread, `run` from one.
    """

    def __init__(self, options: JobOptions, storage: Storage) -> None:
        """Have nothing to do.

        Args:
            options: Options of all jobs, without input and output.
            storage: Files and batches.
        """
        # A request that cannot be run fails, and others go on; progress is in the batch.
        self._options = replace(options, progress="none", on_error="record", on_bad_line="skip")
        self._storage = storage
        self._session = Session(_KEPT)
        self._changed = threading.Condition()
        self._chats: list[Chat] = []
        self._newest_s = self._oldest_s = 0.0  # time.monotonic of the newest and the oldest waiting chat
        self._cancelled: set[str] = set()
        self._of_other_settings: set[str] = set()  # batches that only a server with those goes on with
        self._running: str | None = None  # id of the batch that runs
        self._batches_from_s = 0.0  # time.monotonic before which no batch is run
        self._closed = False

    @property
    def loads(self) -> int:
        """Number of times that the model was loaded."""
        return self._session.loads

    def add_chat(self, chat: Chat) -> None:
        """Let a request wait for the next job of chats."""
        with self._changed:
            self._newest_s = time.monotonic()
            if not self._chats:
                self._oldest_s = self._newest_s
            self._chats.append(chat)
            self._changed.notify()

    def add_batch(self, input_file_id: str, endpoint: str, completion_window: str, metadata: dict[str, str]) -> Batch:
        """Make a batch, which waits for its turn."""
        with self._changed:
            batch = self._storage.add_batch(input_file_id, endpoint, completion_window, metadata)
            self._changed.notify()
        return batch

    def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch; one that has ended stays as it is."""
        with self._changed:
            batch = self._storage.batch(batch.id) or batch
            if batch.status in (*ENDED, "cancelling"):
                return batch
            batch = batch.becomes("cancelling")
            if batch.id != self._running:
                self._end_cancelled(batch)
                return batch
            self._storage.put(batch)
            self._cancelled.add(batch.id)
            self._changed.notify()
        return batch

    def _end_cancelled(self, batch: Batch) -> None:
        """End a cancelled batch that does not run: first its files, which may be what fills the disk."""
        self._storage.discard(batch.id)
        self._put(batch.becomes("cancelled"))

    def progress(self, batch: Batch) -> Batch:
        """A batch with the numbers of its requests as its job last told."""
        if batch.status not in ("in_progress", "cancelling"):
            return batch
        try:
            told = json.loads((run_directory(self._storage.output_path(batch.id)) / SNAPSHOT_FILE).read_bytes())
        except (OSError, ValueError):
            return batch
        failed = told["rows_failed"]
        return replace(batch, total=told["rows"] or 0, completed=told["rows_done"] - failed, failed=failed)

    def run(self) -> None:
        """Do what there is to do until the worker is closed."""
        try:
            while True:
                keep(lambda: _KEPT)  # between jobs, each of which saves its rows first
                chats, batch = self._next()
                if chats:
                    self._run_chats(chats)
                elif batch is not None:
                    self._run_or_delay(batch)
                else:
                    return
        finally:
            self._session.close()

    def close(self) -> None:
        """Let `run` return after the job that it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next(self) -> tuple[list[Chat], Batch | None]:
        """The chats of the next job, or the next batch; neither: the worker is closed. It waits for them."""
        with self._changed:
            while not self._closed:
                self._chats = [chat for chat in self._chats if chat.wanted()]
                if self._chats:
                    now = time.monotonic()
                    left_s = min(self._newest_s + _SETTLED_S, self._oldest_s + _MOST_GATHERED_S) - now
                    if left_s <= 0 or len(self._chats) >= _MOST_CHATS:
                        chats, self._chats = self._chats[:_MOST_CHATS], self._chats[_MOST_CHATS:]
                        self._oldest_s = now
                        return chats, None
                    self._changed.wait(left_s)
                    continue
                due = time.monotonic() >= self._batches_from_s
                if due and (batch := next(filter(self._can_run, self._storage.waiting()), None)) is not None:
                    self._running = batch.id
                    return [], batch
                self._changed.wait(1.0)  # and not for ever: signals are seen between
            return [], None

    def _can_run(self, batch: Batch) -> bool:
        return batch.id not in self._of_other_settings

    def _run_chats(self, chats: list[Chat]) -> None:
        """Run chats as one job, and answer them. Where one of them lets the job be refused, the others are run."""
        answers: dict[str, tuple[int, dict[str, Any]]] = {}
        unanswered = refusal(400, "the request cannot be read")
        try:
            answers = self._answers_of(chats)
        except InputError as error:
            if len(chats) > 1:
                self._run_chats(chats[: len(chats) // 2])
                self._run_chats(chats[len(chats) // 2 :])
                return
            unanswered = refusal(400, str(error))
        except (BatchgenError, OSError) as error:
            logger.warning("%d chats have no answer: %s", len(chats), reason_of(error))
            unanswered = refusal(500, reason_of(error))
        except Exception as error:
            if _device_error() is None:
                logger.exception("%d chats have no answer", len(chats))
            unanswered = refusal(500, reason_of(error))
        for chat in chats:
            status, body = answers.get(chat.row_id, unanswered)
            if status == 200:  # a batch's are the same whenever it is run, a server's are not
                kind = body["id"].partition("-")[0]
                now = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time())}
                body = body | now | {"model": chat.body.get("model") or body["model"]}
            chat.answer(status, body)
        if (lost := _device_error()) is not None:
            raise lost

    def _answers_of(self, chats: list[Chat]) -> dict[str, tuple[int, dict[str, Any]]]:
        """The status and the body of the answer to each chat, by its row id."""
        folder = self._storage.chats / f"{time.time_ns()}"
        folder.mkdir(mode=0o700)
        try:
            source, output = folder / "input.jsonl", folder / "output.jsonl"
            with source.open("w") as file:
                for chat in {chat.row_id: chat for chat in chats}.values():
                    line = {"custom_id": chat.row_id, "method": "POST", "url": chat.url, "body": chat.body}
                    file.write(json.dumps(line) + "\n")
            self._session.should_stop = lambda: False
            self._run_job(source, output)
            return _answers_in(output) | _answers_in(errors_path(output))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_or_delay(self, batch: Batch) -> None:
        """Run a batch; where the disk is full, it is tried again later."""
        try:
            self._run_batch(batch)
        except OSError as error:
            logger.warning("%s waits, and is tried again every %.0f s: %s", batch.id, _RETRY_S, reason_of(error))
            self._batches_from_s = time.monotonic() + _RETRY_S
        finally:
            with self._changed:
                self._running = None

    def _run_batch(self, batch: Batch) -> None:
        """Run a batch, until it ends or makes way for chats."""
        if batch.status == "cancelling":  # it ran meanwhile, or in a server that was killed
            self._end_cancelled(batch)
            return
        if batch.status != "in_progress":
            batch = batch.becomes("in_progress")
            self._put(batch)
        began_s: float | None = None

        def should_stop() -> bool:
            nonlocal began_s
            if began_s is None:  # not before: it has loaded the model, and computed nothing
                began_s = time.monotonic()
            makes_way = bool(self._chats) and time.monotonic() - began_s >= _TURN_S
            return makes_way or batch.id in self._cancelled or self._closed

        self._session.should_stop = should_stop
        source, output = self._storage.content_path(batch.input_file_id), self._storage.output_path(batch.id)
        try:
            if not looks_like_openai(str(source), self._options.on_bad_line):
                raise InputError("no line of the file is a request with custom_id, method, url and body")
            report = self._run_job(source, output)
        except OSError:
            raise
        except OtherSettings as error:
            advice = "start the server with the old settings to go on with it, or cancel it"
            logger.warning("%s waits: %s: %s", batch.id, advice, reason_of(error))
            self._of_other_settings.add(batch.id)
            return
        except Exception as error:
            if isinstance(cause := error.__cause__, OSError) and is_full(cause):
                raise cause from None
            if (lost := _device_error()) is not None:
                self._put(_after_loss(batch, lost))
                raise lost from error
            if not isinstance(error, BatchgenError):
                logger.exception("%s failed", batch.id)
            self._put(batch.becomes("failed", error=reason_of(error)))
            return
        batch = replace(batch, total=report["rows"], completed=report["rows_ok"], failed=report["rows_failed"])
        if report["state"] != "stopped":
            self._put(self._storage.keep_outputs(batch).becomes("completed"))
        elif batch.id in self._cancelled:
            self._put(batch.becomes("cancelled"))

    def _run_job(self, source: Path, output: Path) -> dict[str, Any]:
        """Run a job over a file of requests; returns its report. Failed rows are answered as well as others are."""
        try:
            return run_job(replace(self._options, input=str(source), output=str(output)), self._session)
        except TooManyFailed as error:
            return error.report

    def _put(self, batch: Batch) -> None:
        """Keep the state of a batch. One that was cancelled meanwhile is so until it ends."""
        with self._changed:
            if batch.id in self._cancelled:
                if batch.status not in ENDED:
                    return
                stored = self._storage.batch(batch.id) or batch
                batch = replace(batch, times={**stored.times, **batch.times})
            self._storage.put(batch)
            self._cancelled.discard(batch.id)
        if batch.status in WITHOUT_JOB:
            self._storage.remove_job(batch.id)


def _device_error() -> BatchgenError | None:
    """The error that ends the server where its process can use its GPU no longer; None: it can, or has none.

    All jobs to come would fail, and only another process has a CUDA context that is whole.
    """
    failure = card_failure()
    return None if failure is None else BatchgenError(f"{failure}; {_KEPT}")


def _after_loss(batch: Batch, lost: BatchgenError) -> Batch:
    """A batch after the GPU was lost while it ran: it waits for the next start, but for one that loses each GPU."""
    batch = replace(batch, devices_lost=batch.devices_lost + 1)
    if batch.devices_lost < _MOST_DEVICES_LOST:
        return batch
    return batch.becomes("failed", error=f"{batch.devices_lost} times, while this batch ran, {reason_of(lost)}")


def _answers_in(path: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """The status and the body of each answer in a file of answers or of errors, by its custom_id."""
    if not path.exists():
        return {}
    with path.open() as file:
        lines = map(json.loads, file)
        return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}


def refusal(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer to a request that was not run, in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": None}}
