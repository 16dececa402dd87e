"""Measuring in a process of its own: within its memory, gone with it, and as busy as the machine is."""

import json
import mmap
import os
import sys
import textwrap

import pytest

from batchgen.core import machine
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.machine import CpuTime
from batchgen.core.python_command import python_command
from batchgen.job.progress import log_lines
from batchgen.profiler import in_subprocess, overheads
from batchgen.profiler.cache import Wanted
from batchgen.profiler.calibration import _SWEEPS, _kv_tokens, affordable_sweeps
from batchgen.profiler.contention import contention_reason
from batchgen.profiler.in_subprocess import recall_or_measure
from batchgen.profiler.shipped import shipped_profile
from batchgen.profiler.timing import Device, Effort
from batchgen.profiler.transfer import dram_read_rate, first_touch_rate

GIB = 1 << 30


def answer(tmp_path, code, task=None):
    """What the parent makes of a process that runs `code`, with `say(kind, value)`."""
    script = tmp_path / "child.py"
    said = "import json, sys, struct, os\ndef say(kind, value): print(json.dumps([kind, value]), flush=True)\n"
    script.write_text(said + textwrap.dedent(code))
    return in_subprocess._answer([sys.executable, str(script)], task)


class TestProcess:
    def test_log_records_come_as_they_are_made_and_the_profile_last(self, tmp_path, logged):
        profile = shipped_profile("zen4")
        code = f"""
            from batchgen.core.messages import decode
            from batchgen.core.frames import read_frame
            task = decode(bytes(read_frame(sys.stdin.buffer)), dict())
            say("log", [20, task])
            say("log", [20, str(os.getpid())])
            say("profile", {profile.to_json()!r})
        """
        found = answer(tmp_path, code, task="measure this")
        assert isinstance(found, HardwareProfile) and found == HardwareProfile.from_json(
            json.loads(json.dumps(profile.to_json()))
        )
        assert logged[0] == "measure this" and int(logged[1]) != os.getpid()

    def test_what_is_refused_there_is_refused_here(self, tmp_path):
        with pytest.raises(InputError, match="no such disk"):
            answer(tmp_path, 'say("error", "no such disk")')

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("raise SystemExit(3)", "exit code 3 and no result: what it says above"),
            ("", "exit code 0 and no result"),
            (
                "os.close(1); import time; time.sleep(0.3); os._exit(7)",
                "exit code 7 .*--hardware",
            ),  # it takes a while to end
            ('say("log", [20, "x"]); os.kill(os.getpid(), 9)', "signal 9 .*more memory"),
        ],
    )
    def test_its_own_exit_code_is_told_and_memory_only_where_it_was_killed(self, tmp_path, code, said):
        with pytest.raises(BatchgenError, match=said):
            answer(tmp_path, code)

    def test_memory_too_small_for_measuring_is_told_with_what_it_takes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(in_subprocess, "resident_bytes", lambda: GIB)
        with pytest.raises(
            InputError, match=r"takes 3\.0 GiB of memory, more than --cpu-memory .*--hardware machine\.json"
        ):
            answer(tmp_path, f'say("needs", {2 * GIB})')

    def test_nothing_is_measured_in_memory_too_small_for_it(self, tmp_path, logged):
        """The real process says so, before anything is measured."""
        task = (Wanted("cpu", ("float32",)), tmp_path, tmp_path, True, 100 << 20)
        with pytest.raises(InputError, match="--cpu-memory"):
            in_subprocess._answer(python_command(in_subprocess.__name__), task)
        assert logged == [] and not list(tmp_path.iterdir())

    def test_an_interrupt_ends_it(self, tmp_path):
        seen = []

        def interrupted(line):
            seen.append(int(line))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), log_lines(interrupted):
            answer(tmp_path, 'say("log", [20, str(os.getpid())]); sys.stdin.buffer.read()')
        with pytest.raises(ProcessLookupError):
            os.kill(seen[0], 0)

    def test_it_ends_with_its_parent(self, monkeypatch):
        ended = []
        read, write = os.pipe()
        monkeypatch.setattr(in_subprocess.os, "read", lambda number, count, whole=os.read: whole(read, count))
        monkeypatch.setattr(in_subprocess.os, "_exit", ended.append)
        os.close(write)
        in_subprocess._end_with_parent()
        assert ended == [1]
        os.close(read)

    def test_its_memory_is_what_the_budget_leaves_beside_this_process(self, tmp_path, monkeypatch):
        tasks = []
        monkeypatch.setattr(in_subprocess, "_answer", lambda command, task: tasks.append(task))
        monkeypatch.setattr(in_subprocess, "resident_bytes", lambda: GIB)
        monkeypatch.setattr(in_subprocess, "available_memory_bytes", lambda: 20 * GIB)
        for budget in (None, 3 * GIB, GIB // 2):
            recall_or_measure(
                Wanted("cpu", ("float32",)), cache_dir=tmp_path, offload_dir=tmp_path, refresh=False,
                memory_bytes=budget
            )  # fmt: skip
        assert [task[-1] for task in tasks] == [20 * GIB, 2 * GIB, 0]


class TestOverheads:
    """Measurements of the engine itself, where a machine is measured for the first time."""

    def test_a_sweep_takes_time_where_there_is_no_tokenizer(self):
        assert overheads._sweep_s("cpu", 1, 1) > 0

    @pytest.mark.parametrize("loading", [overheads._load_bytes_per_s, overheads._gguf_load_bytes_per_s])
    def test_loading_has_a_rate(self, loading, monkeypatch):
        monkeypatch.setattr(overheads, "_WIDTH", 64)
        monkeypatch.setattr(overheads, "_ROWS", 128)
        assert loading() > 0


class TestMemory:
    @pytest.fixture
    def within(self, monkeypatch):
        """within(bytes): what this process may have more than it has now."""
        monkeypatch.setattr(machine, "_most_resident_bytes", None)
        monkeypatch.setattr(machine, "resident_bytes", lambda: GIB)
        return lambda more: machine.keep_within(GIB + more)

    def test_operands_are_a_part_of_what_is_allowed(self, within):
        for more in (1 << 20, 64 << 20, 512 << 20):
            within(more)
            assert machine.available_memory_bytes() <= more
            assert Device("cpu").pool_bytes(Effort()) <= more // 8

    def test_no_rate_is_zero_however_little_is_left(self, within):
        within(0)
        assert dram_read_rate(Effort(point_s=0.0, sample_s=0.0)) > 0

    def test_fresh_memory_is_a_part_of_it_too(self, within, monkeypatch):
        sizes = []
        whole = mmap.mmap
        monkeypatch.setattr(
            "batchgen.profiler.transfer.mmap.mmap", lambda *a, **k: sizes.append(a[1]) or whole(*a, **k)
        )
        within(8 << 20)
        assert first_touch_rate(Effort()) > 0
        assert sizes == [2 << 20]

    @pytest.mark.parametrize("memory_bytes", [8 * GIB, GIB, 100 << 20, 1 << 20])
    def test_whole_sweeps_have_the_layers_and_kv_that_fit(self, memory_bytes):
        layer_bytes, token_bytes = 14 << 20, 1536
        layers, sweeps = affordable_sweeps(list(_SWEEPS), 30, layer_bytes, token_bytes, memory_bytes)
        most = layers * (layer_bytes + max(map(_kv_tokens, sweeps)) * token_bytes)
        assert 1 <= layers <= 30 and sweeps
        assert most <= memory_bytes or (layers == 1 and len(sweeps) == 1)
        assert (layers, len(sweeps)) == (30, len(_SWEEPS)) if memory_bytes == 8 * GIB else len(sweeps) <= len(_SWEEPS)


class TestBusy:
    def after(self, **spent):
        """On two cores, ten seconds later."""
        before = CpuTime(100.0, 30.0, 1.0)
        return before, CpuTime(120.0, 30.0 + spent.get("others", 0.0), 1.0 + spent.get("stolen", 0.0))

    def test_a_machine_that_is_left_alone(self):
        assert contention_reason(*self.after(others=1.0, stolen=0.4), spread=1.1) is None
        assert contention_reason(None, None, 1.1) is None
        assert contention_reason(CpuTime(1.0, 0.0, 0.0), CpuTime(1.0, 0.0, 0.0), 1.1) is None

    def test_others_their_host_and_times_that_differ_each_tell(self):
        assert "other processes took 50%" in contention_reason(*self.after(others=10.0), spread=1.1)
        assert "the host took 10%" in contention_reason(*self.after(stolen=2.0), spread=1.1)
        assert "2.5 times" in contention_reason(*self.after(), spread=2.5)
        assert "2.5 times" in contention_reason(None, None, 2.5)

    @pytest.mark.skipif(CpuTime.now() is None, reason="the kernel does not count")
    def test_own_work_is_not_that_of_others(self):
        before = CpuTime.now()
        assert 0 <= before.stolen_s <= before.total_s
        assert before.others_s <= before.total_s
