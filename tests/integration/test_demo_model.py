"""The real model: SmolLM2-135M-Instruct from its GGUF, in fp32, against transformers on the same file."""

import json

import demo_answers
import pytest
from demo_answers import MAX_TOKENS, ROWS_STORED, TIE, demo_prompts, encode, greedy_choices
from thorough import quick_or

import batchgen
from batchgen.core.request import Request, SamplingParams


def generated(prompts, count=MAX_TOKENS):
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    with batchgen.Engine("demo", dtype="float32", cpu_memory="6GiB", sampling=sampling) as engine:
        found = sorted(engine.generate(map(Request, prompts)), key=lambda c: c.index)
        assert engine.stats.cached_prompt_tokens > 0, "the chat prompts share their system message"
    return [(completion.prompt_tokens, list(completion.samples[0].token_ids)) for completion in found]


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers():
    """As stored. A row is compared up to its first tie that went the other way."""
    stored, ties, count = json.loads(demo_answers.TOKENS.read_text()), 0, quick_or(24, MAX_TOKENS)
    for (prompt_tokens, tokens), row in zip(generated(demo_prompts(ROWS_STORED), count), stored, strict=True):
        assert prompt_tokens == row["prompt_tokens"] and len(tokens) == count
        differs = next((at for at in range(count) if tokens[at] != row["tokens"][at]), None)
        assert differs is None or differs in row["ties"], (prompt_tokens, differs)
        ties += differs is not None
    assert ties <= 2


@pytest.mark.slow
@pytest.mark.thorough
def test_ours_and_the_stored_tokens_are_those_of_transformers_itself():
    """64 prompts, 64 tokens each. Each token is compared with the reference's choice after the same tokens."""
    model, tokenizer = demo_answers.load_hf()
    stored = json.loads(demo_answers.TOKENS.read_text())
    prompts, ties = demo_prompts(64), 0
    rows = [*generated(prompts), *((row["prompt_tokens"], row["tokens"]) for row in stored)]
    for i, (prompt, (prompt_tokens, tokens)) in enumerate(zip([*prompts, *prompts[:ROWS_STORED]], rows, strict=True)):
        ids = encode(tokenizer, prompt)
        assert prompt_tokens == len(ids) and len(tokens) == MAX_TOKENS
        choices, ahead = greedy_choices(model, ids, tokens)
        differs = [at for at in range(MAX_TOKENS) if choices[at] != tokens[at]]
        assert all(ahead[at] <= TIE for at in differs), f"row {i} differs"
        ties += len(differs)
    assert ties <= 4
