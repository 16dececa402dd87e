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


def test_a_file_that_is_written_at_the_end_is_checked_before_anything_is_measured(folder, monkeypatch):
    def measure(*of, **options):
        raise AssertionError("it was measured")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("batchgen.job.plan.find_hardware", measure)
    for command in (
        ["profile", "-o", "none/profile.json"],
        ["plan", "-m", "M", "-i", "in.jsonl", "-o", "none/plan.json"],
        ["plan", "-m", "M", "-i", "in.jsonl", "--html", "folder"],
        ["run", "-m", "M", "-i", "in.jsonl", "-o", "out.jsonl", "--report-html", "none/page.html"],
    ):
        found = fuzz_commands.outcome(command)
        assert found.code == 2 and "cannot be written" in found.shown, found
