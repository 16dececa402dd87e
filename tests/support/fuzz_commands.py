"""Odd arguments for every command: none of them is a traceback, or more than one line of an error.

`python tests/support/fuzz_commands.py 0 500` draws those of 500 seeds, in a folder of its own, and prints what went
wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click

from batchgen.cli import commands

# What a command may end with when its arguments are wrong. 1: a device that takes nothing.
_CODES = (0, 1, 2, 3, 4)
VALUES = (
    "", " ", "-", "--", "@", ".", "/", "~", "*", "[", "{", "{}", "[]", "null", "true", "\n", "a\nb", "\t", "\x1b[31m",
    "\x00", "a\x00b", "\udcff",
    "in\udce9.jsonl", "é", "\u202egpj", "x" * 300, "x" * 70_000, "a/" * 3000, "-1", "0", "+1", "1.5", "-0.0", "1e400",
    "nan", "inf", "-inf",
    "1_0", "0x10", "٣", "9" * 30, "-" + "9" * 30, "1e9", "%", "5%", "-5%", "101%", "nan%", "0/0", "1/0", "3/2", "-1/4",
    "1/2/3", "9/9" * 9,
    "GiB", "-1GiB", "0B", "1e30TiB", "nanGiB", "1 GiB", "h", "-1h", "1e30h", "nans", "0s", "=", "a=", "=x2",
    "gpu-memory=+-8GiB", "2x",
    "0x t4", "2x none", "cuda:99", "emulated:", "emulated:gpu-memory=0", "folder", "file", "@folder", "@file", "@none",
    "none/none", "link", "loop",
    "file/inside", "/dev/null", "/dev/full", "/proc/self/mem", "memory://", "s3://", "nosuch://a/b", "http://",
    "file:///", "://", "in.jsonl", "M",
    "in.parquet", "out.jsonl", "bad.json", "bad.toml", "deep.json",
)  # fmt: skip
_BASE = {
    "run": {
        "-m": "M", "-i": "in.jsonl", "-o": "out.jsonl", "--max-tokens": "1", "--progress": "none", "--dry-run": None,
    },
    "plan": {"-m": "M", "-i": "in.jsonl", "--max-tokens": "1", "--progress": "none", "--hardware": "zen4"},
    "bench": {"-m": "M", "--num-prompts": "1", "--input-len": "2", "--output-len": "1", "--progress": "none"},
    "profile": {"--output": "none/none"},
    "convert": {"-m": "M", "-o": "store"},
    "status": {},
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a command ended. wrong: what is wrong with that; None: nothing."""

    arguments: tuple[str, ...]
    code: int | None
    shown: str
    wrong: str | None


def prepare(folder: Path) -> None:
    """Files that the arguments name: a model, inputs, and things of another kind in their place."""
    from tiny_models import make_tiny_model

    make_tiny_model("llama", folder / "M")
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(3)))
    (folder / "in.parquet").write_bytes(b"PAR1")
    (folder / "folder").mkdir()
    (folder / "file").write_text("a text\n")
    (folder / "link").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "bad.json").write_text('{"a": ')
    (folder / "bad.toml").write_text('model = "\\u0000"\nlimit = [[1]]\n')
    (folder / "deep.json").write_text("[" * 100_000)


def drawn(seed: int) -> list[str]:
    """The arguments of a command, one to three of which are odd."""
    draw = random.Random(f"arguments {seed}")
    name = draw.choice([*_BASE, "run", "run", "plan"])
    given: dict[str, str | None] = dict(_BASE[name])
    options = [
        option
        for option in commands.cli.commands[name].params
        if isinstance(option, click.Option) and option.name != "refresh"
    ]  # which measures the machine anew
    for option in draw.sample(options, min(len(options), draw.choice([1, 1, 1, 2, 3]))):
        flag = draw.choice(option.opts)
        for other in option.opts:
            given.pop(other, None)
        given[flag] = None if option.is_flag else draw.choice(VALUES)
    arguments = [part for flag, value in given.items() for part in ((flag,) if value is None else (flag, value))]
    if name == "status" or draw.random() < 0.1:
        arguments.insert(draw.randrange(len(arguments) + 1), draw.choice(VALUES))
    return [name, *arguments]


def outcome(arguments: list[str]) -> Outcome:
    """Run a command in this process, in the current folder."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code, wrong = None, None
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _argv(arguments):
            code = commands.run_cli()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})"
    lines = stderr.getvalue().splitlines()
    if wrong is None and code not in _CODES:
        wrong = f"exit code {code}"
    if wrong is None and code and not _is_one_line(lines):
        wrong = f"{len(lines)} lines: {lines[-3:]}"
    if wrong is None and set(stderr.getvalue()) & {"\x1b", "\x00", "\u202e"}:
        wrong = "control characters"
    return Outcome(tuple(arguments), code, stderr.getvalue(), wrong)


def _is_one_line(lines: list[str]) -> bool:
    """Tell whether an error is said in a line of batchgen's, or as click does."""
    errors = [line for line in lines if line.startswith(("batchgen: ", "Error: "))]
    return len(errors) == 1 and lines[-1] == errors[0]


@contextlib.contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    with mock.patch.object(sys, "argv", ["batchgen", *arguments]):
        yield


def main() -> None:
    begin, count = int(sys.argv[1]), int(sys.argv[2])
    os.environ.setdefault("BATCHGEN_HARDWARE", "zen4")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["BATCHGEN_CACHE"] = f"{folder}/cache"
        prepare(Path(folder))
        for seed in range(begin, begin + count):
            found = outcome(drawn(seed))
            if found.wrong:
                print(seed, [a[:60] for a in found.arguments], found.wrong, flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
