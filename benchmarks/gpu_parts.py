"""The parts of `make gpu-check` and the calls they belong to, as plain data.

In a command, the word "python" is the Python that runs the check, {work} the folder of intermediate files, and {output}
the JSON file that the part leaves there, named like the part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

CALL_SECONDS = 530.0  # of nine minutes: packing the results comes after it
PLANNER = ("highspy", "pulp")  # packages of planned jobs
RATES, PROFILE = "rates.json", "profile.json"  # left by the parts "rates" and "profile"
SHAPES = "recipes/throughput/shapes"
# Host memory of jobs that need most of a machine's. It is said, not looked up: machines exist whose memory grows as it
# is used, so that little is free at first.
_HOST_MEMORY = "96GiB"


@dataclass(frozen=True)
class Part:
    """A part of the check: one process with a time limit.

    Attributes:
        command: Program and arguments, started in the repository.
        limit_s: Seconds that the part may take.
        traces: Names of further files that the part leaves in the work folder, which come back as they are.
        needs: Packages without which the part is left out.
        programs: Programs without which the part is left out.
        with_packages: Arguments that are added where a package is installed, by its name.
        with_files: Arguments that are added where an earlier part has left a file, by its name in the work folder.
        environment: Environment variables.
        small: Arguments that make the part small, for a rehearsal without a card.
    """

    command: tuple[str, ...]
    limit_s: float
    traces: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    with_packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    with_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    small: tuple[str, ...] = ()

    @property
    def is_tests(self) -> bool:
        return "pytest" in self.command


def file_name(part: str) -> str:
    """A part's name as the name of a file."""
    return re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-")


def _script(name: str, limit_s: float, *arguments: str, **options) -> Part:
    return Part(("python", f"benchmarks/{name}.py", *arguments, "--output", "{output}"), limit_s, **options)


def _smoke(check: str, limit_s: float, *arguments: str, **options) -> Part:
    return _script("gpu_smoke", limit_s, check, *arguments, **options)


def _tests(limit_s: float, workers: int, *which: str, marked: bool = True, part: float = 0.1, **options) -> Part:
    """Tests in several processes where pytest-xdist is there; a part of them in a rehearsal."""
    command = ("python", "-m", "pytest", "-p", "gpu_tests", "-p", "no:cacheprovider", "--tb=short")
    packages = {"xdist": ("-n", str(workers), "--dist", "worksteal"), "pytest_timeout": ("--timeout", "400")}
    marks = ("-m", "gpu") if marked else ()
    return Part((*command, *marks, *which), limit_s, with_packages=packages, small=("--part", str(part)), **options)


def _case(shape: str, policy: str, limit_s: float, *arguments: str, **options) -> Part:
    """A job of dummy weights by gpu_case.py."""
    files = {RATES: ("--rates", f"{{work}}/{RATES}"), PROFILE: ("--hardware", f"{{work}}/{PROFILE}")}
    needs = PLANNER if policy == "planned" else ()
    small = ("--num-prompts", "2", "--input-len", "16", "--output-len", "6", "--layers", "2")
    script = (f"{SHAPES}/{shape}", "--policy", policy, *arguments)
    return _script("gpu_case", limit_s, *script, with_files=files, needs=needs, small=small, **options)


def _llama(policy: str, limit_s: float, *arguments: str, **options) -> Part:
    job = ("--num-prompts", "96", "--input-len", "1024", "--output-len", "32", "--dtype", "bfloat16")
    return _case("llama-3.1-8b", policy, limit_s, *job, *arguments, **options)


def _resident(name: str, limit_s: float, *arguments: str) -> Part:
    """The 8B model all on the GPU, with a trace of its kernels."""
    trace = f"{name}.kernels.json.gz"
    return _llama(
        *("resident", limit_s, "--gpu-memory", "48GiB", "--kernel-trace", f"{{work}}/{trace}", *arguments),
        traces=(trace,),
    )


def _opt(name: str, policy: str) -> Part:
    """A job with the limits of gpu_offload.py, whose Steps are traced."""
    job = ("--gpu-memory", "16GiB", "--host-memory", _HOST_MEMORY, "--num-prompts", "48", "--num-gpu-batches", "2")
    lengths = ("--input-len", "512", "--output-len", "8", "--dtype", "float16")
    trace = f"{name}.steps.json"
    return _case("opt-30b", policy, 130, *job, *lengths, "--trace", f"{{work}}/{trace}", traces=(trace,))


def _offload(engine: str) -> Part:
    """Another engine under the limits of the jobs of OPT-30B's shape."""
    job = ("--engines", engine, "--rounds", "1", "--variants", "1", "--gen-len", "8", "--num-prompts", "48")
    limits = ("--host-memory", _HOST_MEMORY, "--limit-s", "95")
    small = ("--shape", f"{SHAPES}/opt-1.3b", "--host-memory", "8GiB", "--prompt-len", "16", "--gen-len", "3")
    small += ("--gpu-memory", "3GiB", "--limit-s", "600")
    return _script("gpu_offload", 120, *job, *limits, needs=(engine,), small=small)


_ENGINE = "tests/engine/test_gpu_engine.py"
_KERNELS = tuple(
    f"tests/ops/{name}_checks.py" for name in ("triton_attention", "triton_product", "triton", "triton_state", "graph")
)
_SWEEP = ("python", "benchmarks/gpu_smoke.py", "sweep", "--output", "{output}")


PARTS: dict[str, Part] = {
    "device": _script("gpu_device", 60),
    "build": _script("gpu_build", 120, "--build", "{work}/csrc"),
    "overlap": _smoke("overlap", 60),
    "overlap, 32 connections": _smoke("overlap", 60, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    "rates": _script("gpu_rates", 40),
    # Engines that compile kernels for the first time, and FlashInfer's compiler.
    "demo": _smoke("model", 100, small=("--layers", "2")),
    "demo, int4": _smoke("model", 100, "--weights", "int4", small=("--layers", "2"), needs=("xxhash",)),
    "everything moves": _tests(100, 1, _ENGINE, "-k", "everything_moves", part=1, needs=("xxhash",)),
    "memcheck": Part(
        ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *_SWEEP),
        100,
        programs=("compute-sanitizer",),
    ),
    "FlashInfer compiled": _script("gpu_attention", 100, "--compile", needs=("flashinfer",)),
    "llama-8b, all on the GPU": _resident("llama-8b", 100),
    "llama-8b, without graphs": _resident("llama-8b-no-graphs", 80, "--no-graphs"),
    "attention": _script("gpu_attention", 60, with_files={RATES: ("--rates", f"{{work}}/{RATES}")}),
    "host memory": _smoke("host-memory", 60, small=("--gib", "1")),
    "experts": _script("gpu_experts", 50, small=("--divisor", "8", "--tokens", "16", "2048")),
    "packed weights": _script("gpu_products", 80),
    "opt-30b, KV with CPU attention": _opt("opt-30b-cpu", "cpu"),
    "opt-30b, KV streamed": _opt("opt-30b-streamed", "streamed"),
    "profile": _script("gpu_profile", 80),
    "llama-8b, planned": _llama("planned", 80, "--gpu-memory", "24GiB"),
    "FlexGen": _offload("flexgen"),
    "Accelerate": _offload("accelerate"),
    "tests-kernels": _tests(300, 12, *_KERNELS, marked=False, environment={"BATCHGEN_CHECK_DEVICE": "cuda"}),
    "tests-engine": _tests(120, 4, _ENGINE),
    "tests-policies": _tests(160, 6, "tests/engine/test_tiers.py"),
    "tests-scores": _tests(120, 4, "tests/engine/test_scoring_tiers.py"),
    "tests-identity": _tests(200, 8, "tests/engine/card_checks.py", marked=False),
    "tests-ranks": _tests(120, 4, "tests/engine/test_gpu_ranks.py", "tests/distributed/nccl_checks.py"),
}

# Each call is rows of parts. Parts of a row run side by side, rows one after the other: what is timed is alone. The
# most useful rows come first, since a call may have less time than all of its parts.
CALLS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("device",),
        ("build",),
        ("overlap", "overlap, 32 connections"),
        ("rates",),
        ("demo", "demo, int4", "everything moves", "memcheck", "FlashInfer compiled"),
        ("llama-8b, all on the GPU",),
        ("llama-8b, without graphs",),
        ("attention",),
        ("host memory",),
        ("experts",),
        ("packed weights",),
    ),
    (
        ("device",),
        ("build",),
        ("rates",),
        ("opt-30b, KV with CPU attention",),
        ("opt-30b, KV streamed",),
        ("profile",),
        ("llama-8b, planned",),
        ("FlexGen",),
        ("Accelerate",),
    ),
    (
        ("device",),
        ("build",),
        ("tests-kernels",),
        ("tests-engine", "tests-ranks"),
        ("tests-identity",),
        ("tests-policies", "tests-scores"),
    ),
)
