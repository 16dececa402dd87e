"""What installs batchgen: the Makefile, the Dockerfile, and the lines of pages and messages."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from fnmatch import fnmatch
from pathlib import Path

import pybind11
import pytest

from batchgen.ops.cpp import instruction_sets

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "USER", "WORKDIR"}


def dockerfile():
    """(instruction, arguments) of each line of the Dockerfile, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip() and line[0] != "#"]


def sent_to_the_builder(name):
    """Whether .dockerignore lets a path through: the last pattern that matches it or a folder above it decides."""
    sent = True
    for pattern in (ROOT / ".dockerignore").read_text().split():
        for path in (name, *map(str, Path(name).parents)):
            if fnmatch(path, pattern.removeprefix("!").removeprefix("**/")):
                sent = pattern.startswith("!")
    return sent


def test_the_dockerfile_has_known_instructions_and_copies_what_is_there():
    stages, copied = set(), set()
    for instruction, arguments in dockerfile():
        assert instruction in INSTRUCTIONS, instruction
        words = arguments.split()
        if instruction == "FROM" and "AS" in words:
            stages.add(words[-1])
        if instruction == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif instruction == "COPY":
            copied |= set(words[:-1])
        if instruction in ("CMD", "ENTRYPOINT"):
            assert all(isinstance(word, str) for word in json.loads(arguments))
    assert {"pyproject.toml", "README.md", "csrc", "batchgen"} <= copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert sent_to_the_builder(name), f".dockerignore leaves {name} out"
    assert not sent_to_the_builder(".git") and not sent_to_the_builder(".venv")
    assert not sent_to_the_builder("batchgen/ops/_kernels.cpython-311-x86_64-linux-gnu.so")


def test_the_image_is_small_and_its_user_is_not_root():
    last = max(i for i, (instruction, _) in enumerate(dockerfile()) if instruction == "FROM")
    final = dockerfile()[last:]
    assert "-slim" in final[0][1] and not any("g++" in arguments for _, arguments in final)
    (user,) = (arguments for instruction, arguments in final if instruction == "USER")
    assert user not in ("root", "0")


def test_torch_is_one_version_from_one_index_wherever_it_is_installed():
    places = ("Makefile", "Dockerfile", "docs/getting_started.md")
    versions = {version for name in places for version in re.findall(r"torch(?:==| )(\d[\d.]+)", _text(name))}
    versions |= set(re.findall(r"install_torch \S+ (\d[\d.]+)", _text("Makefile")))
    assert len(versions) == 1, versions
    for name in (".ci/install_torch", "Dockerfile", "docs/getting_started.md"):
        assert CPU_INDEX in _text(name), name


def _text(name):
    return (ROOT / name).read_text()


def fake_python(folder, *, has_torch, reaches_index):
    """A program in place of Python that notes what pip is asked for."""
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -c ]; then exit {0 if has_torch else 1}; fi\n'
        f'echo "$*" >> {folder}/asked\n'
        f'case "$*" in *--index-url*) exit {0 if reaches_index else 1};; esac\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("has_torch", "reaches_index", "indexes"),
    [(True, True, []), (False, True, [CPU_INDEX]), (False, False, [CPU_INDEX, None])],
)
def test_torch_that_is_there_is_left_alone_and_pips_own_index_comes_last(tmp_path, has_torch, reaches_index, indexes):
    python = fake_python(tmp_path, has_torch=has_torch, reaches_index=reaches_index)
    environment = {"PATH": os.environ["PATH"]}
    command = [ROOT / ".ci" / "install_torch", python, "9.9"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    asked = (tmp_path / "asked").read_text().splitlines() if indexes else []
    assert [re.findall(r"--index-url (\S+)", line)[:1] for line in asked] == [
        [index] if index else [] for index in indexes
    ]
    assert all("torch==9.9" in line for line in asked)
    assert ("PyPI's brings CUDA, 2.7 GB" in said) == (None in indexes)


def test_what_pages_say_of_torch_on_pypi_is_what_pip_would_install():
    """By a dry run without any settings of this machine, where an index has the data of packages beside them."""
    index = pytest.importorskip("pip._internal.models.index").PyPI
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{index.simple_url}/torch/", headers=headers)
    (version,) = set(re.findall(r"torch==([\d.]+)", _text("Dockerfile")))
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            files = json.load(answer)["files"]
    except (urllib.error.URLError, TimeoutError, ValueError):
        pytest.skip("PyPI cannot be reached")
    wheels = [f for f in files if f["filename"].startswith(f"torch-{version}-{tag}-") and "x86_64" in f["filename"]]
    if not wheels or not all(f.get("core-metadata") for f in wheels):
        pytest.skip("this index would send whole wheels, gigabytes, for a dry run")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    report = subprocess.run(
        [*command, "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:", "--target", "nowhere",
         f"torch=={version}"],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    names = {package["metadata"]["name"] for package in json.loads(report.stdout)["install"]}
    assert any(name.startswith(("nvidia-", "cuda-")) for name in names), (
        "PyPI's torch brings no CUDA: correct the pages"
    )


def test_no_line_installs_the_placeholder_that_pypi_has_under_this_name():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    named = re.compile(
        r"(?:pip|uv|pipx)\b[^\n`]*? (?:install|add|download|wheel)\b[^\n]*?[ '\"]batchgen(?=[\[=<>~'\"` ]|$)"
    )
    lines = [
        f"{name}: {line.strip()}"
        for name in tracked
        if name
        and Path(name).suffix in (".md", ".py", ".toml", ".sh", ".yaml", ".yml", ".cpp", "")
        and name != "CITATION.cff"
        for line in (ROOT / name).read_text(errors="ignore").splitlines()
        if named.search(line) and "named.search" not in line
    ]
    assert not lines, "name the checkout or a wheel: " + "; ".join(lines)


def test_a_job_is_set_up_without_what_tests_and_linters_need(tmp_path):
    done = subprocess.run(
        ["make", "--dry-run", "quickstart", f"VENV={tmp_path}/environment"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "recipes/data_wrangling/fodors_zagats/job.toml" in done.stdout
    assert re.search(r"requirements\.py +>", done.stdout), "only what the package itself needs"
    assert "dev docs test" not in done.stdout and "PLAIN_TWINS=ON" not in done.stdout


@pytest.mark.skipif(not shutil.which("cmake"), reason="CMake is not installed by itself")
def test_a_build_for_this_machine_has_its_instruction_sets_but_the_plainest(tmp_path):
    here = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    command = ["cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-DBATCHGEN_TARGETS=native", *here]
    subprocess.run(command, check=True, capture_output=True)
    configured = re.findall(r"X\((\w+)\)", (tmp_path / "targets.h").read_text())
    usable = [name for name in instruction_sets() if name != "scalar"] or ["scalar"]
    # The system may refuse AMX to this process on a CPU that has it.
    assert [name for name in configured if name != "amx"] == [name for name in usable if name != "amx"]


def test_progress_shows_the_lines_asked_for_and_all_of_a_failure(tmp_path):
    progress = [ROOT / ".ci" / "progress", tmp_path / "logs" / "log", "s/^step (.*)/at \\1/p", "bash", "-c"]
    good = subprocess.run([*progress, "echo noise; echo step one; echo step two"], capture_output=True, text=True)
    assert (good.returncode, good.stdout, good.stderr) == (0, "at one\nat two\n", "")
    bad = subprocess.run([*progress, "echo step one; echo the reason >&2; exit 7"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (7, "at one\n")
    assert "the reason" in bad.stderr and str(tmp_path / "logs" / "log") in bad.stderr
