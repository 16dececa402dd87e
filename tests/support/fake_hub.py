"""A hub of models on this machine: a web server that answers as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A repository of the hub.

    Attributes:
        folder: Its files.
        revisions: Names of its one commit, besides the commit itself.
        gated: Whether files are for those who have asked for access.
        private: Whether nobody is to know that it is there.
        cut_at: Byte of a file at which connections break.
        cuts: Number of connections that are still to break there.
    """

    folder: Path
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    private: bool = False
    cut_at: int = 0
    cuts: int = 0

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.folder).encode()).hexdigest()

    def files(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())


@dataclass
class Hub:
    """The hub.

    Attributes:
        url: Address of the server.
        repositories: Its repositories by name.
        sent: For each answer with a file's content: name of the file, first byte, number of bytes sent.
    """

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    sent: list[tuple[str, int, int]] = field(default_factory=list)

    def sent_bytes(self, suffix: str) -> int:
        """Bytes that were sent of all files with a suffix."""
        return sum(count for name, _, count in self.sent if name.endswith(suffix))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(body)

    def do_GET(self) -> None:
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        path = urlsplit(self.path).path
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path)
        if match:
            revision, folder = unquote(match[3] or "main"), unquote(match[4] or "")
            return self._api(match[1], match[2] or "revision", revision, folder, body)
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        if match:
            return self._file(match[1], unquote(match[2]), unquote(match[3]))
        return self._refuse(404, "RepoNotFound")

    def _repository(self, name: str, revision: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None or found.private:
            self._refuse(401, "RepoNotFound")
        elif revision not in (*found.revisions, found.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return found
        return None

    def _api(self, name: str, what: str, revision: str, folder: str, body: bytes) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        if what == "revision":
            names = [{"rfilename": file} for file in found.files()]
            self._json(
                {"id": name, "modelId": name, "sha": found.commit, "siblings": names, "tags": [], "downloads": 0}
            )
            return
        inside = [file for file in found.files() if file.startswith(f"{folder}/" if folder else "")]
        wanted = json.loads(body)["paths"] if what == "paths-info" else inside
        self._json([_entry(found.folder / file, file) for file in wanted if (found.folder / file).is_file()])

    def _file(self, name: str, revision: str, file: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        if found.gated:
            self._refuse(403, "GatedRepo")
            return
        path = found.folder / file
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first = int(match[1]) if match else 0
        stop = min(int(match[2]) + 1, len(content)) if match and match[2] else len(content)
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{_sha256(path)}"')
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - first))
        if match:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        part = content[first:stop]
        if found.cuts and stop > found.cut_at:
            found.cuts -= 1
            part, self.close_connection = part[: max(0, found.cut_at - first)], True
        self.hub.sent.append((file, first, len(part)))
        self.wfile.write(part)

    def _json(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", kind)
        self.send_header("X-Error-Message", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(path: Path, name: str) -> dict[str, Any]:
    size, digest = path.stat().st_size, _sha256(path)
    entry = {"type": "file", "path": name, "size": size, "oid": digest[:40]}
    if path.suffix in (".safetensors", ".gguf"):
        entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def serve(hub_class: type[Hub] = Hub) -> tuple[Hub, http.server.ThreadingHTTPServer]:
    """Start a hub without repositories; the server is to be shut down."""
    handler = type("Handler", (_Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.hub = hub_class(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return handler.hub, server
