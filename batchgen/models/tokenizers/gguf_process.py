"""Building of a GGUF's tokenizer and saving of its files, in this process or in one that ends with it.

A vocabulary of 262,144 tokens takes hundreds of MiB while it is built, as Python's strings and pairs, and the freed
parts are too scattered to be given back to the system. The memory of a process of its own is gone when it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.core.python_command import python_command
from batchgen.models.formats.gguf.header import read_gguf_vocabulary
from batchgen.models.tokenizers.loading_errors import refusing
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer_config import write_tokenizer_config


def save_here(source: Path, directory: Path) -> None:
    """Build the tokenizer that a GGUF describes, and write the files that it is loaded from into a directory.

    Raises:
        InputError: The GGUF has no tokenizer that is supported.
        OSError: The directory cannot be written.
    """
    with refusing(source):
        parts = _taken_out(source)
    write_tokenizer_config(directory, parts.special_tokens, parts.chat_template)
    # The library's own `save` raises no OSError.
    (directory / "tokenizer.json").write_text(parts.backend.to_str(), encoding="utf-8")


def save_apart(source: Path, directory: Path) -> None:
    """Build the tokenizer of a GGUF in another process, and write its files into a directory.

    Raises:
        InputError: The GGUF has no tokenizer that is supported, or the process was ended.
        OSError: The directory cannot be written, or no process can be started.
    """
    command = python_command(__name__, str(source), str(directory))
    # A session of its own: Ctrl-C is for the process that has started it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        answer, _ = process.communicate()
    finally:
        process.kill()  # where waiting for it was interrupted
    try:
        number, text = json.loads(answer)
    except ValueError:
        raise InputError(
            f"cannot load the tokenizer of {source}: the process that builds it ended with code {process.returncode}:"
            " see what it said, and free memory"
        ) from None
    if number is not None:
        raise OSError(number, text)
    if text is not None:
        raise InputError(text)


def _taken_out(path: Path) -> TokenizerParts:
    """Build the tokenizer that a GGUF describes. Raises InputError."""
    from batchgen.models.tokenizers.gguf_tokenizer import backend_of, names_of

    pairs = read_gguf_vocabulary(path)
    template = pairs.get("tokenizer.chat_template")
    return TokenizerParts(backend_of(pairs), names_of(pairs), template if isinstance(template, str) else None)


def main() -> None:
    """Build and save the tokenizer that the command line names; write the error's number and text as JSON."""
    source, directory = map(Path, sys.argv[1:3])
    number, text = None, None
    try:
        save_here(source, directory)
    except InputError as error:
        text = str(error)
    except OSError as error:
        number, text = error.errno, error.strerror
    print(json.dumps([number, text]))
