"""Ctrl-C at any moment: the process is gone soon, with one true line and exit code 130, whatever it was at.

Every phase is made to last for ever in a C call that no signal wakes, so how fast the machine is does not matter:
either the process ends, or it never would.
"""

import ctypes
import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import start_in_process
from thorough import some_of

ROOT = Path(__file__).parents[2]
LONG_S = 600  # until then everything may take its time; what hangs would take for ever
ROWS = 40


def hang(sign: Path) -> None:
    """Tells of itself, then locks a mutex twice: neither a signal nor Python ends that."""
    sign.touch()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # zeros: PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def wait_for(sign: Path, alive) -> None:
    while not sign.exists():
        assert alive(), f"it never came to {sign.name}"
        time.sleep(0.01)


def saved(output: Path) -> int:
    parts = output.with_name(output.name + ".batchgen") / "parts"
    return sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*.parquet"))


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    """(output) -> arguments; rows are saved only at the end, or when the job is interrupted."""
    folder = tmp_path_factory.mktemp("job")
    pq.write_table(pa.table({"prompt": [f"Row {i}." for i in range(ROWS)]}), folder / "in.parquet")

    def arguments(output):
        return [
            "run", "-m", tiny_models("llama")[0], "-i", folder / "in.parquet", "-o", output, "--max-tokens", 4,
            "--dtype", "float32",
            "--max-num-seqs", 4, "--progress", "none", "--cpu-memory", "4GiB", "--flush-interval", "1h",
            "--offload-dir", folder,
        ]  # fmt: skip

    return arguments


def patched(name: str, sign: str, after: int, arguments: list[str]) -> None:
    """The command, in this process.

    The function `name` ("module:attribute") hangs at its call number `after`, from 0.
    """
    module, _, attribute = name.partition(":")
    owner = importlib.import_module(module)
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), []

    @functools.wraps(real)
    def replaced(*args, **kwargs):
        calls.append(None)
        if len(calls) > after:
            hang(Path(sign))
        return real(*args, **kwargs)

    setattr(owner, last, replaced)
    from batchgen import cli

    sys.argv = ["batchgen", *arguments]
    cli.main()


PHASES = {
    "model": ("batchgen.job.run:resolve_model", 0, 0),
    "input": ("batchgen.job.source:open_dataset", 0, 0),
    "identity of the input": ("batchgen.dataset.dataset:Dataset.identity", 0, 0),
    "tokenizer": ("batchgen.models.tokenizers.loading:load_tokenizer", 0, 0),
    "run directory": ("batchgen.output.run_directory:_lock", 0, 0),
    "workload": ("batchgen.job.run:measure_workload", 0, 0),
    "profile": ("batchgen.job.machine_profile:given_for_run", 0, 0),
    "solver": ("batchgen.planner.solver:MIP.solve", 0, 0),
    "weights": ("batchgen.job.loading:load_on_ranks", 0, 0),
    "first sweep": ("batchgen.engine.engine:Engine._run", 0, 0),
    "sweeps": ("batchgen.engine.engine:Engine._run", 14, None),
    "a row's result": ("batchgen.job.run:_row_result", 21, 21),
    "join": ("batchgen.output.run_directory:join", 0, ROWS),
    "rename of the output": ("batchgen.output.run_directory:replace_durably", 0, ROWS),
    "report": ("batchgen.job.run:make_report", 0, ROWS),
}


@pytest.mark.parametrize("phase", some_of(PHASES, 8, "interrupts"))
def test_in_every_phase(job, tmp_path, phase):
    """rows: how many are finished then; None: some, but not all."""
    name, after, rows = PHASES[phase]
    how = signal.SIGTERM if phase == "sweeps" else signal.SIGINT
    output, sign, log = tmp_path / "out.parquet", tmp_path / "sign", tmp_path / "log"
    process = start_in_process(patched, [name, str(sign), after, [str(a) for a in job(output)]], log)
    try:
        wait_for(sign, process.is_alive)
        os.kill(process.pid, how)
        process.join(LONG_S)
        assert process.exitcode == 130, f"it hangs: {process.exitcode}"
    finally:
        process.kill()
    line = log.read_text().strip()
    assert line.startswith("batchgen: interrupted; ") and "\n" not in line, line
    if phase == "report":
        assert pq.read_metadata(output).num_rows == ROWS
    elif rows is None:
        rows = saved(output)
        assert 0 < rows < ROWS
    else:
        assert rows == saved(output) and not output.exists()
    if rows:
        assert f"{rows} rows of out.parquet finished and saved, the same command goes on" in line
    else:
        none = "no rows of out.parquet are finished yet"
        assert none in line or line.endswith("no rows are finished yet"), line


def test_what_earlier_runs_finished_is_not_denied(job, tmp_path):
    output, sign, log = tmp_path / "out.parquet", tmp_path / "sign", tmp_path / "log"
    said = []
    for name, after in (
        ("batchgen.job.run:_row_result", 9),
        ("batchgen.job.run:open_rows", 0),
        ("batchgen.job.loading:load_on_ranks", 0),
    ):
        process = start_in_process(patched, [name, str(sign), after, [str(a) for a in job(output)]], log)
        wait_for(sign, process.is_alive)
        sign.unlink()
        os.kill(process.pid, signal.SIGINT)
        process.join(LONG_S)
        assert process.exitcode == 130
        said.append(log.read_text())
    assert "9 rows of out.parquet finished" in said[0] and "9 rows of out.parquet finished" in said[2]
    assert "earlier runs are kept" in said[1], said[1]


def test_a_second_signal_does_not_wait_for_the_disk(job, tmp_path):
    """Rows that cannot be saved hold the process; the second Ctrl-C ends it, and what was saved before is there."""
    output, sign, log = tmp_path / "out.parquet", tmp_path / "sign", tmp_path / "log"
    arguments = [str(a) for a in job(output)]
    arguments[arguments.index("1h")] = "0.001s"
    process = start_in_process(patched, ["batchgen.output.part_writer:write_part", str(sign), 2, arguments], log)
    try:
        wait_for(sign, process.is_alive)
        os.kill(process.pid, signal.SIGINT)
        process.join(2)
        assert process.is_alive(), "rows were being saved"
        os.kill(process.pid, signal.SIGINT)
        process.join(LONG_S)
        assert process.exitcode == 130
    finally:
        process.kill()
    # Where the first one has come to the command line before the second ends all, there is an empty line.
    assert log.read_text().lstrip("\n") == "batchgen: interrupted; ended at once; what was saved before is kept\n"
    assert saved(output) > 0


@pytest.mark.parametrize("module", ["click", "torch", "tokenizers"])
def test_while_libraries_are_imported(job, tmp_path, module):
    """tokenizers is imported by a thread, for which the main one waits."""
    stubs, sign = tmp_path / "stubs", tmp_path / "sign"
    stubs.mkdir()
    blocking = (
        "import ctypes, pathlib\n"
        f"pathlib.Path({str(sign)!r}).touch()\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)\n"
        "libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)\n"
    )
    (stubs / f"{module}.py").write_text(blocking)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(stubs), str(ROOT)])}
    command = [sys.executable, "-m", "batchgen", *map(str, job(tmp_path / "out.parquet"))]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(sign, lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in said, said
    nothing = "nothing was done yet" if module == "click" else "no rows are finished yet"
    assert said.strip() == f"batchgen: interrupted; {nothing}"


def test_deaf_in_the_background_of_a_shell(tmp_path):
    """A shell without job control ignores SIGINT for what it starts with &: so does what is started."""
    code = (
        "import os, signal, time\nfrom batchgen.core.interrupts import guarded\n"
        "with guarded():\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(1.5)\nprint('done')"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_forked_process_does_not_speak_for_its_parent(tmp_path):
    """multiprocessing ends its workers by SIGTERM: that is no interruption of the job."""
    code = (
        "import os, signal, time\nfrom batchgen.core.interrupts import guarded\n"
        "with guarded():\n"
        "    child = os.fork()\n"
        "    if not child:\n        time.sleep(5); os._exit(0)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
        "    time.sleep(1.5)\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"done\n"), done.stderr


@pytest.mark.parametrize("stuck", [False, True])
def test_a_save_that_fails_does_not_keep_the_process(stuck):
    script = f"""
import signal, threading
from batchgen.core.interrupts import guarded, keep
def fail(): raise OSError("the disk is gone")
with guarded():
    keep(fail)
    if {stuck}:
        signal.signal(signal.SIGINT, lambda *_: None)
    print(flush=True)
    threading.Event().wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said == "batchgen: interrupted; not everything could be saved: the disk is gone\n"
