"""`make gpu-check` to its end without a GPU: on a card that is played on the CPU, with the packages of its list alone.

    python tests/support/played_card.py benchmarks/gpu_rehearsal.py --results DIR [--parts NAME ...] [--wheels DIR]

Each part is made small. Tests, and what asks the card for numbers, have kernels that are played. What measures has
kernels that do nothing, models of two layers, and large copies that move nothing. So its times mean nothing; what it
calls, reads and writes is that of a real card. A part without needs finds the packages of PACKAGES and what they
require, no other ones. The others also find what `make gpu-wheels` fetches: from --wheels, or as far as it is installed
here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gpu_check
from gpu_parts import PARTS, Part

# What a machine for gpu-check has to have.
PACKAGES = (
    "torch", "triton", "transformers", "pyarrow", "safetensors", "click", "tqdm", "pybind11", "cmake", "ninja",
    "pytest", "hypothesis",
)  # fmt: skip
# What `make gpu-wheels` fetches, but for FlashInfer, which a compiler takes minutes for.
WHEELS = ("accelerate", "attrs", "flexgen", "gguf", "highspy", "psutil", "pulp", "xxhash")
_LIMIT_S = 900  # of a part: it has the CPU for everything
_EMPTY = {"PLAYED_CUDA_KERNELS": "0", "PLAYED_CUDA_EMPTY": "1"}
# What asks the card for numbers: checks of tokens by gpu_smoke.py, routes that torch waits for, and an engine that
# looks after each token if all rows have ended.
_READS_NUMBERS = {"model", "sweep", "benchmarks/gpu_experts.py", "accelerate"}


def with_required(names: Iterable[str]) -> set[str]:
    """Packages, and what they require, as far as it is installed."""
    left, found = [*names], set()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            requires = [] if name in found else importlib.metadata.requires(name) or []
            found.add(name)
            left += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in requires if "extra" not in r.partition(";")[2]]
    return found


def link_packages(names: Iterable[str], folder: Path) -> None:
    """Make a folder in which Python finds these packages and no others, by links to where they are installed."""
    folder.mkdir()
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (link := folder / top).is_symlink():
                    link.symlink_to(package.locate_file(top))


def package_of_kernels(kernels: Path) -> set[str]:
    """The installed package without which parts do not find the C++ kernels.

    Args:
        kernels: The compiled kernels that Python finds here: an installation's, or those that lie in the sources, as
            the part "build" puts them there.
    """
    return set() if kernels == gpu_check.KERNELS else {"batchgen"}


def made_small(part: Part) -> Part:
    """The part as it is rehearsed: the command after compute-sanitizer, with few rows and layers."""
    reads_numbers = part.is_tests or not _READS_NUMBERS.isdisjoint(part.command)
    environment = {**part.environment, **({} if reads_numbers else _EMPTY)}
    command = part.command[part.command.index("python") :]
    return replace(part, command=command, programs=(), limit_s=_LIMIT_S, environment=environment)


class Rehearsal(gpu_check.Check):
    """The check, with packages from folders of links."""

    def __init__(self, results: Path, folder: Path) -> None:
        super().__init__(results, folder / "work", small=True)
        self.packages, self.wheels = folder / "packages", folder / "wheels"

    def _has(self, package: str) -> bool:
        return any((place / package).exists() for place in (self.packages, self.site) if place)

    def environment(self) -> dict[str, str]:
        """Environment variables of all parts. There are two cards, for ranks."""
        played = {"PLAYED_SITE_PACKAGES": str(self.packages), "PLAYED_CUDA_DEVICES": "2"}
        return super().environment() | played | {"BATCHGEN_TEST_ALL": "0"}


def rehearse(names: Iterable[str], results: Path, folder: Path, wheels: Path | None) -> dict:
    """Run parts, those without needs first. Returns their results by name."""
    check = Rehearsal(results, folder)
    kernels = Path(find_spec("batchgen.ops._kernels").origin)
    link_packages(with_required(PACKAGES) | package_of_kernels(kernels), check.packages)
    link_packages(WHEELS, check.wheels)
    parts = {name: made_small(PARTS[name]) for name in names}
    PARTS.update(parts)
    check.run([(name,) for name, part in parts.items() if not part.needs])
    if wheels:
        check.use_wheels(wheels)
    else:
        check.site = check.wheels
    check.run([(name,) for name, part in parts.items() if part.needs])
    return {name: check.result["parts"][name] for name in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="NAME", help="only these")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, help="folder of wheels in place of the packages installed here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchgen-rehearsal-") as folder:
        parts = rehearse(args.parts, args.results.resolve(), Path(folder), args.wheels)
    wrong = [name for name, part in parts.items() if not part["outcome"].startswith(("ok", "not run"))]
    sys.exit(f"gpu_rehearsal: not ok: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
