"""A plugin of pytest for tests on a card: a line for each test that has ended, and a new process after a lost card.

`gpu_check.py` reads the lines, so what is cut off is missing and nothing else. After some errors, such as an illegal
address, a process can no longer use its card. Then the worker of pytest-xdist ends, and another one goes on with the
tests that are left.
"""

from __future__ import annotations

import json
import os
import sys

TEST_LOG = "BATCHGEN_GPU_CHECK_TESTS"  # names the file of lines
_MOST_TEXT = 20_000  # characters of what a test has to say that are kept
_failed: set[str] = set()  # tests of this process


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    path = os.environ.get(TEST_LOG)
    if path is None or _is_worker():  # a worker reports to the process that started it
        return
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longreprtext
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "why": why[-_MOST_TEXT:],
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logfinish(nodeid: str) -> None:
    if nodeid in _failed and _is_worker() and _card_is_lost():
        os._exit(1)


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _card_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
