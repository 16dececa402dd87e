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


@dataclass(frozen=True)
class Tags:
    """The tags of a family of models around what they think.

    Attributes:
        begin, end: The first and the second tag.
        head: Text behind the first tag that is no thought, such as the name of a channel.
        answer: Tags that the family writes around its answer; None: it writes none.
    """

    begin: str
    end: str
    head: str = ""
    answer: tuple[str, str] | None = None


# The tags of families, in the order in which they are looked for.
TAGS = {
    "Granite 3.3": Tags("<think>", "</think>", answer=("<response>", "</response>")),
    "Qwen3, DeepSeek-R1 and most others": Tags("<think>", "</think>"),
    "Gemma 4": Tags("<|channel>", "<channel|>", head="thought\n"),
    "Magistral, Ministral 3": Tags("[THINK]", "[/THINK]"),
    "Seed-OSS": Tags("<seed:think>", "</seed:think>", head="<seed:cot_budget_reflect>"),
    "Command A Reasoning": Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "EXAONE Deep": Tags("<thought>", "</thought>"),
    "Granite 3.2": Tags("Here is my thought process:", "Here is my response:"),
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
        tags: The tags.
    """

    tokenizer: Tokenizer
    tags: Tags

    @classmethod
    def of(cls, tokenizer: Tokenizer | NoText, regex: str | None = None) -> Thinking | None:
        """The tags of a model that reasons between tags.

        Args:
            tokenizer: Tokenizer of the model. The model reasons if the vocabulary has the tags, or its chat template
                writes one of them.
            regex: Regular expression that texts have to match. If it contains both tags, the model reasons too.

        Returns:
            The tags; None if nothing shows that the model reasons.
        """
        for tags in TAGS.values():
            if tags.answer is not None and not tokenizer.writes_in_chats(tags.answer[1]):
                continue
            pair = (tags.begin, tags.end)
            have_tokens = None not in map(tokenizer.token_id, pair)
            if have_tokens or any(map(tokenizer.writes_in_chats, pair)) or _spells(regex, *pair):
                return cls(tokenizer, tags)  # type: ignore[arg-type]  # NoText has none of these
        return None

    @property
    def begin(self) -> str:
        """The first tag."""
        return self.tags.begin

    @property
    def end(self) -> str:
        """The second tag."""
        return self.tags.end

    def begins(self, prompt: Sequence[int], continued: Sequence[Mapping[str, Any]] = ()) -> bool:
        """True if a sample begins with reasoning.

        Args:
            prompt: Tokens of the sample's prompt.
            continued: Messages of the prompt, if the sample continues the last message; otherwise empty.
        """
        text = str(continued[-1].get("content")) if continued else ""
        if text.rfind(self.begin) > text.rfind(self.end):
            return True
        return self._ends_with(prompt, self.begin, self.begin + self.tags.head.rstrip())

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
        if self.in_regex(sampling.regex):
            return None
        begin, end = self.tokenizer.token_id(self.begin), self.end_id
        if begun:
            return SpelledGate(self) if end is None else TagGate(None, end)
        if not begins_turn or begin is None or end is None or self._ends_with(prompt, self.end):
            return None
        return TagGate(begin, end)

    def split(self, token_ids: Sequence[int], begun: bool, sampling: SamplingParams) -> Split | None:
        """Split the tokens of a sample into reasoning and answer.

        Args:
            token_ids: Tokens of the sample, without a token that ended it.
            begun: Whether the sample begins with reasoning (`begins`).
            sampling: Sampling parameters of the sample.

        Returns:
            The texts of both; None if the whole sample is the answer.
        """
        gated = begun and sampling.constrained and not self.in_regex(sampling.regex)
        before, after = self._parted(token_ids, gated)
        opened = before.lstrip().startswith(self.begin)
        if not opened and not begun:
            return None
        thoughts = before.lstrip().removeprefix(self.begin) if opened else before
        return Split(self._answer(after), self._without_head(thoughts).strip())

    def _parted(self, token_ids: Sequence[int], gated: bool) -> tuple[str, str]:
        """The text before the second tag, and the text after it.

        Args:
            token_ids: Tokens of a sample.
            gated: Whether a grammar began with the token behind the tag (`SpelledGate`). What the tag's last token has
                behind the tag is no part of the answer then.
        """
        end, decode = self.end_id, self.tokenizer.decode
        if end is not None and end in token_ids:
            at = list(token_ids).index(end)
            return self._text(token_ids[:at]), decode(token_ids[at + 1 :])
        before, found, after = decode(token_ids).partition(self.end)
        if not found:
            return self._text(token_ids), ""
        if gated:
            gate = SpelledGate(self)
            at = next((i for i, token in enumerate(token_ids, 1) if gate.answer_from(token) is not None), 0)
            after = decode(token_ids[at:])
        return before, after

    def _without_head(self, thoughts: str) -> str:
        """Thoughts without the head that the family begins them with, which may be cut short."""
        head, text = self.tags.head, thoughts.lstrip()
        return "" if head.startswith(text) else text.removeprefix(head)

    def _answer(self, text: str) -> str:
        """The text of an answer, without the tags that the family writes around it."""
        text = text.lstrip()
        if self.tags.answer is None or not text.startswith(self.tags.answer[0]):
            return text
        begin, end = self.tags.answer
        return text.removeprefix(begin).lstrip().partition(end)[0].rstrip()

    def _ends_with(self, prompt: Sequence[int], *endings: str) -> bool:
        """Tell whether a prompt ends with one of some texts and blanks behind it."""
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(endings)

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


class SpelledGate:
    """The `Gate` of a model that is in thoughts, and spells the tag behind them with several tokens."""

    must_begin = False

    def __init__(self, thinking: Thinking) -> None:
        self.first: int | None = None
        self._tag = thinking.tokenizer.stop_detector([thinking.end])

    def answer_from(self, token_id: int) -> int | None:
        """1 if the tag ends with this token, so that the answer begins with the next one; None: it does not."""
        return None if self._tag.push(token_id) is None else 1


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
