"""Short checks of what the CUDA path takes for granted, each a process of its own. Writes JSON, fails where one fails.

    python benchmarks/gpu_smoke.py overlap --output overlap.json

overlap: while the stream that computes waits for the host, copies and kernels of the other streams go on, and other
threads run although a stream is full. host-memory: how fast host memory is pinned, and read and written by kernels.
model: greedy tokens of SmolLM2-135M's shape with random weights are those of the CPU. sweep: a few sweeps of a tiny
model, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from random_model import make_model

from batchgen import Engine, Request, SamplingParams
from batchgen.core.errors import BatchgenError
from batchgen.core.machine import available_memory_bytes
from batchgen.ops import dispatch as ops
from batchgen.profiler.timing import FULL, Device, Trial
from batchgen.runtime.cuda import CudaDriver, CudaLink, PinnedMemory
from batchgen.runtime.streams import STREAMS
from batchgen.schedule.step_graph import LANES

MIB, GIB = 1 << 20, 1 << 30
SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rope_theta": 100000.0, "rope_scaling": None,
}  # fmt: skip
TINY = SMOLLM2 | {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
_HOST_LANE = next(lane for lane in LANES if lane not in STREAMS)
_MOVED_BYTES = 256 * MIB
_PATIENCE_S = 10.0  # for what takes milliseconds unless it waits for what will not come
_MOST_LAUNCHES = 5000
_NEAR = 1e-3  # log-probabilities that differ by less may change places between devices


def overlap(args: argparse.Namespace) -> dict:
    """Close the computing stream by a host semaphore, then see what goes on."""
    driver, pinned = CudaDriver(), PinnedMemory()
    host, card = pinned.zeros((_MOVED_BYTES,), torch.uint8), torch.zeros(_MOVED_BYTES, dtype=torch.uint8, device="cuda")
    rows, index = host.view(-1, 64 << 10), torch.arange(len(host) // (64 << 10), device="cuda")
    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    to_card, to_host = CudaLink(driver, True), CudaLink(driver, False)
    works: dict[str, tuple[str, Callable[[], None]]] = {
        "copy to the GPU": ("h2d", lambda: _copy(to_card, card, host)),
        "gather by a kernel": ("h2d", lambda: to_card.gather(card.view(rows.shape), rows, index)),
        "copy to the host": ("d2h", lambda: _copy(to_host, host, card)),
    }
    seconds = {name: _seconds(driver, *work) for name, work in works.items() for _ in range(2)}  # the second is kept
    driver.launch("compute", lambda: _count(number))
    driver.finish()

    behind: dict[str, float | None] = {}
    driver.wait_for_host("compute", _HOST_LANE, 1)
    driver.launch("compute", lambda: _count(number))
    closed = driver.record("compute")
    try:
        for name, work in works.items():
            behind[name] = _seconds(driver, *work, patience_s=_PATIENCE_S)
        passed_by = driver.is_done(closed)
        launching, queued = _launches_until_blocked(driver, number)
    finally:
        started = time.perf_counter()
        driver.signal(_HOST_LANE, 1)
    driver.synchronize(closed)
    opened_s = time.perf_counter() - started
    launching.join()  # a thread that still launches would end the process with an error
    driver.finish()
    rates = {name: taken and _MOVED_BYTES / taken for name, taken in behind.items()}
    stuck = [name for name, taken in behind.items() if taken is None]
    summary = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items() if rate)
    problems = [f"{name} waits for the computing stream" for name in stuck]
    problems += ["the computing stream did not wait"] if passed_by else []
    return {
        "behind_a_closed_semaphore_bytes_per_s": rates,
        "bytes_per_s": {name: _MOVED_BYTES / taken for name, taken in seconds.items() if taken},
        "opened_s": opened_s,
        **queued,
        "problems": problems,
        "summary": f"behind a closed semaphore: {summary}; a stream took {queued['launches']} launches",
    }


def _copy(link: CudaLink, target: torch.Tensor, source: torch.Tensor) -> None:
    link.copy(target, source)


def _count(number: torch.Tensor) -> None:
    number.add_(1)


def _seconds(driver: CudaDriver, lane: str, work: Callable[[], None], patience_s: float = 60.0) -> float | None:
    """Seconds of work on a stream; None: it had not ended after `patience_s`."""
    started = driver.record(lane)
    driver.launch(lane, work)
    ended = driver.record(lane)
    until = time.perf_counter() + patience_s
    while not driver.is_done(ended):
        if time.perf_counter() > until:
            return None
        time.sleep(0.001)
    return driver.seconds(started, ended)


def _launches_until_blocked(driver: CudaDriver, number: torch.Tensor) -> tuple[threading.Thread, dict]:
    """Launch kernels on a closed stream from a thread until it blocks or has launched many.

    If the blocked launch holds the interpreter's lock, this thread cannot go on, and the process ends.

    Returns:
        The thread, which goes on in background, and how many launches it took.
    """
    launched = 0

    def launch() -> None:
        nonlocal launched
        with torch.cuda.stream(driver.streams["compute"]):
            for _ in range(_MOST_LAUNCHES):
                number.add_(1)
                launched += 1

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    before = -1
    faulthandler.dump_traceback_later(2 * _PATIENCE_S, exit=True)
    while thread.is_alive() and launched != before:
        before = launched
        time.sleep(0.5)
    faulthandler.cancel_dump_traceback_later()
    return thread, {"launches": launched, "blocked": thread.is_alive()}


def host_memory(args: argparse.Namespace) -> dict:
    """Pin host memory GiB by GiB, then have kernels read and write it in rows of several sizes."""
    pinned, chunks, steps = PinnedMemory(), [], []
    for _ in range(args.gib):
        started = time.perf_counter()
        try:
            chunks.append(pinned.zeros((GIB,), torch.uint8))
        except BatchgenError as error:
            print(error)
            break
        seconds = time.perf_counter() - started
        steps.append({"seconds": seconds, "free_bytes": available_memory_bytes(), "all_bytes": _all_memory_bytes()})
    if not chunks:
        raise BatchgenError("not even 1 GiB of host memory can be pinned")
    device, rates = Device("cuda"), {}
    card = torch.zeros(_MOVED_BYTES, dtype=torch.uint8, device="cuda")
    for width in (4 << 10, 64 << 10, 512 << 10):
        pool, rows = chunks[0].view(-1, width), card.view(-1, width)
        index = torch.randperm(len(pool))[: len(rows)].cuda()
        for name, run in (
            ("gather", lambda rows=rows, pool=pool, index=index: ops.gather_rows(rows, pool, index)),
            ("scatter", lambda rows=rows, pool=pool, index=index: ops.scatter_rows(pool, index, rows)),
        ):
            rates[f"{name}, rows of {width:,} bytes"] = device.rate(Trial(card.nbytes, lambda i, run=run: run()), FULL)
    part = chunks[0][: card.nbytes]
    rates["copy"] = device.rate(Trial(card.nbytes, lambda i: card.copy_(part, non_blocking=True)), FULL)
    pin = GIB / statistics.median(step["seconds"] for step in steps)
    said = [f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()]
    grown = (steps[-1]["all_bytes"] - steps[0]["all_bytes"]) / GIB
    pinning = f"pinning {pin / 1e9:.1f} GB/s of {len(steps)} GiB, memory grew by {grown:.1f} GiB"
    return {
        "pinned": steps,
        "pin_bytes_per_s": pin,
        "bytes_per_s": rates,
        "problems": [],
        "summary": f"{pinning}; {', '.join(said)}",
    }


def _all_memory_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1]) << 10


def model(args: argparse.Namespace) -> dict:
    """Tokens of a random model on the CPU and on the GPU, in fp32; enough sweeps for graphs to be captured."""
    prompts = [[(7 * row + 13 * k) % 5000 + 1 for k in range(20 + row % 30)] for row in range(args.rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(folder, **SMOLLM2 | ({"num_hidden_layers": args.layers} if args.layers else {}))
        expected = _completions(str(path), prompts, args, device="cpu")
        started = time.perf_counter()
        actual = _completions(str(path), prompts, args, device="cuda", gpu_memory="6GiB")
        seconds = time.perf_counter() - started
    differing = [row for row, (a, b) in enumerate(zip(expected, actual, strict=True)) if not _alike(a, b)]
    same = sum(a.token_ids == b.token_ids for a, b in zip(expected, actual, strict=True))
    return {
        "rows": args.rows,
        "same_rows": same,
        "differing_rows": differing,
        "gpu_s": seconds,
        "problems": [f"row {row} has other tokens than on the CPU" for row in differing],
        "summary": f"{same} of {args.rows} rows have the CPU's tokens, {seconds:.0f} s on the GPU with its warm-up",
    }


def _completions(path: str, prompts: list[list[int]], args: argparse.Namespace, **where) -> list:
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True, logprobs=2)
    options = {"dtype": "float32", "weights": args.weights, "cpu_memory": "8GiB", "max_model_len": 512}
    with Engine(path, sampling=sampling, **options, **where) as engine:
        done = sorted(engine.generate([Request(prompt) for prompt in prompts]), key=lambda c: c.index)
    if errors := [c.error for c in done if c.error]:
        raise BatchgenError(errors[0])
    return [c.samples[0] for c in done]


def _alike(expected, actual) -> bool:
    """Tell if tokens are the same up to the first place where the two most likely ones are as likely."""
    for a, b, likely in zip(expected.token_ids, actual.token_ids, expected.logprobs, strict=True):
        if a != b:
            first, second = likely.top[:2]
            return abs(first.logprob - second.logprob) < _NEAR and b == second.token_id
    return True


def sweep(args: argparse.Namespace) -> dict:
    """A few sweeps of a tiny model: prompts, and decode sweeps before any is captured."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(folder, **TINY)
        args.tokens, args.weights = 4, "auto"
        done = _completions(
            str(path), [[3, 5, 7 + row] * (row + 1) for row in range(6)], args, device="cuda", gpu_memory="2GiB"
        )
    return {"problems": [], "summary": f"{len(done)} rows of {args.tokens} tokens"}


CHECKS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "overlap": overlap, "host-memory": host_memory, "model": model, "sweep": sweep,
}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--gib", type=int, default=8, help="host memory that is pinned")
    parser.add_argument("--rows", type=int, default=48, help="of the model")
    parser.add_argument("--tokens", type=int, default=24, help="that each row generates")
    parser.add_argument("--layers", type=int, help="of the model; by default all")
    parser.add_argument("--weights", default="auto", help="format of the model's weights")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("gpu_smoke: torch finds no CUDA device here")
    try:
        result = CHECKS[args.check](args)
    except BatchgenError as error:
        sys.exit(f"gpu_smoke: {error}")
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    problems = "; ".join(result["problems"])
    print(f"summary: {problems + '; ' if problems else ''}{result['summary']}", flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
