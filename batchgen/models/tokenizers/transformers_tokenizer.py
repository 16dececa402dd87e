"""Tokenizers as objects of transformers: for evaluation harnesses, and for files that need code of transformers.

Nothing else imports transformers, which takes about a second.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import InputError
from batchgen.core.installer import install_command
from batchgen.models.tokenizers.parts import TokenizerParts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def as_hf_tokenizer(parts: TokenizerParts) -> PreTrainedTokenizerFast:
    """A tokenizer as an object of transformers, with the same backend."""
    with _quiet_transformers():
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE
        from transformers import PreTrainedTokenizerFast

        of_backend: Any = PreTrainedTokenizerFast  # whose __init__ has no types
        # Transformers changes the tokenizer that it is given: an empty one, which is put away.
        hf: PreTrainedTokenizerFast = of_backend(tokenizer_object=Backend(BPE()), **parts.special_tokens)
    hf.chat_template = parts.chat_template
    hf._tokenizer = parts.backend
    return hf


def load_with_transformers(directory: Path) -> TokenizerParts:
    """Load the tokenizer of a directory by the class of transformers that its files name.

    Raises:
        InputError: It is no fast tokenizer, or transformers is not installed.
        Exception: The files are damaged, or need Python code.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "without a tokenizer.json it needs the package transformers: fetch that file, or"
            f" {install_command('transformers>=4.51')}"
        )
    with _quiet_transformers():
        from transformers import AutoTokenizer

        hf: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    if not hf.is_fast:
        raise InputError("it is no fast tokenizer: fetch the model's tokenizer.json")
    return TokenizerParts.of_transformers(hf)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Within a `with` block, transformers logs only errors."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
