"""Triton's kernels by its interpreter, and compiled for cards that are not there.

The checks are in triton_checks.py and its neighbours. Kernels are made for the interpreter or for a card when they are
imported, so each of these is a process of its own, whatever this one has imported. On a card, `make gpu-check` runs the
checks themselves (BATCHGEN_CHECK_DEVICE=cuda), so that each is a test of its own.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from thorough import quick_or

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(*command, **environment):
    whole = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    whole |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | environment
    done = subprocess.run([sys.executable, *command], env=whole, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def check(tmp_path, *checks):
    told = run(
        *("-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *(HERE / name for name in checks)),
        *quick_or(("--part", "0.25"), ()),
        BATCHGEN_CHECK_DEVICE="cpu",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert " passed" in told


CHECKS = {
    "attention and states": ["triton_attention_checks.py", "triton_state_checks.py"],
    "products, captured sweeps and the rest": ["triton_product_checks.py", "graph_checks.py", "triton_checks.py"],
}


@pytest.mark.slow
@pytest.mark.parametrize("which", CHECKS)
def test_under_the_interpreter(which, tmp_path):
    check(tmp_path, *CHECKS[which])


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, head_dims",
    quick_or(
        [("75", ["128"])], [("75", ["64", "128"]), ("80", ["64", "128"]), ("86", ["256", "512"]), ("90", ["64", "128"])]
    ),
    ids=str,
)
def test_all_kernels_compile_and_fit(capability, head_dims, tmp_path):
    """The widest heads on the cards with the least shared memory, of those that attend by these kernels."""
    run(
        *("-m", "pytest", "--tb=short", "-p", "no:cacheprovider", HERE / "launch_checks.py"),
        BATCHGEN_CHECK_CAPABILITY=capability,
        BATCHGEN_CHECK_HEAD_DIMS=",".join(head_dims),
        TRITON_CACHE_DIR=str(tmp_path),
        **absent_cuda(tmp_path),
    )


def absent_cuda(folder):
    """The environment of a process in which a library is the CUDA driver of a card that is not there."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    library = folder / "libcuda.so.1"
    headers = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "include"
    source = ROOT / "tests" / "support" / "absent_cuda.c"
    command = [compiler, "-shared", "-fPIC", "-Wno-unused-parameter", f"-I{headers}", source, "-o", library]
    subprocess.run(command, check=True)
    return {
        "ABSENT_CUDA": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
    }
