"""The tokenizer that a GGUF's key-value pairs describe. Its token ids equal those of llama.cpp.

Three kinds of vocabulary are supported, by `tokenizer.ggml.model`. "llama" is SentencePiece's: the neighbours whose
joined token has the best score are joined first. "gpt2" and "gemma4" have pairs that are merged in the order of a list,
of bytes or of characters. Other kinds are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from batchgen.core.errors import InputError
from batchgen.models.formats.gguf.header import VOCABULARY
from batchgen.models.formats.gguf.known_tokens import KNOWN, cut_out_ids, plain_id, special_id
from batchgen.models.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # kinds of tokens in `tokenizer.ggml.token_type`
_CUT_OUT = (_UNKNOWN, _CONTROL, _USER_DEFINED)
SPACE = "▁"  # stands for a space in SentencePiece's vocabularies
_MODELS = ("llama", "gpt2", "gemma4")
_USE_SAFETENSORS = "use the model's safetensors"
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 behind which spaces are kept


@dataclass
class _Vocabulary:
    """The vocabulary of a GGUF.

    Attributes:
        pairs: Key-value pairs of the file.
        tokens: Texts of the tokens, by id.
        kinds: Kind of each token, by id, as a number of `tokenizer.ggml.token_type`.
        is_sentencepiece: Whether tokens are joined by their scores, as SentencePiece does.
        ids: Ids of the tokens, by text.
    """

    pairs: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    is_sentencepiece: bool
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        known = {text: self.ids[text] for text in KNOWN if text in self.ids}
        for token_id in cut_out_ids(self.pairs, known):
            if self.kinds[token_id] not in _CUT_OUT:
                self.kinds[token_id] = _CONTROL
        if (plain := plain_id(known)) is not None:
            self.kinds[plain] = _NORMAL

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.{key}`, or `default`. Raises InputError if the value is not of type `kind`."""
        return _get(self.pairs, key, kind, default)

    def array(self, key: str, *kinds: type) -> tuple[Any, ...] | None:
        """The values of the array `tokenizer.ggml.{key}`; None: there is none.

        Raises:
            InputError: A value is not of one of the types `kinds`.
        """
        return _array(self.pairs, key, *kinds)

    def special_id(self, name: str) -> int | None:
        """The id of a special token, such as "bos"; None: the vocabulary has none."""
        token_id = special_id(self.pairs, name)
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    @property
    def cut_out(self) -> Iterator[tuple[str, int]]:
        """The tokens, with their kinds, that are found in a text before it is tokenized otherwise."""
        for token, kind in zip(self.tokens, self.kinds, strict=True):
            if kind in _CUT_OUT:
                yield token, kind


def backend_of(pairs: Mapping[str, Any], model: models.Model | None = None) -> Backend:
    """Build the tokenizer of a GGUF.

    Args:
        pairs: Key-value pairs of the GGUF (`header.read_gguf_vocabulary`).
        model: Model of `tokenizers` to use instead of the one that the pairs describe; or None.

    Raises:
        InputError: The GGUF has no tokenizer, or one whose ids would differ from those of llama.cpp.
    """
    words = _vocabulary(pairs)
    if model is not None:
        backend, begins_with_bos = Backend(model), True
    else:
        backend, begins_with_bos = _sentencepiece(words) if words.is_sentencepiece else _by_merges(words)
    named_phi3 = any(name in str(pairs.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    _refuse_overlaps([token for token, _ in words.cut_out])
    backend.add_tokens([_added(token, kind, named_phi3) for token, kind in words.cut_out])
    backend.post_processor = _around(words, begins_with_bos)
    return backend


def names_of(pairs: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a GGUF by their name in transformers, such as "bos_token"."""
    words = _vocabulary(pairs)
    ids = {attribute: words.special_id(name) for name, attribute in _NAMES.items()}
    return {attribute: words.tokens[i] for attribute, i in ids.items() if i is not None}


def _get(pairs: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = pairs.get(VOCABULARY + key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise InputError(f"{VOCABULARY}{key} is not what it should be, {kind.__name__}: fetch the file again")
    return value


def _array(pairs: Mapping[str, Any], key: str, *kinds: type) -> tuple[Any, ...] | None:
    values: tuple[Any, ...] | None = _get(pairs, key, tuple)
    if values is not None and not all(isinstance(value, kinds) for value in values):
        raise InputError(f"{VOCABULARY}{key} is not an array of {kinds[0].__name__}: fetch the file again")
    return values


def _vocabulary(pairs: Mapping[str, Any]) -> _Vocabulary:
    model = _get(pairs, "model", str)
    if model is None:
        raise InputError("it has none")
    if model not in _MODELS:
        raise InputError(
            f"tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(_MODELS)}: {_USE_SAFETENSORS}"
        )
    texts = _array(pairs, "tokens", str)
    if not texts:
        raise InputError("it has no tokens (tokenizer.ggml.tokens)")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise InputError(f"two of its tokens are {twice!r}: fetch the file again, or {_USE_SAFETENSORS}")
    kinds = _array(pairs, "token_type", int)
    kinds = (_NORMAL,) * len(tokens) if kinds is None else kinds
    if len(kinds) < len(tokens):
        raise InputError(f"it has {len(tokens)} tokens, and types of {len(kinds)}: fetch the file again")
    return _Vocabulary(pairs, tokens, list(kinds[: len(tokens)]), model == "llama")


def _added(token: str, kind: int, of_phi3: bool) -> AddedToken:
    return AddedToken(
        token, normalized=False, special=kind != _USER_DEFINED, rstrip=of_phi3 and token not in _NOT_STRIPPED
    )


def _refuse_overlaps(tokens: list[str]) -> None:
    """Raise InputError if one token may overlap the beginning of a longer one in a text.

    llama.cpp finds the longest token in a text first, but `tokenizers` finds the leftmost one. For tokens that repeat
    one character both give the same result.
    """
    by_begin: dict[str, list[str]] = {}
    for token in tokens:
        for at in range(1, len(token)):
            by_begin.setdefault(token[:at], []).append(token)
    for token in tokens:
        for at in range(1, len(token)):
            for longer in by_begin.get(token[at:], ()):
                if len(longer.encode()) > len(token.encode()) and len({*token, *longer}) > 1:
                    raise InputError(f"its tokens {token!r} and {longer!r} may overlap in a text: {_USE_SAFETENSORS}")


def _around(words: _Vocabulary, begins_with_bos: bool) -> processors.PostProcessor:
    """A post-processor that puts BOS before a text and EOS after it, if the file says so."""
    template, tokens = ["$A"], []
    for name, is_there in (
        ("bos", words.get("add_bos_token", bool, begins_with_bos)),
        ("eos", words.get("add_eos_token", bool, False)),
    ):
        if not is_there:
            continue
        if (token_id := words.special_id(name)) is None:
            raise InputError(f"it adds {name.upper()} to texts, and does not say which token that is")
        template = [name, *template] if name == "bos" else [*template, name]
        tokens.append({"id": name, "ids": [token_id], "tokens": [words.tokens[token_id]]})
    return processors.TemplateProcessing(single=template, special_tokens=tokens)


def _by_merges(words: _Vocabulary) -> tuple[Backend, bool]:
    """Build the tokenizer of a vocabulary with a list of merges.

    Returns:
        The tokenizer; whether a text begins with BOS if the file does not say it.
    """
    name = "gemma4" if words.get("model", str) == "gemma4" else words.get("pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise InputError(f"tokenizer.ggml.pre {name!r} is not supported: {_USE_SAFETENSORS}")
    kind = PRE_TOKENIZERS[name]
    if words.array("merges", str) is None and name != "kimi-k2":
        raise InputError("it has no merges (tokenizer.ggml.merges)")
    build = _spelled_in_bytes if kind.spells_bytes else _spelled_in_characters
    return build(words, kind, list(_merges(words))), kind.begins_with_bos


def _spelled_in_bytes(words: _Vocabulary, kind: PreTokenizer, merges: list[tuple[str, str]]) -> Backend:
    backend = Backend(models.BPE(vocab=words.ids, merges=merges, ignore_merges=kind.ignores_merges))
    backend.pre_tokenizer = _cutting(kind, words)
    backend.decoder = decoders.ByteLevel()
    return backend


def _spelled_in_characters(words: _Vocabulary, kind: PreTokenizer, merges: list[tuple[str, str]]) -> Backend:
    if kind.joins_lines:
        merges += _merges_of_lines(words, merges)
    backend = Backend(models.BPE(vocab=words.ids, merges=merges, fuse_unk=False, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(kind))
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_of_lines(words: _Vocabulary, merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs to merge after all others, which make a token of a run of line feeds that is one.

    Raises:
        InputError: Some runs are tokens, and shorter ones are not.
    """
    lengths = sorted(len(token) for token in words.tokens if token and not token.strip("\n"))
    if lengths != list(range(1, len(lengths) + 1)):
        raise InputError(f"it has tokens of {lengths} line feeds, and not of all numbers between: {_USE_SAFETENSORS}")
    known = set(merges)
    pairs = (("\n" * left, "\n" * (total - left)) for total in lengths for left in range(total - 1, 0, -1))
    return [pair for pair in pairs if pair not in known]


def _merges(words: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The pairs of tokens to merge, in order and without repetitions."""
    seen = set()
    for line in words.array("merges", str) or ():
        at = line.find(" ", 1)
        pair = (line[:at], line[at + 1 :])
        if at < 0 or pair in seen:
            continue
        seen.add(pair)
        if missing := next((part for part in (*pair, "".join(pair)) if part not in words.ids), None):
            raise InputError(f"its merges have {missing!r}, which is no token: {_USE_SAFETENSORS}")
        yield pair


def _cutting(kind: PreTokenizer, words: _Vocabulary) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that cuts texts into words, written as bytes.

    Bytes that are not in the vocabulary are left out, and separate their neighbours.
    """
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - words.ids.keys())
    steps = [*_splits(kind), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if missing:
        escaped = "".join(rf"\x{{{ord(character):X}}}" for character in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{escaped}]"), "removed"))
    return pre_tokenizers.Sequence(steps)


def _splits(kind: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(expression), "isolated") for expression in kind.splits]


def _sentencepiece(words: _Vocabulary) -> tuple[Backend, bool]:
    """Build the tokenizer of a SentencePiece vocabulary.

    Returns:
        The tokenizer; whether a text begins with BOS if the file does not say it.
    """
    scores = words.array("scores", float, int)
    if scores is None or len(scores) < len(words.tokens) or not all(map(math.isfinite, scores)):
        raise InputError("it has no score for each of its tokens (tokenizer.ggml.scores): fetch the file again")
    unknown = words.special_id("unknown")
    merges = _merges_by_score(words, scores)
    backend = Backend(
        models.BPE(
            vocab=words.ids,
            merges=merges,
            unk_token=None if unknown is None else words.tokens[unknown],
            fuse_unk=False,
            byte_fallback=True,
        )
    )
    has_prefix = words.get("add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    last = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return backend, True


def _merges_by_score(words: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that can be joined to a token, the best score first.

    Of pairs with equal scores, llama.cpp joins the leftmost one in the text. A list of merges cannot express this. Only
    tokens that repeat one character may have equal scores. In a run of that character the leftmost pair has the longest
    parts, so pairs with longer parts come first in the list.
    """
    # Nothing of a text that is cut out before is ever put together, unless its spaces are spelled otherwise.
    whole = {token for token, _ in words.cut_out if SPACE not in token}
    pairs = []
    for token_id, token in enumerate(words.tokens):
        if token in whole:
            continue
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in words.ids and right in words.ids:
                pairs.append((-scores[token_id], -at, -len(right), left, right))
            elif (len(left) == 1 or left in words.ids) and (len(right) == 1 or right in words.ids):
                missing = left if left not in words.ids else right
                raise InputError(f"it has the token {token!r} and not {missing!r}: {_USE_SAFETENSORS}")
    pairs.sort(key=lambda pair: pair[:3])
    _refuse_ties(pairs)
    return [pair[3:] for pair in pairs]


def _refuse_ties(pairs: list[tuple[float, int, int, str, str]]) -> None:
    """Raise InputError if two tokens with equal scores may overlap in a text.

    Tokens that repeat one character may.
    """
    by_score: dict[float, list[tuple[str, str]]] = {}
    for score, _, _, left, right in pairs:
        by_score.setdefault(score, []).append((left, right))
    for score, tied in by_score.items():
        made_from = {right: left + right for left, right in tied}
        for left, right in tied:
            other, token = made_from.get(left, left + right), left + right
            if other != token and len({*other, *token}) > 1:
                raise InputError(
                    f"its tokens {other!r} and {token!r} have the same score, {-score:g}: {_USE_SAFETENSORS}"
                )
