"""HELM runs side by side: deployments of one model under several clients, runs of the same entries, and their results.

HELM itself is not imported here; the Python that runs this has it, and batchgen.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

RUNNER = "batchgen.helm.runner.BatchgenRunner"
BATCHGEN = "batchgen.helm.client.BatchgenClient"
HUGGING_FACE = "helm.clients.huggingface_client.HuggingFaceClient"
RAW_LOGITS = "helm_raw_logits.RawLogitsClient"
TOKENIZER = "batchgen.helm.tokenizer.BatchgenTokenizer"
HUGGING_FACE_TOKENIZER = "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"
MODEL = "local/model"
SUITE = "suite"

# Statistics in which clients differ by what they are, and not by what the model says: times, and reasons why
# completions ended, which HELM's Hugging Face client does not tell.
OF_THE_CLIENT = {
    "inference_runtime", "inference_denoised_runtime", "batch_size", "finish_reason_length", "finish_reason_stop",
    "finish_reason_endoftext", "finish_reason_unknown",
}  # fmt: skip
# Those that are made of log-probabilities; the last ones by bins and fits, which a rounding can move.
OF_LOGPROBS = {"logprob", "perplexity", "bits_per_byte", "logprob_per_byte", "max_prob"}
OF_CALIBRATION = {
    "ece_10_bin", "ece_1_bin", "selective_cov_acc_area", "selective_acc@10", "platt_coef", "platt_intercept",
    "platt_ece_10_bin", "platt_ece_1_bin",
}  # fmt: skip


def write_deployment(
    folder: Path, client: str, arguments: dict[str, Any], source: str, end_of_text: str, length: int
) -> Path:
    """The configuration of MODEL under a client with these arguments; returns the folder, helm-run's --local-path.

    source: where the tokenizer is, a Hugging Face directory for their clients, else what batchgen takes as a model.
    end_of_text: also what stands before texts. length: of the context, in tokens.
    """
    own = client == BATCHGEN
    class_name = TOKENIZER if own else HUGGING_FACE_TOKENIZER
    tokenizer = {"class_name": class_name, "args": {"model" if own else "pretrained_model_name_or_path": source}}
    deployment = {"tokenizer_name": MODEL, "max_sequence_length": length}
    deployment["client_spec"] = {"class_name": client, "args": arguments}
    special = {"end_of_text_token": end_of_text, "prefix_token": end_of_text}
    files = {
        "model_deployments": {"name": MODEL, **deployment},
        "tokenizer_configs": {"name": MODEL, "tokenizer_spec": tokenizer, **special},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps({name: [content]}, indent=1))  # JSON is YAML
    return folder


def write_questions(output: Path, questions: list[tuple[str, list[str], int]], name: str = "questions.jsonl") -> str:
    """Writes multiple choice questions where the scenario custom_mcqa of a run looks for them; returns its description.

    Args:
        output: the output path of the run.
        questions: (question, choices, place of the right one).
    """
    folder = output / "scenarios" / "custom_mcqa"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        for question, choices, right in questions:
            references = [{"output": {"text": c}, "tags": ["correct"] * (i == right)} for i, c in enumerate(choices)]
            file.write(json.dumps({"input": {"text": question}, "references": references, "split": "test"}) + "\n")
    return f"custom_mcqa:path={name}"


def helm_command(deployment: Path, output: Path, entries: list[str], *arguments: str) -> list[str]:
    """The command line of `helm-run` for these entries on MODEL. Nothing comes from HELM's own cache."""
    described = [entry + ("," if ":" in entry else ":") + f"model={MODEL}" for entry in entries]
    command = [sys.executable, "-m", "helm.benchmark.run", "--local-path", str(deployment), "-o", str(output)]
    return [*command, "--suite", SUITE, "--disable-cache", "--run-entries", *described, *arguments]


def read_runs(output: Path) -> dict[str, tuple[list[dict], list[dict]]]:
    """By run: its stats.json, and the request states of its scenario_state.json."""
    folder = output / "runs" / SUITE
    runs = {}
    for stats in sorted(folder.rglob("stats.json")):
        states = json.loads((stats.parent / "scenario_state.json").read_text())["request_states"]
        runs[str(stats.parent.relative_to(folder))] = json.loads(stats.read_text()), states
    return runs


def compare(ours: tuple[list[dict], list[dict]], theirs: tuple[list[dict], list[dict]]) -> dict[str, Any]:
    """Two clients' answers to the same run: requests whose texts or tokens differ, the largest difference of a token's
    log-probability, and of each statistic (means) that differs. Raises ValueError where the requests are not the same.
    """
    found: dict[str, Any] = {
        "requests": len(ours[1]),
        "texts_differ": 0,
        "tokens_differ": 0,
        "token_logprobs_differ": 0.0,
    }
    for mine, other in zip(ours[1], theirs[1], strict=True):
        if mine["request"] != other["request"]:
            raise ValueError(f"not the same request: {mine['request']} and {other['request']}")
        a, b = (state["result"]["completions"] for state in (mine, other))
        found["texts_differ"] += [c["text"] for c in a] != [c["text"] for c in b]
        tokens_a, tokens_b = ([token for completion in c for token in completion["tokens"]] for c in (a, b))
        if [token["text"] for token in tokens_a] != [token["text"] for token in tokens_b]:
            found["tokens_differ"] += 1
            continue
        differences = (abs(x["logprob"] - y["logprob"]) for x, y in zip(tokens_a, tokens_b, strict=True))
        found["token_logprobs_differ"] = max(found["token_logprobs_differ"], *differences, 0.0)
    means_a, means_b = ({json.dumps(s["name"]): s.get("mean") for s in stats} for stats in (ours[0], theirs[0]))
    found["stats"] = len(means_a)
    found["stats_differ"] = defaultdict(float)
    for key in means_a.keys() | means_b.keys():
        name, a, b = json.loads(key)["name"], means_a.get(key), means_b.get(key)
        if a != b:
            difference = abs(a - b) if None not in (a, b) else float("inf")  # one has none
            found["stats_differ"][name] = max(found["stats_differ"][name], difference)
    return found
