"""Thoughts of a model between two tags before its answer: `<think>...</think>` of Qwen3, DeepSeek-R1 and others.

A text begins in thoughts where it begins with the first tag, or where the prompt has ended with it, as some chat
templates do. They end at the second tag; without one, all of the text is thoughts. A tag anywhere else is part of an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.core.request import SamplingParams
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.models.tokenizers.tokenizer import NoText, StopDetector, Tokenizer

# The tags that begin and end what models think, in the order in which they are looked for.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_TAIL_TOKENS = 16  # the first tag and blanks behind it take no more tokens of a prompt


def gives_reasoning(model: str, sampling: SamplingParams) -> bool:
    """True where the samples of a model may have thoughts beside their texts. Raises InputError.

    Args:
        model: The model, which is not loaded.
        sampling: Sampling parameters of the samples.
    """
    files = resolve_model(model)
    return read_config(files).has_channels or Thinking.of(load_tokenizer(files), sampling.regex) is not None


@dataclass(frozen=True)
class Thinking:
    """Tells thoughts from answers.

    Attributes:
        tokenizer: Tokenizer of the texts.
        begin, end: Tags around thoughts.
    """

    tokenizer: Tokenizer
    begin: str
    end: str

    @classmethod
    def of(cls, tokenizer: Tokenizer | NoText, regex: str | None = None) -> Thinking | None:
        """The tags of a model that thinks.

        Args:
            tokenizer: Tokenizer of the model. It has the tags as tokens, or its chat template writes them.
            regex: Regular expression that texts have to match: one that spells the tags out has a model think that does
                not by itself.

        Returns:
            None where nothing says that the model thinks.
        """
        for begin, end in TAGS:
            have_tokens = None not in (tokenizer.token_id(begin), tokenizer.token_id(end))
            if have_tokens or tokenizer.writes_in_chats(end) or _spells(regex, begin, end):
                return cls(tokenizer, begin, end)  # type: ignore[arg-type]  # NoText has none of these
        return None

    def begins(
        self, prompt: Sequence[int], sampling: SamplingParams, continued: Sequence[Mapping[str, Any]] = ()
    ) -> bool:
        """True where a sample begins in thoughts.

        Args:
            prompt: Tokens of its prompt.
            sampling: Its parameters. Under a grammar that does not spell the second tag out, all of the text is answer.
            continued: Messages of the prompt where the last of them is gone on with.
        """
        if sampling.constrained and self.end not in _plain(sampling.regex):
            return False
        text = str(continued[-1].get("content")) if continued else ""
        if text.rfind(self.begin) > text.rfind(self.end):
            return True
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(self.begin)

    def split(self, token_ids: Sequence[int], begun: bool) -> Split | None:
        """The thoughts in a sample's tokens, and the answer.

        Args:
            token_ids: Tokens of the sample, without one that ended it.
            begun: Whether the sample begins in thoughts (`begins`).

        Returns:
            None where it is all answer.
        """
        before, after = self._parted(token_ids)
        opened = before.lstrip().startswith(self.begin)
        if not opened and not begun:
            return None
        thoughts = before.lstrip().removeprefix(self.begin) if opened else before
        return Split(after.lstrip(), thoughts.strip())

    def _parted(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The text before the second tag, and the text behind it."""
        end = self.tokenizer.token_id(self.end)
        if end is not None and end in token_ids:
            at = list(token_ids).index(end)
            return self._text(token_ids[:at]), self.tokenizer.decode(token_ids[at + 1 :])
        before, found, after = self.tokenizer.decode(token_ids).partition(self.end)
        return (before if found else self._text(token_ids)), after

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text, with the first tag even where that is a special token."""
        text = self.tokenizer.decode(token_ids)
        first = self.tokenizer.token_id(self.begin)
        has_first = first in self.tokenizer.special_ids and first in token_ids[:2]
        return f"{self.begin}{text}" if has_first else text


def _spells(regex: str | None, begin: str, end: str) -> bool:
    """Tell whether a regular expression has both tags as they are, but for backslashes."""
    return re.search(f"{re.escape(begin)}.*{re.escape(end)}", _plain(regex), re.DOTALL) is not None


def _plain(regex: str | None) -> str:
    """A regular expression without its backslashes."""
    return (regex or "").replace("\\", "")


@dataclass(frozen=True)
class Split:
    """A sample's answer, and what was thought before it."""

    answer: str
    thoughts: str


class ThoughtStops:
    """A `StopDetector` for the answer alone: a stop string may well stand in the thoughts before it."""

    def __init__(self, thinking: Thinking, begun: bool, detector: StopDetector) -> None:
        self._thinking, self._detector = thinking, detector
        self._end = thinking.tokenizer.stop_detector([thinking.end]) if begun else None
        self._undecided: list[int] | None = None if begun else []  # tokens that may be the beginning of thoughts

    def push(self, token_id: int) -> str | None:
        """Take a token. Returns the stop string that the answer holds now; None: none."""
        if self._undecided is not None:
            return self._decide([*self._undecided, token_id])
        if self._end is None:
            return self._detector.push(token_id)
        if self._end.push(token_id) is not None:
            self._end = None
        return None

    def _decide(self, token_ids: list[int]) -> str | None:
        """Find out whether the sample begins with thoughts, as soon as its first tokens tell."""
        tokenizer, begin = self._thinking.tokenizer, self._thinking.begin
        text = tokenizer.decode(token_ids, skip_special_tokens=False).lstrip()
        if text.startswith(begin):
            self._undecided, self._end = None, tokenizer.stop_detector([self._thinking.end])
            return None
        if begin.startswith(text):
            self._undecided = token_ids
            return None
        self._undecided = None
        stops = [self._detector.push(token_id) for token_id in token_ids]
        return next((stop for stop in stops if stop is not None), None)

    @property
    def text(self) -> str:
        """The answer so far, up to the stop string if one was found."""
        return self._detector.text
