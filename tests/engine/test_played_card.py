"""Whole engines with `--device cuda`, unmodified, on a card that is played on the CPU under torch's CUDA build.

Each test is a process of the environment with that build (`make cuda-env`). It fails where the card notes a fault: what
a real one would not have survived, or would not have noticed.
"""

import json
import re
import sys
from pathlib import Path

import played_card
import played_runs
import pytest
from played_runs import check, needs_a_played_card, pytest_on
from thorough import quick_or

HERE = Path(__file__).parent
sys.path.append(str(played_card.ROOT / "benchmarks"))

from gpu_parts import CALLS  # noqa: E402

CHECKS = HERE / "card_checks.py"
# Each test of the table in a process of its own in `make test-all`, where they have hundreds of cells.
TABLE = quick_or([CHECKS], [f"{CHECKS}::{name}" for name in re.findall(r"(?m)^def (test_\w+)", CHECKS.read_text())])
of_the_table = pytest.mark.parametrize("which", TABLE, ids=lambda which: str(which).split("::")[-1].split("/")[-1])

pytestmark = [pytest.mark.slow, needs_a_played_card]
play = played_runs.play


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


@of_the_table
def test_the_identity_table_on_a_card(play, which):
    check(play(*pytest_on(which)))


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


# A few sweeps, and a job that is measured.
QUICK = ("memcheck", "opt-30b, KV streamed")
REHEARSAL = played_card.ROOT / "benchmarks" / "gpu_rehearsal.py"


def outcomes(play, tmp_path, *parts):
    """Outcomes of parts of `make gpu-check`, by name."""
    done, counts, faults = play(REHEARSAL, "--results", tmp_path, "--parts", *parts)
    check((done, counts, [fault for fault in faults if "a full queue" not in fault]))  # "overlap" fills one to see it
    results = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    return {name: part["outcome"] for name, part in results.items()}


def test_quick_parts_of_gpu_check_run_to_their_end(play, tmp_path):
    assert outcomes(play, tmp_path, *QUICK) == dict.fromkeys(QUICK, "ok")


@pytest.mark.thorough
@pytest.mark.parametrize("call", CALLS, ids=["call 1", "call 2", "call 3"])
def test_gpu_check_runs_to_its_end(play, tmp_path, call):
    """With the packages of its list alone. FlashInfer, FlexGen and Accelerate are left out where they are not there."""
    names = [name for row in call for name in row]
    found = outcomes(play, tmp_path, *names)
    left_out = {name: f"not run: {name.split()[0].lower()} not installed (--wheels)" for name in names}
    assert {name for name in names if found[name] == left_out[name]} <= {"FlashInfer compiled", "FlexGen", "Accelerate"}
    assert {outcome for name, outcome in found.items() if outcome != left_out[name]} == {"ok"}, found


@of_the_table
def test_the_identity_table_on_a_card_without_triton_products(play, which):
    check(play(*pytest_on(*quick_or(("--part", "0.4"), ()), which), capability=75))


def test_what_the_runtime_is_relied_on_for(play):
    check(play(*pytest_on(HERE.parent / "runtime" / "cuda_checks.py"), pinnable_mib=96, mib=2048))
