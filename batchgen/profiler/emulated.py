"""The profile of an emulated accelerator: compute on CPU cores, and links that are throttled copies."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

from batchgen.core.cores import dedicated_core, on_cores
from batchgen.core.device import Device
from batchgen.core.hardware import COMPUTE_RATES, HardwareProfile
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops

_MOST_BYTES, _LEAST_BYTES = 16 << 20, 4096  # of a copied piece
_PIECE_S, _LINK_S = 0.05, 0.2
_HANDOVERS = 100
# From compute to the link, from there to CPU attention, and back to compute: each waits for the one before, which takes
# so long that a core without work has gone to sleep.
_ATTENDED, _ATTENDED_STEP_S = 40, 1e-3
# Copies like those of the queries, keys and values of a few sequences.
_COPIES_OF_STEP, _COPIED_ROWS, _COPIED_WIDTH, _LONGEST_COPY_S = 3, 8, 512, 1e-3
_WAKINGS, _WAKING_WIDTH, _WAKING_LAYERS, _LEAST_SLEEP_S = 60, 512, 16, 5e-4


def emulated_profile(cpu: HardwareProfile, device: Device, core: HardwareProfile | None = None) -> HardwareProfile:
    """The profile of a machine without a GPU, with an emulated accelerator added. Takes less than a second.

    The accelerator's memory is taken from the host's. Unless the device has a dedicated core, its compute and CPU
    attention share the cores. Copies use the cores only for as long as they would take without throttling: a throttled
    link sleeps for the rest of its time. (Measured on two cores: copies at 2, 6 and 19 GB/s make a GEMM take 1.05, 1.2
    and 1.8 times as long; unthrottled copies ran at 35 to 40 GB/s.)

    Args:
        cpu: Profile of all cores; with a dedicated core, of the cores besides it.
        device: The emulated accelerator.
        core: Profile of the device's dedicated core; None: it has none.
    """
    assert device.gpu_memory_bytes is not None
    h2d_s, d2h_s, free_s = (piece_times(rate) for rate in (device.h2d_bytes_per_s, device.d2h_bytes_per_s, None))
    emulated = replace(
        cpu,
        name=f"{device} on {cpu.name}",
        cpu=replace(cpu.cpu, waking_overhead_s=cpu.cpu.waking_overhead_s + attended_handovers_s(device)),
        gpu=cpu.cpu,
        gpu_memory_bytes=device.gpu_memory_bytes,
        cpu_memory_bytes=max(1, cpu.cpu_memory_bytes - device.gpu_memory_bytes),
        h2d_bytes_per_s=1 / statistics.median(h2d_s),
        d2h_bytes_per_s=1 / statistics.median(d2h_s),
        link_overhead_s=copy_overhead_s(device),
        shared_cores=True,
        # The rate without contention: other processes' work is not part of the copies.
        copy_bytes_per_s=1 / min(free_s),
    )
    if device.slowdown is None:
        return emulated
    with on_cores(dedicated_core()[0]), kernels.alone():
        waking = waking_s(device.slowdown)
    return dedicated_core_profile(emulated, device, core or cpu, waking)


def dedicated_core_profile(
    profile: HardwareProfile, device: Device, core: HardwareProfile, waking: float = 0.0
) -> HardwareProfile:
    """The profile of a machine whose emulated device computes on a dedicated CPU core.

    Copies of the device run on whichever core sleeps.

    Args:
        profile: Profile with a `gpu` that computes on the CPU's cores; the extra time of CPU attention is kept.
        device: The emulated device, which is slower than its core.
        core: Profile of the core, as a CPU.
        waking: Seconds by which a computation takes longer after such a sleep.
    """
    assert profile.gpu is not None and device.slowdown is not None
    step_s = device.slowdown * core.cpu.step_overhead_s + device.step_overhead_s
    waking_gpu, waking_cpu = (slower * waking * (slower > 1) for slower in (device.slowdown, device.cpu_slowdown))
    profile = replace(
        profile,
        cpu=replace(profile.cpu, waking_overhead_s=profile.cpu.waking_overhead_s + waking_cpu),
        gpu=replace(core.cpu, step_overhead_s=step_s, waking_overhead_s=waking_gpu),
        sampling_logits_per_s=core.sampling_logits_per_s,
        sweep_overhead_s=core.sweep_overhead_s,
        batch_overhead_s=core.batch_overhead_s,
        sequence_overhead_s=core.sequence_overhead_s,
        issue_overhead_s=core.issue_overhead_s,
        shared_cores=False,
        copy_bytes_per_s=None,
    )
    slower = [name for name in COMPUTE_RATES if name != "sampling_logits_per_s"]  # the host samples
    return profile.scaled(**dict.fromkeys(slower, 1 / device.slowdown), cpu_decode_attention=1 / device.cpu_slowdown)


def piece_times(bytes_per_s: float | None) -> list[float]:
    """Seconds per byte of pieces of a copy over a link. bytes_per_s: throttled rate; None: an unthrottled link."""
    import torch

    from batchgen.runtime.memory.transfers import Link, untouched

    link = Link(bytes_per_s)
    size = _MOST_BYTES if bytes_per_s is None else int(min(_MOST_BYTES, max(_LEAST_BYTES, bytes_per_s * _PIECE_S)))
    # The source leaves the caches before it is used again, as weights do.
    sources, targets = (untouched((count, size), torch.uint8) for count in (8, 2))
    sources.fill_(1), targets.fill_(1)
    times: list[float] = []
    deadline = time.perf_counter() + _LINK_S
    while len(times) < 3 or time.perf_counter() <= deadline:
        started = time.perf_counter()
        link.copy(targets[len(times) % 2], sources[len(times) % 8])
        times.append((time.perf_counter() - started) / size)
    return times


def copy_overhead_s(device: Device) -> float:
    """Fixed seconds of a copy of KV rows from an emulated device to host memory, while the device computes."""
    import torch

    from batchgen.runtime.dedicated_core import DedicatedCore
    from batchgen.runtime.lanes import Lanes
    from batchgen.runtime.memory.transfers import Link
    from batchgen.schedule.step_graph import Step

    rate = device.d2h_bytes_per_s or math.inf
    width = int(min(_COPIED_WIDTH, max(1, rate * _LONGEST_COPY_S / 4 / _COPIED_ROWS)))
    link, rows = Link(device.d2h_bytes_per_s), torch.arange(0, 2 * _COPIED_ROWS, 2)
    new, pool = torch.ones(_COPIED_ROWS, width), torch.ones(2 * _COPIED_ROWS, width)
    weights, x = _small_weights(), torch.ones(_COPIED_ROWS, _WAKING_WIDTH)
    times: list[float] = []

    def perform(step: Step) -> None:
        if step.lane == "d2h":
            started = time.perf_counter()
            for _ in range(_COPIES_OF_STEP):
                link.scatter(pool, rows, new)
            times.append((time.perf_counter() - started) / _COPIES_OF_STEP)
            return
        with cores.throttled(step) if cores else nullcontext():
            for weight in weights[:_COPIES_OF_STEP]:
                ops.linear(x, weight)

    # A computation waits for the copies before the last ones, so that copies go on beside computations.
    steps = [
        step
        for i in range(0, 2 * _HANDOVERS, 2)
        for step in (
            Step(i, "post", "compute", 0, 0, 0, None, None, (i - 3,) if i > 3 else ()),
            Step(i + 1, "store_hidden", "d2h", 0, 0, 0, None, None, (i,)),
        )
    ]
    cores = None if device.slowdown is None else DedicatedCore(device.slowdown)
    lanes = Lanes(perform, on_thread=cores.keep_lane if cores else lambda lane: None)
    try:
        with cores.computing() if cores else nullcontext():
            lanes.execute(steps)
            lanes.drain()
    finally:
        lanes.close()
        if cores:
            cores.close()
    kept = sorted(times)[_HANDOVERS // 10 : -_HANDOVERS // 10]  # without contention
    return max(0.0, statistics.mean(kept) - float(new.nbytes) / rate)


def _small_weights() -> list[ops.Weight]:
    """Weights of layers whose computation takes no longer than a copy."""
    import torch

    return [ops.pack_weight(torch.ones(_WAKING_WIDTH, _WAKING_WIDTH)) for _ in range(_WAKING_LAYERS)]


def waking_s(slowdown: float) -> float:
    """Seconds by which a computation takes longer after a sleep than right after another computation.

    A core has to wake up after a sleep, and finds other data in its caches. slowdown: how many times slower than its
    core the device is, which decides how long it sleeps.
    """
    import torch

    weights = _small_weights()
    x = torch.ones(8, _WAKING_WIDTH)

    def median_s(sleeps: bool) -> float:
        times = []
        for i in range(_WAKINGS):
            busy = time.thread_time()
            ops.linear(x, weights[i % len(weights)])
            times.append(time.thread_time() - busy)
            if sleeps:
                time.sleep(max(_LEAST_SLEEP_S, (slowdown - 1) * times[-1]))
        return statistics.median(times)

    return max(0.0, statistics.median(median_s(True) - median_s(False) for _ in range(3)))


def attended_handovers_s(device: Device) -> float:
    """Seconds that CPU attention of a micro-batch takes beside its work: queries go out, results are waited for.

    They are from the end of each Step to the start of the one on another lane that waits for it. A core that has slept
    for as long as a Step lasts takes two to three times as long to wake up as one that waits for the first time.
    """
    from batchgen.runtime.dedicated_core import DedicatedCore
    from batchgen.runtime.lanes import Lanes
    from batchgen.schedule.step_graph import KINDS, Step, StepKind

    begun, ended = list[float](), list[float]()

    def perform(step: Step) -> None:
        begun.append(time.perf_counter())
        time.sleep(_ATTENDED_STEP_S)
        ended.append(time.perf_counter())

    kinds: tuple[StepKind, ...] = ("pre", "send_qkv", "cpu_attention")
    steps = [
        Step(3 * layer + i, kind, KINDS[kind], 0, 0, 0, None, None, (3 * layer + i - 1,) if layer or i else ())
        for layer in range(_ATTENDED)
        for i, kind in enumerate(kinds)
    ]
    cores = None if device.slowdown is None else DedicatedCore(device.slowdown)
    lanes = Lanes(perform, on_thread=cores.keep_lane if cores else lambda lane: None)
    try:
        with cores.computing() if cores else nullcontext():
            lanes.execute(steps)
            lanes.drain()
    finally:
        lanes.close()
        if cores:
            cores.close()
    waits = [after - before for before, after in zip(ended, begun[1:], strict=False)]
    return sum(statistics.median(waits[i::3]) for i in range(3))
