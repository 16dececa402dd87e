"""Jobs run for hours under a 3 GiB memory limit, with KV on disk, and disturbed all the time.

Memory must stay flat, nothing may be left behind, and every output must equal that of a job nobody disturbed.

Each job is disturbed at random moments and run again until it is complete. Deadlines and full disks meet one process
that lives as long as the soak and runs every job to its end; kills (SIGKILL) and interrupts (SIGINT) meet processes of
their own, whose rows that process goes on from. Its memory, files and threads are counted whenever it has completed a
job.

Output, KV and weights are on a small file system of their own, so that a full disk is nobody else's. Needs root and the
memory controller of cgroups version 1.

    python benchmarks/soak.py --hours 2 --seed 0
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import pyarrow as pa
import pyarrow.parquet as pq
from kills import WORDS, put_on_disk
from peers.memory_limit import memory_group
from processes import start_in_process
from recording import result_path, write

from batchgen.core.machine import resident_bytes

LIMIT_BYTES = 3 << 30
DISK_BYTES = 256 << 20
FLAT = 0.05  # growth that is still flat
DISTURBANCES = ("deadline", "disk full", "kill", "interrupt")
_LIMIT_S = 600.0  # a run that takes longer hangs
_MOST_DISTURBANCES = 4  # of one job
_WARM_UP = 0.1  # of the jobs, before which the memory of the process is not yet what it needs


@dataclass
class Found:
    """The record of a soak.

    Attributes:
        moments: counts of the process that lives on, after each job that it has completed.
    """

    jobs: int = 0
    disturbed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    rows_resumed: int = 0
    wrong: list[str] = field(default_factory=list)
    moments: list[dict[str, float]] = field(default_factory=list)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A new file system of this size.

    Raises:
        SystemExit: none can be mounted.
    """
    image, disk = folder / "disk.img", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"no small file system can be mounted: {error}") from error
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Fills a file system with one file, which it returns."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            free = os.statvfs(disk)
            os.posix_fallocate(
                file.fileno(), os.fstat(file.fileno()).st_size, max(4096, free.f_bfree * free.f_bsize // 2)
            )
    return filler


def worker(connection: Connection) -> None:
    """Runs one job after the other: receives options of `batchgen.run`, sends (how it ended, rows resumed, counts)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import batchgen
    from batchgen.core.errors import BatchgenError

    while (options := connection.recv()) is not None:
        resumed = 0
        try:
            report = batchgen.run(**options)
            ended, resumed = report["state"], report["rows_resumed"]
            del report
        except BatchgenError as error:
            ended = f"{type(error).__name__}: {error}"
        except Exception as error:
            ended = f"unforeseen {type(error).__name__}: {error}"
        gc.collect()
        counts = {
            "resident_bytes": resident_bytes(),
            "open_files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        connection.send((ended, resumed, counts))


class Soak:
    """Jobs in one folder, of which `disk` is a small file system."""

    def __init__(self, folder: Path, disk: Path, group: Path, seed: int, rows: int) -> None:
        self.folder, self.disk, self.group, self.seed, self.rows = folder, disk, group, seed, rows
        self.draw, self.found = random.Random(seed), Found()
        self.output, self.temporary = disk / "out.parquet", folder / "tmp"
        self.temporary.mkdir()
        os.environ |= {"BATCHGEN_HARDWARE": "zen4", "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self._make_input()
        self.options = {
            "model": str(folder / "model"), "input": str(folder / "in.parquet"), "output": str(self.output),
            "max_tokens": 64,
            "sampling_column": "sampling", "dtype": "float32", "offload_dir": str(disk / "offload"),
            "flush_interval": "0.2s",
        }  # fmt: skip
        self._plan()
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=worker, args=(other,), daemon=True)
        self.process.start()
        self._run_here()  # converts the weights, and imports
        self._clear()
        started_s = time.monotonic()
        self._run_here()
        self.whole_s = time.monotonic() - started_s
        self.expected = pq.read_table(self.output)
        self.left = self._files()
        self._clear()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join()

    def job(self) -> None:
        """One job, disturbed and run again until it is complete, then compared."""
        found = self.found
        for _ in range(self.draw.randrange(_MOST_DISTURBANCES + 1)):
            how = self.draw.choice(DISTURBANCES)
            after_s = self.draw.uniform(0.1, 1.1) * self.whole_s
            ended = self._disturb(how, after_s)
            found.disturbed[how] += 1
            found.ended[f"{how}: {_kind(ended)}"] += 1
            if "unforeseen" in ended:
                found.wrong.append(f"job {found.jobs}: {how}: {ended}")
        ended, resumed, counts = self._run_here()
        found.jobs += 1
        found.rows_resumed += resumed
        found.moments.append(counts)
        if ended not in ("complete", "already complete"):
            found.wrong.append(f"job {found.jobs}: {ended}")
        elif not pq.read_table(self.output).equals(self.expected):
            found.wrong.append(f"job {found.jobs}: other rows")
        if (files := self._files()) != self.left:
            found.wrong.append(f"job {found.jobs}: files {sorted(files ^ self.left)}")
        self._clear()

    def _disturb(self, how: str, after_s: float) -> str:
        """Runs the job, which meets something after some seconds; how it ended."""
        if how == "deadline":
            return self._run_here(max_time=f"{after_s:.2f}s")[0]
        if how == "disk full":
            timer = threading.Timer(after_s, fill, [self.disk])
            timer.start()
            try:
                return self._run_here()[0]
            finally:
                timer.cancel()
                timer.join()
                (self.disk / "filler").unlink(missing_ok=True)
        return self._run_apart(signal.SIGKILL if how == "kill" else signal.SIGINT, after_s)

    def _run_here(self, **more: Any) -> tuple[str, int, dict[str, float]]:
        """Runs the job in the process that lives on."""
        self.connection.send(self.options | more)
        if not self.connection.poll(_LIMIT_S):
            raise SystemExit("a run hangs")
        return self.connection.recv()

    def _run_apart(self, how: int, after_s: float) -> str:
        """Runs the job in a process of its own, which gets a signal."""
        log = self.folder / "log"
        process = start_in_process(_command, [_arguments("run", self.options)], log)
        process.join(after_s)
        with suppress(ProcessLookupError):
            os.kill(process.pid, how)
        process.join(_LIMIT_S)
        if process.is_alive():
            raise SystemExit(f"a run hangs: {log.read_text()}")
        code = process.exitcode
        known = code in (0, -how) or (how == signal.SIGINT and code == 130)
        return f"exit code {code}" if known else f"unforeseen exit code {code}: {log.read_text()[-500:]}"

    def _files(self) -> set[str]:
        """The names of all files beside the input, with N for numbers."""
        folders = [self.disk, self.temporary]
        return {re.sub(r"\d+", "N", str(path)) for folder in folders for path in folder.rglob("*") if path.is_file()}

    def _clear(self) -> None:
        self.output.unlink()
        shutil.rmtree(f"{self.output}.batchgen")

    def _make_input(self) -> None:
        """A small model, and prompts of different lengths, of which every other one is sampled."""
        from tiny_models import make_tiny_model

        make_tiny_model(
            "llama", self.folder / "model", hidden_size=256, num_hidden_layers=6, intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=4,
        )  # fmt: skip
        prompts = [" ".join(self.draw.choices(WORDS, k=self.draw.randrange(1, 60))) for _ in range(self.rows)]
        prompts[self.rows // 3] = None  # it fails
        sampling = [{"temperature": 0.8 * (i % 2), "top_p": 0.95} for i in range(self.rows)]
        pq.write_table(pa.table({"prompt": prompts, "sampling": sampling}), self.folder / "in.parquet")

    def _plan(self) -> None:
        """Plans the job with all weights but one layer, and half of the KV, on disk."""
        plan = self.folder / "plan.json"
        asked = {name: value for name, value in self.options.items() if name not in ("output", "flush_interval")}
        log = self.folder / "log"
        more = ["--cpu-memory", "1GiB", "--max-num-seqs", "32", "-o", str(plan)]
        process = start_in_process(_command, [[*_arguments("plan", asked), *more]], log)
        process.join()
        if process.exitcode:
            raise SystemExit(log.read_text())
        put_on_disk(plan)
        self.options |= {"plan": str(plan), "cpu_memory": "1GiB"}


def _kind(ended: str) -> str:
    """How a run ended, in words that two runs share."""
    if ended.startswith("exit code"):
        return ended
    return re.sub(r"\d+", "N", re.sub(r"/\S+/", "", ended))[:160]


def _arguments(command: str, options: dict[str, Any]) -> list[str]:
    flags = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]
    return [command, *flags, "--progress", "none"]


def _command(arguments: list[str]) -> None:
    from batchgen import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["batchgen", *arguments]
    cli.main()


def growth(values: list[float]) -> float:
    """The median of the last quarter over that of the first, less one, without the values of the warm-up."""
    warm = values[int(len(values) * _WARM_UP) :]
    quarter = max(1, len(warm) // 4)
    return statistics.median(warm[-quarter:]) / statistics.median(warm[:quarter]) - 1


def results(soak: Soak, asked_h: float, lasted_s: float) -> dict[str, Any]:
    found = soak.found
    resident = [moment["resident_bytes"] for moment in found.moments]
    every = max(1, len(resident) // 200)
    return {
        "seed": soak.seed,
        "rows": soak.rows,
        "hours_asked": asked_h,
        "hours": round(lasted_s / 3600, 3),
        "limit_bytes": LIMIT_BYTES,
        "most_bytes_in_group": int((soak.group / "memory.max_usage_in_bytes").read_text()),
        "job_undisturbed_s": soak.whole_s,
        "jobs": found.jobs,
        "disturbed": dict(found.disturbed),
        "ended": dict(sorted(found.ended.items())),
        "rows_resumed": found.rows_resumed,
        "wrong": found.wrong,
        "resident_growth": growth(resident),
        "resident_bytes": {"first": resident[0], "last": resident[-1], "least": min(resident), "most": max(resident)},
        "resident_mib_over_jobs": [round(value / (1 << 20), 1) for value in resident[::every]],
        "open_files": [found.moments[0]["open_files"], found.moments[-1]["open_files"]],
        "threads": [found.moments[0]["threads"], found.moments[-1]["threads"]],
    }


def run_soak(
    folder: Path, *, hours: float, seed: int, rows: int, notify: Callable[[dict], None] = lambda found: None
) -> dict[str, Any]:
    """Runs jobs for so long, and returns the results, as JSON values.

    Args:
        notify: called with the results after each job.

    Raises:
        SystemExit: a run hangs, or the machine lets it set no limit or mount nothing.
    """
    with small_disk(folder, DISK_BYTES) as disk, memory_group(LIMIT_BYTES) as group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        started_s = time.monotonic()
        soak = Soak(folder, disk, group, seed, rows)
        try:
            while not soak.found.jobs or time.monotonic() - started_s < hours * 3600:
                soak.job()
                found = results(soak, hours, time.monotonic() - started_s)
                notify(found)
        finally:
            soak.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--output", type=Path, default=result_path("soak"))
    args = parser.parse_args()

    def note(found: dict[str, Any]) -> None:
        write(args.output, found)
        print(
            json.dumps({name: found[name] for name in ("hours", "jobs", "wrong", "resident_growth")}), file=sys.stderr
        )

    with tempfile.TemporaryDirectory(prefix="batchgen-soak-") as folder:
        found = run_soak(Path(folder), hours=args.hours, seed=args.seed, rows=args.rows, notify=note)
    if found["wrong"]:
        sys.exit(f"{len(found['wrong'])} jobs went wrong")
    if found["resident_growth"] > FLAT:
        sys.exit(f"memory grew by {found['resident_growth']:.1%}")


if __name__ == "__main__":
    main()
