"""The peers' virtual environments: made once, outside of the repository, with the versions that are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Installed one after the other. llama-cpp-python is compiled for this machine, with all its instructions.
PACKAGES = {
    "accelerate": [["torch==2.13.0"], ["transformers==5.23.0", "accelerate==1.15.0", "safetensors"]],
    "llama.cpp": [["llama-cpp-python==0.3.36"]],
}
_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


def python_of(peer: str, work_dir: Path) -> Path:
    """The Python of a peer's environment, which is made where it is not there."""
    folder = work_dir / peer
    python, ready = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(" ".join(packages) for packages in PACKAGES[peer])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {peer} in {folder} (takes minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in PACKAGES[peer]:
            pip = [str(python), "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(pip, check=True, env=os.environ | _BUILD)
        ready.write_text(wanted)
    return python
