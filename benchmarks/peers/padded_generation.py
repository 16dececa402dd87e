"""transformers' generate() over rows of several lengths: left-padded batches of rows of about the same length."""

from __future__ import annotations

import torch
from runner import Row
from transformers import GenerationMixin

_PAD = 0


@torch.inference_mode()
def generate_padded(model: GenerationMixin, rows: list[Row], batch_size: int) -> list[list[int]]:
    """The greedy tokens of each row. A batch is generated up to its longest output."""
    generated: list[list[int]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        longest, count = max(len(rows[i][0]) for i in batch), max(rows[i][1] for i in batch)
        ids = torch.full((len(batch), longest), _PAD)
        mask = torch.zeros_like(ids)
        for line, i in enumerate(batch):
            prompt = torch.tensor(rows[i][0])
            ids[line, longest - len(prompt) :], mask[line, longest - len(prompt) :] = prompt, 1
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=_PAD)
        for line, i in enumerate(batch):
            generated[i] = out[line, longest : longest + rows[i][1]].tolist()
    return generated
