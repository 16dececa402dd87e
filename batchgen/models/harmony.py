"""Harmony, the form of gpt-oss's answers: messages in channels, `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final...`.

What the channel "final" holds is the answer; all others are how the model came to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.models.tokenizer import Tokenizer

_MARKS = {"<|start|>": "start", "<|channel|>": "channel", "<|message|>": "message", "<|end|>": "end"}
_ENDS = ("<|return|>", "<|call|>")  # of an answer; they count as `<|end|>`


@dataclass(frozen=True)
class Harmony:
    """Reads answers of one tokenizer. marks: token id -> what it begins or ends."""

    tokenizer: Tokenizer
    marks: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Harmony | None:
        """None where the tokenizer lacks the tokens that tell channels apart."""
        ids = {tokenizer.token_id(token): mark for token, mark in _MARKS.items()}
        if None in ids:
            return None
        return cls(tokenizer, {**dict.fromkeys(map(tokenizer.token_id, _ENDS), "end"), **ids})

    def read(self, token_ids: Sequence[int]) -> tuple[str, str] | None:
        """The answer and what was thought before it, of the tokens of one sample; None where no channel is named."""
        if "channel" not in map(self.marks.get, token_ids):
            return None
        channel: list[int] = []
        messages: list[tuple[str, list[int]]] = [("", [])]  # (channel, text): the prompt may have begun the first
        state = "message"
        for token_id in token_ids:
            mark = self.marks.get(token_id)
            if mark == "message":
                messages.append((self.tokenizer.decode(channel).strip(), []))
            if mark is not None:
                state, channel = mark, []
            elif state == "channel":
                channel.append(token_id)
            elif state == "message":
                messages[-1][1].append(token_id)
        texts = [(name == "final", self.tokenizer.decode(text)) for name, text in messages]
        answer, thoughts = ([text for final, text in texts if final is wanted and text] for wanted in (True, False))
        return "".join(answer), "\n".join(thoughts)
