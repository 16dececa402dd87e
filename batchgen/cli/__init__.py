"""The console script `batchgen`. It handles interruptions before it imports anything that takes long."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress

from batchgen.core.imports import importing
from batchgen.core.interrupts import guarded
from batchgen.core.screen import claim_standard_streams, leave_standard_output


def main() -> None:
    """Run the command line. Any error prints one line and sets the exit code."""
    claim_standard_streams()
    try:
        with guarded():
            with importing():
                from batchgen.cli.commands import run_cli
            code = run_cli()
    finally:
        gc.freeze()  # else objects are searched once more as the interpreter ends, for half a second
    leave_standard_output()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done and said: no traceback while the interpreter ends
    sys.exit(code)


def program() -> None:
    """Run the command line as a process of its own, which ends at once.

    The interpreter is not taken apart: that takes a fifth of a second, and it aborts a process (exit code 134) whose
    other threads are in torch or in the kernels, although its output is complete.
    """
    try:
        main()
    except SystemExit as end:
        if sys.getprofile() is not None or sys.gettrace() is not None:  # who measures the process goes on after it
            raise
        atexit._run_exitfuncs()
        leave_standard_output()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(int(end.code or 0))
