"""Errors of a CUDA GPU, as one line that a person can act on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def card_failure() -> str | None:
    """The line for the error after which this process can use its GPU no longer, such as an illegal memory access.

    None: it uses no GPU, or the GPU answers. Such an error stays until the process ends: each call of CUDA returns it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return _failed(str(error))
    return None


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
        return f"{_failed(text)}; BATCHGEN_LOG=DEBUG shows where it fails"
    return None


def _failed(text: str) -> str:
    return f"the GPU failed ({one_line(reason_of(RuntimeError(text)))}): run the same command again"
