"""Greedy tokens of transformers."""

from __future__ import annotations

import torch


@torch.inference_mode()
def greedy_tokens(model, prompts: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """The tokens that a model of transformers chooses after each prompt, up to and including the end of the text.

    Each call of the model looks at a guess of all tokens of all prompts. Its choice after right tokens is right, so a
    call makes at least one more of each prompt right, and mostly several: a fraction of the time that `generate` takes.
    Prompts are padded at their ends, which no token before these attends to.
    """
    found = [prompt[-1:] * max_tokens for prompt in prompts]
    num_right = [0] * len(prompts)
    while unfinished := [i for i in range(len(prompts)) if num_right[i] < max_tokens]:
        rows = [prompts[i] + found[i][:-1] for i in unfinished]
        longest = max(map(len, rows))
        chosen = model(torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows]), use_cache=False)
        for i, choices in zip(unfinished, chosen.logits.argmax(-1).tolist(), strict=True):
            begin = len(prompts[i]) - 1
            right = choices[begin : begin + max_tokens]
            num_right[i] = 1 + next((j for j in range(max_tokens) if right[j] != found[i][j]), max_tokens - 1)
            found[i] = right
            if ends := [j for j in range(num_right[i]) if right[j] in _ends(model)]:
                found[i], num_right[i] = right[: ends[0] + 1], max_tokens
    return [tuple(tokens) for tokens in found]


def _ends(model) -> list[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]
