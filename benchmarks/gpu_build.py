"""Compiles the C++ kernels for this machine into the package, unless those that are there can be used.

python benchmarks/gpu_build.py --build build/csrc --output build.json
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "batchgen" / "ops" / f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def usable() -> str | None:
    """The best instruction set of the kernels that are there; None: there are none, or from other sources."""
    program = "from batchgen.ops.instruction_set import instruction_set; print(instruction_set())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def build(folder: Path) -> None:
    """Compile the kernels of this machine's instruction sets. Raises CalledProcessError."""
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
    )
    configure = ["cmake", "-S", "csrc", "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DBATCHGEN_TARGETS=native", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-Dpybind11_DIR={pybind11.stdout.strip()}"]
    for command in (configure, ["cmake", "--build", str(folder), "--parallel"]):
        subprocess.run(command, cwd=ROOT, check=True)
    temporary = KERNELS.with_name(f".{KERNELS.name}.new")
    temporary.write_bytes((folder / KERNELS.name).read_bytes())
    temporary.replace(KERNELS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder of CMake's files")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    isa, built = usable(), False
    if isa is None:
        try:
            build(args.build.resolve())
        except (subprocess.CalledProcessError, OSError) as error:
            sys.exit(f"gpu_build: {error}")
        isa, built = usable(), True
    if isa is None:
        sys.exit("gpu_build: the kernels that were compiled cannot be loaded")
    seconds = time.perf_counter() - started
    args.output.write_text(json.dumps({"isa": isa, "built": built, "seconds": seconds}) + "\n")
    print(f"summary: kernels for {isa}, " + (f"compiled in {seconds:.0f} s" if built else "there already"))


if __name__ == "__main__":
    main()
