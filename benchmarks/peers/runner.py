"""The process of a runner, of any engine: a job comes as JSON, tokens and times go back as JSON.

Only Python's library is needed here.

A runner is a process of its own: it loads the model, generates for the warm-up rows, then for the job's, and ends.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = tuple[list[int], int]  # prompt token ids, and how many tokens to generate, whatever they are
Generate = Callable[[list[Row]], list[list[int]]]


@dataclass(frozen=True)
class Job:
    """model: the file or directory that the engine reads. share_prefixes: prompts begin alike, and the engine may make
    use of that. settings: the engine's own."""

    model: str
    rows: list[Row]
    warm_up: list[Row]
    share_prefixes: bool
    threads: int
    settings: dict[str, Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and output."""
        return max(len(ids) + count for ids, count in [*self.rows, *self.warm_up])

    @property
    def common_prefix(self) -> int:
        """Tokens that all prompts begin with, less than any of them has; 0 where prefixes are not to be shared."""
        if not self.share_prefixes:
            return 0
        first, last = (edge(ids for ids, _ in self.rows) for edge in (min, max))
        same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        return min(same, min(len(ids) for ids, _ in self.rows) - 1)


def read_job(path: Path) -> Job:
    """The job in a file."""
    given = json.loads(path.read_text())
    rows = {name: [(ids, count) for ids, count in given.pop(name)] for name in ("rows", "warm_up")}
    return Job(**given, **rows)


def write_synced(path: Path, text: str) -> None:
    """Writes a result; the file's time is that at which it was on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.utime(path)


def main(load: Callable[[Job], tuple[Generate, dict[str, Any]]], packages: list[str]) -> None:
    """Runs the job in the file that the first argument names, and writes the result to the second one's.

    load: gives what generates, and the settings that it runs with. packages: those whose versions are told.
    """
    job = read_job(Path(sys.argv[1]))
    started = time.perf_counter()
    generate, settings = load(job)
    loaded = time.perf_counter()
    if job.warm_up:
        generate(job.warm_up)
    ready = time.perf_counter()
    generated = generate(job.rows)
    done = time.perf_counter()
    result = {
        "load_s": loaded - started,
        "warm_up_s": ready - loaded,
        "wall_s": done - ready,
        "generated": [list(map(int, ids)) for ids in generated],
        "settings": settings,
        "peak_resident_bytes": _peak_resident_bytes(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    write_synced(Path(sys.argv[2]), json.dumps(result))


def _peak_resident_bytes() -> int:
    """Of this process alone: what getrusage tells may be its parent's."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
