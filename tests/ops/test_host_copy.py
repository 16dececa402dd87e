"""Small arrays through pinned memory that never grows: what arrives is what was sent, however little there is of it."""

import gc
import random

import numpy as np
import pytest
import torch
from fake_device import ORDERS, FakeDevice

from batchgen.ops.host_copy import Passage, bytes_of


@pytest.mark.parametrize("order", ORDERS[::9])
def test_what_goes_up_is_what_was_sent(order):
    """Through 192 bytes in four sections, with sources that change at once."""
    device, rng, found, sent = FakeDevice(*order, passage_bytes=256), random.Random(1), [], []

    def work():
        for dtype in [torch.int64, torch.uint8, torch.float32] * 20:
            source = torch.randint(0, 100, (rng.randrange(0, 90), rng.randrange(1, 4))).to(dtype)
            sent.append(source.clone())
            found.append(device.upload(source))
            source.fill_(77)

    device.launch("compute", work)
    device.finish()
    assert [f.shape for f in found] == [s.shape for s in sent]
    assert all(torch.equal(f, s) for f, s in zip(found, sent, strict=True))


def test_a_section_is_not_filled_before_its_copies_are_done(monkeypatch):
    """That nothing waits is noticed."""
    device, sent = FakeDevice(*ORDERS[0], passage_bytes=256), torch.arange(200)
    monkeypatch.setattr(device.passage, "_synchronize", lambda event: None)
    found = []
    device.launch("compute", lambda: found.append(device.upload(sent)))
    device.finish()
    assert not torch.equal(found[0], sent)


def make_passage(num_bytes):
    return Passage(torch.zeros(num_bytes, dtype=torch.uint8), lambda: None, lambda event: None)


def test_a_single_number_goes_up_whatever_its_strides():
    column = np.array([5])[:, None]
    assert 0 in column.strides
    assert make_passage(4096).upload(column, torch.zeros(1, 1, dtype=torch.int64)).tolist() == [[5]]


def test_what_comes_down_stays_until_it_is_read():
    passage, rng, held = make_passage(4096), random.Random(2), []
    memory = {page.data_ptr() + i for page in passage._pages for i in range(len(page))}
    for i in range(400):
        source = torch.full((rng.randrange(1, 8), 2), i)
        held.append((passage.download(source), source))
        assert held[-1][0].data_ptr() in memory
        if len(held) > 3:
            found, wanted = held.pop(0)
            assert torch.equal(found, wanted)
            del found


def test_more_than_there_is_room_for_comes_down_too():
    passage = make_passage(4096)
    sources = [torch.randint(0, 99, (20,)) for _ in range(40)]
    found = [passage.download(source) for source in sources]  # 6,400 bytes of 1,024
    found.append(passage.download(torch.arange(5000)))
    assert all(torch.equal(f, s) for f, s in zip(found, [*sources, torch.arange(5000)], strict=True))
    copies = passage.num_copies
    assert 0 < copies < 40
    found.clear()
    gc.collect()
    passage.download(sources[0])
    assert passage.num_copies == copies + 1, "what nobody holds is not used again"


@pytest.mark.parametrize("numbers", [0, 1, 3])
def test_memory_is_seen_as_bytes_whatever_stride_few_numbers_have(numbers):
    tensor = torch.arange(numbers) if numbers > 1 else torch.arange(1).as_strided((numbers,), (0,))
    assert bytes_of(tensor).tolist() == list(tensor.numpy().tobytes())
