"""Picks the most likely of several answers, without generating anything.

python examples/scoring.py [MODEL]
"""

import sys

import batchgen

QUESTIONS = {
    "The capital of France is": (" Paris", " London", " Rome"),
    "Two plus two is": (" four", " five"),
}


def main(model: str = "demo") -> dict[str, str]:
    """Returns the most likely answer to each question."""
    prompts = list(QUESTIONS)
    answers = {}
    with batchgen.Engine(model) as engine:
        for scored in engine.score(batchgen.ScoreRequest(prompt, QUESTIONS[prompt]) for prompt in prompts):
            best = max(range(len(scored.scores)), key=lambda i: scored.scores[i].logprob)
            answers[prompts[scored.index]] = QUESTIONS[prompts[scored.index]][best]
    return answers


if __name__ == "__main__":
    for question, answer in main(*sys.argv[1:]).items():
        print(question + answer)
