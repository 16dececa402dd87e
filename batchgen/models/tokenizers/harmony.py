"""Harmony, the form of gpt-oss's answers: messages in channels.

An answer is `<|channel|>analysis<|message|>...<|end|>` and then `<|start|>assistant<|channel|>final...`. The channel
"final" holds the answer; all others are how the model came to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.models.tokenizers.tokenizer import StopDetector, Tokenizer

_MARKS = {"<|start|>": "start", "<|channel|>": "channel", "<|message|>": "message", "<|end|>": "end"}
_ENDS = ("<|return|>", "<|call|>")  # they end an answer, and count as `<|end|>`


@dataclass(frozen=True)
class Harmony:
    """Reads answers of one tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        marks: Token id -> the part of a message that it begins, or "end".
    """

    tokenizer: Tokenizer
    marks: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Harmony | None:
        """The reader for a tokenizer; None where that lacks the tokens that tell channels apart."""
        ids = {token: tokenizer.token_id(token) for token in (*_MARKS, *_ENDS)}
        if any(ids[token] is None for token in _MARKS):
            return None
        marks = {**dict.fromkeys(_ENDS, "end"), **_MARKS}
        return cls(tokenizer, {i: marks[token] for token, i in ids.items() if i is not None})

    def name_of(self, channel: Sequence[int]) -> str:
        """Name of a channel, by the tokens before its message.

        "final" may be followed by what the answer is bound to, such as "json".
        """
        words = self.tokenizer.decode(channel).split()
        return words[0] if words else ""

    def read(self, token_ids: Sequence[int]) -> tuple[str, str] | None:
        """The answer of a sample and the thoughts before it; None where no channel is named.

        Args:
            token_ids: Tokens of the sample.
        """
        if "channel" not in map(self.marks.get, token_ids):
            return None
        reader, messages = _Reader(self), dict[tuple[int, str], list[int]]()
        for token_id in token_ids:
            if reader.is_text(token_id):
                messages.setdefault((reader.number, reader.channel), []).append(token_id)
        texts = [(channel == "final", self.tokenizer.decode(text)) for (_, channel), text in messages.items()]
        answer, thoughts = ([text for final, text in texts if final is wanted and text] for wanted in (True, False))
        return "".join(answer), "\n".join(thoughts)


class _Reader:
    """Goes through the tokens of a sample.

    Attributes:
        number: Number of the message it is at; 0 for one that the prompt may have begun.
        channel: Name of its channel.
    """

    def __init__(self, harmony: Harmony) -> None:
        self.number, self.channel = 0, ""
        self._harmony = harmony
        self._state = "message"
        self._header: list[int] = []

    def is_text(self, token_id: int) -> bool:
        """True where the next token is one of the message's text."""
        mark = self._harmony.marks.get(token_id)
        if mark == "message":
            self.number, self.channel = self.number + 1, self._harmony.name_of(self._header)
        if mark is not None:
            self._state, self._header = mark, []
        elif self._state == "channel":
            self._header.append(token_id)
        return mark is None and self._state == "message"


class AnswerStops:
    """A `StopDetector` for the answer alone: a stop string may well stand in the thoughts before it."""

    def __init__(self, harmony: Harmony, detector: StopDetector) -> None:
        self._reader, self._detector = _Reader(harmony), detector

    def push(self, token_id: int) -> str | None:
        """Take a token. Returns the stop string that the answer holds now; None: none."""
        reader = self._reader
        # Without a named channel all is the answer.
        if reader.is_text(token_id) and (reader.number == 0 or reader.channel == "final"):
            return self._detector.push(token_id)
        return None

    @property
    def text(self) -> str:
        """The answer so far, up to the stop string if one was found."""
        return self._detector.text
