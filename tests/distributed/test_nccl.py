"""Sums on CUDA devices go by NCCL, between processes with a device each."""

from pathlib import Path

import played_runs
import pytest
import ranks
from played_runs import check, needs_a_played_card, pytest_on

from batchgen.distributed.launch import own_device

HERE = Path(__file__).parent
play = played_runs.play


@pytest.mark.slow
@needs_a_played_card
def test_sums_on_played_cards(play):
    check(play(*pytest_on("--timeout", "200", HERE / "nccl_checks.py"), devices=2))


@pytest.mark.slow
@needs_a_played_card
@pytest.mark.parametrize(
    "name",
    [
        "tokens_of_ranks_with_a_card_each_are_those_of_the_cpu[2-gemma3-CPU attention]",  # embeddings on the card
        "tokens_of_stages_with_a_card_each_are_those_of_the_cpu[lfm2-weights and KV stream]",
    ],
)
def test_engines_over_two_played_cards(play, name):
    check(play(*pytest_on(f"{HERE.parent / 'engine' / 'test_gpu_ranks.py'}::test_{name}"), devices=2))


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
