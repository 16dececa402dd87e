"""A command that runs a function of this package in another Python process."""

from __future__ import annotations

import os
import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """Make the command that calls `main` of a module with what this process can import.

    It is not `python -m`, which would let files of the current directory stand for modules of Python's.

    Args:
        module: The full name of the module.
        arguments: The arguments of `main`, which has them as `sys.argv[1:]`.
    """
    program = (
        f"import sys; count = {len(arguments) + 1}; sys.path[:], sys.argv[count:] = sys.argv[count:], [];"
        f" from {module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments, *(path or os.getcwd() for path in sys.path)]
