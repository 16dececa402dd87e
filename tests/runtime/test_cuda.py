"""The memory that an engine pins, copies and loads on a card played on the CPU, and what it may take of a card."""

from pathlib import Path
from types import SimpleNamespace

import played_runs
import pytest
import torch
from played_runs import check, needs_a_played_card, pytest_on

from batchgen.runtime import cuda

play = played_runs.play


@pytest.mark.slow
@needs_a_played_card
@pytest.mark.parametrize("capability", [90, pytest.param(75, marks=pytest.mark.thorough)])
def test_engines_on_a_played_card(play, capability):
    check(play(*pytest_on(Path(__file__).parent / "card_engine_checks.py"), capability=capability))


def test_a_card_is_held_to_what_tensors_and_the_work_space_of_cublas_take(monkeypatch):
    total, fractions = 80 << 30, []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - (1 << 30), total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    hopper_bytes = 32 << 20
    for card_bytes in (2 << 30, 16 << 30):
        usable = cuda.usable_memory(card_bytes)
        assert 0.9 * (card_bytes - (600 << 20)) - hopper_bytes < usable < card_bytes - (600 << 20) - hopper_bytes
        cuda.cap_memory(usable)
        assert usable + hopper_bytes < fractions[-1] * total < card_bytes - (600 << 20) + (2 << 20)
