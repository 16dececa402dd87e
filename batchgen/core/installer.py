"""Programs that install Python packages: pip, or uv where an environment has no pip of its own."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path


def install_command(*requirements: str) -> str:
    """The command, for people to copy, that installs packages into this environment.

    Args:
        requirements: Requirements such as "llguidance>=1.7".
    """
    has_pip = importlib.util.find_spec("pip") is not None
    return shlex.join([*(["pip"] if has_pip else ["uv", "pip"]), "install", *requirements])


def installer() -> list[str]:
    """The beginning of the command `pip install`, or of one that takes the same arguments.

    Without pip and uv it is the pip that comes with Python's library, run from where it lies: in that library, or where
    a distribution keeps it (WHEEL_PKG_DIR of Python's build).

    Raises:
        LookupError: There is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    bundled = importlib.util.find_spec("ensurepip")
    folders = [Path(bundled.origin).parent / "_bundled"] if bundled and bundled.origin else []
    if of_distribution := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(of_distribution))
    for wheel in (wheel for folder in folders for wheel in folder.glob("pip-*.whl")):
        return [sys.executable, str(wheel / "pip"), "install", "--disable-pip-version-check"]
    raise LookupError("there is neither pip nor uv")
