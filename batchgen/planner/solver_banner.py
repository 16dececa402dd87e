"""Keeps the solver's banner off standard output, which is for plans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from functools import cache

import highspy


@cache
def silence_banner() -> None:
    """Have HiGHS print its banner where nobody reads it: 1.16 does with the first solver of a process, before any option."""
    with contextlib.suppress(OSError):  # there is no standard output
        sys.stdout.flush()
        shown, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            highspy.Highs()  # type: ignore[no-untyped-call]
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(shown, 1)
            os.close(shown)
            os.close(nowhere)
