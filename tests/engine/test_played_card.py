"""Whole engines with `--device cuda`, unmodified, on a card that is played on the CPU under torch's CUDA build.

Each test is a process of the environment with that build (`make cuda-env`). It fails where the card notes a fault: what
a real one would not have survived, or would not have noticed.
"""

import json
import subprocess
from pathlib import Path

import played_card
import pytest

HERE = Path(__file__).parent
CHECKS = HERE / "card_checks.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(played_card.missing() is not None, reason=str(played_card.missing())),
]


# By day with the newest torch.
VENVS = [
    pytest.param(venv, id=venv.name, marks=[pytest.mark.thorough] * (number > 0))
    for number, venv in enumerate(played_card.venvs())
]


@pytest.fixture(params=VENVS)
def play(tmp_path, request):
    """A function that runs Python on a played card: play(arguments..., options) -> what it prints, counts, faults."""

    def play(*arguments, **options):
        report = tmp_path / "report"
        report.write_text("")
        environment = played_card.environment(request.param, report=report, **options)
        command = [played_card.python(request.param), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=played_card.ROOT)
        lines = report.read_text().splitlines()
        faults = [line for line in lines if line.startswith("FAULT")]
        counts = {what: int(n) for n, _, what in (line.partition(" ") for line in lines if line not in faults)}
        return done, counts, faults

    return play


def check(played):
    done, _, faults = played
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert faults == []


def pytest_on(*arguments):
    return "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *arguments


# A fault, and what a card does not forgive: the stream `compute` waits for a lane of the host meanwhile.
FAULTS = {
    "while a stream waits for the host: cudaMalloc": "torch.empty(64 << 20, device='cuda')",
    "while a stream waits for the host: cudaHostRegister": "pages = PinnedMemory().zeros((4096,), torch.uint8)",
    "while a stream waits for the host: a copy of pageable memory": "torch.ones(8).cuda()",
    "a stream waits at a value that is not pinned": "wait_value(c_void_p(stream), c_uint64(place), 1, 0)",
    "memory is registered again": "cudart.cudaHostRegister(pages.data_ptr() + 64, 64, 0)",
}
IN_CAPTURES = {
    "in a capture: cudaStreamSynchronize": "x.sum().item()",
    "a capture waits for an event of outside": "torch.cuda.current_stream().wait_event(event)",
}


def test_what_a_card_does_not_forgive_is_noted(play):
    program = f"""
import torch
from ctypes import CDLL, c_uint64, c_void_p
from batchgen.runtime.cuda import CudaDriver, PinnedMemory
d, x, cudart = CudaDriver(), torch.ones(8, device="cuda"), torch.cuda.cudart()
stream, wait_value = d.streams["compute"].cuda_stream, CDLL("libcuda.so.1").cuStreamWaitValue32_v2
place, event = torch.zeros(4).data_ptr(), torch.cuda.Event()
event.record()
torch.cuda.synchronize()
for number, code in enumerate({list(FAULTS.values())}, 1):
    d.wait_for_host("compute", "cpu_attention", number)
    exec(code)
    d.signal("cpu_attention", number)
    torch.cuda.synchronize()
CDLL("libcuda.so.1").cudaGetLastError()  # which the last of them has left
for code in {list(IN_CAPTURES.values())}:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            exec(code)
    except RuntimeError:
        continue
    raise AssertionError(code)
"""
    done, _, faults = play("-c", program, kernels=0)
    assert done.returncode == 0, done.stderr
    noted = {line.split(" ", 2)[2] for line in faults}
    assert noted >= {*FAULTS, *IN_CAPTURES}


def test_the_host_cannot_touch_memory_of_the_card(play):
    program = "import torch, ctypes\nctypes.string_at(torch.ones(1, device='cuda').data_ptr(), 4)"
    done, _, _ = play("-c", program)
    assert done.returncode < 0 and "fault: the host touches memory of the card" in done.stderr


def test_an_error_stays_until_somebody_reads_it(play):
    """As on a card: a later launch, which has nothing to do with it, fails of it."""
    program = """
import mmap, torch
x = torch.ones(1, device="cuda")
pages = mmap.mmap(-1, 4 << 20)
address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
assert int(torch.cuda.cudart().cudaHostRegister(address, len(pages), 0)) == 2
try:
    x + 1
except RuntimeError as error:
    print(error)
assert (x + 1).item() == 2
"""
    done, _, faults = play("-c", program, pinnable_mib=1)
    assert done.returncode == 0 and "CUDA error" in done.stdout and faults == [], done.stderr


def test_new_memory_has_no_contents(play):
    program = "import torch\nx = torch.empty(5, device='cuda')\nassert x.isnan().all()\nprint((x.zero_() + 2).tolist())"
    check(found := play("-c", program))
    assert found[0].stdout == "[2.0, 2.0, 2.0, 2.0, 2.0]\n"


def test_the_identity_table_on_a_card(play):
    check(play(*pytest_on(CHECKS)))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1, 5))
def test_tokens_do_not_depend_on_the_order_in_which_streams_run(play, seed):
    check(play(*pytest_on(HERE / "card_orders.py"), seed=seed, delay_us=500))


# Tests that a card is there for, in processes of their own where they must be.
ON_CARDS = {
    "engines": ("test_gpu_engine.py",),
    "ranks": ("test_gpu_ranks.py",),
    "any policy": ("test_tiers.py", "test_scoring_tiers.py"),
    "kernels": ("../ops/test_triton.py",),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", ON_CARDS)
def test_tests_for_a_card_pass(play, which):
    check(play(*pytest_on("-m", "gpu", "--all", *(HERE / name for name in ON_CARDS[which])), devices=2))


# A check of tokens, a job that is measured, and the card itself.
QUICK = ("device", "memcheck", "opt-30b, KV streamed")
REHEARSAL = played_card.ROOT / "benchmarks" / "gpu_rehearsal.py"


def outcomes(play, tmp_path, *parts):
    """Outcomes of parts of `make gpu-check`, by name."""
    check(play(REHEARSAL, "--results", tmp_path, *(["--parts", *parts] if parts else [])))
    results = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    return {name: part["outcome"] for name, part in results.items()}


def test_quick_parts_of_gpu_check_run_to_their_end(play, tmp_path):
    assert outcomes(play, tmp_path, *QUICK) == dict.fromkeys(QUICK, "ok")


@pytest.mark.thorough
def test_gpu_check_runs_to_its_end(play, tmp_path):
    """All parts, with the packages of its list alone. FlashInfer, which a compiler takes minutes for, is left out."""
    found = outcomes(play, tmp_path)
    assert found.pop("FlashInfer compiled") == "not run: flashinfer not installed (--wheels)"
    assert set(found.values()) == {"ok"}, found


def test_the_identity_table_on_a_card_without_triton_products(play):
    """Tokens are right. The host waits there for routers, and where a stream's queue is full."""
    done, _, _ = play(*pytest_on(CHECKS), capability=75)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def test_what_the_runtime_is_relied_on_for(play):
    check(play(*pytest_on(HERE.parent / "runtime" / "cuda_checks.py"), pinnable_mib=96, mib=2048))
