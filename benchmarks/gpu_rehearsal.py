"""`make gpu-check` without a GPU and with no other packages than its list.

Each part has to get as far as its first CUDA call.

    python benchmarks/gpu_rehearsal.py                # one test of each part of tests
    python benchmarks/gpu_rehearsal.py --all          # all of them

Of what is installed, only the packages of the list and those they require can be imported. torch says that there is a
card; the first call that would need it fails, and is noted. What fails of anything else, or never asks for a card, is
told.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "torch", "triton", "transformers", "pyarrow", "safetensors", "click", "tqdm", "pybind11", "cmake", "ninja",
    "pytest",
    "hypothesis",
)  # fmt: skip
LISTED, CALLS = "BATCHGEN_REHEARSAL_LISTED", "BATCHGEN_REHEARSAL_CALLS"  # what child processes are told


class FirstCudaCall(RuntimeError):
    """There is no card behind the one that torch was made to report."""


def listed() -> set[str]:
    """PACKAGES, and what these require, as far as it is installed."""
    left, found = [_plain(name) for name in PACKAGES], set()
    while left:
        name = left.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            requires = [] if name in found else importlib.metadata.requires(name) or []
            found.add(name)
            left += [
                _plain(re.split(r"[^\w.-]", r, maxsplit=1)[0]) for r in requires if "extra" not in r.partition(";")[2]
            ]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class OnlyListed:
    """An import finder of listed packages alone, and of modules of no package, such as the repository's.

    It has torch report a card once it is imported.
    """

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        owners = importlib.metadata.packages_distributions()
        self._blocked = {m for m, names in owners.items() if not packages & {_plain(n) for n in names}} - {"batchgen"}
        # What an editable installation put before Python's own: it knows where the compiled kernels are.
        self._batchgen = [f for f in sys.meta_path if f not in (BuiltinImporter, FrozenImporter)]

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._blocked:
            return None
        finders = self._batchgen if name.partition(".")[0] == "batchgen" else [PathFinder]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and name in ("torch", "batchgen.core.device"):
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                pretend_a_card(module)

            spec.loader.exec_module = exec_module
        return spec

    def find_distributions(self, *args, **kwargs) -> Iterator[importlib.metadata.Distribution]:
        """Plugins of pytest come this way."""
        found = PathFinder.find_distributions(*args, **kwargs)
        return (package for package in found if _plain(package.metadata["Name"] or "") in self._packages)


def pretend_a_card(module) -> None:
    if module.__name__ == "batchgen.core.device":
        module.has_cuda = lambda: True
        return

    def first_call(*args, **kwargs):
        with open(os.environ[CALLS], "a") as file:
            file.write("a card was asked for\n")
        raise FirstCudaCall("FirstCudaCall: there is no card")

    module.cuda.is_available = lambda: True
    module.cuda._lazy_init = first_call
    for kind in (module.cuda.Stream, module.cuda.Event):  # a build without CUDA refuses them before it is initialised
        kind.__new__ = first_call


def install() -> None:
    """For the rest of this process. sitecustomize calls it in child processes."""
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyListed(set(os.environ[LISTED].split(",")))]


@contextlib.contextmanager
def rehearsing() -> Iterator[Path]:
    """Leaves this process and its children listed packages only and a card that fails; yields the file of its calls."""
    with tempfile.TemporaryDirectory(prefix="batchgen-rehearsal-") as folder:
        calls = Path(folder) / "calls"
        calls.touch()
        Path(folder, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(HERE)!r})\nimport gpu_rehearsal\ngpu_rehearsal.install()\n"
        )
        root = str(HERE.parent)
        os.environ[LISTED], os.environ[CALLS] = ",".join(sorted(listed())), str(calls)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, root, str(HERE), os.environ.get("PYTHONPATH", "")])
        sys.path[:0] = [folder, root, str(HERE)]
        install()
        yield calls


def in_child(command: list[str], output: Path) -> int:
    """The exit status of `python *command` in a fork of this process, which has imported the large packages for all.


    All that it prints goes to the file."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        sys.argv = command[1:] if command[0] == "-m" else command
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def uncollected(calls: Path) -> str | None:
    """What is wrong with `pytest -m gpu --collect-only`, or None."""
    log = calls.with_name("log")
    status = in_child(["-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"], log)
    return None if status == 0 else f"exit status {status}: {log.read_text()[-1500:]}"


def ready_parts() -> list[str]:
    """Names of the parts that are rehearsed: those that run on a card, by no other program than Python."""
    from gpu_parts import PARTS

    return [
        name
        for name, part in PARTS.items()
        if name != "build" and not part.programs and "--compile" not in part.command
    ]


def rehearse(name: str, calls: Path, every_test: bool) -> str | None:
    """Runs a part up to its first CUDA call; what is wrong with it, or None."""
    from gpu_parts import PARTS
    from gpu_tests import TEST_LOG

    part = PARTS[name]
    tests = part.is_tests
    log, done = calls.with_name("log"), calls.with_name("tests")
    places = {"{work}": str(calls.parent), "{output}": str(calls.with_name("output"))}
    command = [re.sub(r"\{\w+\}", lambda found: places[found[0]], word) for word in part.command[1:]]
    os.environ |= {TEST_LOG: str(done)} | dict(part.environment)
    done.write_text("")
    calls.write_text("")
    if tests and not every_test:
        command.append("--maxfail=1")
    if command[0].endswith("gpu_case.py"):  # each would be planned with a profile of the same machine
        command += ["--hardware", "t4"]
    status = in_child(command, log)
    told = log.read_text()
    if not calls.read_text():
        return f"asked for no card (exit status {status}): {told[-1500:]}"
    if "ModuleNotFoundError" in told or "ImportError" in told:
        return f"lacks a package: {told[-1500:]}"
    if not tests:
        return None if "FirstCudaCall" in told else f"failed of something else: {told[-1500:]}"
    failures = [test for line in done.read_text().splitlines() if (test := json.loads(line))["outcome"] == "failed"]
    others = [f"{test['test']}: {test['why'][-800:]}" for test in failures if "FirstCudaCall" not in test["why"]]
    return None if failures and not others else f"failed of something else: {others or told[-1500:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all tests of each part")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--collect", action="store_true", help="and with --parts, collect all tests marked gpu as well")
    args = parser.parse_args()
    os.chdir(HERE.parent)
    with rehearsing() as calls:
        import pyarrow  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401

        wrong = 0
        if args.collect or not args.parts:
            wrong += (problem := uncollected(calls)) is not None
            print(f"collection of all tests marked gpu: {problem or 'ok'}", flush=True)
        names = args.parts or ready_parts()
        for name in names:
            problem = rehearse(name, calls, args.all)
            print(f"{name}: {problem or 'ok'}", flush=True)
            wrong += problem is not None
    sys.exit(f"gpu_rehearsal: {wrong} parts are not ready" if wrong else 0)


if __name__ == "__main__":
    main()
