"""The imports of a process that runs a command, and its first lines."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

# A command, with all imports of its process on the last line of standard output.
COMMAND = """
import atexit, json, sys
atexit.register(lambda: print("\\n" + json.dumps(sorted(sys.modules))))
sys.argv[0] = "batchgen"
from batchgen.cli import main
main()
"""
SLOW = {"transformers", "datasets", "pandas", "triton", "huggingface_hub"}


def imports_of(*arguments: str, expected_code: int = 0) -> set[str]:
    """The modules that a new process imports for a command."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == expected_code, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Arguments of a job with an empty cache."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BATCHGEN_HARDWARE", "zen4")
    make_tiny_model("llama", tmp_path / "model")
    make_tiny_tokenizer(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"said": "one"}\n{"said": "two"}\n')
    arguments = ["--model", str(tmp_path / "model"), "--input", str(rows), "--output", str(tmp_path / "out.parquet")]
    return ["run", *arguments, "--prompt-template", "{{ said }}", "--max-tokens", "2"]


def test_a_job_imports_no_library_that_it_does_not_use(job):
    found = imports_of(*job)
    assert {"torch", "tokenizers", "pyarrow", "pulp"} <= found
    assert found.isdisjoint(SLOW)


def test_chats_of_a_gguf_need_no_transformers_either(job, tmp_path):
    model = make_tiny_model("llama", tmp_path / "hf")
    write_tiny_gguf(model, tmp_path / "tiny.gguf", tokenizer=make_tiny_tokenizer(tmp_path / "hf"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    start = job.index("--prompt-template")
    job[start : start + 2] = ["--messages-column", "messages"]
    for _ in range(2):  # the tokenizer is built, and then taken from the cache
        assert imports_of(*job, "--model", str(tmp_path / "tiny.gguf"), "--overwrite").isdisjoint(SLOW)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_neither_torch_nor_anything_that_reads_data(arguments):
    assert imports_of(*arguments).isdisjoint(SLOW | {"torch", "numpy", "pyarrow", "tokenizers", "pulp", "highspy"})


def test_a_mistake_is_told_before_torch_is_imported(job):
    assert "torch" not in imports_of(*job, "--max-failed", "none of them", expected_code=2)


def test_a_terminal_shows_the_job_before_data_libraries_are_imported(job, tmp_path):
    """The first line comes although pyarrow, numpy and torch fail to be imported."""
    broken = tmp_path / "broken"
    for name in ("pyarrow", "numpy", "torch"):
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text("raise SystemExit(7)")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchgen", *job], stderr=theirs, env=os.environ | {"PYTHONPATH": str(broken)}
    )
    assert process.wait(60) == 7
    os.close(theirs)
    assert f"{job[2]} over {job[4]}" in os.read(ours, 4096).decode()
    os.close(ours)
