"""`batchgen` in processes that have all imports behind them: these would be most of a test that starts many."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "batchgen.cli.commands", "batchgen.job.run", "batchgen.runtime.executor", "batchgen.runtime.sampler",
    "batchgen.dataset.prompts",
])  # fmt: skip


def start_batchgen(arguments: list, log: Path) -> multiprocessing.Process:
    """The command `batchgen *arguments` in a process of its own; what it says goes to `log`."""
    return start_in_process(_batchgen, [[str(a) for a in arguments]], log)


def start_in_process(function: Callable, arguments: list, log: Path) -> multiprocessing.Process:
    """A function in a process of its own; what it prints goes to `log`."""
    process = _CONTEXT.Process(target=_main, args=(function, arguments, str(log)))
    process.start()
    return process


def batchgen(arguments: list, log: Path) -> int:
    """Runs it to its end; its exit code."""
    process = start_batchgen(arguments, log)
    process.join()
    return process.exitcode


def _main(function: Callable, arguments: list, log: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()  # jobs collect garbage: all that was imported is none
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    function(*arguments)


def _batchgen(arguments: list[str]) -> None:
    from batchgen import cli

    sys.argv = ["batchgen", *arguments]
    cli.main()
