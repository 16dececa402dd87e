"""The console script. Interruptions are handled before anything is imported that takes long."""

from __future__ import annotations

import signal
import sys

from batchgen.core.interrupts import guarded
from batchgen.core.screen import claim_standard_streams, leave_standard_output


def main() -> None:
    """Run the command line: one line and an exit code for whatever goes wrong."""
    claim_standard_streams()
    with guarded():
        from batchgen.cli.commands import run_cli

        code = run_cli()
    leave_standard_output()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done and said: no traceback while the interpreter ends
    sys.exit(code)
