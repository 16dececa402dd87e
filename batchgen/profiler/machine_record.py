"""The record of a machine, one small file: probes and jobs add what they show, and later jobs begin with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.knowledge import Knowledge
from batchgen.core.private_files import why_untrusted
from batchgen.core.text_file import read_text
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.profiler.transfer import DiskRates

logger = logging.getLogger(__name__)

_VERSION = 1
# A process that holds the lock needs a few milliseconds. What cannot be kept is learned by a later job.
_TRIES, _PAUSE_S = 20, 0.02
_MOST_TABLES = _MOST_DISKS = 16


@dataclass(frozen=True)
class MachineRecord:
    """The knowledge of a machine that earlier probes and jobs have left.

    Attributes:
        knowledge: Knowledge of the rates, by the name of the table that the factors belong to.
        disks: Rates of the disks of directories.
        version: Version of the file.
    """

    knowledge: Mapping[str, Knowledge] = field(default_factory=dict)
    disks: Mapping[str, DiskRates] = field(default_factory=dict)
    version: int = _VERSION

    def with_knowledge(self, known: Knowledge) -> MachineRecord:
        """The record with what is known of one table replaced."""
        kept = {table: other for table, other in self.knowledge.items() if table != known.table}
        return replace(self, knowledge=dict([*kept.items(), (known.table, known)][-_MOST_TABLES:]))

    def with_disk(self, directory: Path, rates: DiskRates) -> MachineRecord:
        """The record with the rates of one directory's disk replaced."""
        kept = {name: other for name, other in self.disks.items() if name != str(directory)}
        return replace(self, disks=dict([*kept.items(), (str(directory), rates)][-_MOST_DISKS:]))


def record_path(cache_dir: Path, identity: Mapping[str, object]) -> Path:
    """The file of a machine's record.

    Args:
        cache_dir: The cache directory.
        identity: Values that identify the machine.
    """
    return cache_dir / "profiles" / f"machine-{json_sha256(dict(identity))[:16]}.json"


def read_record(path: Path) -> MachineRecord:
    """The record in a file; an empty one where there is none that can be used."""
    try:
        if not path.exists() or why_untrusted(path, path.parent.parent):
            return MachineRecord()
        record: MachineRecord = read_typed(MachineRecord, parse_json(read_text(path)), "the record")
        is_usable = all(min(rates.read_bytes_per_s, rates.write_bytes_per_s) > 0 for rates in record.disks.values())
        return record if is_usable and record.version == _VERSION else MachineRecord()
    except (OSError, ValueError):
        return MachineRecord()


def update_record(path: Path, change: Callable[[MachineRecord], MachineRecord]) -> None:
    """Change a machine's record, whatever other jobs add to it at the same time.

    What cannot be kept is logged, and lost.

    Args:
        path: The file.
        change: Function from the record as it is now to the new one.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            content = json.dumps(asdict(change(read_record(path)))).encode()
            write_atomically(path, content, contended=True, mode=0o600)
    except (OSError, LockHeld) as error:
        logger.debug("what was learned of this machine is not kept in %s (%s)", path, error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    for attempt in range(_TRIES):
        try:
            descriptor = lock_file(path)
            break
        except LockHeld:
            if attempt == _TRIES - 1:
                raise
            time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(descriptor)
