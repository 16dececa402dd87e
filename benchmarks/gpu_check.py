"""Everything that needs a CUDA GPU, in three calls of nine minutes: rates, smoke checks, short jobs, profile and tests.

    make gpu-check                                     # all of it, one call after the other
    make gpu-check CALL=1                              # the first call: checks, and a model that fits the card
    python benchmarks/gpu_check.py --parts rates,overlap
    python benchmarks/gpu_check.py --merge a.json b.json    # what calls on different machines have written, as one

The calls are for a machine that is rented for half an hour: fire one after the other, and read afterwards. Each part
(`gpu_parts.py`) is a process of its own with a time limit, so none stops another. Results are written after each part.

It needs no network, and nothing installed but torch, triton, transformers, pyarrow, safetensors, click, tqdm, pybind11,
cmake, ninja, pytest and hypothesis. `make gpu-wheels` gets what such a machine may lack besides, and --wheels names the
folder: a planner for planned jobs, xxhash for weight stores, FlashInfer and FlexGen to compare with.

Results go to --results: gpu_check.md (what happened, in its first lines), gpu_check.json, gpu_check.log, archives of
traces, and archives to carry on. These hold the compiled C++ kernels and what Triton has compiled; put into the folder
of --carried, they spare the next machine the compilers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import gpu_archives
import gpu_report
from gpu_parts import CALL_SECONDS, CALLS, PARTS, Part, file_name
from gpu_processes import Ending, Interrupted, Task, run_side_by_side
from gpu_tests import TEST_LOG

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build"
KERNELS = ROOT / "batchgen" / "ops" / f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"
DEVICE = "device"  # the part without which no other one has a use
_MOST_LOG = 400_000  # characters of a part's log that are kept

Row = tuple[str, ...]


class Check:
    """Runs parts and keeps their results.

    Invariant: the result files hold every part that has ended.
    """

    def __init__(self, results: Path, work: Path, seconds: float | None = None, small: bool = False) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._results, self._work, self._small = results, work, small
        self._packed: dict[str, list] = {}
        for folder in (results, work):
            folder.mkdir(parents=True, exist_ok=True)
        self.site: Path | None = None  # of packages that are not installed
        self.result: dict = {"parts": {}}
        if (earlier := results / "gpu_check.json").exists():
            self.result = json.loads(earlier.read_text())

    def run(self, rows: list[Row]) -> None:
        """Run rows of parts one after the other. Without a card, only the first part."""
        for row in rows:
            if self.has_no_card():
                for name in row:
                    self._keep(name, Ending("not run: there is no CUDA device to be used here", 0.0))
            else:
                self.run_row({name: PARTS[name] for name in row})
                self.pack()

    def has_no_card(self) -> bool:
        part = self.result["parts"].get(DEVICE)
        return part is not None and part["outcome"] != "ok"

    def run_row(self, parts: dict[str, Part]) -> None:
        """Run parts side by side."""
        tasks = {}
        for name, part in parts.items():
            for path in (self._output(name), self._log(name), self._tests(name)):
                path.unlink(missing_ok=True)
            if missing := self._missing(part):
                self._keep(name, Ending(f"not run: {' and '.join(missing)} not installed (--wheels)", 0.0))
            else:
                tasks[name] = self._task(name, part)
        print(f"== {', '.join(parts)}", flush=True)
        run_side_by_side(tasks, self._keep)

    def _missing(self, part: Part) -> list[str]:
        packages = [name for name in part.needs if not self._has(name)]
        return packages + [name for name in part.programs if not _program(name)]

    def _has(self, package: str) -> bool:
        return find_spec(package) is not None or bool(self.site and (self.site / package).exists())

    def _task(self, name: str, part: Part) -> Task:
        added = [words for package, words in part.with_packages.items() if self._has(package)]
        added += [words for file, words in part.with_files.items() if (self._work / file).exists()]
        added += [part.small] if self._small else []
        words = [*part.command, *(word for words in added for word in words)]
        words = [sys.executable if word == "python" else self._placed(word, name) for word in words]
        words[0] = _program(words[0]) or words[0]
        limit_s = part.limit_s if self._ends is None else min(part.limit_s, self._ends - time.monotonic())
        environment = self.environment() | dict(part.environment) | {TEST_LOG: str(self._tests(name))}
        return Task(words, limit_s, self._log(name), ROOT, environment)

    def _placed(self, word: str, name: str) -> str:
        return word.replace("{work}", str(self._work)).replace("{output}", str(self._output(name)))

    def environment(self) -> dict[str, str]:
        """Environment variables of all parts."""
        paths = [ROOT, HERE, self.site, os.environ.get("PYTHONPATH", "")]
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return outer | {
            # cmake and ninja are this Python's, whether or not its environment is the shell's.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(self._triton_cache),
            "FLASHINFER_WORKSPACE_BASE": str(self._work),
        }

    @property
    def _triton_cache(self) -> Path:
        return self._work / "triton"

    def _output(self, name: str) -> Path:
        return self._work / f"{file_name(name)}.json"

    def _log(self, name: str) -> Path:
        return self._work / f"{file_name(name)}.log"

    def _tests(self, name: str) -> Path:
        return self._work / f"{file_name(name)}.tests.jsonl"

    def _keep(self, name: str, ending: Ending) -> None:
        """Take the result of a part that has ended, and write all results."""
        log = self._log(name).read_text(errors="replace") if self._log(name).exists() else ""
        kept: dict = {"outcome": ending.outcome, "seconds": ending.seconds, "said": gpu_report.said(log)}
        if PARTS[name].is_tests and not ending.outcome.startswith("not run"):
            kept |= gpu_report.tests_result(_whole_lines(self._tests(name)))
            if ending.outcome == "ok" and not kept["tests"]["passed"]:
                kept["outcome"] = "failed: no test ran"
        if (output := self._output(name)).exists():
            with contextlib.suppress(ValueError):  # it died while it wrote
                kept["result"] = json.loads(output.read_text())
        if kept["outcome"] != "ok":
            kept["tail"] = gpu_report.tail(log)
        self.result |= gpu_report.merged([self.result, {"parts": {name: kept}}])
        with (self._results / "gpu_check.log").open("a") as file:
            file.write(f"== {name}: {kept['outcome']}\n{log[-_MOST_LOG:]}\n")
        print(f"   {name}: {kept['outcome']}, {ending.seconds} s: {kept['said']}", flush=True)
        self.write()

    def write(self) -> None:
        write(self.result, self._results)

    def carry_on_from(self, folder: Path) -> None:
        """Take over what an earlier machine has compiled."""
        if count := gpu_archives.unpack_carried(folder, self._triton_cache, KERNELS):
            print(f"{count} compiled files carried on from {folder}", flush=True)

    def pack(self) -> None:
        """Write the archives, where what goes into them has changed."""
        traces = [name for part in PARTS.values() for name in part.traces if (self._work / name).exists()]
        archives = {
            gpu_archives.CARRIED: gpu_archives.carried_files(self._triton_cache, KERNELS),
            gpu_archives.TRACES: {name: self._work / name for name in traces},
        }
        left_out = []
        for archive, files in archives.items():
            stamp = gpu_archives.stamp(files)
            if stamp != self._packed.get(archive, []):
                left_out += gpu_archives.pack(files, self._results, archive)
                self._packed[archive] = stamp
        if left_out:
            self.result["left_out"] = left_out
            self.write()

    def use_wheels(self, wheels: Path) -> None:
        """Have all parts find the packages of a folder of wheels. Raises SystemExit."""
        files = sorted(map(str, wheels.glob("*.whl")))
        if not files:
            sys.exit(f"gpu-check: --wheels {wheels}: no wheels there; make gpu-wheels gets them")
        site = self._work / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--upgrade", "--target", str(site)]
        done = subprocess.run([*pip, *files], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"gpu-check: the wheels cannot be installed: {done.stderr.strip()[-600:]}")
        self.site = site


def _whole_lines(path: Path) -> list[dict]:
    """The JSON lines of a file; the last one may be cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _program(name: str) -> str | None:
    """The path of a program; None: it is not there. CUDA's own are often not on the PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def write(result: dict, folder: Path) -> None:
    texts = {"gpu_check.json": json.dumps(result, indent=1) + "\n", "gpu_check.md": gpu_report.table(result)}
    for name, text in texts.items():
        temporary = folder / f".{name}.new"
        temporary.write_text(text)
        temporary.replace(folder / name)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--parts", type=lambda text: _named(text.split(","), parser), metavar="NAME,NAME", help="only these"
    )
    which.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="the parts of one call")
    which.add_argument("--merge", type=Path, nargs="+", help="run nothing: put these results together")
    which.add_argument("--list", action="store_true", help="the calls and their parts")
    parser.add_argument("--seconds", type=float, help=f"for all of it; with --call {CALL_SECONDS:.0f}")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with packages that are not installed")
    parser.add_argument(
        "--results", type=Path, default=Path(os.environ.get("OUT") or HERE / "results" / "gpu_check"),
        help="folder of the results; by default $OUT, or benchmarks/results/gpu_check",
    )  # fmt: skip
    parser.add_argument("--carried", type=Path, default=BUILD / "gpu-carried", help="folder of archives to carry on")
    parser.add_argument("--work", type=Path, default=BUILD / "gpu-check", help="folder of intermediate files")
    return parser.parse_args(argv)


def _named(names: list[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Parts by their names, or by how those begin: names of jobs have commas and blanks."""
    named = tuple(part for part in PARTS if any(part == n or part.startswith(n.strip()) for n in names if n.strip()))
    if not named:
        parser.error(f"--parts: none of {', '.join(names)} is a part: see --list")
    return named


def rows_of(args: argparse.Namespace) -> list[Row]:
    """The rows to run: of a call, or of all calls with each part once; named parts are rows by themselves."""
    if args.parts:
        return [(DEVICE,), ("build",), *((name,) for name in args.parts if name not in (DEVICE, "build"))]
    rows, named = [], set()
    for call in CALLS if args.call is None else (CALLS[args.call - 1],):
        for row in call:
            if fresh := tuple(name for name in row if name not in named):
                rows.append(fresh)
                named |= set(fresh)
    return rows


def main() -> None:
    args = arguments()
    if args.list:
        for number, call in enumerate(CALLS, 1):
            for row in call:
                print(f"call {number}: " + ", ".join(f"{name} (up to {PARTS[name].limit_s:.0f} s)" for name in row))
        return
    args.results.mkdir(parents=True, exist_ok=True)
    if args.merge:
        write(gpu_report.merged([json.loads(path.read_text()) for path in args.merge]), args.results)
        return
    check = Check(args.results, args.work, args.seconds or (CALL_SECONDS if args.call else None))
    check.result["parts"].pop(DEVICE, None)  # of this machine
    check.carry_on_from(args.carried)
    if args.wheels:
        check.use_wheels(args.wheels)
    rows = rows_of(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        check.run(rows)
    except Interrupted:
        print("gpu-check: told to stop", flush=True)
    print("\n".join(gpu_report.first_lines(check.result)))
    names = [name for row in rows for name in row]
    if check.has_no_card():
        why = check.result["parts"][DEVICE]["said"] or check.result["parts"][DEVICE]["outcome"]
        sys.exit(
            f"gpu-check: {sys.executable} finds no CUDA device ({why}); give make PYTHON=, a Python whose torch is for"
            " this GPU's driver"
        )
    wrong = [
        n for n in names if not check.result["parts"].get(n, {"outcome": ""})["outcome"].startswith(("ok", "not run"))
    ]
    sys.exit(f"gpu-check: not ok: {', '.join(wrong)}" if wrong else 0)


def _interrupt(*_: object) -> None:
    raise Interrupted


if __name__ == "__main__":
    main()
