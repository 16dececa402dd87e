"""Errors of a CUDA GPU, as one line that a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.core.errors import BatchgenError, one_line, reason_of

# First words of what torch, its libraries and Triton raise, RuntimeErrors all of them.
_FULL = re.compile(r"CUDA (?:out of memory|(?:driver )?error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED))")
_FAILED = re.compile(r"CUDA\b|Triton Error \[CUDA\]")
_WANTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


@contextmanager
def naming_card_errors() -> Iterator[None]:
    """Turn an error of a CUDA GPU that is raised within the block into a BatchgenError that names the fix.

    torch is not imported for it: what is raised is told by its words.
    """
    try:
        yield
    except RuntimeError as error:
        if (message := _message(str(error))) is None:
            raise
        raise BatchgenError(message) from error


def _message(text: str) -> str | None:
    """The line for an error with this text; None: it is none of a GPU."""
    if _FULL.match(text):
        wanted = _WANTED.search(text)
        asked = f" ({wanted[1]} more were asked for)" if wanted else ""
        return (
            f"the GPU's memory is full{asked}: end what else runs on it (nvidia-smi shows that), or give less"
            " --gpu-memory, and run the same command again"
        )
    if _FAILED.match(text):
        told = one_line(reason_of(RuntimeError(text)))
        return f"the GPU failed ({told}): run the same command again; BATCHGEN_LOG=DEBUG shows where it fails"
    return None
