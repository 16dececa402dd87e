"""The attention budget of a job: how many KV pages a decoding token attends to (Quest, arXiv 2406.10774)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from batchgen.core.errors import InputError

# The budget of jobs in which every token attends to all tokens before it.
ALL = "all"
# Stands for the sliding window of layers that attend to chosen pages, among windows in tokens and None (no window).
CHOSEN_PAGES = 0
# The first layers of a model, which attend to all pages: their attention is spread over many of them (Quest, section
# 3.1).
DENSE_LAYERS = 2
# Pages that are always attended to: the first, and the newest ones, of which the last may be incomplete.
FIRST_PAGES, RECENT_PAGES = 1, 2
_LEAST_PAGES = FIRST_PAGES + RECENT_PAGES + 1
_ROUNDING = 1e-9  # of a share times pages


@dataclass(frozen=True)
class AttentionBudget:
    """The pages that a decoding token attends to; a page is one KV block of a sequence.

    Attributes:
        share: Share of the sequence's pages; None: the budget is a number of tokens.
        tokens: Number of tokens; None: the budget is a share.
    """

    share: float | None = None
    tokens: int | None = None

    @classmethod
    @lru_cache
    def of(cls, text: str) -> AttentionBudget | None:
        """The budget that an option states; None: all tokens are attended to.

        Args:
            text: "all", a share such as "10%", or a number of tokens such as "1024".

        Raises:
            InputError: The text is none of these.
        """
        if text == ALL:
            return None
        if re.fullmatch(r"\d+(\.\d+)?%", text) and 0 < (percent := float(text[:-1])) <= 100:
            return None if percent == 100 else cls(share=percent / 100)
        if re.fullmatch(r"[\d,_]+", text) and (tokens := int(re.sub("[,_]", "", text) or 0)) > 0:
            return cls(tokens=tokens)
        raise InputError(f"--attention-budget {text}: give all, a share such as 10%, or a number of tokens")

    def pages(self, num_pages: int, kv_block_size: int) -> int:
        """The number of pages that a token attends to.

        Args:
            num_pages: Pages of the sequence.
            kv_block_size: Tokens of a page.
        """
        if self.share is not None:
            wanted = math.ceil(self.share * num_pages - _ROUNDING)
        else:
            assert self.tokens is not None
            wanted = -(-self.tokens // kv_block_size)
        return min(max(wanted, _LEAST_PAGES), num_pages)

    def most_dense_tokens(self, kv_block_size: int) -> int:
        """The most tokens of a sequence that attends to all of its pages.

        Args:
            kv_block_size: Tokens of a page.
        """
        num_pages = _LEAST_PAGES
        while self.pages(num_pages + 1, kv_block_size) > num_pages:
            num_pages += 1
        return num_pages * kv_block_size
