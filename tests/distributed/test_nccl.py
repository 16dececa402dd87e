"""Sums on CUDA devices go by NCCL, between processes with a device each."""

from pathlib import Path

import played_runs
import pytest
import ranks
from played_runs import check, needs_a_played_card, pytest_on

from batchgen.distributed.launch import own_device

play = played_runs.play


@pytest.mark.slow
@needs_a_played_card
def test_sums_on_played_cards(play):
    check(play(*pytest_on(Path(__file__).parent / "nccl_checks.py"), devices=2))


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("", ["0", "1", "2"]),
        ("4,6,7", ["4", "6", "7"]),
        ("GPU-8932f937,GPU-12,MIG-3", ["GPU-8932f937", "GPU-12", "MIG-3"]),
        ("5", ["5", "5", "5"]),  # a launcher has given each of its own
    ],
)
def test_a_rank_sees_one_device(visible, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [own_device(rank, environment) for rank in range(3)] == devices


def test_processes_have_the_device_of_their_number(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(ranks.__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    group = ranks.start(3, ranks.note_device, str(tmp_path / "device"))
    group.ready()
    group.close()
    assert [(tmp_path / f"device.{rank}").read_text() for rank in (1, 2)] == ["5", "7"]
