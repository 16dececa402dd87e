"""Everything that needs a CUDA GPU: kernels built, the tests marked `gpu`, the profile, short benchmarks.

Writes one JSON, one Markdown table and one log.

    make gpu-check                                    # all of it, one part after the other
    make gpu-check CALL=1                             # the first of several calls, each of less than nine minutes
    python benchmarks/gpu_check.py --parts machine,tests-engine --output out/gpu_check.json
    python benchmarks/gpu_check.py --merge a.json b.json    # what calls on different machines have written, as one

Needs no network and nothing installed but torch, triton, transformers, pyarrow, safetensors, click, tqdm, pybind11,
cmake, ninja, pytest and hypothesis. What else there is is made use of: a planner (highspy) for the planned jobs, xxhash
for weights on disk. For a machine without a network, `make gpu-wheels` gets them as wheels; --wheels names the folder.

Each part is a process of its own with a time limit; parts of the same name from earlier calls are replaced. Results are
written after each part, and those of tests after each test, so that what is cut off is missing and nothing else.
Kernels that Triton has compiled are kept in one directory for all parts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SHAPES = ROOT / "recipes" / "throughput" / "shapes"
BUILD = ROOT / "build" / "gpu-check"
KERNELS = ROOT / "batchgen" / "ops" / f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"
PLANNER = ("highspy",)
CALL_SECONDS = 530.0
_LEAST_S = 5.0  # a part with less time than this is not begun
_TOLD = 20_000  # characters of what a test has to say that are kept
_TEST_LOG = "BATCHGEN_GPU_CHECK_TESTS"  # names the file that `pytest_runtest_logreport` adds to

RATES, PROFILE, EXPERTS = BUILD / "rates.json", BUILD / "profile.json", BUILD / "experts.json"


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        command: arguments of `python`.
        most_s: seconds it may take.
        writes: the JSON file that it leaves.
        needs: packages that it has no use without.
    """

    command: tuple[str, ...]
    most_s: float
    writes: Path | None = None
    needs: tuple[str, ...] = ()


def _tests(most_s: float, *which: str) -> Part:
    return Part(
        ("-m", "pytest", "-m", "gpu", "-p", "gpu_check", "-p", "no:cacheprovider", "--tb=short", *which), most_s
    )


def _case(shape: str, policy: str, most_s: float, *rest: str) -> Part:
    path = BUILD / "case.json"
    script, needs = str(HERE / "gpu_case.py"), PLANNER if policy == "planned" else ()
    command = (script, str(SHAPES / shape), "--policy", policy, *rest, "--output", str(path))
    return Part(command, most_s, path, needs)


def _llama(policy: str, *rest: str) -> Part:
    job = ("--num-prompts", "96", "--input-len", "1024", "--output-len", "32", "--dtype", "bfloat16")
    return _case("llama-3.1-8b", policy, 70, *job, *rest)


def _opt(policy: str, *rest: str) -> Part:
    job = (
        "--gpu-memory",
        "16GiB",
        "--num-prompts",
        "48",
        "--input-len",
        "512",
        "--output-len",
        "8",
        "--dtype",
        "float16",
    )
    return _case("opt-30b", policy, 160, *job, *rest)


PARTS: dict[str, Part] = {
    "machine": Part((str(HERE / "gpu_rates.py"), "--output", str(RATES)), 40, RATES),
    "build": Part((), 90),
    "tests-kernels": _tests(390, "tests/ops/test_triton.py", "-k", "not experts"),
    "tests-engine": _tests(120, "tests/engine/test_gpu_engine.py", "-k", "not experts"),
    "tests-policies": _tests(280, "tests/engine/test_tiers.py"),
    "tests-ranks": _tests(180, "tests/engine/test_gpu_ranks.py"),
    "tests-experts": _tests(160, "tests/ops/test_triton.py", "tests/engine/test_gpu_engine.py", "-k", "experts"),
    "experts": Part((str(HERE / "gpu_experts.py"), "--output", str(EXPERTS)), 50, EXPERTS),
    "tests-scores": _tests(180, "tests/engine/test_scoring_tiers.py"),
    "profile": Part((str(HERE / "gpu_profile.py"), "--output", str(PROFILE)), 80, PROFILE),
    # Everything on the GPU: decode sweeps are captured graphs.
    "llama-8b, all on the GPU": _llama("resident", "--gpu-memory", "48GiB"),
    "llama-8b, KV with CPU attention": _llama("cpu", "--gpu-memory", "24GiB", "--num-gpu-batches", "2"),
    "llama-8b, KV streamed": _llama("streamed", "--gpu-memory", "24GiB", "--num-gpu-batches", "2"),
    "llama-8b, planned": _llama("planned", "--gpu-memory", "24GiB"),
    "opt-30b, KV with CPU attention": _opt("cpu", "--num-gpu-batches", "2"),
    "opt-30b, KV streamed": _opt("streamed", "--num-gpu-batches", "2"),
    "opt-30b, planned": _opt("planned"),
}
# Tests before benchmarks. The limits of a call's parts, and of a build where there is none yet, add up to CALL_SECONDS
# at most.
CALLS: tuple[tuple[str, ...], ...] = (
    ("machine", "build", "tests-kernels"),
    ("machine", "tests-engine", "tests-policies"),
    ("machine", "tests-ranks", "tests-experts", "experts"),
    ("machine", "tests-scores", "profile", "llama-8b, all on the GPU", "llama-8b, KV with CPU attention"),
    ("machine", "profile", "llama-8b, KV streamed", "llama-8b, planned", "opt-30b, KV with CPU attention"),
    ("machine", "profile", "opt-30b, KV streamed", "opt-30b, planned"),
)


def pytest_runtest_logreport(report) -> None:
    """Of pytest, to which parts of tests give this module as a plugin: a line for each test that has ended."""
    path = os.environ.get(_TEST_LOG)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:  # xdist reports to the process that started it
        return
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longreprtext
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "why": why[-_TOLD:],
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


class Check:
    """The parts done so far, in this call and in earlier ones.

    Invariant: the files hold every part that has ended.
    """

    def __init__(self, output: Path, seconds: float | None = None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._output, self._log = output, output.with_suffix(".log")
        output.parent.mkdir(parents=True, exist_ok=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        self.site: Path | None = None  # of packages that are not installed
        self.result: dict = {"parts": {}}
        if output.exists():
            self.result = json.loads(output.read_text())

    def environment(self) -> dict[str, str]:
        paths = [ROOT, HERE, self.site, os.environ.get("PYTHONPATH", "")]
        own = {
            name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"
        }  # of who started this
        return own | {
            # cmake and ninja are this Python's, whether or not its environment is the shell's.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
            "TRITON_CACHE_DIR": str(BUILD / "triton"),
            _TEST_LOG: str(BUILD / "tests.jsonl"),
        }

    def run(self, name: str, commands: list[list[str]], most_s: float) -> dict:
        """Runs a part's commands one after the other, until one fails; returns its result."""
        left = most_s if self._ends is None else min(most_s, self._ends - time.monotonic())
        part: dict = {"command": "; ".join(" ".join(command) for command in commands).replace(str(ROOT), ".")}
        self.result["parts"][name] = part
        print(f"== {name}", flush=True)
        started = time.monotonic()
        with self._log.open("a+b") as log:
            log.write(f"== {name}\n".encode())
            log.flush()
            begins = log.tell()
            part["outcome"] = self._outcome(commands, left, log)
            log.seek(begins)
            told = log.read().decode(errors="replace")
        part["seconds"] = round(time.monotonic() - started, 1)
        if part["outcome"] != "ok":
            part["told"] = told[-3000:]
        return part

    def _outcome(self, commands: list[list[str]], left: float, log) -> str:
        if left < _LEAST_S:
            return "not run: the time was over"
        ends = time.monotonic() + left
        for command in commands:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"stopped after {left:.0f} s"
            finally:  # its own processes too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code:
                return f"failed ({code})"
        return "ok"

    def skip(self, name: str, why: str) -> None:
        self.result["parts"][name] = {"outcome": f"not run: {why}", "seconds": 0.0}
        self.done(name)

    def done(self, name: str) -> None:
        part = self.result["parts"][name]
        print(f"   {part['outcome']}, {part['seconds']} s\n{part.get('told', '')}", flush=True)
        write(self.result, self._output)


def write(result: dict, output: Path) -> None:
    for path, text in ((output, json.dumps(result, indent=1) + "\n"), (output.with_suffix(".md"), table(result))):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        temporary.replace(path)


def merged(results: list[dict]) -> dict:
    """The parts of all; of those that several have, the last, unless it did not run there."""
    whole: dict = {"parts": {}}
    for result in results:
        whole |= {key: value for key, value in result.items() if key != "parts"}
        for name, part in result["parts"].items():
            if name not in whole["parts"] or not part["outcome"].startswith("not run"):
                whole["parts"][name] = part
    order = list(PARTS)
    whole["parts"] = dict(
        sorted(whole["parts"].items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)
    )
    return whole


def table(result: dict) -> str:
    """The result for a person."""
    machine = result.get("machine", {})
    lines = [f"# GPU check: {machine.get('gpu', 'no GPU')}", "", "| part | outcome | seconds | |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {part['outcome']} | {part['seconds']} | {_found(part)} |" for name, part in result["parts"].items()
    ]
    return "\n".join(lines) + "\n"


def _found(part: dict) -> str:
    if "tests" in part:
        counts = part["tests"]
        return ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped") if counts[what])
    case = part.get("case")
    if not case:
        return part.get("rates", "")
    found = f"{case['generated_tokens_per_s']:,.0f} generated tokens/s, block of {case['block']}"
    found += f", GPU busy {case['gpu_busy_frac']:.0%}"
    if "of_bound" in case:
        found += f", {case['of_bound']:.0%} of the bound ({case['bound']['by']})"
    said = case["predicted_generation_s"]
    return found + f", {case['generation_s']:.1f} s" + (f" (predicted {said:.1f})" if said else ", not planned")


def build(check: Check) -> None:
    """The C++ kernels, into the package's own folder."""
    asked = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True)
    configure = ["cmake", "-S", "csrc", "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={asked.stdout.strip()}"]
    part = check.run("build", [configure, ["cmake", "--build", str(BUILD), "--parallel"]], PARTS["build"].most_s)
    made = BUILD / KERNELS.name
    if part["outcome"] == "ok" and made.exists():
        KERNELS.write_bytes(made.read_bytes())
    elif part["outcome"] == "ok":
        part["outcome"] = f"failed: it left no {made.name}"
    check.done("build")


def run_part(check: Check, name: str) -> None:
    part, tests = PARTS[name], BUILD / "tests.jsonl"
    if missing := [n for n in part.needs if find_spec(n) is None and not (check.site and (check.site / n).exists())]:
        check.skip(name, f"{' and '.join(missing)} not installed (--wheels)")
        return
    for path in (part.writes, tests):
        if path is not None:
            path.unlink(missing_ok=True)
    found = check.run(name, [[sys.executable, *_with_options(part)]], part.most_s)
    if "pytest" in part.command:
        found |= _tests_found(tests, found["outcome"])
    if part.writes is not None and part.writes.exists():
        _take(check, name, json.loads(part.writes.read_text()))
    check.done(name)


def _with_options(part: Part) -> tuple[str, ...]:
    """The command, with what only some machines have: several processes for tests; what earlier parts have measured."""
    command = part.command
    if "pytest" in command:
        command += ("-n", "4", "--dist", "worksteal") if find_spec("xdist") else ()
        command += ("--timeout", "240") if find_spec("pytest_timeout") else ()
    if command[0].endswith("gpu_case.py"):
        command += ("--rates", str(RATES)) if RATES.exists() else ()
        command += ("--hardware", str(PROFILE)) if PROFILE.exists() else ()
    return command


def _tests_found(path: Path, outcome: str) -> dict:
    """Counts by outcome, what failed, why tests were skipped. Where nothing passed, nothing was checked."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    counts = Counter(test["outcome"] for test in done)
    found: dict = {
        "tests": {what: counts[what] for what in ("passed", "failed", "skipped")},
        "failures": [test for test in done if test["outcome"] == "failed"],
        "skipped": dict(Counter(test["why"] for test in done if test["outcome"] == "skipped")),
        "slowest": {t["test"]: t["seconds"] for t in sorted(done, key=lambda t: -t["seconds"])[:5]},
    }
    if outcome == "ok" and not counts["passed"]:
        found["outcome"] = "failed: no test ran"
    return found


def _take(check: Check, name: str, values: dict) -> None:
    """What a part has written, into the result."""
    part = check.result["parts"][name]
    if name == "machine":
        check.result |= values
        rates = values["rates"]
        part["rates"] = (
            f"host to GPU {rates['h2d_bytes_per_s'] / 1e9:.1f} GB/s, {rates['gpu_flops_per_s'] / 1e12:.0f} TFLOP/s"
        )
    elif name == "profile":
        check.result["profile"] = values
        part["rates"] = f"launching a layer {values['gpu']['launch_overhead_s'] * 1e6:.0f} us"
    elif name == "experts":
        check.result["experts"] = values
        part["rates"] = ", ".join(
            f"{case['tokens']:,} tokens in {case['grouped_s'] * 1e3:.2f} ms ({case['torch_s'] * 1e3:.2f} by torch)"
            for case in values
        )
    else:
        part["case"] = values


def use_wheels(check: Check, wheels: Path) -> None:
    """Has all parts find the packages of a folder of wheels."""
    site = BUILD / "site"
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        sys.exit(f"gpu-check: --wheels {wheels}: no wheels there; make gpu-wheels gets them")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--upgrade",
        "--target",
        str(site),
    ]
    part = check.run("wheels", [[*pip, *files]], 60)
    check.done("wheels")
    if part["outcome"] != "ok":
        sys.exit("gpu-check: the wheels cannot be installed")
    check.site = site


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--parts", type=lambda text: _named(text.split(","), parser), metavar="NAME,NAME", help="only these"
    )
    which.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="the parts of one call")
    which.add_argument("--merge", type=Path, nargs="+", help="run nothing: put these results into --output")
    which.add_argument("--list", action="store_true", help="the parts, and which call they belong to")
    parser.add_argument("--seconds", type=float, help=f"for all of it; with --call {CALL_SECONDS:.0f}")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels with packages that are not installed")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu_check.json")
    return parser.parse_args(argv)


def _named(names: list[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Parts by their names, or by how those begin: names of jobs have commas and blanks."""
    found = tuple(part for part in PARTS if any(part == n or part.startswith(n.strip()) for n in names if n.strip()))
    if not found:
        parser.error(f"--parts: none of {', '.join(names)} is a part: see --list")
    return found


def main() -> None:
    args = arguments()
    if args.list:
        for name, part in PARTS.items():
            calls = ", ".join(str(i) for i, call in enumerate(CALLS, 1) if name in call)
            print(f"call {calls}: {name} (at most {part.most_s:.0f} s)")
        return
    if args.merge:
        write(merged([json.loads(path.read_text()) for path in args.merge]), args.output)
        return
    names = args.parts or (CALLS[args.call - 1] if args.call else tuple(PARTS))
    seconds = args.seconds or (CALL_SECONDS if args.call else None)
    check = Check(args.output, seconds)
    if args.wheels:
        use_wheels(check, args.wheels)
    if "build" in names or not KERNELS.exists():
        build(check)
    for name in names:
        if name != "build":
            run_part(check, name)
        if name == "machine" and check.result["parts"][name]["outcome"] != "ok":
            sys.exit("gpu-check: no CUDA device to be used here, or no time for it")
    print(table(check.result))
    failed = [n for n in names if not check.result["parts"][n]["outcome"].startswith(("ok", "not run"))]
    sys.exit(f"gpu-check: not ok: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
