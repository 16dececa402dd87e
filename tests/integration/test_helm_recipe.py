"""The HELM recipe: FlexGen's seven sub-scenarios as run entries, and the table of their metrics."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "helm"

spec = importlib.util.spec_from_file_location("_helm_recipe", RECIPE / "run.py")
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


def entries():
    text = (RECIPE / "run_entries.conf").read_text()
    return re.findall(r'\{description: "([^"]+)", priority: (\d)\}', text)


def test_the_entries_are_those_of_flexgen():
    expected = {
        "wikifact:k=5,subject=plaintiff", "wikifact:k=5,subject=instance_of", "mmlu:subject=abstract_algebra",
        "mmlu:subject=us_foreign_policy", "synthetic_reasoning:mode=pattern_match",
        "synthetic_reasoning_natural:difficulty=easy", "summarization_xsum:temperature=0.3",
    }  # fmt: skip
    assert {description for description, _ in entries()} == expected
    assert {d for d, priority in entries() if priority == "1"} == {d for d in expected if d.startswith("synthetic")}
    assert {d.split(":")[0] for d in expected} == set(recipe.METRICS)


def test_the_table_shows_the_test_split_as_it_is(tmp_path):
    folder = tmp_path / "mmlu:subject=abstract_algebra,method=multiple_choice_joint,model=huggingface_x"
    folder.mkdir()
    stats = [
        {"name": {"name": "exact_match", "split": "valid"}, "mean": 0.9},
        {"name": {"name": "exact_match", "split": "test", "perturbation": {"name": "robustness"}}, "mean": 0.1},
        {"name": {"name": "exact_match", "split": "test"}, "mean": 0.25},
        {"name": {"name": "num_instances", "split": "test"}, "mean": 100.0},
        {"name": {"name": "num_prompt_tokens", "split": "test"}, "mean": 432.1},
    ]
    (folder / "stats.json").write_text(json.dumps(stats))
    (_, line) = recipe.table(tmp_path)
    assert line.split() == ["mmlu:subject=abstract_algebra,method=multiple_choice_joint", "100", "432", "0.0",
    "exact_match", "0.250"]  # fmt: skip


def test_helm_knows_the_entries():
    pytest.importorskip("helm.benchmark.run")
    from helm.benchmark.presentation.run_entry import read_run_entries
    from helm.benchmark.run import run_entries_to_run_specs
    from helm.benchmark.runner import set_benchmark_output_path

    set_benchmark_output_path("/nowhere")
    found = read_run_entries([str(RECIPE / "run_entries.conf")]).entries
    assert [(entry.description, str(entry.priority)) for entry in found] == entries()
    specs = run_entries_to_run_specs(found, max_eval_instances=10, models_to_run=["openai/gpt2"])
    assert len(specs) == 7


@pytest.mark.slow
def test_the_recipe_runs_offline(tmp_path):
    """Its two sub-scenarios that need no download, with the demo model; once more, nothing is computed again."""
    pytest.importorskip("helm.benchmark.run")
    command = [sys.executable, str(RECIPE / "run.py"), "--output", str(tmp_path), "--priority", "1",
    "--max-eval-instances", "6"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    first, second = (subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2))
    for process in (first, second):
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
        assert re.search(
            r"^synthetic_reasoning:mode=pattern_match .* quasi_exact_match [01]\.\d{3}$", process.stdout, re.M
        )
        assert re.search(
            r"^synthetic_reasoning_natural:difficulty=easy .* f1_set_match [01]\.\d{3}$", process.stdout, re.M
        )
    assert "12 rows in" in first.stdout + first.stderr and "rows in" not in second.stdout + second.stderr
    assert not (RECIPE / "prod_env" / "cache").exists()
