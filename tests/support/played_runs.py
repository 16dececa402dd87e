"""Processes on a played card, as tests run them."""

import subprocess

import played_card
import pytest

needs_a_played_card = pytest.mark.skipif(played_card.missing() is not None, reason=str(played_card.missing()))


# By day with the newest torch.
VENVS = [
    pytest.param(venv, id=venv.name, marks=[pytest.mark.thorough] * (number > 0))
    for number, venv in enumerate(played_card.venvs())
]


@pytest.fixture(params=VENVS)
def play(tmp_path, request):
    """A function that runs Python on a played card: play(arguments..., options) -> what it prints, counts, faults."""

    def play(*arguments, **options):
        report = tmp_path / "report"
        report.write_text("")
        environment = played_card.environment(request.param, report=report, **options)
        command = [played_card.python(request.param), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=played_card.ROOT)
        lines = report.read_text().splitlines()
        faults = [line for line in lines if line.startswith("FAULT")]
        counts = {what: int(n) for n, _, what in (line.partition(" ") for line in lines if line not in faults)}
        return done, counts, faults

    return play


def check(played):
    done, _, faults = played
    assert faults == [], done.stderr[-2000:]
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def pytest_on(*arguments):
    return "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *arguments
