"""Everything that needs a CUDA GPU, in one go of less than nine minutes: kernels built, the tests marked `gpu`, the profile, short
benchmarks. Writes one JSON and one Markdown table.

    make gpu-check        # or: python benchmarks/gpu_check.py --seconds 520

Needs no network and nothing installed but torch, triton, transformers, pyarrow, safetensors, click, tqdm, pybind11, pytest,
hypothesis, cmake and ninja; what is missing beside (PuLP for plans, say) is told in the result. Each part is a process of its
own with a time limit, and the result is written after each: what was cut off is missing, and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ROOT / "recipes" / "throughput" / "shapes"
BUILD = ROOT / "build" / "gpu-check"
OPTIONAL = ("pulp", "highspy", "datasets", "gguf", "accelerate", "xdist")

# name -> (arguments of gpu_case.py, seconds at most)
CASES = {
    "llama-8b, KV on the GPU": (
        ["llama-3.1-8b", "--gpu-memory", "24GiB", "--num-prompts", "96", "--input-len", "1024", "--output-len", "64",
         "--kv-classes", "gpu"], 90),
    "llama-8b, any KV": (
        ["llama-3.1-8b", "--gpu-memory", "24GiB", "--num-prompts", "96", "--input-len", "1024", "--output-len", "64"], 90),
    "opt-30b in 16 GiB": (
        ["opt-30b", "--gpu-memory", "16GiB", "--num-prompts", "48", "--input-len", "512", "--output-len", "8"], 150),
}  # fmt: skip


class Check:
    """The parts done so far. Invariant: what is written holds every part that has ended."""

    def __init__(self, seconds: float, output: Path) -> None:
        self._ends = time.monotonic() + seconds
        self._output = output
        self._environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.result: dict = {"parts": {}}

    def run(self, name: str, command: list, most_s: float, **environment: str) -> subprocess.CompletedProcess | None:
        """Runs a part; None where there is no time left, or it took too long."""
        left = min(most_s, self._ends - time.monotonic())
        part: dict = {"command": " ".join(map(str, command)).replace(str(ROOT), ".")}
        done = None
        print(f"== {name}", flush=True)
        started = time.monotonic()
        if left < 5:
            part["outcome"] = "not run: the time was over"
        else:
            try:
                done = subprocess.run(
                    list(map(str, command)), cwd=ROOT, env=self._environment | environment, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=left,
                )  # fmt: skip
                part["outcome"] = "ok" if done.returncode == 0 else f"failed ({done.returncode})"
                if done.returncode:
                    part["told"] = done.stdout[-4000:]
            except subprocess.TimeoutExpired as error:
                part["outcome"] = f"stopped after {left:.0f} s"
                part["told"] = (error.stdout or b"")[-2000:].decode(errors="replace")
        part["seconds"] = round(time.monotonic() - started, 1)
        self.result["parts"][name] = part
        print(f"   {part['outcome']}, {part['seconds']} s\n{part.get('told', '')}", flush=True)
        self.write()
        return done

    def note(self, name: str, **values: object) -> None:
        self.result["parts"][name] |= values
        self.write()

    def write(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.with_suffix(".json").write_text(json.dumps(self.result, indent=1) + "\n")
        self._output.with_suffix(".md").write_text(table(self.result))


def table(result: dict) -> str:
    """The result for a person."""
    machine = result.get("machine", {})
    lines = [f"# GPU check: {machine.get('gpu', 'no GPU')}", "", "| part | outcome | seconds | |", "|---|---|---|---|"]
    for name, part in result["parts"].items():
        case = part.get("case")
        found = part.get("tests") or part.get("rates") or ""
        if case:
            said = case["predicted_generation_s"]
            found = f"{case['generated_tokens_per_s']:,.0f} generated tokens/s, GPU busy {case['gpu_busy_frac']:.0%}"
            found += f", {case['of_bound']:.0%} of the bound" if "of_bound" in case else ""
            found += f", {case['generation_s']:.1f} s (predicted {said:.1f})" if said else ", not planned"
        lines.append(f"| {name} | {part['outcome']} | {part['seconds']} | {found} |")
    return "\n".join(lines) + "\n"


def machine() -> dict:
    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    found["missing"] = [name for name in OPTIONAL if find_spec(name) is None]
    found["triton"] = importlib.metadata.version("triton") if find_spec("triton") else None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return found


def build(check: Check) -> None:
    """The C++ kernels, into the package's own folder."""
    configure = ["cmake", "-S", "csrc", "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    folder = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True).stdout
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={folder.strip()}"]
    check.run("configure", configure, 60)
    check.run("build", ["cmake", "--build", BUILD, "--parallel"], 200)
    for made in BUILD.glob("_kernels*.so"):
        (ROOT / "batchgen" / made.name).write_bytes(made.read_bytes())


def tests(check: Check, most_s: float) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb", "short", "--timeout", "0"]
    if find_spec("pytest_timeout") is None:
        command = command[:-2]
    done = check.run("tests", [*command, "tests"], most_s)
    if done is not None:
        counts = re.findall(r"(\d+) (passed|failed|skipped|error\w*)", done.stdout)
        check.note("tests", tests=", ".join(f"{n} {what}" for n, what in counts))
        print(done.stdout[-3000:])


def profile(check: Check, most_s: float) -> None:
    path = BUILD / "profile.json"
    path.unlink(missing_ok=True)
    program = (
        "import sys, json, pathlib\n"
        "from batchgen.overheads import measure_overheads\n"
        "from batchgen.planner.profile_cache import load_or_measure\n"
        "from batchgen.model_files import cache_dir\n"
        "p = load_or_measure(cache_dir(), device='cuda', offload_dir=cache_dir(), dtypes=('bfloat16',), refresh=True,"
        " measure_overheads=measure_overheads, notify=print)\n"
        f"pathlib.Path({str(path)!r}).write_text(json.dumps(p.to_json(), indent=1))\n"
    )
    if check.run("profile", [sys.executable, "-c", program], most_s) is None or not path.exists():
        return
    rates = json.loads(path.read_text())
    check.result["profile"] = rates
    said = f"host to GPU {rates['h2d_bytes_per_s'] / 1e9:.1f} GB/s, back {rates['d2h_bytes_per_s'] / 1e9:.1f}, launching a layer"
    said += f" {rates['gpu']['launch_overhead_s'] * 1e6:.0f} us"
    check.note("profile", rates=said)


def case(check: Check, name: str, arguments: list[str], most_s: float) -> None:
    path = BUILD / "case.json"
    path.unlink(missing_ok=True)
    shape, *rest = arguments
    command = [sys.executable, ROOT / "benchmarks" / "gpu_case.py", SHAPES / shape, *rest, "--output", path]
    check.run(name, command, most_s)
    if path.exists():
        check.note(name, case=json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=520.0, help="for all of it")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument("--skip", nargs="*", default=[], choices=["build", "tests", "profile", "cases"])
    args = parser.parse_args()
    check = Check(args.seconds, args.output)
    check.result["machine"] = machine()
    BUILD.mkdir(parents=True, exist_ok=True)
    if "build" not in args.skip:
        build(check)
    if "gpu" not in check.result["machine"]:
        check.write()
        sys.exit("gpu-check: torch finds no CUDA device here")
    if "profile" not in args.skip:
        profile(check, 90)
    if "cases" not in args.skip:
        for name, (arguments, most_s) in CASES.items():
            case(check, name, arguments, most_s)
    if "tests" not in args.skip:  # last, with all the time that is left
        tests(check, args.seconds)
    print(table(check.result))
    failed = [name for name, part in check.result["parts"].items() if part["outcome"] != "ok"]
    sys.exit(f"gpu-check: not ok: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
