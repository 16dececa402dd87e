"""The errors of loading a tokenizer, each as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.core.errors import InputError, reason_of


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Within a `with` block, turn any error of reading tokenizer files into an InputError with a one-line message."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # files broken in any way, packages that are not installed, panics of `tokenizers`
        raise InputError(f"cannot load the tokenizer of {path}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of an error's text; if it has no text, the name of its class."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of the model's directory, which is never run: save it as a tokenizer.json"
    return reason_of(error)
