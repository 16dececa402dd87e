"""The separation of reasoning from the answer, for models that reason between two tags.

Qwen3, DeepSeek-R1 and others write `<think>...</think>` before the answer, other families have other tags (`TAGS`). A
sample begins with reasoning if its text begins with the first tag, or if its prompt ends with the first tag, as some
chat templates make it. The reasoning ends at the second tag. Without a second tag, the whole text is reasoning. A tag
in any other place is part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.core.request import SamplingParams
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.models.tokenizers.tokenizer import NoText, StopDetector, Tokenizer

# The tags that begin and end what models think, by family, in the order in which they are looked for.
TAGS = {
    "Qwen3, DeepSeek-R1 and most others": ("<think>", "</think>"),
    "Magistral": ("[THINK]", "[/THINK]"),
    "Seed-OSS": ("<seed:think>", "</seed:think>"),
    "Command A Reasoning": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "EXAONE Deep": ("<thought>", "</thought>"),
    "Granite 3.2": ("Here is my thought process:", "Here is my response:"),
}
_TAIL_TOKENS = 48  # a tag and blanks behind it take no more tokens of a prompt


def gives_reasoning(model: str, sampling: SamplingParams, chat_template: str | None = None) -> bool:
    """True if the samples of a model may have reasoning.

    Args:
        model: Name of the model, which is not loaded.
        sampling: Sampling parameters of the samples.
        chat_template: Chat template that replaces the model's; None: the model's.

    Raises:
        InputError: The model's tokenizer is missing or broken.
    """
    files = resolve_model(model)
    tokenizer = load_tokenizer(files, chat_template=chat_template)
    return read_config(files).has_channels or Thinking.of(tokenizer, sampling.regex) is not None


@dataclass(frozen=True)
class Thinking:
    """The tags of a model around its reasoning.

    Attributes:
        tokenizer: Tokenizer of the model.
        begin, end: The first and the second tag.
    """

    tokenizer: Tokenizer
    begin: str
    end: str

    @classmethod
    def of(cls, tokenizer: Tokenizer | NoText, regex: str | None = None) -> Thinking | None:
        """The tags of a model that reasons between tags.

        Args:
            tokenizer: Tokenizer of the model. The model reasons if the vocabulary has the tags, or its chat template
                writes them.
            regex: Regular expression that texts have to match. If it contains both tags, the model reasons too.

        Returns:
            The tags; None if nothing shows that the model reasons.
        """
        for begin, end in TAGS.values():
            have_tokens = None not in (tokenizer.token_id(begin), tokenizer.token_id(end))
            if have_tokens or tokenizer.writes_in_chats(end) or _spells(regex, begin, end):
                return cls(tokenizer, begin, end)  # type: ignore[arg-type]  # NoText has none of these
        return None

    def begins(
        self, prompt: Sequence[int], sampling: SamplingParams, continued: Sequence[Mapping[str, Any]] = ()
    ) -> bool:
        """True if a sample begins with reasoning.

        Args:
            prompt: Tokens of the sample's prompt.
            sampling: Sampling parameters of the sample. Under a grammar that begins with the text, the whole text is
                the answer.
            continued: Messages of the prompt, if the sample continues the last message; otherwise empty.
        """
        if sampling.constrained and not self.in_regex(sampling.regex) and self.end_id is None:
            return False
        text = str(continued[-1].get("content")) if continued else ""
        if text.rfind(self.begin) > text.rfind(self.end):
            return True
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(self.begin)

    @property
    def end_id(self) -> int | None:
        """The token that is the second tag; None: it is spelled with several."""
        return self.tokenizer.token_id(self.end)

    def in_regex(self, regex: str | None) -> bool:
        """Tell whether a regular expression has the second tag, so that it allows for thoughts itself."""
        return self.end in _plain(regex)

    def gate(self, prompt: Sequence[int], sampling: SamplingParams, begun: bool, begins_turn: bool) -> Gate | None:
        """The gate that keeps a sample's grammar out of its thoughts; None: the grammar begins with the text.

        Args:
            prompt: Tokens of the sample's prompt.
            sampling: Sampling parameters of the sample, which has a grammar.
            begun: Whether the sample begins with reasoning (`begins`).
            begins_turn: Whether the prompt is chat messages after which the model begins an answer, as it may with the
                first tag.
        """
        if self.end_id is None or self.in_regex(sampling.regex):
            return None
        if begun:
            return TagGate(None, self.end_id)
        begin = self.tokenizer.token_id(self.begin)
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        if not begins_turn or begin is None or tail.rstrip().endswith(self.end):
            return None
        return TagGate(begin, self.end_id)

    def split(self, token_ids: Sequence[int], begun: bool) -> Split | None:
        """Split the tokens of a sample into reasoning and answer.

        Args:
            token_ids: Tokens of the sample, without a token that ended it.
            begun: Whether the sample begins with reasoning (`begins`).

        Returns:
            The texts of both; None if the whole sample is the answer.
        """
        before, after = self._parted(token_ids)
        opened = before.lstrip().startswith(self.begin)
        if not opened and not begun:
            return None
        thoughts = before.lstrip().removeprefix(self.begin) if opened else before
        return Split(after.lstrip(), thoughts.strip())

    def _parted(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The text before the second tag, and the text after it."""
        end = self.tokenizer.token_id(self.end)
        if end is not None and end in token_ids:
            at = list(token_ids).index(end)
            return self._text(token_ids[:at]), self.tokenizer.decode(token_ids[at + 1 :])
        before, found, after = self.tokenizer.decode(token_ids).partition(self.end)
        return (before if found else self._text(token_ids)), after

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with the first tag even if that is a special token."""
        text = self.tokenizer.decode(token_ids)
        first = self.tokenizer.token_id(self.begin)
        has_first = first in self.tokenizer.special_ids and first in token_ids[:2]
        return f"{self.begin}{text}" if has_first else text


def _spells(regex: str | None, begin: str, end: str) -> bool:
    """Tell whether a regular expression contains both tags, apart from backslashes."""
    return re.search(f"{re.escape(begin)}.*{re.escape(end)}", _plain(regex), re.DOTALL) is not None


def _plain(regex: str | None) -> str:
    """A regular expression without its backslashes."""
    return (regex or "").replace("\\", "")


@dataclass(frozen=True)
class Split:
    """The texts of a sample.

    Attributes:
        answer: Text of the answer.
        thoughts: Text of the reasoning before it.
    """

    answer: str
    thoughts: str


class Gate(Protocol):
    """The part of a sample before its answer, in which its grammar does not apply yet.

    Attributes:
        first: Token that the sample may begin its thoughts with; None: it is in thoughts already.
        must_begin: Whether the sample has to begin with this token; otherwise it may begin with the answer.
    """

    first: int | None
    must_begin: bool

    def answer_from(self, token_id: int) -> int | None:
        """Read the next token of the sample.

        Returns:
            0 if the answer begins with this token, 1 if it begins with the next one; None: it has not begun.
        """


class TagGate:
    """The `Gate` of a model that thinks between tags, of which the second is a token."""

    must_begin = False

    def __init__(self, first: int | None, end: int) -> None:
        self.first, self._end = first, end
        self._undecided = first is not None

    def answer_from(self, token_id: int) -> int | None:
        """0 if the answer begins with this token, 1 if it begins with the next one; None: it has not begun."""
        if self._undecided:
            self._undecided = False
            return None if token_id == self.first else 0
        return 1 if token_id == self._end else None


class ThoughtStops:
    """A `StopDetector` that searches only the answer for stop strings, not the reasoning before it."""

    def __init__(self, thinking: Thinking, begun: bool, detector: StopDetector) -> None:
        self._thinking, self._detector = thinking, detector
        self._end = thinking.tokenizer.stop_detector([thinking.end]) if begun else None
        self._undecided: list[int] | None = None if begun else []  # tokens that may be the beginning of thoughts

    def push(self, token_id: int) -> str | None:
        """Add the next token of the sample.

        Returns:
            The stop string that is first in the answer; None: the answer has none.
        """
        if self._undecided is not None:
            return self._decide([*self._undecided, token_id])
        if self._end is None:
            return self._detector.push(token_id)
        if self._end.push(token_id) is not None:
            self._end = None
        return None

    def _decide(self, token_ids: list[int]) -> str | None:
        """Find out whether the sample begins with reasoning, when there are enough tokens to decide it."""
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
        """The text of the answer so far, up to the stop string if there is one."""
        return self._detector.text
