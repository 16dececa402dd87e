"""Whole engines with `--device cuda`, unmodified, on a card that is played on the CPU under torch's CUDA build.

Each test is a process of the environment with that build (`make cuda-env`). It fails where the card notes a fault: what
a real one would not have survived, or would not have noticed.
"""

import subprocess
from pathlib import Path

import played_card
import pytest

HERE = Path(__file__).parent
CHECKS = HERE / "card_checks.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(played_card.missing() is not None, reason=str(played_card.missing())),
]


@pytest.fixture
def play(tmp_path):
    """A function that runs Python on a played card: play(arguments..., options) -> what it prints, counts, faults."""

    def play(*arguments, **options):
        report = tmp_path / "report"
        report.write_text("")
        environment = played_card.environment(report=report, **options)
        command = [played_card.python(), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=played_card.ROOT)
        lines = report.read_text().splitlines()
        faults = [line for line in lines if line.startswith("FAULT")]
        counts = {what: int(n) for n, _, what in (line.partition(" ") for line in lines if line not in faults)}
        return done, counts, faults

    return play


def check(played):
    done, _, faults = played
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert faults == []


def pytest_on(*arguments):
    return "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *arguments


def test_the_identity_table_on_a_card(play):
    check(play(*pytest_on(CHECKS)))


def test_the_identity_table_on_a_card_without_triton_products(play):
    """Tokens are right. The host waits there for routers, and where a stream's queue is full."""
    done, _, _ = play(*pytest_on(CHECKS), capability=75)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def test_what_the_runtime_is_relied_on_for(play):
    check(play(*pytest_on(HERE.parent / "runtime" / "cuda_checks.py"), pinnable_mib=96, mib=2048))
