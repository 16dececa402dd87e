"""Whatever is given to a command: it runs, or one line says why not."""

import fuzz_commands
import pytest
from thorough import SEED, quick_or


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments")
    fuzz_commands.prepare(path)
    return path


def test_odd_arguments_are_told_in_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BATCHGEN_CACHE", str(folder / "cache"))
    begin = SEED * 1000
    found = [fuzz_commands.outcome(fuzz_commands.drawn(seed)) for seed in range(begin, begin + quick_or(24, 400))]
    assert [(outcome.arguments, outcome.wrong) for outcome in found if outcome.wrong] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--config", "/dev/zero"],
        ["run", "--config", "deep.json"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--json-schema", "/dev/zero"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--prompt-template", "@/dev/zero"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--plan", "/dev/zero"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--plan", "deep.json"],
        ["plan", "-m", "M", "-i", "in.jsonl", "--hardware", "/dev/zero"],
        ["plan", "-m", "M", "-i", "in.jsonl", "--hardware", "./deep.json"],
    ],
    ids=" ".join,
)
def test_a_file_without_an_end_or_of_endless_depth_is_refused(folder, monkeypatch, arguments):
    monkeypatch.chdir(folder)
    found = fuzz_commands.outcome([*arguments, "--progress", "none"])
    assert found.code == 2 and found.wrong is None, (found.shown, found.wrong)


JOB = ["-m", "M", "-i", "in.jsonl", "--max-tokens", "1", "--progress", "none"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", *JOB, "-o", "out.jsonl", "--regex", "\udcff"], "--regex is not UTF-8"),
        (["run", *JOB, "-o", "out.jsonl", "--system", "a\udc80"], "--system is not UTF-8"),
        (["run", *JOB, "-o", "a\x00b"], "--output has a NUL character"),
        (["run", *JOB, "-o", "out.jsonl", "--hardware", ""], "--hardware is empty"),
        (["run", *JOB, "-o", "out.jsonl", "--limit", "9" * 30], "--limit must be at most 9,223,372,036,854,775,807"),
        (["run", *JOB, "-o", "out.jsonl", "--tensor-parallel", "9" * 30], "--tensor-parallel must be at most 4,096"),
        (["run", *JOB, "-o", "out.jsonl", "--pipeline", "5000"], "--pipeline must be at most 4,096"),
        (["plan", *JOB, "--num-gpu-batches", "2147483647"], "--num-gpu-batches must be at most 1,024"),
        (
            ["plan", *JOB, "--max-num-batched-tokens", "9" * 30],
            "--max-num-batched-tokens must be at most 2,147,483,647",
        ),
        (["run", "--config", "nul.toml"], "--output has a NUL character"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_file_no_prompt_and_no_count_can_be_is_refused(folder, monkeypatch, arguments, says):
    monkeypatch.chdir(folder)
    (folder / "nul.toml").write_text('model = "M"\ninput = "in.jsonl"\noutput = "a\\u0000b"\n')
    found = fuzz_commands.outcome(arguments)
    assert found.code == 2 and found.wrong is None and says in found.shown, (found.shown, found.wrong)


def test_a_file_that_is_written_at_the_end_is_checked_before_anything_is_measured(folder, monkeypatch):
    def measure(*of, **options):
        raise AssertionError("it was measured")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("batchgen.job.plan.measured_hardware", measure)
    for command in (
        ["profile", "-o", "none/profile.json"],
        ["plan", "-m", "M", "-i", "in.jsonl", "-o", "none/plan.json"],
        ["plan", "-m", "M", "-i", "in.jsonl", "--html", "folder"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--report-html", "none/page.html"],
    ):
        found = fuzz_commands.outcome(command)
        assert found.code == 2 and "cannot be written" in found.shown, found
