"""Harmony, the format of gpt-oss's output: messages in channels, which separate reasoning from the answer.

The output is `<|channel|>analysis<|message|>...<|end|>`, followed by `<|start|>assistant<|channel|>final...`. The
answer is in the channel "final". All other channels are reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.models.tokenizers.tokenizer import StopDetector, Tokenizer

_MARKS = {"<|start|>": "start", "<|channel|>": "channel", "<|message|>": "message", "<|end|>": "end"}
_HEAD_TOKENS = 8  # of a message's head there are no more
_ENDS = ("<|return|>", "<|call|>")  # they end an answer, and count as `<|end|>`


@dataclass(frozen=True)
class Harmony:
    """A reader of outputs in the Harmony format.

    Attributes:
        tokenizer: Tokenizer of the model.
        marks: For the id of each special token of the format, the part of a message that begins after it, or "end".
    """

    tokenizer: Tokenizer
    marks: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Harmony | None:
        """The reader for a tokenizer; None if its vocabulary lacks the special tokens of the format."""
        ids = {token: tokenizer.token_id(token) for token in (*_MARKS, *_ENDS)}
        if any(ids[token] is None for token in _MARKS):
            return None
        marks = {**dict.fromkeys(_ENDS, "end"), **_MARKS}
        return cls(tokenizer, {i: marks[token] for token, i in ids.items() if i is not None})

    def gate(self, prompt: Sequence[int]) -> ChannelGate | None:
        """The gate that keeps a grammar out of thoughts; None: the prompt does not end in the head of a message.

        Args:
            prompt: Tokens of the sample's prompt.
        """
        head = self.tokenizer.decode(prompt[-_HEAD_TOKENS:], skip_special_tokens=False)
        return ChannelGate(self) if head.endswith("<|start|>assistant") else None

    def name_of(self, channel: Sequence[int]) -> str:
        """The name of a channel, from the tokens between the channel mark and the message.

        After "final" there may be a constraint of the answer, such as "json", which is left out.
        """
        words = self.tokenizer.decode(channel).split()
        return words[0] if words else ""

    def read(self, token_ids: Sequence[int]) -> tuple[str, str] | None:
        """Split the tokens of a sample into answer and reasoning.

        Args:
            token_ids: Tokens of the sample.

        Returns:
            The text of the answer and of the reasoning before it; None if the sample names no channel.
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
    """The state of reading a sample token by token.

    Attributes:
        number: Number of the current message. 0: the message that the prompt may have begun.
        channel: Name of the current message's channel.
    """

    def __init__(self, harmony: Harmony) -> None:
        self.number, self.channel = 0, ""
        self._harmony = harmony
        self._state = "message"
        self._header: list[int] = []

    def is_text(self, token_id: int) -> bool:
        """Read the next token, and tell whether it is part of a message's text."""
        mark = self._harmony.marks.get(token_id)
        if mark == "message":
            self.number, self.channel = self.number + 1, self._harmony.name_of(self._header)
        if mark is not None:
            self._state, self._header = mark, []
        elif self._state == "channel":
            self._header.append(token_id)
        return mark is None and self._state == "message"


class ChannelGate:
    """The `Gate` of a model whose answer is in the channel "final": a grammar begins with this channel's message."""

    must_begin = True

    def __init__(self, harmony: Harmony) -> None:
        self.first: int | None = next(i for i, mark in harmony.marks.items() if mark == "channel")
        self._harmony, self._reader = harmony, _Reader(harmony)

    def answer_from(self, token_id: int) -> int | None:
        """1 if the answer begins with the next token; None: it has not begun."""
        self._reader.is_text(token_id)
        begins = self._harmony.marks.get(token_id) == "message" and self._reader.channel == "final"
        return 1 if begins else None


class AnswerStops:
    """A `StopDetector` that searches only the answer for stop strings, not the reasoning before it."""

    def __init__(self, harmony: Harmony, detector: StopDetector) -> None:
        self._reader, self._detector = _Reader(harmony), detector

    def push(self, token_id: int) -> str | None:
        """Add the next token of the sample.

        Returns:
            The stop string that is first in the answer; None: the answer has none.
        """
        reader = self._reader
        # Without a named channel all is the answer.
        if reader.is_text(token_id) and (reader.number == 0 or reader.channel == "final"):
            return self._detector.push(token_id)
        return None

    @property
    def text(self) -> str:
        """The text of the answer so far, up to the stop string if there is one."""
        return self._detector.text
