"""Structured output: which tokens may come next, so that a sample's text follows its JSON schema, regex or grammar.

llguidance does the work; it is an optional extra, imported where a grammar is first needed. A sample's mask for its
next token is made in a thread of its own, from the moment its last token is known: while the next sweep's layers
compute.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from itertools import accumulate, takewhile
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from batchgen.core.errors import InputError, one_line
from batchgen.core.installer import install_command
from batchgen.core.machine import available_cores
from batchgen.core.request import SamplingParams
from batchgen.runtime.json_schema import read_schema, rewritten, with_exclusive_branches

# Between two parts of a JSON text at most one space: it stays one line, and its length is bounded where the schema
# bounds it. A schema's own "x-guidance" goes before these.
_JSON_DEFAULTS: dict[str, Any] = {"whitespace_pattern": " ?"}
_COMPACT_JSON_DEFAULTS: dict[str, Any] = {"whitespace_flexible": False}
# llguidance makes masks once for tokens that fit into a string with so much left, which is where masks take longest.
# With more lengths than its own (10 and 30) a JSON record with bounded strings takes two thirds of the time.
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{n}}}" for n in (2, 4, 6, 8, 12, 16)),
    f"{_STRING_CHARACTER}+",
]
_KEPT_GRAMMARS = 256  # compiled ones, some tens of kilobytes each


class _Rule(NamedTuple):
    """A rule that a text must follow.

    Attributes:
        kind: A name of `core.request.GRAMMARS`, the parameter that it was given as.
        value: Its value.
        compact_json: True for JSON without spaces between its parts.
    """

    kind: str
    value: Any
    compact_json: bool

    @classmethod
    def of(cls, sampling: SamplingParams) -> _Rule:
        """The rule of sampling parameters, which have one."""
        (kind,) = sampling.given_grammars
        return cls(kind, getattr(sampling, kind), sampling.compact_json)


def check_grammar(sampling: SamplingParams) -> None:
    """Raise InputError for a rule of the text that cannot be followed, or where llguidance is missing.

    Takes a millisecond or less, and no tokenizer.
    """
    if sampling.constrained:
        _grammar(_Rule.of(sampling))


class Constraint:
    """The state of one sample in its grammar.

    Invariant: the matcher has taken every token of the sample but the end-of-text, each once, or is taking the last
    one.
    """

    takes_drafts = True

    def __init__(self, matcher: Any, mask: np.ndarray, vocab_size: int) -> None:
        self.matcher, self._vocab_size = matcher, vocab_size
        self.error: str | None = None  # why the sample cannot go on
        self._mask = mask
        self._wait: Callable[[], None] | None = None  # where the mask is being made
        self._masks_of_drafts: Callable[[], np.ndarray] | None = None  # those after each of its drafts
        self._taken_ahead: list[int] = []

    def mask(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [words of 32 tokens], lowest bit first.

        Waits until they are there. All tokens, where there is an `error`.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._mask

    def take_ahead(self) -> list[int]:
        """The tokens that come next as nothing else is allowed, once. The matcher has taken them.

        Waits for the thread that makes masks.
        """
        self.mask()
        tokens, self._taken_ahead = self._taken_ahead, []
        return tokens

    def forced(self) -> list[int]:
        """The tokens that the text goes on with, whichever is chosen: its next bytes, as the tokenizer writes them.

        They end before one that the model lacks. Waits for the thread that makes masks.
        """
        self.mask()
        tokens = [] if self.error is not None else self.matcher.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._vocab_size, tokens))

    def after(self, num_drafts: int) -> MaskAfterDrafts:
        """The state after the first drafts of those given to `Grammars.draft`."""
        assert self._masks_of_drafts is not None, "nobody makes masks of drafts"
        return MaskAfterDrafts(self._masks_of_drafts, num_drafts)


class _WithoutDrafts:
    """A state that nothing is drafted in."""

    error: str | None = None
    takes_drafts = False

    def after(self, num_drafts: int) -> NoReturn:
        raise AssertionError("the state takes no drafts")

    def forced(self) -> list[int]:
        return []


class MaskAfterDrafts(_WithoutDrafts):
    """The state of a sample as it will be if its first drafts are accepted."""

    def __init__(self, masks: Callable[[], np.ndarray], num_drafts: int) -> None:
        self._masks, self._num_drafts = masks, num_drafts

    def mask(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [words of 32 tokens], lowest bit first. Waits for them."""
        mask: np.ndarray = self._masks()[self._num_drafts - 1]
        return mask


class Unconstrained(_WithoutDrafts):
    """The state of a sample whose grammar has not begun; a draft might begin it."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def mask(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [words of 32 tokens], lowest bit first."""
        return self._mask


class Grammar:
    """A compiled rule of a text."""

    def __init__(self, matcher: Any, first_mask: np.ndarray, vocab_size: int) -> None:
        self._matcher, self._first_mask, self._vocab_size = matcher, first_mask, vocab_size

    def start(self) -> Constraint:
        """The state of a new sample."""
        return Constraint(self._matcher.deep_copy(), self._first_mask, self._vocab_size)

    def before(self, first: int | None = None, *, must_begin: bool = False) -> Unconstrained:
        """The state of a new sample whose grammar begins later.

        Args:
            first: Token that may come next, beside those that begin the grammar; None: any token may come.
            must_begin: Whether only the token `first` may come.
        """
        if first is None:
            return Unconstrained(np.full_like(self._first_mask, -1))
        mask = np.zeros_like(self._first_mask) if must_begin else self._first_mask.copy()
        mask.view(np.uint32)[first // 32] |= np.uint32(1 << first % 32)
        return Unconstrained(mask)


class Grammars:
    """Grammars over one model's tokens, and the thread that makes masks.

    Attributes:
        busy_s: Seconds in which the thread was busy.
        waited_s: Seconds of them that sweeps waited for.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Ask nothing of the tokenizer until there is a grammar.

        Args:
            tokenizer_json: Gives the tokenizer in the JSON format of Hugging Face's `tokenizers`.
            vocab_size: Columns of the model's logits; the tokenizer may have fewer tokens, or more.
            eos_token_ids: Tokens that end a text.
        """
        self.busy_s = self.waited_s = 0.0
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchgen-masks")
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    def compile(self, sampling: SamplingParams) -> Grammar | None:
        """The grammar of sampling parameters; None: they have none. One thread at a time. Raises InputError."""
        if not sampling.constrained:
            return None
        return self._compiled(_Rule.of(sampling))

    def compile_ahead(self, sampling: SamplingParams) -> Future:
        """Compile the grammar of sampling parameters in the thread (`compile`)."""
        return self._thread.submit(self.compile, sampling)

    def advance(self, steps: Mapping[Constraint, Sequence[int]], ahead: Mapping[Constraint, int] | None = None) -> None:
        """Advance constraints by the tokens of each, and have the thread make their next masks.

        Args:
            steps: Tokens of each constraint.
            ahead: Constraints that go on while a single token is allowed, each with the most such tokens;
                `Constraint.take_ahead` must be called.
        """
        wait = partial(self._wait_for, self._thread.submit(self._advance, steps, ahead or {}))
        for constraint in steps:
            constraint._wait, constraint._masks_of_drafts = wait, None

    def draft(self, drafts: Mapping[Constraint, Sequence[int]]) -> None:
        """Have the thread make the masks after drafts of constraints, which stay where they are."""
        made = self._thread.submit(self._masks_after_drafts, drafts)
        for constraint in drafts:
            constraint._masks_of_drafts = partial(self._masks_made, made, constraint)

    def restore(self, constraint: Constraint, token_ids: Sequence[int]) -> None:
        """Advance a new sample's constraint by tokens that an earlier run has chosen under it."""
        constraint._wait = partial(self._wait_for, self._thread.submit(self._restore, constraint, token_ids))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    @cached_property
    def _tokenizer(self) -> Any:
        if not self._eos_token_ids:
            raise InputError("the model has no end-of-text token, with which structured output ends")
        options = {"eos_token": self._eos_token_ids, "slices": _SLICES}
        make = partial(_llguidance().LLTokenizer, self._tokenizer_json(), **options)
        try:
            try:
                return make(n_vocab=self._vocab_size)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
                return make()
        except ValueError as error:
            raise InputError(
                f"structured output does not work with the model's tokenizer: {one_line(error)}"
            ) from error

    @cached_property
    def _pool(self) -> Any:
        # Half of the cores: the layers need them all.
        return _llguidance().LLExecutor(num_threads=max(1, available_cores() // 2))

    @cached_property
    def _known(self) -> np.ndarray:
        """The mask of the tokens that the model has."""
        bits = np.arange(-(-self._tokenizer.vocab_size // 32) * 32) < self._vocab_size
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _wait_for(self, made: Future) -> None:
        began = time.perf_counter()
        made.result()
        self.waited_s += time.perf_counter() - began

    def _compile(self, rule: _Rule) -> Grammar:
        matcher = _llguidance().LLMatcher(self._tokenizer, _grammar(rule), log_level=0)
        mask = self._next_masks([matcher])[0]
        if matcher.is_error() or not (mask & self._known).any():
            raise InputError(_refused(rule, matcher.get_error() or "no token of the model begins it"))
        return Grammar(matcher, mask, self._vocab_size)

    def _masks_made(self, made: Future, constraint: Constraint) -> np.ndarray:
        self._wait_for(made)
        masks: np.ndarray = made.result()[constraint]
        return masks

    def _advance(self, steps: Mapping[Constraint, Sequence[int]], ahead: Mapping[Constraint, int]) -> None:
        began = time.perf_counter()
        moved = dict.fromkeys(steps, True)
        for i in range(max(map(len, steps.values()))):
            going = [constraint for constraint, tokens in steps.items() if i < len(tokens) and moved[constraint]]
            taken = self._pool.consume_token_par([(constraint.matcher, steps[constraint][i]) for constraint in going])
            moved |= zip(going, taken, strict=True)
        self._set_masks(list(steps), list(moved.values()))
        ahead = {constraint: most for constraint, most in ahead.items() if most > 0}
        while ahead:
            ahead = self._take_single_tokens(ahead)
        self.busy_s += time.perf_counter() - began

    def _take_single_tokens(self, most: Mapping[Constraint, int]) -> dict[Constraint, int]:
        """Advance constraints that allow a single token by it.

        Args:
            most: The most tokens that each constraint goes on by, at least 1.

        Returns:
            The constraints that may allow a single token again, with the most tokens that are left to each.
        """
        constraints = list(most)
        masks = np.stack([constraint._mask for constraint in constraints]) & self._known
        of_one_word = np.flatnonzero((masks != 0).sum(axis=1) == 1)
        going: dict[Constraint, int] = {}
        for i in of_one_word.tolist():
            bits = np.flatnonzero(np.unpackbits(masks[i].view(np.uint8), bitorder="little"))
            if len(bits) == 1 and constraints[i].error is None:
                constraints[i]._taken_ahead.append(int(bits[0]))
                if int(bits[0]) not in self._eos_token_ids:
                    going[constraints[i]] = int(bits[0])
        if going:
            moved = self._pool.consume_token_par([(constraint.matcher, token) for constraint, token in going.items()])
            self._set_masks(list(going), moved)
        return {constraint: most[constraint] - 1 for constraint in going if most[constraint] > 1}

    def _masks_after_drafts(self, drafts: Mapping[Constraint, Sequence[int]]) -> dict[Constraint, np.ndarray]:
        """Masks of the tokens that may come after each of the drafts, [drafts, words]: all, where none may."""
        from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

        began = time.perf_counter()
        stops = list(accumulate(len(tokens) + 1 for tokens in drafts.values()))
        masks = np.zeros((stops[-1], len(self._known)), dtype=np.int32)
        steps = [
            (constraint.matcher, stop - len(tokens) - 1, list(tokens))
            for (constraint, tokens), stop in zip(drafts.items(), stops, strict=True)
        ]
        fill_next_token_bitmask_par_with_draft_tokens(self._pool, steps, masks)
        masks[~(masks & self._known).any(axis=1)] = -1  # a draft that is not allowed is refused whatever follows it
        self.busy_s += time.perf_counter() - began
        return {c: masks[stop - len(drafts[c]) : stop] for c, stop in zip(drafts, stops, strict=True)}

    def _restore(self, constraint: Constraint, token_ids: Sequence[int]) -> None:
        self._set_masks([constraint], [constraint.matcher.consume_tokens(list(token_ids))])

    def _set_masks(self, constraints: Sequence[Constraint], moved: Sequence[bool]) -> None:
        """Make the next masks of constraints, or set their errors. moved: whether each has taken its last token."""
        masks = self._next_masks([constraint.matcher for constraint in constraints])
        possible = (masks & self._known).any(axis=1)
        for i, constraint in enumerate(constraints):
            constraint._mask = masks[i]
            if not (moved[i] and possible[i]) or constraint.matcher.is_error():
                reason = constraint.matcher.get_error() or "no token of the model goes on with it"
                constraint.error = f"the text cannot go on as its grammar wants: {_first_line(reason)}"
                constraint._mask = np.full_like(masks[i], -1)

    def _next_masks(self, matchers: list) -> np.ndarray:
        from llguidance.numpy import fill_next_token_bitmask_par

        masks = np.zeros((len(matchers), len(self._known)), dtype=np.int32)
        fill_next_token_bitmask_par(self._pool, [(matcher, i) for i, matcher in enumerate(matchers)], masks)
        return masks


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise InputError(f"structured output needs llguidance: {install_command('llguidance>=1.7')}") from error
    return llguidance


@lru_cache(_KEPT_GRAMMARS)
def _grammar(rule: _Rule) -> str:
    """The grammar in the form that llguidance reads. Raises InputError."""
    if rule.kind == "json_schema":
        defaults = _COMPACT_JSON_DEFAULTS if rule.compact_json else _JSON_DEFAULTS
        try:
            schema = rewritten(read_schema(rule.value), _knows_format)
            grammar, problem = _of_schema(schema, defaults)
            if problem is not None and "oneOf" in problem:
                grammar, problem = _of_schema(with_exclusive_branches(schema), defaults)
        except RecursionError as error:
            raise InputError("json_schema is nested too deeply") from error
    else:
        matcher = _llguidance().LLMatcher
        if rule.kind == "grammar":
            grammar = matcher.grammar_from_lark(rule.value)
        else:
            grammar = matcher.grammar_from_regex(_one_of(rule.value) if rule.kind == "choice" else rule.value)
        problem = _problem(grammar)
    if problem is not None:
        raise InputError(_refused(rule, problem))
    return grammar


def _one_of(texts: Sequence[str]) -> str:
    """A regular expression that matches these texts and no other."""
    return "|".join("".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in texts)


def _of_schema(schema: Any, defaults: dict[str, Any]) -> tuple[str, str | None]:
    """The grammar of a schema, and why it cannot be followed; None: it can. Raises InputError."""
    try:
        grammar = _llguidance().LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), defaults=defaults
        )
    except ValueError as error:
        raise InputError(f"json_schema cannot be read: {one_line(error)}") from error
    return grammar, _problem(grammar)


def _problem(grammar: str) -> str | None:
    wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if wrong else None


@lru_cache(_KEPT_GRAMMARS)
def _knows_format(name: str) -> bool:
    """Tell whether llguidance makes texts of a format."""
    return _of_schema({"type": "string", "format": name}, {})[1] is None


def _refused(rule: _Rule, reason: str) -> str:
    is_schema = rule.kind == "json_schema"
    if is_schema and "oneOf" in reason:
        return (
            "json_schema cannot be followed: a text may be valid for two schemas of a oneOf; write anyOf, or give the"
            ' schema "x-guidance": {"coerce_one_of": true} where that is right as well'
        )
    where = "in a pattern, " if is_schema and "look" in reason else ""
    if rule.kind == "grammar" and (place := re.match(r"(?:at )?(\d+)\((\d+)\): ", reason)):  # which may be far away
        where, reason = f"line {place[1]}, column {place[2]}: ", reason[place.end() :]
    return f"{rule.kind} cannot be followed: {where}{_first_line(reason)}"


def _first_line(reason: str) -> str:
    """The first line of llguidance's messages, whose others show the position, and its own state."""
    lines = reason.strip().splitlines()
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return "no text is like that" if told == "NoExtensionBias" else one_line(told)
