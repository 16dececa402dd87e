"""Libraries that could keep answers across jobs: inserts, lookups and eviction of a million rows, in CPU seconds.

    python benchmarks/answer_stores.py --rows 1000000 --folder DIR

SQLite is what `batchgen.output.answer_store` uses; DuckDB is measured if it can be imported. Rows come in the batches
that a job has: 1,000 inserted and 64 looked up at a time. Keys are random, as hashes are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.output.answer_store import AnswerStore

ANSWER_BYTES, INSERTED, LOOKED_UP = 300, 1000, 64


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = AnswerStore(folder / "sqlite", most_bytes=1 << 40)

    def insert(self, rows: list[tuple[bytes, bytes]]) -> None:
        self._store.put(dict(rows))

    def look_up(self, keys: list[bytes]) -> int:
        return len(self._store.get(keys))

    def size_bytes(self) -> int:
        return _size(self._folder / "sqlite")


class DuckDB:
    def __init__(self, folder: Path) -> None:
        import duckdb

        self._path = folder / "answers.duckdb"
        self._db = duckdb.connect(str(self._path))
        self._db.execute("CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB)")

    def insert(self, rows: list[tuple[bytes, bytes]]) -> None:
        keys, answers = (pa.array(column, pa.binary()) for column in zip(*rows, strict=True))
        batch = pa.table({"key": keys, "answer": answers})
        self._db.register("batch", batch)
        self._db.execute("INSERT OR REPLACE INTO answers SELECT * FROM batch")

    def look_up(self, keys: list[bytes]) -> int:
        marks = ",".join("?" * len(keys))
        return len(self._db.execute(f"SELECT key, answer FROM answers WHERE key IN ({marks})", keys).fetchall())

    def size_bytes(self) -> int:
        return _size(self._path.parent, "answers.duckdb*")


class Parquet:
    """A file for each batch, and all keys in memory: what each job would have to read before its first row."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder / "parquet", 0
        self._folder.mkdir()
        self._where: dict[bytes, tuple[int, int]] = {}

    def insert(self, rows: list[tuple[bytes, bytes]]) -> None:
        table = pa.table({"key": [key for key, _ in rows], "answer": [answer for _, answer in rows]})
        pq.write_table(table, self._folder / f"{self._count}.parquet")
        self._where.update({key: (self._count, i) for i, (key, _) in enumerate(rows)})
        self._count += 1

    def look_up(self, keys: list[bytes]) -> int:
        count = 0
        for part in {self._where[key][0] for key in keys if key in self._where}:
            count += sum(key in self._where for key in keys if self._where.get(key, (None,))[0] == part)
            pq.read_table(self._folder / f"{part}.parquet", columns=["answer"])
        return count

    def size_bytes(self) -> int:
        return _size(self._folder)


def _size(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def _timed(work: Callable[[], Any]) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu_s, 2), "wall_s": round(time.perf_counter() - began, 2)}


def measure(make: Callable[[Path], Any], folder: Path, rows: int, looked_up: int) -> dict[str, Any]:
    """CPU and wall seconds of inserting rows, and of looking some of them up, half of which are not there."""
    store, rng = make(folder), np.random.default_rng(0)
    keys = [bytes(key) for key in rng.integers(0, 256, (rows, 16), np.uint8)]
    answer = os.urandom(ANSWER_BYTES)
    wanted = [keys[i] if i % 2 else os.urandom(16) for i in rng.integers(0, rows, looked_up).tolist()]

    def insert() -> None:
        for start in range(0, rows, INSERTED):
            store.insert([(key, answer) for key in keys[start : start + INSERTED]])

    found = 0

    def look_up() -> None:
        nonlocal found
        for start in range(0, looked_up, LOOKED_UP):
            found += store.look_up(wanted[start : start + LOOKED_UP])

    inserted, read = _timed(insert), _timed(look_up)
    assert 0.4 * looked_up < found < 0.6 * looked_up
    return {"rows": rows, "insert": inserted, "looked_up": looked_up, "look_up": read, "bytes": store.size_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="an empty directory")
    options = parser.parse_args()
    results = {"sqlite": measure(Sqlite, options.folder, options.rows, options.rows)}
    try:
        results["duckdb"] = measure(DuckDB, options.folder, options.rows, options.rows // 20)
    except ImportError:
        results["duckdb"] = None
    results["parquet"] = measure(Parquet, options.folder, options.rows, options.rows // 100)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
