"""The console script. Interruptions are handled before anything is imported that takes long."""

from __future__ import annotations

import signal
import sys

from batchgen.core.interrupts import guarded


def main() -> None:
    """Run the command line: one line and an exit code for whatever goes wrong."""
    with guarded():
        from batchgen.cli.commands import run_cli

        code = run_cli()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done and said: no traceback while the interpreter ends
    sys.exit(code)
