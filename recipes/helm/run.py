"""The seven HELM sub-scenarios of FlexGen's table 9 on batchgen, and a table of what HELM made of the answers.

    python recipes/helm/run.py                      # all of them; five download their data
    python recipes/helm/run.py --priority 1         # those that need no network

A run that was stopped goes on with the same command. Options that are not listed go to helm-run as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "huggingface/smollm2-135m-instruct"
# By scenario: the metric that HELM shows for it.
METRICS = {
    "synthetic_reasoning": "quasi_exact_match",
    "synthetic_reasoning_natural": "f1_set_match",
    "wikifact": "quasi_exact_match@5",
    "mmlu": "exact_match",
    "summarization_xsum": "rouge_2",
}


def mean(stats: list[dict], name: str) -> float | None:
    """A statistic over the test split as it is, without perturbations; None where it is not there."""
    wanted = {"name": name, "split": "test"}
    return next((stat.get("mean") for stat in stats if stat["name"] == wanted), None)


def table(runs: Path) -> list[str]:
    """A line for each run in HELM's output folder."""
    lines = [f"{'scenario':<50} {'instances':>9} {'prompt':>7} {'output':>7}  metric"]
    for path in sorted(runs.rglob("stats.json")):
        stats = json.loads(path.read_text())
        name = path.parent.name.split(",model=")[0].split(":model=")[0]
        metric = METRICS[name.split(":")[0]]
        counts = [mean(stats, "num_instances"), mean(stats, "num_prompt_tokens"), mean(stats, "num_output_tokens")]
        instances, prompt, output = (0.0 if count is None else count for count in counts)
        value = mean(stats, metric)
        lines.append(
            f"{name:<50} {instances:>9.0f} {prompt:>7.0f} {output:>7.1f}"
            f"  {metric} {'-' if value is None else format(value, '.3f')}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="out/helm", help="of HELM: runs, and the engine's jobs")
    parser.add_argument("--max-eval-instances", default="100", metavar="N", help="a scenario; HELM's papers take 1000")
    parser.add_argument(
        "--model", default=MODEL, help="HELM's name of a model that the configuration has a deployment of"
    )
    parser.add_argument("--local-path", default=str(HERE / "prod_env"), help="HELM's configuration")
    arguments, others = parser.parse_known_args()

    output = Path(arguments.output)
    configuration = output / "prod_env"  # a copy: HELM puts its caches beside it
    configuration.mkdir(parents=True, exist_ok=True)
    for path in Path(arguments.local_path).glob("*.yaml"):
        shutil.copy(path, configuration)
    command = [
        sys.executable, "-m", "helm.benchmark.run", "--conf-paths", str(HERE / "run_entries.conf"), "--suite",
        "flexgen",
        "--runner-class-name", "batchgen.helm.runner.BatchgenRunner", "--local-path", str(configuration), "-o",
        str(output),
        "--models-to-run", arguments.model, "--max-eval-instances", arguments.max_eval_instances, *others,
    ]  # fmt: skip
    started = time.monotonic()
    code = subprocess.run(command).returncode
    print("\n".join(table(output / "runs" / "flexgen")))
    print(f"helm-run took {time.monotonic() - started:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    main()
