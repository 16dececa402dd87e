"""Prints what pyproject.toml asks for, a requirement a line: of the package, and of the extras named as arguments.

`--build` alone: what it is built with, CMake and ninja too where the system has none.
"""

import shutil
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, whose pip brings its own
    from pip._vendor import tomli as tomllib

settings = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
if sys.argv[1:] == ["--build"]:
    missing = [program for program in ("cmake", "ninja") if not shutil.which(program)]
    print(*settings["build-system"]["requires"], *missing, sep="\n")
    sys.exit()
project = settings["project"]
extras = [requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra]]
print(*project["dependencies"], *extras, sep="\n")
