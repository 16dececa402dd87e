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

# A command, with all imports of its process on the last line of standard output, and those that were not made without
# garbage collections.
COMMAND = """
import atexit, gc, json, sys
class Collecting:
    found = set()
    def find_spec(self, name, path=None, target=None):
        if gc.isenabled():
            self.found.add(name)
sys.meta_path.insert(0, Collecting())
atexit.register(lambda: print("\\n" + json.dumps([sorted(sys.modules), sorted(Collecting.found)])))
sys.argv[0] = "batchgen"
from batchgen.cli import program
program()
"""
# The last of them has the shapes of torch's operations, for programs that are traced.
SLOW = {"transformers", "datasets", "pandas", "triton", "huggingface_hub", "torch._meta_registrations"}
LARGE = {"torch", "numpy", "pyarrow", "pulp", "highspy"}


def imports_of(*arguments: str, expected_code: int = 0) -> set[str]:
    """The modules that a new process imports for a command. Large ones come without garbage collections."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == expected_code, done.stderr
    found, beside_collections = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert beside_collections.isdisjoint(LARGE | {"batchgen.job.run", "batchgen.job.plan"})
    return found


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
    """Not where it draws random numbers either: weights of 4 bits are fitted to inputs that random tokens make."""
    found = imports_of(*job, "--weights", "int4")
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
    assert imports_of(*arguments).isdisjoint(SLOW | LARGE | {"tokenizers"})


def test_a_plan_imports_no_library_that_it_does_not_use(job):
    assert imports_of("plan", *job[1:]).isdisjoint(SLOW)


def test_torch_comes_whole_where_its_shapes_are_asked_for_later():
    program = """
from batchgen.core.imports import import_torch
import_torch()
import torch
from torch import _meta_registrations
assert _meta_registrations.activate_meta
assert torch.zeros(2, 3, device="meta").matmul(torch.zeros(3, 4, device="meta")).shape == (2, 4)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


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


# A program whose command leaves a thread in one of torch's functions, which has to have the interpreter back.
LEAVING = """
import sys, threading, time, torch
from batchgen import cli
def run():
    matrix = torch.ones(400, 400)
    while True:
        matrix @ matrix
def main():
    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.2)
    print("all is written")
    sys.exit(3)
cli.main = main
cli.program()
"""


def test_a_command_ends_with_its_own_exit_code_while_a_thread_is_in_torch():
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "all is written\n", "")
