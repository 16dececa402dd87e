"""The exchange of rank 0's address and of the shared secret among ranks that a launcher has started.

A launcher gives only an address, so whoever answers there must prove that it knows the secret. On several hosts, users
set the secret in BATCHGEN_SECRET or BATCHGEN_SECRET_FILE. On one host, rank 0 writes its port and a new secret to a
file that only this user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.core.atomic_file import write_atomically
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.private_files import open_regular, runtime_folder
from batchgen.distributed.launch import LOOPBACK, SECRET, SECRET_FILE, Rank, is_loopback

if TYPE_CHECKING:
    from torch.distributed import Store

_LEAST_CHARACTERS = 32
_MOST_BYTES = 4096  # of a file with a secret
_MAKE_ONE = "`openssl rand -hex 32` makes one"
_KEY = "batchgen/rank-0"  # of the launcher's store: where rank 0 is


@dataclass(frozen=True)
class Found:
    """The published address of rank 0, and the secret that it must know.

    Attributes:
        host: Host of rank 0.
        port: Port at which rank 0 accepts connections.
        secret: The secret of the job.
    """

    host: str
    port: int
    secret: bytes


def new_secret() -> bytes:
    """A new random secret for one job."""
    return secrets.token_hex(32).encode()


def secret_of_user(environment: Mapping[str, str] | None = None) -> bytes | None:
    """The secret that the user, or the process that has started this one, has set; None where there is none.

    Raises:
        InputError: The secret is too short, or others can read its file.
    """
    environment = os.environ if environment is None else environment
    if path := environment.get(SECRET_FILE):
        text, name = _text_of(Path(path)), f"{SECRET_FILE} {path}"
    elif SECRET in environment:
        text, name = environment[SECRET], SECRET
    else:
        return None
    if len(text.strip()) < _LEAST_CHARACTERS:
        raise InputError(f"{name} has fewer than {_LEAST_CHARACTERS} characters: {_MAKE_ONE}")
    return text.strip().encode()


def _text_of(path: Path) -> str:
    try:
        with open(open_regular(path.resolve(), os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES)
        text = content.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(f"{SECRET_FILE} {path} cannot be read ({reason}): {_MAKE_ONE}") from error
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"{SECRET_FILE} {path} is not this user's alone: chown it to yourself, and chmod 600")
    return text


class Meeting:
    """The exchange of rank 0's address and secret, seen from one rank."""

    def __init__(self, place: Rank) -> None:
        """Prepare the exchange.

        Args:
            place: This process's place in the group.

        Raises:
            InputError: Ranks on several hosts have no secret.
        """
        self._place, self._secret = place, secret_of_user()
        self._by_file = self._secret is None
        if self._by_file and not place.on_one_host:
            raise InputError(
                f"ranks on several hosts (MASTER_ADDR is {place.host}) need a secret: give all of them the same one in"
                f" {SECRET}, or in a file of mode 600 that {SECRET_FILE} names; {_MAKE_ONE} (on one host:"
                " MASTER_ADDR=127.0.0.1)"
            )
        if place.rank == 0 and not place.on_one_host and is_loopback(place.host):
            raise InputError(
                f"MASTER_ADDR {place.host} is this host's own loopback address, which no other host reaches: give the"
                " address or name of rank 0's host"
            )

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which rank 0 accepts connections; port 0 (any) where MASTER_PORT is the store's port."""
        host = LOOPBACK if self._by_file else self._place.host
        return host, 0 if self._place.has_store else self._place.port

    @property
    def secret(self) -> bytes:
        """The secret that the other ranks must know; called by rank 0."""
        if self._secret is None:
            self._secret = new_secret()
        return self._secret

    def announce(self, port: int, within_s: float) -> None:
        """Publish rank 0's port to the other ranks; called by rank 0.

        Args:
            port: The port.
            within_s: Timeout of the launcher's store in seconds, where there is such a store.

        Raises:
            BatchgenError: The port cannot be published.
        """
        place = self._place
        if self._by_file:
            content = json.dumps({"port": port, "secret": self.secret.decode()}).encode()
            try:
                write_atomically(self._path(), content, mode=0o600)
            except OSError as error:
                raise BatchgenError(
                    f"cannot write {error.filename}: {error.strerror}: set TMPDIR, or {SECRET}"
                ) from error
        elif place.has_store:
            try:
                self._store(within_s).set(_KEY, f"{place.host} {port}")
            except RuntimeError as error:
                first_line = str(error).splitlines()[0]
                raise BatchgenError(
                    f"rank 0 cannot reach the launcher's store at {place.host}:{place.port}: {first_line}"
                ) from error

    def find(self, within_s: float) -> Found | None:
        """Find the address of rank 0 and the secret; None where rank 0 has not published them yet.

        Args:
            within_s: Timeout of the launcher's store in seconds, where there is such a store.
        """
        place = self._place
        if self._by_file:
            with contextlib.suppress(
                OSError, ValueError, LookupError, TypeError, AttributeError
            ):  # it is not there yet
                with open(open_regular(self._path(), os.O_RDONLY), "rb") as file:
                    found = json.loads(file.read(_MOST_BYTES))
                return Found(LOOPBACK, int(found["port"]), found["secret"].encode())
            return None
        if not place.has_store:
            return Found(place.host, place.port, self.secret)
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # the store is torch's, and it is not known who has written there
            host, port = self._store(within_s).get(_KEY).decode().split()
            return Found(host, int(port), self.secret)
        return None

    def _path(self) -> Path:
        """The path of the file for this launch, in a folder that only this user can write to."""
        key = hashlib.sha256(f"{self._place.host} {self._place.port} {self._place.run}".encode()).hexdigest()
        return runtime_folder() / f"ranks-{key[:16]}.json"

    def _store(self, timeout_s: float) -> Store:
        """Connect to the launcher's key-value store. Raises RuntimeError."""
        import torch.distributed as dist

        timeout = timedelta(seconds=max(0.01, timeout_s))
        return dist.TCPStore(
            self._place.host, self._place.port, is_master=False, wait_for_workers=False, timeout=timeout
        )

    def end(self) -> None:
        """Remove the published secret, once all ranks are connected or none is waited for; called by rank 0."""
        if self._by_file:
            with contextlib.suppress(OSError):
                self._path().unlink(missing_ok=True)
