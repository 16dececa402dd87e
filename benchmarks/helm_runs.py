"""helm-run on batchgen against HELM's own Hugging Face client: the same run entries, the same model in fp32, in turn.

The entries are three scenarios that HELM makes itself and questions about the shipped restaurants, as a choice of letters
(generation) and by the likelihood of each answer (scoring). Wall times are those of whole helm-run processes, imports and
metrics included, without HELM's cache. A run of two instances that measures the machine for batchgen, once for all jobs, is
not counted.

HELM's client reports log-probabilities of what it generates after the temperature, 0.0 for each token of greedy decoding.
Two more runs, of fewer instances, compare these as well: there it reports the model's own (`peers/helm_raw_logits.py`).

    python benchmarks/helm_runs.py --work-dir DIR       # in an environment with crfm-helm and batchgen: `make helm-check`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers.bfloat16_files import write_directory
from peers.helm_side import (
    BATCHGEN,
    HUGGING_FACE,
    MODEL,
    OF_CALIBRATION,
    OF_LOGPROBS,
    OF_THE_CLIENT,
    RAW_LOGITS,
    RUNNER,
    compare,
    helm_command,
    read_runs,
    write_deployment,
    write_questions,
)

from batchgen.job.report import versions
from batchgen.models.files import resolve_model

HERE = Path(__file__).parent
RESTAURANTS = HERE.parent / "recipes" / "data_wrangling" / "fodors_zagats_test.parquet"
SCENARIOS = [
    "synthetic_reasoning:mode=pattern_match",
    "synthetic_reasoning_natural:difficulty=easy",
    "dyck_language:num_parenthesis_pairs=3",
]
END_OF_TEXT, CONTEXT = "<|im_end|>", 8192  # of the demo model
CLIENTS = {"batchgen": BATCHGEN, "transformers": HUGGING_FACE, "raw_logits": RAW_LOGITS}


def questions() -> list[tuple[str, list[str], int]]:
    """(question, four choices, place of the right one): which kind of food a restaurant serves."""
    import pyarrow.parquet as pq

    rng = random.Random(0)
    rows = {row["left_name"]: row for row in pq.read_table(RESTAURANTS).to_pylist() if row["left_type"]}
    kinds = sorted({row["left_type"] for row in rows.values()})
    made = []
    for name, row in rows.items():
        right = rng.randrange(4)
        choices = rng.sample([kind for kind in kinds if kind != row["left_type"]], 3)
        choices.insert(right, row["left_type"])
        made.append((f"What kind of food does {name}, {row['left_addr']}, {row['left_city']}, serve?", choices, right))
    return made


def run(side: str, work_dir: Path, instances: int, threads: int) -> float:
    """One helm-run in a fresh folder of that name; returns its wall time in seconds."""
    output = work_dir / side
    shutil.rmtree(output, ignore_errors=True)
    model = {"model": "demo", "dtype": "float32"}
    if side != "batchgen":
        model = {"pretrained_model_name_or_path": str(work_dir.parent / "demo-fp32"), "torch_dtype": "torch.float32"}
    source = next(iter(model.values()))
    settings = {**model, "apply_chat_template": False}
    deployment = write_deployment(output / "deployment", CLIENTS[side], settings, source, END_OF_TEXT, CONTEXT)
    choices = write_questions(output, questions())
    entries = [*SCENARIOS, choices, f"{choices},method=multiple_choice_separate_original"]
    how = ["--runner-class-name", RUNNER] if side == "batchgen" else ["-n", str(threads)]
    command = helm_command(deployment, output, entries, "-m", str(instances), "--exit-on-error", *how)
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    started = time.perf_counter()
    with (output / "log.txt").open("w") as log:
        process = subprocess.run(command, env=environment, cwd=output, stdout=log, stderr=subprocess.STDOUT)
    wall_s = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"helm-run on {side} failed: see {output / 'log.txt'}")
    print(f"{side}, {instances} instances an entry: {wall_s:.1f} s", flush=True)
    return wall_s


def compared(work_dir: Path, theirs: str) -> dict[str, Any]:
    """`compare` of every run entry, and what must hold: see the keys of "summary"."""
    ours, other = read_runs(work_dir / "batchgen"), read_runs(work_dir / theirs)
    assert ours.keys() == other.keys() and len(ours) == len(SCENARIOS) + 2
    entries = {name.replace(f",model={MODEL.replace('/', '_')}", ""): compare(ours[name], other[name]) for name in ours}
    scored = [entry for name, entry in entries.items() if theirs == "raw_logits" or "separate" in name]
    differing = {stat for entry in entries.values() for stat in entry["stats_differ"]} - OF_THE_CLIENT
    summary = {
        "requests": sum(entry["requests"] for entry in entries.values()),
        "requests_with_other_tokens": sum(entry["tokens_differ"] for entry in entries.values()),
        "other_statistics_that_differ": sorted(differing - OF_LOGPROBS - OF_CALIBRATION),
        # Where both report those of the model itself:
        "entries_with_logprobs": len(scored),
        "token_logprobs_differ": max(entry["token_logprobs_differ"] for entry in scored),
        "logprob_statistics_differ": max(
            entry["stats_differ"].get(stat, 0.0) for entry in scored for stat in OF_LOGPROBS
        ),
    }
    return {"summary": summary, "entries": entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, help="for models, runs and logs; about 600 MB")
    parser.add_argument("--instances", type=int, default=200, help="evaluation instances an entry (helm-run -m)")
    parser.add_argument("--threads", type=int, default=4, help="of HELM's client (helm-run -n, whose default this is)")
    parser.add_argument("--repeats", type=int, default=1, help="the sides take turns this many times")
    parser.add_argument(
        "--check-instances", type=int, default=25, help="those of the log-probabilities' check; 0: none"
    )
    parser.add_argument("--output", default=str(HERE / "results" / "helm.json"))
    arguments = parser.parse_args()
    work_dir = Path(arguments.work_dir).absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    write_directory(resolve_model("demo").path, work_dir / "demo-fp32", "float32")

    run("batchgen", work_dir / "first", 2, arguments.threads)  # measures the machine, unless it is known
    walls: dict[str, list[float]] = {"batchgen": [], "transformers": []}
    for _ in range(arguments.repeats):
        for side, times in walls.items():
            times.append(run(side, work_dir / "timed", arguments.instances, arguments.threads))
    comparisons = {"transformers": compared(work_dir / "timed", "transformers")}
    if arguments.check_instances:
        for side in ("batchgen", "raw_logits"):
            run(side, work_dir / "checked", arguments.check_instances, arguments.threads)
        comparisons["raw_logits"] = compared(work_dir / "checked", "raw_logits")

    import importlib.metadata

    result = {
        "benchmark": "helm_runs",
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("output", "work_dir")},
        "cores": os.cpu_count(),
        "wall_s": walls,
        "ratio": min(walls["transformers"]) / min(walls["batchgen"]),
        "compared": comparisons,
        "versions": versions() | {"crfm-helm": importlib.metadata.version("crfm-helm")},
    }
    Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['ratio']:.2f} times as fast")
    for name, comparison in comparisons.items():
        print(f"against {name}: {json.dumps(comparison['summary'])}")


if __name__ == "__main__":
    main()
