"""Measuring of this machine's profile in a subprocess, within the job's memory budget."""

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

# The least bytes beside a process with torch in which rates can be measured: two thirds are what measuring imports and
# keeps, and in the rest operands are still larger than the inner caches.
_LEAST_BYTES = 352 << 20
_TASK = table_of(Wanted, Effort, ModelConfig, RopeConfig)  # kinds of values in a task


def recall_or_measure(
    wanted: Wanted,
    *,
    cache_dir: Path,
    offload_dir: Path,
    refresh: bool,
    memory_bytes: int | None,
) -> HardwareProfile:
    """This machine's profile from the cache; rates that are missing there are measured in a subprocess.

    Args:
        wanted: Rates that the profile must have.
        cache_dir: Directory with the cached profiles.
        offload_dir: Directory of the disk tier.
        refresh: Whether cached rates are measured again.
        memory_bytes: Resident bytes that this process and the subprocess may have together; None: the free memory.

    Raises:
        InputError: The device is missing, a dtype is unknown, offload_dir is unusable, or memory_bytes is too small.
        BatchgenError: The subprocess has ended without a result.
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
    """Run the command of `main` on a task; the subprocess ends with this process in any case."""
    # A session of its own: Ctrl-C is this process's to handle.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    profile = None
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
                profile = HardwareProfile.from_json(value)
        _wait_for_end(process)
    except BrokenPipeError:
        _wait_for_end(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if profile is None:
        raise BatchgenError(f"measuring this machine {_ending(process.returncode)}, or give --hardware a profile")
    return profile


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait a short time for a subprocess to end by itself after its output ended, so that its exit code says why."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _ending(code: int) -> str:
    """Message about a process that ended without a result, with what helps."""
    if code < 0:
        return f"was ended by signal {-code} and has no result: run the command again with more memory"
    reason = "what it says above is the reason; mend that and run the command again"
    return f"ended with exit code {code} and no result: {reason}"


def _too_small(needed_bytes: int) -> InputError:
    return InputError(
        f"this machine was not measured yet, which takes {format_bytes(needed_bytes)} of memory, more than --cpu-memory"
        " or the machine has: allow that much, or measure once without a limit (`batchgen profile -o machine.json`) and"
        " give --hardware machine.json"
    )


def main() -> None:
    """The subprocess: measure the task on standard input; write log records, then the profile, as lines of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print

    def say(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    if (task := read_frame(sys.stdin.buffer)) is None:  # the parent has ended
        return
    wanted, cache_dir, offload_dir, refresh, allowed = decode(bytes(task), _TASK)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch  # noqa: F401  (so that its resident bytes count)

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
    """A log handler that sends records to the parent process, which logs them as its own."""

    def __init__(self, say: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("log", [record.levelno, record.getMessage()])


def _end_with_parent() -> None:
    """End this process when its parent has ended in any way, since that closes standard input."""
    os.read(0, 1)
    os._exit(1)
