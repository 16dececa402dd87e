"""Headers of the kernels: each compiles by itself, and none includes itself through others."""

import graphlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.ops import cpp

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = sorted(path.relative_to(CSRC) for path in CSRC.rglob("*.h"))
VECTORS = {Path(f"simd/{name}.h") for name in ("avx2", "avx512", "neon", "scalar")}  # one of them in a translation unit
COMPILER = shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def _compile_alone(headers: list[Path], flags: list[str], folder: Path) -> None:
    """Compile a source for each header that includes nothing else, all in one process."""
    sources = []
    for header in headers:
        source = folder / f"{'_'.join(header.with_suffix('').parts)}.cpp"
        source.write_text(f'#include "{header}"\n')
        sources.append(str(source))
    command = [COMPILER, *flags, "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror", *sources]
    result = subprocess.run(command, cwd=CSRC, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]


def test_each_header_compiles_by_itself_with_the_flags_of_an_editor(tmp_path):
    flags = (CSRC / "compile_flags.txt").read_text().split()
    _compile_alone([header for header in HEADERS if header not in VECTORS - {Path("simd/scalar.h")}], flags, tmp_path)


@pytest.fixture(scope="module")
def compile_commands(tmp_path_factory) -> dict[str, list[str]]:
    """The compile commands of CMake, by the names of their instruction sets."""
    if shutil.which("cmake") is None:
        pytest.skip("no CMake")
    pybind11 = pytest.importorskip("pybind11")
    build = tmp_path_factory.mktemp("build")
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    ]
    subprocess.run(["cmake", "-S", CSRC, "-B", build, *options], check=True, capture_output=True)
    commands = [shlex.split(entry["command"]) for entry in json.loads((build / "compile_commands.json").read_text())]
    names = {name: command for command in commands for name in re.findall(r"BATCHGEN_TARGET=(\w+)", " ".join(command))}
    return {name: command[1 : command.index("-o")] for name, command in names.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("target", cpp.built())
def test_each_header_compiles_by_itself_for_each_instruction_set(target, compile_commands, tmp_path):
    flags = compile_commands[target]
    other_vectors = {header for header in VECTORS if f"/{header.name}" not in " ".join(flags)}
    _compile_alone([header for header in HEADERS if header not in other_vectors], flags, tmp_path)


def test_no_header_includes_itself_through_others():
    includes = {str(header): set(re.findall(r'#include "([^"]+)"', (CSRC / header).read_text())) for header in HEADERS}
    graphlib.TopologicalSorter(includes).prepare()  # raises where there is a cycle
