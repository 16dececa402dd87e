"""This machine's profile, measured in a process of its own.

What measuring takes of the memory is gone afterwards, and it keeps to a budget that the job's process is a part of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.frames import framed, read_frame
from batchgen.core.hardware import HardwareProfile
from batchgen.core.machine import available_memory_bytes, keep_within, resident_bytes
from batchgen.core.messages import decode, encode, table_of
from batchgen.core.python_command import python_command
from batchgen.core.units import format_bytes
from batchgen.models.config import ModelConfig
from batchgen.models.rope import RopeConfig
from batchgen.profiler.cache import Wanted, load_or_measure, recall
from batchgen.profiler.timing import Effort

logger = logging.getLogger(__name__)

# The least that rates can be measured in, beside a process that has torch: two thirds of it are what measuring imports and keeps, and
# in the rest operands are still larger than the inner caches.
_LEAST_BYTES = 352 << 20
_TASK = table_of(Wanted, Effort, ModelConfig, RopeConfig)  # what a task is made of


def recall_or_measure(
    wanted: Wanted,
    *,
    cache_dir: Path,
    offload_dir: Path,
    refresh: bool,
    memory_bytes: int | None,
) -> HardwareProfile:
    """Return this machine's profile, as `load_or_measure` does, which runs in another process if anything has to be measured.

    Args:
        wanted: the rates.
        cache_dir: where profiles are kept.
        offload_dir: the directory of the disk tier.
        refresh: measure even what the cache has.
        memory_bytes: what this process and the other one may have resident, together; None: what is free.

    Raises:
        InputError: as of `load_or_measure`.
        BatchgenError: the process has ended without a result.
    """
    if not refresh:
        kept = recall(wanted, cache_dir=cache_dir, offload_dir=offload_dir)
        if kept is not None:
            return kept
    allowed = available_memory_bytes()
    if memory_bytes is not None:
        allowed = min(allowed, max(0, memory_bytes - resident_bytes()))
    task = (wanted, cache_dir, offload_dir, refresh, allowed)
    return _answer(python_command(__name__), task)


def _answer(command: list[str], task: Any) -> HardwareProfile:
    """Runs the command of `main`, which ends with this process in any case."""
    # A session of its own: Ctrl-C is this process's to handle.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    found = None
    try:
        process.stdin.write(framed(encode(task, _TASK)))
        process.stdin.flush()
        for line in process.stdout:
            kind, value = json.loads(line)
            if kind == "log":
                logger.log(*value)
            elif kind == "error":
                raise InputError(value)
            elif kind == "needs":
                raise _too_small(resident_bytes() + value)
            else:
                found = HardwareProfile.from_json(value)
        _wait_for_end(process)
    except BrokenPipeError:
        _wait_for_end(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if found is None:
        raise BatchgenError(f"measuring this machine {_ending(process.returncode)}, or give --hardware a profile")
    return found


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Gives a process whose output has ended the time to end by itself, so that its exit code is its own."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _ending(code: int) -> str:
    """How the process ended without a result, and what helps."""
    if code < 0:
        return f"was ended by signal {-code} and has no result: run the command again with more memory"
    return f"ended with exit code {code} and no result: what it says above is the reason; mend that and run the command again"


def _too_small(needed_bytes: int) -> InputError:
    return InputError(
        f"this machine was not measured yet, which takes {format_bytes(needed_bytes)} of memory, more than --cpu-memory or the machine has: "
        "allow that much, or measure once without a limit (`batchgen profile -o machine.json`) and give --hardware machine.json"
    )


def main() -> None:
    """Measure what standard input asks for; lines of JSON on standard output say what goes on, and the last one the result."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print

    def say(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    if (task := read_frame(sys.stdin.buffer)) is None:  # whoever asked has ended
        return
    wanted, cache_dir, offload_dir, refresh, allowed = decode(bytes(task), _TASK)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch  # noqa: F401  (a part of what the process has anyway)

    if allowed < (needed := resident_bytes() + _LEAST_BYTES):
        say("needs", needed)
        return
    keep_within(allowed)
    package = logging.getLogger("batchgen")
    package.addHandler(_SentRecords(say))
    package.setLevel(logging.INFO)
    try:
        profile = load_or_measure(
            wanted,
            cache_dir=cache_dir,
            offload_dir=offload_dir,
            refresh=refresh,
        )
        say("profile", profile.to_json())
    except InputError as error:
        say("error", str(error))


class _SentRecords(logging.Handler):
    """Log records sent to the process that asked for the profile, which logs them as its own."""

    def __init__(self, say: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("log", [record.levelno, record.getMessage()])


def _end_with_parent() -> None:
    """Ends this process when the other end of standard input is closed, as it is however that process ends."""
    os.read(0, 1)
    os._exit(1)
