"""`batchgen.ray.run` on a Ray cluster of two nodes in one machine: its rows, its rate beside two plain workers, and an actor killed in the middle.

    python benchmarks/ray_cluster.py                       # 10,000 rows, a few minutes
    python benchmarks/ray_cluster.py --rows 500            # a try

One model with random weights is run over the same rows in fp32 four times:

    run      by `batchgen run`: the rows that the others must have
    share    by two workers with --share, each with a core
    ray      by two actors, each on a node of its own, with a core
    killed   the same, with one of the actors killed when a third of the rows are saved

Rates are those between a fifth and four fifths of the rows, as these are saved: starting a process, planning and loading the model are not in them.
They are in `wall_s`, which for Ray does not have the start of the cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.machine import cpu_name

sys.path.insert(0, str(Path(__file__).parent))
from random_model import make_model, prompt_text

_TICKS = os.sysconf("SC_CLK_TCK")
_ACTOR = "MapWorker(MapBatches(Generate"
RESULTS = Path(__file__).parent / "results"
_SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
}


class Watch:
    """Looks how many rows are saved, and what each kind of process has computed, a few times a second, in a thread of its own."""

    def __init__(self, saved: Callable[[], int], kind_of: Callable[[str], str], every_s: float = 0.2) -> None:
        """kind_of: of a process, as its command line says."""
        self.samples: list[tuple[float, int, dict[str, float]]] = []
        self._saved, self._kind_of, self._every_s, self._over = saved, kind_of, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._started_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wall_s = time.monotonic() - self._started_s
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.samples.append((time.monotonic() - self._started_s, self._saved(), cpu_seconds(self._kind_of)))

    def found(self, rows: int) -> dict[str, Any]:
        """Of a job of so many rows."""
        early, late = (next(one for one in self.samples if one[1] >= part * rows) for part in (0.2, 0.8))
        # What was saved by then is a little more than a fifth, or than four fifths.
        seconds, count = late[0] - early[0], late[1] - early[1]
        cpu_s = {kind: busy - early[2].get(kind, 0.0) for kind, busy in late[2].items()}
        per_row = {kind: 1e3 * busy / count for kind, busy in cpu_s.items() if busy > 0}
        return {"wall_s": self.wall_s, "rows_per_s": count / seconds, "cpu_ms_per_row": per_row}


def processes() -> dict[int, tuple[int, float, str]]:
    """Of each process its parent, the seconds that it has computed, and its command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(folder.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, name)
    return found


def descendants(process: int) -> dict[int, tuple[int, float, str]]:
    """As `processes`, those that descend from one, itself among them."""
    found = processes()

    def descends(pid: int) -> bool:
        while pid in found and pid != process:
            pid = found[pid][0]
        return pid == process

    return {pid: one for pid, one in found.items() if descends(pid)}


def cpu_seconds(kind_of: Callable[[str], str]) -> dict[str, float]:
    """What the processes that this one has started have computed, by kind; this one is "driver"."""
    busy: dict[str, float] = {}
    for pid, (_, seconds, name) in descendants(os.getpid()).items():
        kind = "driver" if pid == os.getpid() else kind_of(name)
        busy[kind] = busy.get(kind, 0.0) + seconds
    return busy


def rows_in(folder: Path, pattern: str, known: dict[Path, int]) -> int:
    """Rows of all part files there, whole ones. known: of those that were looked at before."""
    for path in folder.glob(pattern):
        if path not in known:
            try:
                known[path] = pq.read_metadata(path).num_rows
            except (OSError, pa.ArrowInvalid):
                continue  # gone, or not a part
    return sum(known.values())


def command(model: Path, folder: Path, output: str, *more: str) -> list[str]:
    job = ["run", "--model", str(model), "--input", str(folder / "in.parquet"), "--output", str(folder / output)]
    return [sys.executable, "-m", "batchgen", *job, "--progress", "none", "--flush-interval", "1s", *more]


def flags(options: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in options.items() if value is not True}
    switches = [f"--{name.replace('_', '-')}" for name in options if name not in given]
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))] + switches


def kind_in_ray(name: str) -> str:
    """Of a process of Ray."""
    if _ACTOR in name:
        return "actors"
    return "ray's workers" if name.startswith("ray::") else "ray's servers"


def by_ray(model: Path, folder: Path, output: str, options: dict[str, Any], rows: int, kill: bool) -> dict[str, Any]:
    import batchgen.ray

    out, killed = folder / output, []
    known: dict[Path, int] = {}

    def saved() -> int:
        count = rows_in(out, "part-*.parquet", known)
        if kill and not killed and count >= rows / 3:
            victim = min(pid for pid, (_, _, name) in descendants(os.getpid()).items() if _ACTOR in name)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
        return count

    with Watch(saved, kind_in_ray) as watch:
        done = batchgen.ray.run(
            str(model),
            str(folder / "in.parquet"),
            out,
            id_column="id",
            concurrency=2,
            num_cpus=1,
            ray_remote_args={"resources": {"worker": 1}},
            **options,
        )
    assert done == {"rows": rows, "rows_resumed": 0}, done
    assert bool(killed) == kill
    return watch.found(rows) | {"parts": len([*out.glob("part-*.parquet")])}


def by_workers(model: Path, folder: Path, options: dict[str, Any], rows: int) -> dict[str, Any]:
    parts = folder / "share.parquet.batchgen" / "share" / "parts"
    known: dict[Path, int] = {}
    with Watch(lambda: rows_in(parts, "*/part-*.parquet", known), lambda name: "workers") as watch:
        workers = [
            subprocess.Popen(
                ["taskset", "--cpu-list", core, *command(model, folder, "share.parquet", "--share", *flags(options))]
            )
            for core in ("0", "1")
        ]
        assert [worker.wait() for worker in workers] == [0, 0]
    return watch.found(rows)


def cluster() -> Any:
    """Two nodes, each with room for one actor and the tasks around it."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    for _ in range(2):
        made.add_node(num_cpus=2, resources={"worker": 1}, object_store_memory=200 << 20)
    ray.init(address=made.address, logging_level="warning", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument(
        "--seqs", type=int, default=64, help="samples in flight: few, so that rows come out all the time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "ray_cluster.json")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "max_tokens": args.output_len,
        "ignore_eos": True,
        "max_num_seqs": args.seqs,
        "cpu_memory": "2GiB",
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="batchgen-ray-") as name:
        folder = Path(name)
        model = make_model(folder / "model", seed=args.seed, **_SHAPE)
        draw = random.Random(args.seed)
        prompts = [
            prompt_text(draw.choices(range(_SHAPE["vocab_size"]), k=draw.randint(8, 72))) for _ in range(args.rows)
        ]
        pq.write_table(pa.table({"prompt": prompts, "id": range(args.rows)}), folder / "in.parquet", row_group_size=500)
        subprocess.run(command(model, folder, "run.parquet", *flags(options)), check=True)
        expected = pq.read_table(folder / "run.parquet").replace_schema_metadata(None)
        found["share"] = by_workers(model, folder, options, args.rows)
        assert pq.read_table(folder / "share.parquet").replace_schema_metadata(None).equals(expected)
        print("share", json.dumps(found["share"]), flush=True)
        import ray

        nodes = cluster()
        for case, kill in (("ray", False), ("killed", True)):
            found[case] = by_ray(model, folder, case, options, args.rows, kill)
            made = pa.concat_tables(pq.read_table(path) for path in (folder / case).glob("part-*.parquet")).sort_by(
                "id"
            )
            rows, whole = made.to_pylist(), expected.to_pylist()
            found[case]["rows_that_differ"] = sum(a != b for a, b in zip(rows, whole, strict=True))
            print(case, json.dumps(found[case]), flush=True)
        ray.shutdown()
        nodes.shutdown()
    found["ray_over_share"] = found["ray"]["rows_per_s"] / found["share"]["rows_per_s"]
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__}
    settings = {"rows": args.rows, "output_len": args.output_len, "seqs": args.seqs, "seed": args.seed}
    args.output.write_text(json.dumps({"machine": machine, **settings, **found}, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
