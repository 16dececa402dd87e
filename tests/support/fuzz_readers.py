"""Damaged files of every reader that takes JSON, in this process, many a second; and what must hold of each.

A reader gives a value, or raises a `BatchgenError` of one line; it neither computes for long nor takes much memory, and
leaves the file as it was. `fuzz.py` does so for whole jobs, in processes of their own. `python
tests/support/fuzz_readers.py` tries many cases.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command_line import invoke, planned
from quantized_checkpoints import gptq, requantize
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

import batchgen
from batchgen.core.errors import BatchgenError
from batchgen.core.hardware import read_profile
from batchgen.job.planning import read_plan
from batchgen.job.status import describe_status, output_status
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_for_planning, resolve_model, resolve_weights
from batchgen.models.identity import model_identity
from batchgen.models.model_versions import model_versions
from batchgen.models.store.manifest import store_manifest_checksum
from batchgen.models.store.weight_store import load_extent, open_store
from batchgen.output.run_directory import open_run
from batchgen.share.files import DirectoryFiles
from batchgen.share.lease import Lease, Table, WorkerRecord, claim, finish, write_worker
from batchgen.share.ranges import row_ranges
from batchgen.share.run import SharedJob

MOST_BYTES = 256 << 20
_FINGERPRINT = {"input": {"rows": 3}, "sampling": {"seed": 0}}


@dataclass(frozen=True)
class Reader:
    """A reader of a file. make: writes it whole into a folder; file: its name there; read: reads it there.

    quick: Cases in `make test`. most_cpu_s: That a case may compute.
    """

    make: Callable[[Path], Any]
    file: str
    read: Callable[[Path], Any]
    wrap: Callable[[bytes, bytes], bytes] = lambda whole, text: text  # the file around its JSON
    unwrap: Callable[[bytes], bytes] = lambda whole: whole
    quick: int = 25
    most_cpu_s: float = 3.0


def _read_model(folder: Path) -> None:
    files = resolve_model(str(folder / "model"))
    read_config(files)
    model_versions(files)
    model_identity(files)
    resolve_weights(files, "native")
    checkpoint = open_checkpoint(files)
    for j in range(checkpoint.config.num_layers):
        checkpoint.load_layer(j, torch.float32)
    checkpoint.load_embeddings(torch.float32)
    checkpoint.load_head(torch.float32)


def _read_shape(folder: Path) -> None:
    _, config = resolve_for_planning(str(folder / "model" / "config.json"))
    assert config.num_params >= 0 and config.layer_matrices


def _quantized(folder: Path) -> None:
    make_tiny_model("llama", folder / "model", intermediate_size=128, num_hidden_layers=1)
    requantize(folder / "model", gptq(32))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (folder / "model" / "config.json").write_text(json.dumps(config))


def _store(folder: Path) -> None:
    make_tiny_model("llama", folder / "source", num_hidden_layers=1)
    convert(resolve_model(str(folder / "source")), folder / "model", dtype="float32", weights="int4")


def _read_store(folder: Path) -> None:
    files = resolve_model(str(folder / "model"))
    read_config(files)
    model_identity(files)
    store = open_store(files.path)
    for file in store.files:
        for extent in file.extents.values():
            load_extent(file, extent, torch.float32)


def _with_checksum(_: bytes, text: bytes) -> bytes:
    """So that what is read is not refused for its checksum alone."""
    try:
        manifest = json.loads(text)
        return json.dumps(manifest | {"checksum": store_manifest_checksum(manifest)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text


def _header(whole: bytes) -> bytes:
    return whole[8 : 8 + int.from_bytes(whole[:8], "little")]


def _with_header(whole: bytes, text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + whole[8 + len(_header(whole)) :]


def _make_run(folder: Path) -> None:
    with open_run(folder / "out.parquet", _FINGERPRINT):
        pass


def _open_run(folder: Path) -> None:
    output_status(folder / "out.parquet", sleep=lambda s: None)
    with open_run(folder / "out.parquet", _FINGERPRINT):
        pass


def _make_shared(folder: Path) -> None:
    files = DirectoryFiles(folder / "share")
    files.make()
    table = Table(files, 60.0, time.monotonic)
    lease = claim(files, table, "000000", "me", lambda generation: 0)
    assert isinstance(lease, Lease)
    finish(files, lease, 1, 3, 0)
    write_worker(files, "me", WorkerRecord(3, "process 1 on here", ranges={"000001": (1, 0)}))


def _read_shared(folder: Path) -> None:
    table = Table(DirectoryFiles(folder / "share"), 60.0, time.monotonic)
    table.refresh()
    assert table.is_free("000001", "another") in (True, False) and isinstance(table.alive, list)
    for done in table.done.values():
        assert all(count >= 0 for count in done.parts.values()) and done.ok + done.failed >= 0
    for record in table.workers.values():
        assert isinstance(record.counter + record.seconds + sum(map(sum, record.ranges.values())), float | int)


def _make_shared_run(folder: Path) -> None:
    with open_run(folder / "out.parquet", _FINGERPRINT):
        pass
    files = DirectoryFiles(folder / "out.parquet.batchgen" / "share")
    files.make()
    files.create("job.json", SharedJob(_FINGERPRINT, 3, 60.0, 0).to_json())


def _read_shared_run(folder: Path) -> None:
    status = output_status(folder / "out.parquet", sleep=_sleep)
    assert describe_status(status)
    row_ranges(status.get("rows_left") or 0)


def _sleep(seconds: float) -> None:
    assert 0 <= seconds < 10**8


def _unfinished(folder: Path) -> None:
    _store(folder)
    (folder / "model" / "manifest.json").rename(folder / "model" / "manifest.partial.json")
    (folder / "model" / "head.safetensors").unlink()


def _go_on(folder: Path) -> None:
    convert(resolve_model(str(folder / "source")), folder / "model", dtype="float32", weights="int4")
    _read_store(folder)


def _plan(folder: Path) -> None:
    make_tiny_model("llama", folder / "model")
    lengths = ("--num-prompts", "8", "--input-len", "8", "--output-len", "2")
    planned("-m", folder / "model", *lengths, "--hardware", "zen4", "-o", folder / "plan.json")


def _profile(folder: Path) -> None:
    shutil.copy(Path(batchgen.__file__).parent / "profiler" / "profiles" / "t4.json", folder / "profile.json")


def _profile_and_model(folder: Path) -> None:
    _profile(folder)
    make_tiny_model("llama", folder / "model")


def _plan_by_profile(folder: Path) -> None:
    lengths = ("--num-prompts", "8", "--input-len", "8", "--output-len", "2", "--progress", "none")
    _command("plan", "-m", folder / "model", *lengths, "--hardware", folder / "profile.json")


def _plan_and_rows(folder: Path) -> None:
    _plan(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')


def _run_by_plan(folder: Path) -> None:
    rows = ("-i", folder / "rows.jsonl", "-o", folder / "out.jsonl", "--max-tokens", "2", "--progress", "none")
    _command("run", "-m", folder / "model", *rows, "--plan", folder / "plan.json")


def _command(*args: Any) -> None:
    """A command in this process. Raises what it ends with."""
    code, _, said = invoke(*args)
    if code:
        raise BatchgenError(said)


def _sharded(folder: Path) -> None:
    make_tiny_model("llama", folder / "model", max_shard_size="60KB")


def _small(folder: Path) -> None:
    make_tiny_model("llama", folder / "model", num_hidden_layers=1)
    path = folder / "model" / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt"})


READERS = {
    "config": Reader(_small, "model/config.json", _read_model),
    "config, for planning": Reader(_small, "model/config.json", _read_shape),
    "generation_config": Reader(_small, "model/generation_config.json", _read_model),
    "quantize_config": Reader(_quantized, "model/quantize_config.json", _read_model),
    "index": Reader(_sharded, "model/model.safetensors.index.json", _read_model),
    "header": Reader(_small, "model/model.safetensors", _read_model, _with_header, _header),
    "store": Reader(_store, "model/manifest.json", _read_store, _with_checksum),
    "unfinished store": Reader(_unfinished, "model/manifest.partial.json", _go_on, _with_checksum, quick=10),
    "profile": Reader(_profile, "profile.json", lambda folder: read_profile(folder / "profile.json")),
    "plan": Reader(_plan, "plan.json", lambda folder: read_plan(str(folder / "plan.json"))),
    "profile, planned with": Reader(_profile_and_model, "profile.json", _plan_by_profile, quick=6, most_cpu_s=30),
    "plan, run by": Reader(_plan_and_rows, "plan.json", _run_by_plan, quick=6, most_cpu_s=30),
    "run manifest": Reader(_make_run, "out.parquet.batchgen/manifest.json", _open_run),
    "shared job": Reader(_make_shared_run, "out.parquet.batchgen/share/job.json", _read_shared_run),
    "lease": Reader(_make_shared, "share/leases/000000.0000", _read_shared),
    "done": Reader(_make_shared, "share/done/000000", _read_shared),
    "worker": Reader(_make_shared, "share/workers/me", _read_shared),
}

_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), -float("inf"),
    "", "\ud800", "\x00", "a" * 5000, "../..", "/etc/passwd", "NaN", "float32", "é" * 300, [], [[]], {}, {"": None},
    [None], [1, 2],
    {"a": {"b": [1]}},
]  # fmt: skip
_DEEP = b"[" * 200_000, b'{"a":' * 200_000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000


def mutate(text: bytes, rng: random.Random) -> bytes:
    """JSON with one to three accidents: values of another kind, keys gone, renamed or twice; or text that is none."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = _mutate_values(text, rng) if rng.random() < 0.8 else _mutate_text(text, rng)
    return text


def _mutate_values(text: bytes, rng: random.Random) -> bytes:
    from fuzz import _places

    try:
        value = {"": json.loads(text)}
        holder, key = rng.choice(list(_places(value)))
    except (ValueError, RecursionError, IndexError):
        return text
    match rng.randrange(8):
        case 0 if holder is not value:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", f"{key}x", "\x00", "9" * 30))] = holder[key]
        case 2:
            holder[key] = [holder[key]] * rng.choice((1, 3))
        case 3:
            holder[key] = {str(holder[key])[:50]: holder[key]}
        case 4 if isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
            holder[key] = rng.choice((-holder[key], holder[key] * 10**9, f"{holder[key]:g}"[:50], 1.5))
        case _:
            holder[key] = rng.choice(_VALUES)
    return json.dumps(value[""]).encode()


def _mutate_text(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(6):
        case 0:
            return text[:at]
        case 1:
            return (
                text[:at]
                + rng.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"{", b"]", b"1e999", b"-"))
                + text[at:]
            )
        case 2:
            return rng.choice((b"", b"[]", b"null", b"0", b'"a"', b"{}", b"\xef\xbb\xbf{}", b"NaN"))
        case 3:
            colon = text.find(b":", at)
            return text[: colon + 1] + rng.choice(_DEEP) + text[colon + 1 :]
        case 4:  # a key twice
            colon = text.find(b'":', at)
            start = text.rfind(b'"', 0, colon)
            return text if min(colon, start) < 0 else text[:start] + text[start : colon + 2] + b"7, " + text[start:]
    return text[:at] + text[at + rng.choice((1, 4, 64)) :]


def try_reader(reader: Reader, whole: Path, folder: Path, seed: Any) -> tuple[str, str | None]:
    """Damage the file and read it; what came of it ("read" or the error's class), and what does not hold or None.

    whole: a folder of `reader.make`. folder: of this case, made anew.
    """
    rng = random.Random(str(seed))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    file = folder / reader.file
    data = file.read_bytes()
    damaged = reader.wrap(data, mutate(reader.unwrap(data), rng))
    file.write_bytes(damaged)
    tracemalloc.start()
    before = time.process_time()
    outcome, wrong = "read", None
    try:
        reader.read(folder)
    except BatchgenError as error:
        outcome = type(error).__name__
        if "\n" in str(error) or not str(error):
            wrong = f"is not one line: {error}"
    except Exception as error:
        outcome, wrong = "traceback", f"{type(error).__name__}: {error}"[:500]
    cpu_s, (_, peak) = time.process_time() - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if cpu_s > reader.most_cpu_s or peak > MOST_BYTES:
        wrong = wrong or f"computed for {cpu_s:.1f} s and took {peak >> 20} MiB"
    return outcome, wrong


def main() -> None:
    """Try cases of all readers and print those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of every reader")
    parser.add_argument("--readers", type=lambda text: text.split(";"), default=list(READERS))
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    args = parser.parse_args()
    num_failed = 0
    for name in args.readers:
        outcomes: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as work:
            whole = Path(work) / "whole"
            whole.mkdir()
            READERS[name].make(whole)
            for case in range(args.first, args.first + args.cases):
                outcome, wrong = try_reader(READERS[name], whole, Path(work) / "case", f"{name} {case}")
                outcomes[outcome] += 1
                if wrong:
                    num_failed += 1
                    print(f"{name} {case}: {wrong}", flush=True)
        print(f"{name}: {dict(outcomes)}", flush=True)
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main()
