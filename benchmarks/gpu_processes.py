"""Processes side by side, each with its own time limit and log; what one does never stops another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_S = 5.0  # a process with less time than this is not started
# Seconds until a killed process has to be gone. One that waits in a driver for a card that hangs never is.
_GONE_S = 10.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Task:
    """A process to run.

    Attributes:
        command: Program and arguments.
        limit_s: Seconds after which it is killed, with all processes that it has started.
        log: File that gets all that it prints.
        folder: Folder that it runs in.
        environment: All of its environment variables.
    """

    command: Sequence[str]
    limit_s: float
    log: Path
    folder: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        outcome: "ok", or what went wrong.
        seconds: Seconds that it took.
    """

    outcome: str
    seconds: float


class Interrupted(Exception):
    """The check itself was told to stop."""


def run_side_by_side(tasks: Mapping[str, Task], on_end: Callable[[str, Ending], None]) -> None:
    """Run processes at the same time.

    Args:
        tasks: Processes by name.
        on_end: Called with the name of each process that has ended, and how. It is called for all of them, also when an
            exception such as `Interrupted` comes meanwhile.
    """
    running: dict[str, tuple[subprocess.Popen, float]] = {}
    try:
        for name, task in tasks.items():
            started = time.monotonic()
            if task.limit_s < LEAST_S:
                on_end(name, Ending("not run: the time was over", 0.0))
                continue
            try:
                running[name] = _start(task), started
            except OSError as error:
                on_end(name, Ending(f"failed: {error}", 0.0))
        while running:
            for name, (process, started) in list(running.items()):
                seconds = time.monotonic() - started
                if process.poll() is not None:
                    outcome = _outcome(process.returncode)
                elif seconds > tasks[name].limit_s:
                    outcome = f"stopped after {tasks[name].limit_s:.0f} s"
                else:
                    continue
                del running[name]
                on_end(name, Ending(outcome + _end(process), round(seconds, 1)))
            time.sleep(_LOOK_S)
    finally:
        for name, (process, started) in running.items():
            on_end(name, Ending("stopped with the check" + _end(process), round(time.monotonic() - started, 1)))


def _start(task: Task) -> subprocess.Popen:
    with task.log.open("wb") as log:
        return subprocess.Popen(
            list(task.command), cwd=task.folder, env=dict(task.environment), stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _outcome(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"failed: died of {signal.Signals(-code).name}"
    return f"failed ({code})" if code else "ok"


def _end(process: subprocess.Popen) -> str:
    """Kill a process and all that it has started; say so if it does not go."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return ", and could not be ended"
    return ""
