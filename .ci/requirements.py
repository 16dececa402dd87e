"""Prints what pyproject.toml asks for, a requirement a line: of the package, and of the extras named as arguments."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, whose pip brings its own
    from pip._vendor import tomli as tomllib

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
extras = [requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra]]
print(*project["dependencies"], *extras, sep="\n")
