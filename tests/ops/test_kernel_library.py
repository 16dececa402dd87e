"""A library of kernels that was compiled from other sources than those beside it is refused in one line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.core.errors import BatchgenError
from batchgen.ops import kernel_library
from batchgen.ops.kernel_library import check_interface, interface_of, library

CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture
def sources(tmp_path):
    for name in ("bindings.cpp", "kernels.h"):
        shutil.copy(CSRC / name, tmp_path / name)
    return tmp_path


def test_the_library_has_the_digest_of_the_sources_that_it_was_compiled_from():
    assert interface_of(CSRC) == library.INTERFACE


@pytest.mark.parametrize("name", ["bindings.cpp", "kernels.h"])
def test_other_declarations_than_those_compiled_are_refused(sources, name):
    check_interface(library.INTERFACE, sources)
    (sources / name).write_text((sources / name).read_text().replace("int64_t rows", "int64_t columns", 1))
    with pytest.raises(BatchgenError, match=r"compiled from other sources than .*: compile them again with `pip") as e:
        check_interface(library.INTERFACE, sources)
    assert "\n" not in str(e.value)


def test_a_library_from_before_the_digest_is_refused(sources):
    with pytest.raises(BatchgenError, match="compile them again"):
        check_interface("", sources)


def test_a_wheel_has_no_sources_to_compare(tmp_path):
    check_interface("whatever it was compiled from", tmp_path)


def test_a_package_without_compiled_kernels_says_how_to_compile_them(tmp_path):
    package = tmp_path / "batchgen"
    (package / "ops").mkdir(parents=True)
    for name in ("__init__.py", "_version.py", "ops/__init__.py", "ops/kernel_library.py"):
        shutil.copy(Path(kernel_library.__file__).parents[1] / name, package / name)
    shutil.copytree(Path(kernel_library.__file__).parents[1] / "core", package / "core")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import batchgen.ops.kernel_library"
    # Without site-packages, whose finder of an editable installation knows the library.
    child = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 1
    last = child.stderr.strip().splitlines()[-1]
    assert "the C++ kernels cannot be loaded" in last and "pip install --no-deps -e ." in last
