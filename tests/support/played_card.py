"""A CUDA card played on the CPU under torch's own CUDA build: the environment of processes that find it.

    python tests/support/played_card.py [OPTION=VALUE ...] ARGUMENTS    # Python with these arguments, on such a card

The runtime (`played_cuda`) stands for CUDA's runtime, driver, cuBLAS and NCCL. It is loaded before them, so batchgen,
torch and Triton run as they are on a card: streams, events, allocator, graphs, launchers. Kernels do nothing, or are
played on the streams (`played_operations`, `played_kernels`). What a real card would not have survived, or would not
have noticed, is told as a fault.

Options are environment variables PLAYED_CUDA_...: KERNELS (1: they are played; 0: they do nothing), COMPILE (1: Triton
compiles kernels, though nothing runs them), SEED and DELAY_US (of the orders in which streams run), MIB and
PINNABLE_MIB (memory of the card, and what can be pinned), DEVICES, CAPABILITY, QUEUE (operations that a stream holds),
EMPTY (1: large copies move nothing, and what comes from the card is zeros), AT_ONCE (1: no thread, for the time that
the host takes), REPORT (a file for counts and faults). BATCHGEN_CUDA_VENV names the environments with torch's CUDA
build, if they are not those that `make cuda-env` makes; the first one is taken.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
_SOURCES = SUPPORT / "played_cuda"


def venvs() -> list[Path]:
    """The environments with CUDA builds of torch (`make cuda-env`), the newest build first; there may be none."""
    named = os.environ.get("BATCHGEN_CUDA_VENV")
    found = map(Path, named.split(os.pathsep)) if named else sorted(ROOT.glob(".venv-cuda-*"), key=_version)[::-1]
    return [venv for venv in found if (venv / "bin" / "python").exists()]


def _version(venv: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", venv.name)]


def missing() -> str | None:
    """What is missing for a played card; None: nothing."""
    if not venvs():
        return "torch's CUDA build is not installed beside the CPU's (make cuda-env)"
    return None if shutil.which("g++") else "no g++ to compile the played CUDA runtime"


def python(venv: Path) -> str:
    return str(venv / "bin" / "python")


def environment(venv: Path, **options: object) -> dict[str, str]:
    """The environment variables of a process of `python(venv)` that finds a played card.

    Args:
        venv: An environment with torch's CUDA build.
        options: Options of the runtime, in lower case.
    """
    library = _library(venv)
    paths = [SUPPORT / "played_site", ROOT, SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))},
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": str(library.parent / "triton"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PLAYED_SITE_PACKAGES": sysconfig.get_path("purelib"),
        "BATCHGEN_CHECK_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",  # threads of several operations would wait for each other
        **{f"PLAYED_CUDA_{name.upper()}": str(value) for name, value in options.items()},
    }


def _library(venv: Path) -> Path:
    """The compiled runtime, under the name by which the driver is asked for; compiled where it is not there yet."""
    sources, headers = sorted(_SOURCES.glob("*.cpp")), _headers(venv)
    told = [
        *sorted(_SOURCES.iterdir()),
        *(folder / name for folder in headers for name in ("cuda.h", "driver_types.h")),
    ]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in told if path.exists())).hexdigest()[:16]
    library = ROOT / "build" / "played_cuda" / name / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        being_made = library.with_name(f"{library.name}.{os.getpid()}")
        command = ["g++", "-std=gnu++20", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
        places = [option for folder in headers for option in ("-isystem", folder)]
        subprocess.run([*command, *places, *sources, "-o", being_made, "-ldl", "-lpthread"], check=True)
        being_made.rename(library)
    return library


def _headers(venv: Path) -> list[Path]:
    """Folders of CUDA's headers, which torch's CUDA build and Triton bring."""
    (packages,) = venv.glob("lib/python*/site-packages")
    return [packages / "nvidia" / "cu13" / "include", packages / "triton" / "backends" / "nvidia" / "include"]


def main() -> None:
    given = sys.argv[1:]
    count = next((i for i, argument in enumerate(given) if not re.fullmatch("[a-z_]+=.*", argument)), len(given))
    if why := missing():
        sys.exit(why)
    venv, options = venvs()[0], dict(option.split("=") for option in given[:count])
    os.execve(python(venv), [python(venv), *given[count:]], environment(venv, **options))


if __name__ == "__main__":
    main()
