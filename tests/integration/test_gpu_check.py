"""The driver of `make gpu-check`, without a card: its parts are replaced by tiny commands."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_archives  # noqa: E402
import gpu_check  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_processes  # noqa: E402
import gpu_report  # noqa: E402
from gpu_parts import Part  # noqa: E402


def shell(script, limit_s=60, **options):
    return Part(("sh", "-c", script), limit_s, **options)


def python(script, limit_s=60, **options):
    return Part(("python", "-S", "-c", script), limit_s, **options)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(parts, rows=one row for each, seconds=None) -> the result, as it is in the file."""
    monkeypatch.setattr(gpu_check, "KERNELS", tmp_path / "kernels.so")
    monkeypatch.setattr(gpu_processes, "LEAST_S", 0)

    def run(parts, rows=None, seconds=None, prepare=lambda check: None, **options):
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        made = gpu_check.Check(tmp_path / "results", tmp_path / "work", seconds, **options)
        prepare(made)
        made.run(rows or [(name,) for name in parts])
        return json.loads((tmp_path / "results" / "gpu_check.json").read_text())["parts"]

    return run


def report(tmp_path):
    return (tmp_path / "results" / "gpu_check.md").read_text()


class TestParts:
    def test_every_part_is_in_a_call_and_each_call_begins_with_the_device(self):
        named = [name for call in gpu_parts.CALLS for row in call for name in row]
        assert set(named) == set(gpu_parts.PARTS)
        assert all(call[0] == (gpu_check.DEVICE,) and call[1] == ("build",) for call in gpu_parts.CALLS)

    def test_a_call_ends_before_nine_minutes_are_over(self):
        assert gpu_parts.CALL_SECONDS <= 9 * 60 - gpu_processes._GONE_S

    def test_names_of_files_differ(self):
        names = [gpu_parts.file_name(name) for name in gpu_parts.PARTS]
        assert len(set(names)) == len(names)
        traces = [trace for part in gpu_parts.PARTS.values() for trace in part.traces]
        assert len(set(traces)) == len(traces)
        for part in gpu_parts.PARTS.values():
            assert all(any(trace in word for word in part.command) for trace in part.traces)

    def test_files_that_parts_leave_for_others_are_those_of_parts(self):
        left = {f"{gpu_parts.file_name(name)}.json" for name in gpu_parts.PARTS}
        assert all(file in left for part in gpu_parts.PARTS.values() for file in part.with_files)

    def test_all_scripts_and_tests_are_there(self):
        for part in gpu_parts.PARTS.values():
            paths = [word for word in part.command if word.startswith(("benchmarks/", "tests/", "recipes/"))]
            assert paths and all((ROOT / path).exists() for path in paths), part.command

    def test_all_tests_that_need_a_card_are_in_a_part(self):
        named = {word for part in gpu_parts.PARTS.values() for word in part.command if word.endswith(".py")}
        marked = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if "mark.gpu" in path.read_text() and any(ast.unparse(d) == "pytest.mark.gpu" for d in decorators(path))
        }
        assert marked <= named
        checks = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*_checks.py")}
        # Those of a card that is not there, and of one that is played: a real one does not tell what they look at.
        without_a_card = {"tests/ops/launch_checks.py"}
        played = {"tests/runtime/cuda_checks.py", "tests/runtime/card_engine_checks.py"}
        assert checks - named == without_a_card | played

    def test_scripts_understand_their_arguments(self):
        """Also those that a rehearsal adds."""
        import gpu_attention
        import gpu_case
        import gpu_offload
        import gpu_smoke

        parsers = {
            "gpu_case": gpu_case,
            "gpu_smoke": gpu_smoke,
            "gpu_attention": gpu_attention,
            "gpu_offload": gpu_offload,
        }
        parsed = 0
        for part in gpu_parts.PARTS.values():
            for i, word in enumerate(part.command):
                if module := parsers.get(Path(word).stem):
                    added = [argument for words in part.with_files.values() for argument in words]
                    module.arguments([*part.command[i + 1 :], *added, *part.small])
                    parsed += 1
        assert parsed > 10

    def test_all_parts_run_once_without_a_call(self):
        rows = gpu_check.rows_of(gpu_check.arguments([]))
        assert sorted(name for row in rows for name in row) == sorted(gpu_parts.PARTS)

    def test_parts_are_named_on_the_command_line(self):
        rows = gpu_check.rows_of(gpu_check.arguments(["--parts", "rates,tests-engine"]))
        assert rows == [("device",), ("build",), ("rates",), ("tests-engine",)]
        assert len(gpu_check.arguments(["--parts", "llama-8b"]).parts) == 3
        with pytest.raises(SystemExit):
            gpu_check.arguments(["--parts", "nothing"])

    def test_results_go_where_the_environment_says(self, monkeypatch, tmp_path):
        monkeypatch.setenv("OUT", str(tmp_path))
        assert gpu_check.arguments([]).results == tmp_path
        monkeypatch.delenv("OUT")
        assert gpu_check.arguments([]).results == BENCHMARKS / "results" / "gpu_check"


def decorators(path):
    for node in ast.walk(ast.parse(path.read_text())):
        yield from getattr(node, "decorator_list", [])


class TestRunning:
    def test_a_part_that_fails_or_dies_stops_no_other(self, check, tmp_path):
        parts = {
            "failing": shell("echo 'RuntimeError: no memory' >&2; exit 3"),
            "dying": shell("kill -SEGV $$"),
            "missing": Part(("no-such-program",), 60),
            "good": shell("echo 'summary: 12 tokens/s'; echo noise"),
        }
        found = check(parts)
        assert {name: part["outcome"] for name, part in found.items()} == {
            "failing": "failed (3)",
            "dying": "failed: died of SIGSEGV",
            "missing": "failed: [Errno 2] No such file or directory: 'no-such-program'",
            "good": "ok",
        }
        lines = report(tmp_path).splitlines()
        assert lines[0].startswith("GPU check on no GPU: 1 parts ok, 3 not ok, 0 not run")
        assert lines[1] == "NOT OK failing: failed (3): RuntimeError: no memory  "
        assert "| good | ok | 0 | 12 tokens/s |" in lines
        assert "== dying: failed: died of SIGSEGV" in (tmp_path / "results" / "gpu_check.log").read_text()

    def test_what_is_stopped_ends_with_all_its_processes_and_tells_what_it_said(self, check, tmp_path):
        """Also with what its processes have started, which holds the pipe open."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with ThreadPoolExecutor(1) as readers:
            ended = readers.submit(pipe.read_bytes)
            found = check({"slow": shell(f"echo begun; (exec 3>{pipe}; sleep 600) & sleep 600", 1)})
            assert ended.result(timeout=600) == b""
        assert found["slow"]["outcome"] == "stopped after 1 s" and "begun" in found["slow"]["tail"]

    def test_parts_of_a_row_run_side_by_side_each_with_its_own_limit(self, check, tmp_path):
        """Each waits for a file that the other one makes; the third is stopped beside them."""
        waits = "touch {0}; while ! test -e {1}; do sleep 0.05; done"
        a, b = tmp_path / "a", tmp_path / "b"
        parts = {"a": shell(waits.format(a, b)), "b": shell(waits.format(b, a)), "slow": shell("sleep 600", 1)}
        found = check(parts, [("a", "b", "slow")])
        assert [part["outcome"] for part in found.values() if part["outcome"] == "ok"] == ["ok", "ok"]
        assert found["slow"]["outcome"] == "stopped after 1 s"

    def test_what_has_no_time_left_is_not_begun(self, check, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu_processes, "LEAST_S", 5.0)
        found = check({"late": shell(f"touch {tmp_path / 'begun'}")}, seconds=1)
        assert found["late"]["outcome"] == "not run: the time was over"
        assert not (tmp_path / "begun").exists()
        assert "not run: the time was over: late" in report(tmp_path)

    def test_the_time_of_a_call_bounds_that_of_its_parts(self, check):
        found = check({"long": shell("sleep 600", 500)}, seconds=1.4)
        assert found["long"]["outcome"] == "stopped after 1 s"

    def test_without_a_card_nothing_else_is_run(self, check, tmp_path):
        found = check({"device": shell("exit 1"), "other": shell(f"touch {tmp_path / 'begun'}")})
        assert found["other"]["outcome"] == "not run: there is no CUDA device to be used here"
        assert not (tmp_path / "begun").exists()

    def test_a_part_that_does_not_run_again_keeps_what_it_found(self, check):
        found = check({"device": shell("true"), "other": shell("echo 'summary: 9 tokens/s'")})
        assert found["other"]["outcome"] == "ok"
        found = check({"device": shell("exit 1"), "other": shell("true")})
        assert (found["other"]["outcome"], found["other"]["said"]) == ("ok", "9 tokens/s")

    def test_places_arguments_and_environment(self, check, tmp_path):
        """Options are added where an earlier part has left a file, or where a package is there."""
        write = "import sys, json, os; json.dump([sys.argv[2:], os.environ.get('CHECKED')], open(sys.argv[1], 'w'))"
        later = Part(
            ("python", "-c", write, "{output}", "python", "{work}/x"), 60, environment={"CHECKED": "yes"},
            with_files={"first.json": ("--first",), "absent.json": ("--absent",)},
            with_packages={"pytest": ("--pytest",), "no_such_package": ("--no-such",)},
        )  # fmt: skip
        found = check({"first": python("open(__import__('sys').argv[1], 'w').write('{}')"), "later": later})
        assert found["first"]["outcome"] == "failed (1)"  # it was given no place to write to
        words = [sys.executable, f"{tmp_path / 'work'}/x"]
        assert found["later"]["result"] == [[*words, "--pytest"], "yes"]
        first = Part(("python", "-S", "-c", "open(__import__('sys').argv[1], 'w').write('{}')", "{output}"), 60)
        found = check({"first": first, "later": later})
        assert found["later"]["result"] == [[*words, "--pytest", "--first"], "yes"]

    def test_parts_are_small_in_a_rehearsal(self, check):
        part = Part(("sh", "-c", "echo summary: $0 $1", "large"), 60, small=("small",))
        assert check({"it": part})["it"]["said"] == "large"
        assert check({"it": part}, small=True)["it"]["said"] == "large small"

    def test_a_file_that_was_cut_off_is_no_result(self, check):
        found = check({"cut": Part(("sh", "-c", "echo '{\"a\": 1' > $0; kill -9 $$", "{output}"), 60)})
        assert found["cut"]["outcome"] == "failed: died of SIGKILL" and "result" not in found["cut"]

    def test_an_older_result_is_not_taken_for_a_new_one(self, check):
        write = Part(("sh", "-c", "echo 1 > $0", "{output}"), 60)
        assert check({"it": write})["it"]["result"] == 1
        assert "result" not in check({"it": shell("exit 1")})["it"]

    def test_parts_wait_for_packages_and_programs(self, check, tmp_path):
        parts = {"a": shell("true", needs=("no_such_package",)), "b": shell("true", programs=("no-such-program",))}
        found = check(parts)
        assert found["a"]["outcome"] == "not run: no_such_package not installed (--wheels)"
        assert found["b"]["outcome"] == "not run: no-such-program not installed (--wheels)"
        (tmp_path / "site" / "no_such_package").mkdir(parents=True)
        found = check({"a": parts["a"]}, prepare=lambda check: setattr(check, "site", tmp_path / "site"))
        assert found["a"]["outcome"] == "ok"

    def test_results_of_a_call_that_is_told_to_stop_are_kept(self, tmp_path):
        """A shell that has no more time for it sends SIGTERM."""
        program = (
            "import sys, gpu_check\n"
            "from gpu_parts import Part\n"
            f"gpu_check.KERNELS = gpu_check.Path({str(tmp_path / 'kernels.so')!r})\n"
            "long = Part(('sh', '-c', 'echo begun; sleep 600'), 500)\n"
            "gpu_check.PARTS = {'device': Part(('true',), 60), 'long': long}\n"
            "gpu_check.rows_of = lambda args: [('device',), ('long',)]\n"
            "gpu_check.main()\n"
        )
        command = [sys.executable, "-c", program, "--results", tmp_path / "results", "--work", tmp_path / "work"]
        process = subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
        log = tmp_path / "work" / "long.log"
        while not (log.exists() and "begun" in log.read_text()):
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=600)
        parts = json.loads((tmp_path / "results" / "gpu_check.json").read_text())["parts"]
        assert parts["device"]["outcome"] == "ok" and parts["long"]["outcome"] == "stopped with the check"
        assert "GPU check on no GPU: 1 parts ok, 1 not ok" in told and process.returncode == 1


class TestTests:
    """Parts of tests, by their plugin."""

    TESTS = (
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no such thing')\n"
        "def test_left_out(): pass\n"
        "def test_last(): os._exit(9)\n"
    )

    def part(self, tmp_path, text, *arguments):
        (tmp_path / "test_it.py").write_text(text)
        options = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
        command = ("python", "-m", "pytest", "-p", "gpu_tests", *options, *arguments, str(tmp_path / "test_it.py"))
        # Other plugins take seconds to import in each process.
        return Part(command, 120, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})

    def test_tests_count_as_far_as_they_came(self, check, tmp_path):
        found = check({"tests-some": self.part(tmp_path, self.TESTS)})["tests-some"]
        assert found["outcome"] == "failed (9)"
        assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
        assert "assert 1 == 2" in found["failures"][0]["why"] and "no such thing" in str(found["skipped"])
        assert "1 passed, 1 failed, 1 skipped" in report(tmp_path) and "E   assert 1 == 2" in report(tmp_path)

    def test_where_all_tests_are_left_out_nothing_was_checked(self, check, tmp_path):
        skipped = "import pytest\n@pytest.mark.skip(reason='no CUDA device')\ndef test_it(): pass\n"
        assert check({"tests-some": self.part(tmp_path, skipped)})["tests-some"]["outcome"] == "failed: no test ran"

    def test_a_process_that_has_lost_its_card_is_replaced(self, check, tmp_path):
        """One process after the other; the test that spoils the card comes first, and no other one fails."""
        pytest.importorskip("xdist")
        spoiling = (
            "import sys, types, pytest\n"
            "card = types.SimpleNamespace(lost=False, is_initialized=lambda: True)\n"
            "def synchronize():\n"
            "    if card.lost: raise RuntimeError('illegal memory access')\n"
            "card.synchronize = synchronize\n"
            "sys.modules['torch'] = types.SimpleNamespace(cuda=card)\n"
            "def test_spoils():\n    card.lost = True\n    raise RuntimeError('illegal memory access')\n"
            + "".join(f"def test_{i}(): card.synchronize()\n" for i in range(5))
        )
        found = check({"tests-some": self.part(tmp_path, spoiling, "-p", "xdist.plugin", "-n", "1")})["tests-some"]
        assert found["tests"]["passed"] == 5
        assert {test["test"].rpartition("::")[2] for test in found["failures"]} == {"test_spoils"}


class TestArchives:
    def test_files_go_into_few_archives_that_are_whole_and_small(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu_archives, "ARCHIVE_BYTES", 3000)
        files = {}
        for name in "abcde":
            files[name] = tmp_path / name
            files[name].write_bytes(os.urandom(1200))
        files["large"] = tmp_path / "large"
        files["large"].write_bytes(os.urandom(4000))
        left_out = gpu_archives.pack(files | {"gone": tmp_path / "gone"}, tmp_path, gpu_archives.TRACES)
        assert left_out == ["e", "large"]
        packed = {}
        for path in sorted(tmp_path.glob("traces-*.zip")):
            assert path.stat().st_size <= 3000
            with zipfile.ZipFile(path) as archive:
                packed |= {name: archive.read(name) for name in archive.namelist()}
        assert packed == {name: files[name].read_bytes() for name in "abcd"}

    def test_what_was_compiled_is_carried_on_to_another_folder(self, tmp_path):
        """Triton finds its files by whole paths, which are others there."""
        there, here = tmp_path / "there", tmp_path / "here"
        kernel = there / "triton" / "KEY"
        kernel.mkdir(parents=True)
        group = {"child_paths": {"k.cubin": str(kernel / "k.cubin"), "k.json": str(kernel / "k.json")}}
        for name, text in (
            ("k.cubin", "code"),
            ("k.json", "{}"),
            ("k.ttir", "text"),
            ("__grp__k.json", json.dumps(group)),
        ):
            (kernel / name).write_text(text)
        module = there / "_kernels.so"
        module.write_text("module")
        files = gpu_archives.carried_files(there / "triton", module)
        assert set(files) == {
            "module/_kernels.so",
            *(f"triton/KEY/{n}" for n in ("k.cubin", "k.json", "__grp__k.json")),
        }
        assert gpu_archives.pack(files, tmp_path, gpu_archives.CARRIED) == []
        assert gpu_archives.unpack_carried(tmp_path, here / "triton", here / "_kernels.so") == 4
        assert (here / "_kernels.so").read_text() == "module"
        paths = json.loads((here / "triton" / "KEY" / "__grp__k.json").read_text())["child_paths"]
        assert paths == {name: str(here / "triton" / "KEY" / name) for name in ("k.cubin", "k.json")}
        (here / "_kernels.so").write_text("newer")
        assert gpu_archives.unpack_carried(tmp_path, here / "triton", here / "_kernels.so") == 0
        assert (here / "_kernels.so").read_text() == "newer"

    def test_a_check_packs_what_its_parts_leave_and_the_next_one_carries_on(self, check, tmp_path):
        cache = tmp_path / "work" / "triton" / "KEY"
        compile_and_trace = shell(
            f"mkdir -p {cache}; echo code > {cache}/k.cubin; echo trace > {tmp_path}/work/t.json", traces=("t.json",)
        )
        check({"it": compile_and_trace})
        names = {path.name for path in (tmp_path / "results").iterdir()}
        assert names == {"gpu_check.json", "gpu_check.md", "gpu_check.log", "carried-1.zip", "traces-1.zip"}
        (cache / "k.cubin").unlink()
        check({"it": shell("true")}, prepare=lambda check: check.carry_on_from(tmp_path / "results"))
        assert (cache / "k.cubin").read_text() == "code\n"

    def test_all_files_are_few_enough_to_come_back(self):
        assert 3 + sum(gpu_archives.MOST_ARCHIVES.values()) <= 8 and gpu_archives.ARCHIVE_BYTES < 16 << 20


class TestWheels:
    def test_wheels_are_found_by_parts(self, check, tmp_path):
        folder = tmp_path / "wheels"
        folder.mkdir()
        files = {
            "carried.py": "here = 'yes'\n",
            "carried-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1\n",
            "carried-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(folder / "carried-1-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
            record = "".join(f"{path},,\n" for path in [*files, "carried-1.dist-info/RECORD"])
            wheel.writestr("carried-1.dist-info/RECORD", record)
        part = Part(("python", "-c", "import carried; print('summary:', carried.here)"), 60)
        assert check({"it": part}, prepare=lambda check: check.use_wheels(folder))["it"]["said"] == "yes"

    def test_a_folder_without_wheels_is_refused(self, check, tmp_path):
        with pytest.raises(SystemExit, match="make gpu-wheels"):
            check({}, prepare=lambda check: check.use_wheels(tmp_path))


def test_results_of_several_calls_are_put_together(tmp_path, monkeypatch):
    def part(outcome):
        return {"outcome": outcome, "seconds": 1.0, "said": ""}

    first = {"parts": {"device": part("ok"), "profile": part("ok"), "build": part("ok")}}
    late = part("not run: the time was over")
    second = {"parts": {"profile": late, "tests-engine": part("ok"), "build": part("failed (1)")}}
    for name, result in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(result))
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--results", str(tmp_path / "whole"), "--merge", *paths])
    gpu_check.main()
    whole = json.loads((tmp_path / "whole" / "gpu_check.json").read_text())["parts"]
    assert list(whole) == ["device", "build", "profile", "tests-engine"]
    assert [p["outcome"] for p in whole.values()] == ["ok", "failed (1)", "ok", "ok"]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("a\nsummary: 3 tokens\nwarning: at exit\n", "3 tokens"),
        ("Traceback\n  x\nRuntimeError: CUDA error\n\n", "RuntimeError: CUDA error"),
        ("", ""),
    ],
)
def test_the_line_that_sums_a_log_up(log, line):
    assert gpu_report.said(log) == line
