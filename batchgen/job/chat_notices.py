"""Lines that tell a user how a job's chat messages become prompts, each said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from batchgen.core.request import Request, ScoreRequest
from batchgen.engine.encode import is_chat

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer

R = TypeVar("R")

_BEGINS_ANOTHER = (
    "row {row:,} ends with the assistant's message: the model begins another one behind it, unless --continue-final is given"
    " (further rows are not told)"
)
_SAME_PROMPT = "the model's chat template does not read the messages: every row gets the same prompt"


def watch_chats(
    requests: Iterable[R], tokenizer: Callable[[], Tokenizer], notify: Callable[[str], None]
) -> Iterator[R]:
    """Hand on requests, and say what is to be known of their messages when the first such request comes."""
    first = begins_another = True
    for request in requests:
        if isinstance(request, Request | ScoreRequest) and request.error is None:
            messages = request.prompt if isinstance(request, Request) else request.context
            if is_chat(messages):
                if first:
                    first = False
                    if not tokenizer().reads_messages:
                        notify(_SAME_PROMPT)
                if begins_another and not request.chat.continue_final and _ends_with_assistant(messages):
                    begins_another = False
                    notify(_BEGINS_ANOTHER.format(row=request.row or 0))
        yield request


def _ends_with_assistant(messages: object) -> bool:
    from batchgen.models.tokenizers.chat_template import ends_with_assistant

    return ends_with_assistant(messages)  # type: ignore[arg-type]  # they are chat messages
