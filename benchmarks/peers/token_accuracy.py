"""How near the greedy tokens of an engine are to those of the same model in fp32, by transformers.

Each token is judged after the tokens that the engine itself had generated before it, and the reference is the token
that fp32 finds most likely there. So nothing depends on whether two texts are the same: an engine that has taken the
other one of two tokens nearly as likely goes on with another text, and is judged on that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = tuple[list[int], int]  # prompt token ids, and the number of tokens that were asked for


@dataclass(frozen=True)
class TokenAccuracy:
    """The judgement of all tokens of a job.

    Attributes:
        accuracy: The geometric mean, over tokens, of the token's probability by the one of the most likely token there;
            1 for greedy tokens in fp32.
        same: The share of tokens that are the most likely one.
        length: Number of tokens by the number that was asked for.
    """

    accuracy: float
    same: float
    length: float


def load_fp32(directory: Path) -> Any:
    """transformers' model in fp32. directory: a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def token_accuracy(model: Any, rows: list[Row], generated: list[list[int]]) -> TokenAccuracy:
    """Judge the tokens of a job.

    Args:
        model: transformers' model in fp32.
        rows: The rows of the job.
        generated: The tokens of each row.
    """
    import torch

    behind, same = 0.0, 0
    with torch.inference_mode():
        for (ids, _), tokens in zip(rows, generated, strict=True):
            if not tokens:
                continue
            logits = model(torch.tensor([ids + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
            best = logits.max(-1).values
            chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            behind += float((best - chosen).double().sum())
            same += int((best == chosen).sum())
    count = sum(map(len, generated))
    asked = sum(count for _, count in rows)
    if not count:
        return TokenAccuracy(0.0, 0.0, 0.0)
    return TokenAccuracy(math.exp(-behind / count), same / count, count / asked)
