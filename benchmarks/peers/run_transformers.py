"""The job by transformers' generate(): left-padded batches of rows of about the same length, each generated up to its
longest output.

Where prompts begin alike, what they share is computed once and every batch begins with a copy of its KV, as the
documentation's "prefill a cache" has it. Settings: batch_size.
"""

from __future__ import annotations

import copy

import torch
from runner import Generate, Job, Row, main
from transformers import AutoModelForCausalLM, DynamicCache

_PAD = 0


def load(job: Job) -> tuple[Generate, dict]:
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # no token ends a row

    @torch.inference_mode()
    def generate(rows: list[Row]) -> list[list[int]]:
        shared = job.common_prefix if rows is job.rows else 0
        cache = None
        if shared:
            cache = DynamicCache(config=model.config)
            model(torch.tensor([rows[0][0][:shared]]), past_key_values=cache, logits_to_keep=1)
        generated: list[list[int]] = [[] for _ in rows]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        for first in range(0, len(order), job.settings["batch_size"]):
            batch = order[first : first + job.settings["batch_size"]]
            longest, count = max(len(rows[i][0]) for i in batch), max(rows[i][1] for i in batch)
            ids = torch.full((len(batch), longest), _PAD)
            mask = torch.zeros_like(ids)
            for line, i in enumerate(batch):  # what is shared, padding, the rest
                prompt = torch.tensor(rows[i][0])
                ids[line, :shared], ids[line, longest - len(prompt) + shared :] = prompt[:shared], prompt[shared:]
                mask[line, :shared], mask[line, longest - len(prompt) + shared :] = 1, 1
            past = {}
            if cache is not None:
                past["past_key_values"] = copy.deepcopy(cache)
                past["past_key_values"].batch_repeat_interleave(len(batch))
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=_PAD, **past
            )
            for line, i in enumerate(batch):
                generated[i] = out[line, longest : longest + rows[i][1]].tolist()
        return generated

    return generate, job.settings | {
        "dtype": "bfloat16",
        "attention": model.config._attn_implementation,
        "shared_prefix": job.common_prefix,
    }


if __name__ == "__main__":
    main(load, ["transformers", "torch"])
