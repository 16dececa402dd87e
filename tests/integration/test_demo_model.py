"""The real model: SmolLM2-135M-Instruct from its GGUF, in fp32, against transformers on the same file."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from thorough import quick_or

import batchgen
from batchgen.core.request import Request, SamplingParams
from batchgen.models.files import resolve_model

ROWS = Path(__file__).parents[2] / "recipes" / "data_wrangling" / "fodors_zagats_test.parquet"
TIE = 1e-4  # a difference does not count where the reference's two best logits lie this close


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_greedy_tokens_equal_those_of_transformers():
    """64 prompts, or some of them, 64 tokens each. Each token is compared with the reference's choice after the same tokens."""
    from transformers import AutoModelForCausalLM

    rows = pq.read_table(ROWS).slice(0, quick_or(12, 64)).to_pylist()
    requests = [
        Request(
            [
                {
                    "role": "user",
                    "content": "Describe this restaurant: {left_name}, {left_addr}, {left_city}.".format(**row),
                }
            ]
        )
        if i % 2
        else Request("{left_name} is a {left_type} restaurant in {left_city}. Its".format(**row))
        for i, row in enumerate(rows)
    ]
    files = resolve_model("demo")
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    engine = batchgen.Engine("demo", dtype="float32", cpu_memory="6GiB", sampling=sampling)
    found = sorted(engine.generate(requests), key=lambda c: c.index)
    assert engine.stats.cached_prompt_tokens > 0, "the chat prompts share their system message"

    model = AutoModelForCausalLM.from_pretrained(
        str(files.path.parent), gguf_file=files.path.name, dtype=torch.float32
    ).eval()
    tokenizer, ties = engine.parts.tokenizer, 0
    for completion, request in zip(found, requests, strict=True):
        is_text = isinstance(request.prompt, str)
        prompt = tokenizer.encode_batch([request.prompt])[0] if is_text else tokenizer.encode_chat(request.prompt)
        tokens = list(completion.samples[0].token_ids)
        assert completion.prompt_tokens == len(prompt) and len(tokens) == 64
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        differs = logits.argmax(-1) != torch.tensor(tokens)
        assert not (differs & (best - second > TIE)).any(), f"row {completion.index} differs"
        ties += int(differs.sum())
    assert ties <= 4
