"""Completes a few prompts, some with parameters of their own.

python examples/generate.py [MODEL]
"""

import sys

import batchgen

PROMPTS = [
    "The capital of France is",
    batchgen.Request("Once upon a time", sampling=batchgen.SamplingParams(max_tokens=12, temperature=0.8, seed=7)),
    batchgen.Request([{"role": "user", "content": "Name a colour."}]),  # goes through the model's chat template
]


def main(model: str = "demo") -> list[str]:
    """Returns the texts in the order of the prompts; completions come as they end."""
    texts = [""] * len(PROMPTS)
    with batchgen.Engine(model, sampling=batchgen.SamplingParams(max_tokens=8)) as engine:
        for completion in engine.generate(PROMPTS):
            texts[completion.index] = completion.text
    return texts


if __name__ == "__main__":
    for text in main(*sys.argv[1:]):
        print(repr(text))
