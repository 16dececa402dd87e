"""Answers of other engines on the demo model in fp32, stored beside the tests that compare ours with them.

They are transformers' tokens (tests/integration/demo_tokens.json), and the answers of lm_eval's `hf` to the local tasks
(tests/lmeval/demo_answers.json).

`make test-all` compares both with the libraries themselves. To write them anew, after a change to the prompts, the
tasks or lm_eval:

    python tests/support/demo_answers.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]

# transformers' tokens

TOKENS = ROOT / "tests" / "integration" / "demo_tokens.json"
ROWS_STORED = 12
MAX_TOKENS = 64
TIE = 1e-4  # a difference does not count where the two best logits lie this close


def demo_prompts(count: int) -> list:
    """Texts and chats by turns, about the rows of a recipe."""
    import pyarrow.parquet as pq

    table = pq.read_table(ROOT / "recipes" / "data_wrangling" / "fodors_zagats_test.parquet")
    chat = "Describe this restaurant: {left_name}, {left_addr}, {left_city}."
    text = "{left_name} is a {left_type} restaurant in {left_city}. Its"
    rows = enumerate(table.slice(0, count).to_pylist())
    return [[{"role": "user", "content": chat.format(**row)}] if i % 2 else text.format(**row) for i, row in rows]


def load_hf():
    """(transformers' model, its tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from batchgen.models.files import resolve_model

    file = resolve_model("demo").path
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype="float32").eval(), AutoTokenizer.from_pretrained(**where)


def encode(tokenizer, prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def greedy_choices(model, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """The model's choice after the tokens before each token, and how far its best logit was ahead."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1).tolist(), (best - second).tolist()


def greedy_tokens(model, prompt: list[int]) -> list[int]:
    """The model's tokens; one that would end the text is a token like any other."""
    import torch

    found, after, cache = [], prompt, None
    with torch.inference_mode():
        while len(found) < MAX_TOKENS:
            out = model(torch.tensor([after]), past_key_values=cache, use_cache=True)
            after, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
            found += after
    return found


def write_tokens() -> None:
    model, tokenizer = load_hf()
    rows = []
    for prompt in demo_prompts(ROWS_STORED):
        ids = encode(tokenizer, prompt)
        found = greedy_tokens(model, ids)
        ahead = greedy_choices(model, ids, found)[1]
        ties = [at for at, margin in enumerate(ahead) if margin < TIE]
        rows.append({"prompt_tokens": len(ids), "tokens": found, "ties": ties})
    TOKENS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


# lm_eval's answers

ANSWERS = ROOT / "tests" / "lmeval" / "demo_answers.json"
LIMIT = 8
LOCAL_TASKS = ("listings_match", "listings_address", "listings_perplexity")
METRICS = ("acc", "acc_norm", "exact_match")


def evaluate(model, tasks=LOCAL_TASKS, limit=4, **options):
    """lm_eval's evaluation, without a look at the hundreds of tasks that it has itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(ROOT / "recipes" / "lm_eval"), include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), limit=limit, bootstrap_iters=0, task_manager=manager, **options)


def evaluate_hf(limit: int) -> dict:
    from lm_eval.models.huggingface import HFLM

    hf, tokenizer = load_hf()
    # Over a large vocabulary torch's own softmax in fp32 is off by 1e-5 a token, always in the same direction.
    model = HFLM(hf, tokenizer=tokenizer, batch_size=4, max_length=1024, softmax_dtype="float64")
    return evaluate(model, limit=limit)


def answers(evaluation: dict) -> dict[str, list[dict]]:
    """Task -> for each document a digest of its prompts, what was answered, and its metrics; as JSON values."""
    return {
        task: [
            {
                "prompts": hashlib.sha256(json.dumps(sample["arguments"], sort_keys=True).encode()).hexdigest(),
                "answers": json.loads(json.dumps(sample["filtered_resps"])),
                "metrics": {name: float(sample[name]) for name in METRICS if name in sample},
            }
            for sample in samples
        ]
        for task, samples in evaluation["samples"].items()
    }


def write_answers() -> None:
    ANSWERS.write_text(json.dumps(answers(evaluate_hf(LIMIT)), indent=1) + "\n")


if __name__ == "__main__":
    write_tokens()
    write_answers()
