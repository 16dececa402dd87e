"""The HTTP endpoint: OpenAI's files, batches, chat completions and completions, on the loopback interface.

Whoever is on the machine can reach it, and a page in a browser can too. So each request has to give the key, names the
loopback interface as its host, and comes from no page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import resource
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import BodyPartReader, web

from batchgen.core.errors import InputError, one_line
from batchgen.core.typed_json import check_nesting
from batchgen.dataset.openai_batch import CHAT_URL, COMPLETIONS_URL
from batchgen.serve.storage import Batch, Storage
from batchgen.serve.worker import Chat, Worker, refusal

logger = logging.getLogger(__name__)
# Of requests that are no HTTP: anybody may send them, and each would be a traceback. Faults of the server come to the
# other one.
_PROTOCOL = logging.getLogger(f"{__name__}.protocol")
_PROTOCOL.setLevel(logging.CRITICAL)

HOST = "127.0.0.1"
_HOSTS = (HOST, "localhost", "[::1]")
_MOST_BODY_BYTES = 64 << 20  # of a request that is no upload
_CHUNK_BYTES = 1 << 20
_MOST_METADATA = 1 << 14  # characters; 16 texts of 512, as OpenAI takes them, are fewer
_WINDOW = "24h"
_AS_IT_IS = ("binary", "8bit", "7bit")  # transfer encodings
_MOST_OPEN_FILES, _FILES_PER_CONNECTION = 1 << 16, 4  # a connection, a file of its own, and as many for jobs
# What is raised where a body is not what its headers say.
_UNREADABLE = (ValueError, LookupError, RecursionError, web.RequestPayloadError)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """The HTTP endpoint, in a thread of its own."""

    def __init__(self, storage: Storage, worker: Worker, model: str, port: int) -> None:
        """Listen.

        Args:
            storage: Files and batches.
            worker: Worker that runs batches and chats.
            model: Name of the model.
            port: Port of the loopback interface; 0: any free one.

        Raises:
            InputError: The port is taken, or is none.
        """
        if not 0 <= port < 1 << 16:
            raise InputError(f"--port must be between 0 and 65535, not {port}")
        self._storage, self._worker, self._model = storage, worker, model
        self._key = storage.key().encode()
        self._strangers: WeakKeyDictionary[asyncio.BaseTransport, None] = WeakKeyDictionary()  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batchgen-http", daemon=True)
        self._thread.start()
        try:
            self._runner, self._server, self.port = self._call(self._listen(port))
        except OSError as error:
            self._stop()
            raise InputError(f"--port {port} cannot be listened on ({error.strerror}): give another one") from error

    @property
    def url(self) -> str:
        """The address that clients take as their base URL."""
        return f"http://{HOST}:{self.port}/v1"

    def close(self) -> None:
        """Listen no longer; clients that wait lose their connection."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._call(self._runner.cleanup())
        self._stop()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, port: int) -> tuple[web.AppRunner, asyncio.Server, int]:
        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/files", self._upload),
                web.get("/v1/files", self._list_files),
                web.get("/v1/files/{id}", self._get_file),
                web.get("/v1/files/{id}/content", self._content),
                web.delete("/v1/files/{id}", self._delete_file),
                web.post("/v1/batches", self._create_batch),
                web.get("/v1/batches", self._list_batches),
                web.get("/v1/batches/{id}", self._get_batch),
                web.post("/v1/batches/{id}/cancel", self._cancel_batch),
                web.post(CHAT_URL, self._complete),
                web.post(COMPLETIONS_URL, self._complete),
            ]
        )
        # The handler of a client that has gone is cancelled: its chat is not run.
        runner = web.AppRunner(app, access_log=None, logger=_PROTOCOL, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        handlers, most = runner.server, _most_connections()
        assert handlers is not None, "the runner is set up"
        try:
            door = partial(_Door, handlers, most, self._strangers)
            server = await asyncio.get_running_loop().create_server(door, HOST, port)
        except OSError:
            await runner.cleanup()
            raise
        return runner, server, server.sockets[0].getsockname()[1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer requests of clients that have the key; errors become OpenAI's."""
        host = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
        if host not in _HOSTS or "Origin" in request.headers:
            return _error(403, "only programs of this machine are answered, at 127.0.0.1 or localhost")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._key):
            return _error(401, "the key is wrong: it is in the file api_key of the server's --directory")
        if request.transport is not None:
            self._strangers.pop(request.transport, None)
        try:
            return await handler(request)
        except _Refused as refused:
            return _error(refused.status, str(refused))
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except ConnectionError:  # the client has gone
            raise
        except OSError as error:
            logger.warning("%s %s failed: %s", request.method, one_line(request.path), error)
            return _error(500, f"the server's directory cannot be used: {error.strerror or error}")
        except Exception:
            logger.exception("%s %s failed", request.method, one_line(request.path))
            return _error(500, "the server has a fault, and its log has the details")

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "batchgen"}
        return web.json_response({"object": "list", "data": [model]})

    async def _upload(self, request: web.Request) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise _Refused(400, "a file is uploaded as multipart/form-data")
        purpose, filename = None, None
        file_id, path = self._storage.new_file_path()
        try:
            form = await request.multipart()
            while (part := await form.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise _Refused(400, "a part of the form has parts itself")
                if part.name == "purpose":
                    purpose = (await part.text())[:100]
                elif part.name == "file":
                    if filename is not None:
                        raise _Refused(400, "the form has several files: upload one at a time")
                    if (encoding := part.headers.get("Content-Transfer-Encoding", "binary").lower()) not in _AS_IT_IS:
                        raise _Refused(400, f"the file is in {encoding}: send it as it is")
                    filename = part.filename or "input.jsonl"
                    with path.open("xb") as content:
                        while chunk := await part.read_chunk(_CHUNK_BYTES):
                            content.write(chunk)
            if filename is None:
                raise _Refused(400, "the form has no file")
            if purpose != "batch":
                raise _Refused(400, f"purpose must be batch, not {purpose!r}")
            file = self._storage.add_file(file_id, filename, purpose)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, _UNREADABLE):
                raise _Refused(400, f"the form cannot be read: {one_line(error)}") from error
            raise
        return web.json_response(file.to_openai())

    async def _list_files(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        files = [f.to_openai() for f in self._storage.files() if purpose in (None, f.purpose)]
        return _listed(request, files)

    async def _get_file(self, request: web.Request) -> web.Response:
        return web.json_response(self._file(request).to_openai())

    async def _content(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._storage.content_path(self._file(request).id))

    async def _delete_file(self, request: web.Request) -> web.Response:
        file_id = self._file(request).id
        if any(batch.input_file_id == file_id for batch in self._storage.waiting()):
            raise _Refused(409, f"a batch that has not ended reads {file_id}: cancel the batch first")
        self._storage.remove_file(file_id)
        return web.json_response({"id": file_id, "object": "file", "deleted": True})

    async def _create_batch(self, request: web.Request) -> web.Response:
        body = await _json(request)
        file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
        if not isinstance(file_id, str) or self._storage.file(file_id) is None:
            raise _Refused(404, f"there is no file {file_id!r}")
        if endpoint not in (CHAT_URL, COMPLETIONS_URL):
            raise _Refused(400, f"endpoint must be {CHAT_URL} or {COMPLETIONS_URL}, not {endpoint!r}")
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _Refused(400, "metadata must be an object of texts")
        if len(json.dumps(metadata)) > _MOST_METADATA:
            raise _Refused(400, f"metadata must have at most {_MOST_METADATA:,} characters")
        window = str(body.get("completion_window") or _WINDOW)[:100]
        return web.json_response(self._worker.add_batch(file_id, endpoint, window, metadata).to_openai())

    async def _list_batches(self, request: web.Request) -> web.Response:
        return _listed(request, [self._worker.progress(batch).to_openai() for batch in self._storage.batches()])

    async def _get_batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._worker.progress(self._batch(request)).to_openai())

    async def _cancel_batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._worker.cancel(self._batch(request)).to_openai())

    async def _complete(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if body.get("stream"):
            raise _Refused(400, "stream is not supported: a whole batch is answered at once")
        future: asyncio.Future[tuple[int, dict[str, Any]]] = self._loop.create_future()

        def set_answer(status: int, answered: dict[str, Any]) -> None:
            if not future.done():
                future.set_result((status, answered))

        def answer(status: int, answered: dict[str, Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                self._loop.call_soon_threadsafe(set_answer, status, answered)

        self._worker.add_chat(Chat(request.path, body, answer, lambda: not future.done()))
        status, answered = await future
        return web.json_response(answered, status=status)

    def _file(self, request: web.Request) -> Any:
        if (file := self._storage.file(request.match_info["id"])) is None:
            raise _Refused(404, f"there is no file {request.match_info['id']!r}")
        return file

    def _batch(self, request: web.Request) -> Batch:
        if (batch := self._storage.batch(request.match_info["id"])) is None:
            raise _Refused(404, f"there is no batch {request.match_info['id']!r}")
        return batch


class _Refused(Exception):
    """A request that is not done. status: HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Door(asyncio.Protocol):
    """Lets a connection in, in place of another where there are too many: anybody on this machine may connect.

    Jobs open files too, so connections may not have all of them. Clients that have given the key keep theirs.
    """

    def __init__(self, handlers: web.Server, most: int, strangers: MutableMapping[asyncio.BaseTransport, None]) -> None:
        """Wait for the connection.

        Args:
            handlers: Maker of handlers.
            most: The most connections at a time.
            strangers: Connections that have not given the key, the oldest first.
        """
        self._handlers, self._most, self._strangers = handlers, most, strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the connection to a handler, or end it."""
        assert isinstance(transport, asyncio.Transport), "it is one of TCP"
        if len(self._handlers.connections) >= self._most:
            oldest = next((each for each in self._strangers if not each.is_closing()), transport)
            assert isinstance(oldest, asyncio.Transport), "it is one of TCP"
            oldest.abort()
            if oldest is transport:
                return
        self._strangers[transport] = None
        handler = self._handlers()
        transport.set_protocol(handler)
        handler.connection_made(transport)


def _most_connections() -> int:
    """Connections at a time, of a process that may have as many files open as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most // _FILES_PER_CONNECTION


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        text = await request.text()
        body = json.loads(text)
        check_nesting({"body": body}, text)  # as the line of a batch has it
    except _UNREADABLE as error:
        raise _Refused(400, f"the body cannot be read: {one_line(error)}") from None
    if not isinstance(body, dict):
        raise _Refused(400, "the body is not a JSON object")
    return body


def _listed(request: web.Request, objects: list[dict[str, Any]]) -> web.Response:
    """A page of a list, by the parameters `after` and `limit`."""
    after, limit = request.query.get("after"), request.query.get("limit", "100")
    if not limit.isdecimal() or len(limit) > 5 or not 0 < int(limit) <= 10_000:
        raise _Refused(400, f"limit must be between 1 and 10000, not {limit!r}")
    ids = [one["id"] for one in objects]
    # The newest are first, and later ids are greater: the one that is named may have been deleted.
    begin = 0 if after is None else sum(one >= after for one in ids)
    page = objects[begin : begin + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = begin + len(page) < len(objects)
    return web.json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def _error(status: int, message: str) -> web.Response:
    status, body = refusal(status, message)
    return web.json_response(body, status=status)
