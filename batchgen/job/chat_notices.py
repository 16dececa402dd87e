"""Warnings about the prompts that a job makes of chat messages, each logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from batchgen.core.request import Request, ScoreRequest
from batchgen.engine.encode import is_chat

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

R = TypeVar("R")

_BEGINS_ANOTHER = (
    "row %s ends with the assistant's message: the model begins another one behind it, unless --continue-final is given"
    " (further rows are not told)"
)
_SAME_PROMPT = "the model's chat template does not read the messages: every row gets the same prompt"


def watch_chats(requests: Iterable[R], tokenizer: Callable[[], Tokenizer]) -> Iterator[R]:
    """Pass requests on unchanged, and log warnings about the prompts made of their chat messages, each once.

    Args:
        requests: The job's requests.
        tokenizer: Function that returns the tokenizer.
    """
    first = begins_another = True
    for request in requests:
        if isinstance(request, Request | ScoreRequest) and request.error is None:
            messages = request.prompt if isinstance(request, Request) else request.context
            if is_chat(messages):
                if first:
                    first = False
                    if not tokenizer().reads_messages:
                        logger.warning(_SAME_PROMPT)
                begins = not (request.chat.continue_final or request.chat.is_whole)
                if begins_another and begins and _ends_with_assistant(messages):
                    begins_another = False
                    logger.warning(_BEGINS_ANOTHER, f"{request.row or 0:,}")
        yield request


def _ends_with_assistant(messages: object) -> bool:
    from batchgen.models.tokenizers.chat_template import ends_with_assistant

    return ends_with_assistant(messages)  # type: ignore[arg-type]  # they are chat messages
