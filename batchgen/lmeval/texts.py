"""Tokenizing of lm_eval's texts: beginning-of-text tokens, and pairs of context and continuation."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence

from batchgen.core.errors import InputError
from batchgen.models.tokenizers.tokenizer import Tokenizer

_CHUNK = 1024  # texts tokenized at once


class Texts:
    """A tokenizer for lm_eval's texts. Token ids are in arrays of four bytes each, as an evaluation may have many.

    Args:
        tokenizer: The model's tokenizer.
        add_bos_token: Whether texts begin with the beginning-of-text token; None: as the tokenizer does.
        prefix_token_id: Id of the token before a text without a context; None: beginning of text, or else end of text.

    Raises:
        InputError: The model has no such token.
    """

    def __init__(self, tokenizer: Tokenizer, add_bos_token: bool | None, prefix_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._add_bos = add_bos_token
        self._bos = tokenizer.bos_token_id
        if add_bos_token and self._bos is None:
            raise InputError("add_bos_token: the model has no beginning-of-text token: leave it out")
        prefix = tokenizer.begin_token_id if prefix_token_id is None else prefix_token_id
        if prefix is None:
            raise InputError("the model has no beginning-of-text or end-of-text token: give prefix_token_id")
        self.prefix_token_id: int = prefix
        if not 0 <= self.prefix_token_id < tokenizer.vocab_size:
            raise InputError(f"prefix_token_id {prefix_token_id} is not in the vocabulary of {tokenizer.vocab_size}")
        self._prefix_text = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)

    def encode(self, texts: Iterable[str], add_special_tokens: bool | None = None) -> Iterator[array]:
        """The token ids of each text.

        Args:
            texts: Texts.
            add_special_tokens: Whether special tokens are added; None: to texts that do not begin with the prefix
                token's text.
        """
        texts = iter(texts)
        while chunk := list(itertools.islice(texts, _CHUNK)):
            if add_special_tokens is not None:
                yield from self._encode(chunk, add_special_tokens)
                continue
            begun = [bool(self._prefix_text) and text.startswith(self._prefix_text) for text in chunk]
            apart = {
                True: self._encode([text for text, has in zip(chunk, begun, strict=True) if has], False),
                False: self._encode([text for text, has in zip(chunk, begun, strict=True) if not has], self._add_bos),
            }
            yield from (next(apart[has]) for has in begun)

    def pairs(self, texts: Sequence[tuple[str, str]]) -> Iterator[tuple[array, array]]:
        """The token ids of each pair of context and continuation, split as lm_eval splits them.

        Blanks between context and continuation belong to the continuation. The context and the whole text are
        tokenized; if the context has n tokens, the continuation gets the tokens of the whole text after the first n.
        Each context is tokenized once.

        Args:
            texts: Pairs of texts.
        """
        split = []
        for context, continuation in texts:
            stripped = context.rstrip()
            split.append((stripped, context[len(stripped) :] + continuation))
        contexts = list(dict.fromkeys(context for context, _ in split if context))
        known = dict(zip(contexts, self.encode(contexts), strict=True))
        wholes = self.encode(context + continuation for context, continuation in split if context)
        alone = self.encode((continuation for context, continuation in split if not context), add_special_tokens=False)
        prefix = array("i", [self.prefix_token_id])
        for context, _ in split:
            if context:
                yield known[context], next(wholes)[len(known[context]) :]
            else:
                tokens = next(alone)
                has_prefix = tokens[:1] == prefix
                yield prefix, tokens[1:] if has_prefix else tokens

    def _encode(self, texts: list[str], add_special_tokens: bool | None) -> Iterator[array]:
        if not texts:
            return
        bos = [] if self._bos is None else [self._bos]
        for ids in self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens is not False):
            if add_special_tokens and self._add_bos and ids[:1] != bos:  # not all tokenizers know how to
                ids = bos + ids
            yield array("i", ids)
