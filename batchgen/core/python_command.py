"""A command that runs a function of this package in another Python process."""

from __future__ import annotations

import os
import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that calls a module's `main` in a new Python process with this process's import path.

    `python -m` is not used, since a file in the current directory could then replace a module of Python's library.

    Args:
        module: The full name of the module.
        arguments: The command-line arguments of `main` (`sys.argv[1:]`).
    """
    program = (
        f"import sys; count = {len(arguments) + 1}; sys.path[:], sys.argv[count:] = sys.argv[count:], [];"
        f" from {module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments, *(path or os.getcwd() for path in sys.path)]
