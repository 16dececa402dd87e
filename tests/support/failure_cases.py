"""What a job that cannot be run, or not to its end, ends with: exit code, message, and what is on disk afterwards.

`python tests/support/failure_cases.py` writes docs/failures.md from what happens; a test compares the page with it.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from command_line import invoke
from processes import start_in_process

from batchgen.core.file_lock import lock_file

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
ROWS = 12
JOB = (
    "--max-tokens",
    "2",
    "--dtype",
    "float32",
    "--cpu-memory",
    "4GiB",
    "--max-num-seqs",
    "2",
    "--flush-interval",
    "0.001s",
)
HEAD = """\
# Failures

This page says how a job ends that cannot start, or cannot run to its end. `python tests/support/failure_cases.py`
writes it from what happens, and a test compares them. *N* stands for a number that depends on the machine. A job that
is disturbed continues when the same command is run again.

The last column says what is on disk afterwards: `out.parquet` is the output, `out.parquet.batchgen` the run directory
with finished rows ([formats](formats.md#run-directory)). Files that were there before stay as they were.

A job does not depend on its screen. If standard error or standard output is closed or full (`2>&-`, a log on a full
disk, `2>&1 | head`), the job runs to its end, and its exit code says what happened to the rows. When a terminal is
closed, the jobs in it get SIGHUP, which ends them as Ctrl-C does; `nohup batchgen run ... &` keeps them running. But if
the result itself cannot be written, the exit code is 1: so it is for `batchgen plan > /dev/full`, and for a job with
`--output -` whose rows are not taken (they are kept). A reader that stops early (`batchgen plan ... | head`) is no
error.

What only saves work never ends a job. If the tokens of unfinished rows cannot be saved, or are damaged, a line says so,
and these rows begin anew after a stop. If the directory of `--cache` is damaged or full, a line says so, and the job
computes what it would have found there.

Control characters in names and texts, such as the first one of an escape sequence, are spelled out (`\\x1b`) wherever
they are shown.
"""


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong.

    what: in words. options: of `batchgen run`, beside the usual ones; "-i" and "-o" replace these. prepare: what is
    done to the folder before, in it; what it enters is undone afterwards. signal: that the job gets with its fourth
    row.
    """

    group: str
    what: str
    options: tuple[str, ...] = ()
    prepare: Callable[[ExitStack], object] | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How it ended. left: the files that are there and were not before."""

    code: int
    message: str
    left: tuple[str, ...]


def _half() -> None:
    """A job that stopped at its fourth row."""
    _write([*(f"Row {i}." for i in range(3)), None, *(f"Row {i}." for i in range(4, ROWS))])
    invoke(*_arguments(("--on-error", "fail")))


def _first_rows(stack: ExitStack) -> None:
    """A complete job of the first three rows."""
    invoke(*_arguments(("--limit", "3")))


def _write(prompts: list[str | None]) -> None:
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string())}), "in.parquet")


def _failing_card(text: str) -> Callable[[ExitStack], object]:
    """The third sweep of the job raises what torch does of a GPU, with a text of several lines."""

    def prepare(stack: ExitStack) -> None:
        from batchgen.runtime.executor import Executor

        run, calls = Executor._run, itertools.count(1)

        def failing(*of):
            if next(calls) == 3:
                raise RuntimeError(f"{text}\nCUDA kernel errors might be reported at some other call.")
            return run(*of)

        stack.enter_context(mock.patch.object(Executor, "_run", failing))

    return prepare


def _failing(name: str, code: int) -> Callable[[ExitStack], object]:
    """The system refuses what `name` does."""

    def prepare(stack: ExitStack) -> None:
        stack.enter_context(mock.patch(name, side_effect=OSError(code, os.strerror(code))))

    return prepare


def _whole_then_changed(stack: ExitStack) -> None:
    invoke(*_arguments(()))
    with open("out.parquet", "ab") as file:
        file.write(b"more")


def _replaced_meanwhile(stack: ExitStack) -> None:
    """Other rows come to the input, as many, when the first row is done."""
    from batchgen.job import run

    make_result = run._row_result

    def replace_input(*of):
        _write(["Another row."] * ROWS)
        return make_result(*of)

    stack.enter_context(mock.patch("batchgen.job.run._row_result", replace_input))


def _cut_model(stack: ExitStack) -> None:
    folder = Path("model").resolve()
    Path("model").unlink()
    Path("model").mkdir()
    for path in folder.iterdir():
        data = path.read_bytes()
        Path("model", path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)


def _part_alone(stack: ExitStack) -> None:
    Path("big-00002-of-00003.gguf").write_bytes(b"GGUF")


def _held(stack: ExitStack) -> None:
    Path("out.parquet.batchgen").mkdir()
    stack.callback(os.close, lock_file(Path("out.parquet.batchgen/lock")))


def _unwritable(stack: ExitStack) -> None:
    real = os.access
    stack.enter_context(mock.patch("os.access", lambda path, mode: mode != os.W_OK and real(path, mode)))


INPUT, ROW, OUTPUT, MEMORY, DISK, CARD, END = (
    "Bad inputs", "Rows that fail", "Outputs", "Budgets too small", "Full and read-only disks", "GPUs that fail",
    "Deadlines and signals",
)  # fmt: skip
CASES = (
    Case(INPUT, "the input is not there", ("-i", "none.parquet")),
    Case(INPUT, "a Parquet file that is none", prepare=lambda stack: Path("in.parquet").write_text("a text")),
    Case(INPUT, "no such column", ("--prompt-column", "question")),
    Case(INPUT, "a template with an error", ("--prompt-template", "{{ prompt")),
    Case(INPUT, "the model is not there", ("-m", "./none")),
    Case(INPUT, "half of a weight file", prepare=_cut_model),
    Case(INPUT, "a part of a split GGUF alone", ("-m", "big-00002-of-00003.gguf"), _part_alone),
    Case(INPUT, "other rows in it while the job runs", prepare=_replaced_meanwhile),
    Case(ROW, "a null prompt", prepare=lambda stack: _write(["a", None, "b"])),
    Case(ROW, "a null prompt, with `--on-error fail`", ("--on-error", "fail"), lambda stack: _write(["a", None, "b"])),
    Case(ROW, "a null prompt, with `--max-failed 0`", ("--max-failed", "0"), lambda stack: _write(["a", None, "b"])),
    Case(ROW, "all prompts are null", prepare=lambda stack: _write([None, None])),
    Case(OUTPUT, "no such directory", ("-o", "none/out.parquet")),
    Case(OUTPUT, "a format that is not written", ("-o", "out.xlsx")),
    Case(OUTPUT, "somebody else's file", prepare=lambda stack: Path("out.parquet").write_text("a text")),
    Case(OUTPUT, "another process writes it", prepare=_held),
    Case(OUTPUT, "other settings than those of its finished rows", ("--seed", "7"), lambda stack: _half()),
    Case(OUTPUT, "fewer rows than are finished", ("--limit", "2"), lambda stack: _half()),
    Case(OUTPUT, "changed since the job wrote it", prepare=_whole_then_changed),
    Case(MEMORY, "memory for nothing", ("--cpu-memory", "10MiB")),
    Case(MEMORY, "a context that is too small", ("--max-model-len", "2")),
    Case(DISK, "full when rows are saved", prepare=_failing("batchgen.output.parts.written_atomically", errno.ENOSPC)),
    Case(DISK, "full when the output is written", prepare=_failing("batchgen.output.run_directory.join", errno.ENOSPC)),
    Case(DISK, "fails when rows are saved", prepare=_failing("batchgen.output.parts.written_atomically", errno.EIO)),
    Case(DISK, "a directory that cannot be written", prepare=_unwritable),
    Case(DISK, "full where the timeline goes", ("--trace", "/dev/full")),
    Case(CARD, "its memory is full", prepare=_failing_card("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")),
    Case(CARD, "an error of CUDA's", prepare=_failing_card("CUDA error: an illegal memory access was encountered")),
    Case(END, "`--max-time` has passed", ("--max-time", "0.001s")),
    Case(END, "Ctrl-C (SIGINT)", signal=signal.SIGINT),
    Case(END, "SIGTERM", signal=signal.SIGTERM),
    Case(END, "its terminal is closed (SIGHUP)", signal=signal.SIGHUP),
    Case(END, "SIGKILL (137 in a shell)", signal=signal.SIGKILL),
    Case(END, "SIGKILL of a job that goes on from a complete one of `--limit 3`", (), _first_rows, signal.SIGKILL),
)  # fmt: skip


def outcome(case: Case, model: Path, folder: Path) -> Outcome:
    """Run the job of a case in an empty folder, which is the current one meanwhile."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("model").symlink_to(model)
        _write([f"Row {i}." for i in range(ROWS)])
        with ExitStack() as stack:
            if case.prepare:
                case.prepare(stack)
            before = {path.name for path in Path().iterdir()}
            arguments = _arguments(case.options)
            code, said = _signalled(case.signal, arguments) if case.signal else _invoked(arguments)
        return Outcome(code, _shown(said), tuple(sorted({path.name for path in Path().iterdir()} - before - {"log"})))
    finally:
        os.chdir(here)


def page(outcomes: dict[Case, Outcome]) -> str:
    """The whole page."""
    text = HEAD
    for group in dict.fromkeys(case.group for case in outcomes):
        text += f"\n## {group}\n\n| what | exit code | message | on disk afterwards |\n|---|---|---|---|\n"
        text += "".join(line(case, found) + "\n" for case, found in outcomes.items() if case.group == group)
    return text


def line(case: Case, found: Outcome) -> str:
    """A case's line of the page."""
    message = found.message.replace("|", "\\|").replace("`", "'")
    left = ", ".join(f"`{name}`" for name in found.left) or "nothing new"
    return f"| {case.what} | {found.code} | {f'`{message}`' if message else 'none'} | {left} |"


def _arguments(options: tuple[str, ...]) -> list[str]:
    usual = {"-m": "model", "-i": "in.parquet", "-o": "out.parquet"}
    given = dict(zip(options[::2], options[1::2], strict=True))
    return [
        "run",
        *(part for pair in (usual | dict(zip(JOB[::2], JOB[1::2], strict=True)) | given).items() for part in pair),
    ]


def _invoked(arguments: list[str]) -> tuple[int, str]:
    code, _, said = invoke(*arguments, "--progress", "none")
    return code, said


def _signalled(number: int, arguments: list[str]) -> tuple[int, str]:
    process = start_in_process(_with_signal, [os.getcwd(), number, [*arguments, "--progress", "none"]], Path("log"))
    process.join()
    return process.exitcode, Path("log").read_text()


def _with_signal(folder: str, number: int, arguments: list[str]) -> None:
    """The command, which gets a signal when its fourth row is finished and the three before it are saved."""
    from batchgen import cli
    from batchgen.job import run

    os.chdir(folder)
    real, calls = run._row_result, []

    def row_result(*of):
        calls.append(None)
        if len(calls) == 4:
            os.kill(os.getpid(), number)
        return real(*of)

    run._row_result = row_result
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["batchgen", *arguments]
    cli.main()


def _shown(said: str) -> str:
    """The last line, without what depends on the machine."""
    last = (said.strip().splitlines() or [""])[-1].removeprefix("batchgen: ")
    last = re.sub(r"process \d+ on [^)]+", "process N on HOST", last)
    last = re.sub(r"\d+(\.\d+)? (KiB|MiB|GiB)", "N", last)
    return re.sub(r"\d+( finished)? (rows?)\b", r"N\1 \2", last)


def main() -> None:
    """Write the page."""
    from tiny_models import make_tiny_model

    os.environ.setdefault("BATCHGEN_HARDWARE", "zen4")
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model("llama", Path(name, "model"))
        found = {}
        for i, case in enumerate(CASES):
            folder = Path(name, f"{i}")
            folder.mkdir()
            found[case] = outcome(case, Path(name, "model"), folder)
            print(line(case, found[case]), flush=True)
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
