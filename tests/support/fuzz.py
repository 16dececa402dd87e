"""Damaged files of every kind that a job reads, and what must hold of a job that meets one.

A job ends, says what is wrong in one line without a traceback, and takes nothing away; or it writes rows that are
right: those of an undisturbed job for the same prompts. `python tests/support/fuzz.py` tries many cases and writes
those that failed; a test tries a few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_tokenizers
import pyarrow as pa
import pyarrow.parquet as pq
from processes import start_in_process

import batchgen
from batchgen.core.machine import cpu_name

CPU_LIMIT_S = 10  # what a job on a damaged file may compute; a healthy one takes less than two
WAIT_S = 300  # for what waits and computes nothing, on any machine
ALLOWED_CODES = (0, 1, 2, 4)
PROMPTS = [*(f"The ferry left at {hour}, and the {what}" for hour in range(6) for what in ("dog", "cook")), None]
JOB = ["--max-tokens", "4", "--dtype", "float32", "--progress", "none", "--hardware", "zen4"]


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: the file in the work folder.
        options: options of a job that reads it.
        checked: rows must be right.
    """

    file: str
    options: list[str]
    output: str = "out.parquet"
    text: bool = False
    checked: bool = True
    resumed: bool = False  # the file is part of a half-finished job
    head_bytes: int | None = None  # damage these first bytes alone: behind them are weights, any of which are valid


def _input(file: str, **more: Any) -> Kind:
    return Kind(file, ["-m", "model", "-i", file, *JOB], **more)


KINDS: dict[str, Kind] = {
    "parquet": _input("rows.parquet"),
    "jsonl": _input("rows.jsonl", text=True),
    "csv": _input("rows.csv", text=True),
    "openai": Kind("batch.jsonl", ["-m", "model", "-i", "batch.jsonl", *JOB], output="answers.jsonl", text=True),
    "manifest": Kind(
        "out.parquet.batchgen/manifest.json", ["-m", "model", "-i", "rows.parquet", *JOB], text=True, resumed=True
    ),
    "part": Kind("out.parquet.batchgen/parts/*", ["-m", "model", "-i", "rows.parquet", *JOB], resumed=True),
    "plan": Kind("plan.json", ["-m", "model", "-i", "rows.parquet", *JOB[:-2], "--plan", "plan.json"], text=True),
    "profile": Kind(
        "profile.json", ["-m", "model", "-i", "rows.parquet", *JOB[:-2], "--hardware", "profile.json"], text=True
    ),
    "gguf": Kind("tiny.gguf", ["-m", "tiny.gguf", "-i", "rows.parquet", *JOB], checked=False, head_bytes=4096),
    "safetensors": Kind(
        "model/model.safetensors", ["-m", "model", "-i", "rows.parquet", *JOB], checked=False, head_bytes=2048
    ),
}  # fmt: skip


def prepare(folder: Path) -> dict[str, str]:
    """Write a whole file of every kind into a folder; returns the text that each prompt is continued with."""
    from tiny_gguf import write_tiny_gguf
    from tiny_models import make_tiny_model
    from tiny_tokenizers import make_tiny_tokenizer
    from transformers import AutoTokenizer

    model = make_tiny_model("llama", folder / "model")
    make_tiny_tokenizer(
        folder / "model", chat_template=None
    )  # texts of rows and of OpenAI's requests are continued alike
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    write_tiny_gguf(model, folder / "tiny.gguf", tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    rows = [{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=5)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.csv").write_text("id,prompt\n" + "".join(f'{row["id"]},"{row["prompt"]}"\n' for row in rows))
    (folder / "batch.jsonl").write_text("".join(json.dumps(_request(i, p)) + "\n" for i, p in enumerate(PROMPTS)))
    shutil.copy(Path(batchgen.__file__).parent / "profiler" / "profiles" / "zen4.json", folder / "profile.json")
    reads = ["-m", "model", "-i", "rows.parquet"]
    _must(folder, ["run", *reads, *JOB, "-o", "whole.parquet"], 0)
    _must(folder, ["plan", *reads, *JOB[:4], "--hardware", "zen4", "-o", "plan.json"], 0)
    # Half of a job: its last row cannot be run, and the job stops there.
    _must(folder, ["run", *reads, *JOB, "-o", "out.parquet", "--max-num-seqs", 1, "--on-error", "fail"], None)
    return {row["prompt"]: row["text"] for row in pq.read_table(folder / "whole.parquet").to_pylist() if row["prompt"]}


def _request(number: int, prompt: str | None) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def _must(folder: Path, arguments: list, code: int | None) -> None:
    process = start_in_process(_job, [str(folder), [str(a) for a in arguments], str(folder / "usage")], folder / "log")
    process.join()
    if code not in (None, process.exitcode):
        raise RuntimeError(f"{arguments} ended with {process.exitcode}: {(folder / 'log').read_text()}")


def _job(folder: str, arguments: list[str], usage: str) -> None:
    """A command in this process, from a folder; leaves the CPU seconds it took."""
    from batchgen import cli

    os.chdir(folder)
    sys.argv = ["batchgen", *arguments]
    try:
        cli.main()
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        Path(usage).write_text(str(used.ru_utime + used.ru_stime))


def damage(data: bytes, kind: Kind, rng: random.Random) -> bytes:
    """What is left of a file after one to three accidents."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _replace_a_value(data, rng) if kind.text and rng.random() < 0.6 else _damage_bytes(data, kind, rng)
    return data


def try_tokenizer(prepared: Path, name: str, seed: int, folder: Path) -> tuple[str, str | None]:
    """Tries a damaged tokenizer, which is read in this process.

    Args:
        prepared: the folder of `fuzz_tokenizers.prepare`.
    """

    def damaged(data: bytes, text: bool, head: bool, rng: random.Random) -> bytes:
        return damage(data, Kind("", [], text=text, head_bytes=len(data) if head else None), rng)

    return fuzz_tokenizers.try_case(prepared, name, seed, folder, damaged)


def _damage_bytes(data: bytes, kind: Kind, rng: random.Random) -> bytes:
    end = min(len(data), kind.head_bytes or len(data))
    at = rng.randrange(end) if end else 0
    length = min(rng.choice((1, 1, 4, 64)), end - at)
    match rng.randrange(6):
        case 0 if not kind.head_bytes or rng.random() < 0.5:
            return data[:at]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[:at] + rng.randbytes(length) + data[at:]
        case 3:
            return data[:at] + data[at : at + length] * 3 + data[at + length :]
        case 4:
            flipped = data[at] ^ (1 << rng.randrange(8)) if end else 0
            return data[:at] + bytes([flipped]) + data[at + 1 :]
    return data[:at] + rng.randbytes(length) + data[at + length :]


_ODD: list[Any] = [
    None, True, 0, -1, 10**30, -0.0, 1e308, "", "\ud800", "\x00", "a" * 5000, [], {}, [[]], {"": None}, [None], "NaN",
]  # fmt: skip


def _replace_a_value(data: bytes, rng: random.Random) -> bytes:
    """JSON, or one of its lines, in which a value is another, missing or there twice; other text as bytes."""
    whole = data.startswith(b"{\n") or data.count(b"\n") < 2
    lines = [data] if whole else data.splitlines(keepends=True)
    at = rng.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[at])
        places = list(_places(value))
        holder, key = rng.choice(places)
    except (ValueError, IndexError, RecursionError):
        return _damage_bytes(data, KINDS["csv"], rng)
    action = rng.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = rng.choice([*_ODD, float("nan"), float("inf")])
    lines[at] = json.dumps(value, indent=2 if whole else None).encode() + (b"" if whole else b"\n")
    return b"".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def try_case(
    prepared: Path, expected: dict[str, str], name: str, seed: int, folder: Path
) -> tuple[int | None, str | None]:
    """Damage a file of a kind, run the job that reads it; returns its exit code, and what does not hold or None.

    prepared: the folder of `prepare`, which stays as it is. folder: of this case, made anew.
    """
    kind, rng = KINDS[name], random.Random(f"{name} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder, symlinks=True)
    if not kind.resumed:
        shutil.rmtree(folder / "out.parquet.batchgen")
    files = sorted(path for path in folder.glob(kind.file) if path.is_file())
    file = rng.choice(files)
    file.write_bytes(damage(file.read_bytes(), kind, rng))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    log, usage = folder.parent / f"{folder.name}.log", folder.parent / f"{folder.name}.usage"
    process = start_in_process(_job, [str(folder), ["run", *kind.options, "-o", kind.output], str(usage)], log)
    process.join(WAIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None, f"still there after {WAIT_S} s"
    changed = [path.name for path, data in before.items() if not path.exists() or path.read_bytes() != data]
    cpu_s = float(usage.read_text()) if usage.exists() else 0.0
    return process.exitcode, _what_is_wrong(process.exitcode, log.read_text(errors="replace"), cpu_s, changed) or (
        _wrong_row(folder / kind.output, kind, expected) if process.exitcode in (0, 4) else None
    )


def _what_is_wrong(code: int, said: str, cpu_s: float, changed: list[str]) -> str | None:
    if code not in ALLOWED_CODES or "Traceback" in said:
        return f"ended with {code}: {said[-2000:]}"
    if code and not (said.strip().splitlines() or [""])[-1].startswith("batchgen: "):
        return f"does not end with a line that says why: {said[-2000:]}"
    if cpu_s > CPU_LIMIT_S:
        return f"computed for {cpu_s:.0f} s"
    return f"changed {changed}" if changed else None


def _wrong_row(output: Path, kind: Kind, expected: dict[str, str]) -> str | None:
    if not output.exists():
        return "ended well without an output"
    if not kind.checked:
        return None
    if output.suffix == ".parquet":
        rows = pq.read_table(output).to_pylist()
        found = [(row.get("prompt"), row["text"], row["error"]) for row in rows]
    else:
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        prompts = {f"r{i}": prompt for i, prompt in enumerate(PROMPTS)}
        body = [(answer, (answer["response"] or {}).get("body") or {}) for answer in answers]
        found = [
            (None if _differs(output, answer) else prompts.get(answer["custom_id"]), body["choices"][0]["text"], None)
            for answer, body in body
            if body.get("choices")
        ]
    for prompt, text, error in found:
        if prompt in expected and error is None and text != expected[prompt]:
            return f"{prompt!r} is continued by {text!r}, not by {expected[prompt]!r}"
    if kind.resumed and output.suffix == ".parquet" and len(found) != len(PROMPTS):
        return f"{len(found)} rows for {len(PROMPTS)}"
    return None


def _differs(output: Path, answer: dict[str, Any]) -> bool:
    """Whether the request of an answer is not what it was before the damage."""
    requests: list[Any] = []
    for line in (output.parent / "batch.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            requests.append(json.loads(line))
    whole = [_request(i, prompt) for i, prompt in enumerate(PROMPTS)]
    return not any(request in whole and request["custom_id"] == answer["custom_id"] for request in requests)


def main() -> None:
    """Try cases of all kinds and print those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="of every kind")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*KINDS, *fuzz_tokenizers.KINDS])
    parser.add_argument("--first", type=int, default=0, help="seed of the first case, where --output has none yet")
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="JSON file with what was tried and what failed, which is added to")
    args = parser.parse_args()
    shutil.rmtree(args.work_dir, ignore_errors=True)
    args.work_dir.mkdir(parents=True)
    prepared, tokenizers = args.work_dir / "prepared", args.work_dir / "tokenizers"
    prepared.mkdir()
    tokenizers.mkdir()
    expected = prepare(prepared)
    fuzz_tokenizers.prepare(tokenizers)
    found = _found_before(args.output)
    for name in args.kinds:
        begin, first = found["seeds"].get(name, (args.first, args.first))
        codes: Counter[str] = Counter()
        failed: list[dict[str, Any]] = []
        for seed in range(first, first + args.cases):
            if name in KINDS:
                code, wrong = try_case(prepared, expected, name, seed, args.work_dir / "case")
            else:
                code, wrong = try_tokenizer(tokenizers, name, seed, args.work_dir / "case")
            codes[str(code)] += 1
            if wrong:
                failed.append({"kind": name, "seed": seed, "what": wrong})
                print(f"{name} {seed}: {wrong}", flush=True)
        print(f"{name}: {args.cases} tried, exit codes {dict(codes)}, {len(failed)} failed", flush=True)
        found["seeds"][name] = [begin, first + args.cases]
        found["exit_codes"][name] = dict(codes + Counter(found["exit_codes"].get(name, {})))
        found["failed"] += failed
        if args.output:
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["failed"]))


def _found_before(output: Path | None) -> dict[str, Any]:
    """What the file has, so that many cases can be tried a few at a time; seeds: [first, end) of each kind."""
    if output and output.exists():
        return json.loads(output.read_text())
    return {"cpu": cpu_name(), "seeds": {}, "exit_codes": {}, "failed": []}


if __name__ == "__main__":
    main()
