"""KV between the tiers: what is stored comes back bit by bit, and the file on disk leaves nothing behind."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from batchgen.core.errors import BatchgenError
from batchgen.models.hf.config import config_of_hf
from batchgen.runtime.memory.kv_cache import KVCache, kv_shapes
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena, Link
from batchgen.schedule.staging import Run, Staging, merged_runs

LAYERS, HOST_BLOCKS, DISK_BLOCKS, STAGING = 2, 7, 12, 10
# K and V of a block of 16 tokens have 4,096 bytes in fp32; other blocks, and packed ones, do not fill whole disk
# blocks.
FORMATS = [
    ("float32", 16),
    ("float32", 32),
    ("float32", 8),
    ("float32", 5),
    ("bfloat16", 16),
    ("int4", 16),
    ("int5", 16),
    ("int5", 5),
    ("int8", 16),
]


@pytest.fixture(scope="module")
def config(tiny_models):
    """Two KV heads of 16."""
    path = tiny_models("llama", num_hidden_layers=LAYERS)[0]
    return config_of_hf(json.loads((path / "config.json").read_text()))


@pytest.fixture
def make_cache(config, tmp_path):
    """A cache with an accelerator, or on the CPU itself; closed afterwards."""
    made = []

    def make(kv_format="float32", kv_block_size=16, accelerated=True, disk_blocks=DISK_BLOCKS, folder=tmp_path):
        blocks = {"cpu": HOST_BLOCKS, "disk": disk_blocks} | ({"gpu": 3} if accelerated else {})
        cache = KVCache(
            config, kv_block_size, kv_format, blocks,
            tiers=Tiers("gpu", links=(Link(), Link())) if accelerated else None, staging_blocks=STAGING,
            offload_dir=folder,
        )  # fmt: skip
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


def staging(*, host_blocks=(), new_slots=(), host_slots=(), reads=(), writes=(), disk_start=0, num_blocks=STAGING):
    slots = [np.array(values, dtype=np.int64) for values in (host_blocks, new_slots, host_slots)]
    chosen = np.zeros((0, 2), np.int64)  # nobody chooses pages
    runs = tuple(reads), tuple(writes)
    return Staging(num_blocks, *slots, *runs, slots[0], tuple(reads), disk_start, num_blocks, chosen, chosen)


def test_blocks_are_a_run_where_they_are_neighbours_on_both_sides():
    blocks, staged = (np.array(numbers) for numbers in ([4, 5, 9, 10, 11, 3], [0, 1, 2, 4, 5, 6]))
    assert merged_runs(blocks, staged) == (Run(4, 0, 2), Run(9, 2, 1), Run(10, 4, 2), Run(3, 6, 1))
    assert merged_runs(blocks[:0], staged[:0]) == ()


def fill(tensor, seed):
    """Random bits, as packed KV has them; numbers that are not NaN otherwise."""
    torch.manual_seed(seed)
    if not tensor.is_floating_point():
        tensor.view(torch.uint8).random_(0, 256)
    else:
        tensor.normal_()
    return tensor.clone()


def write_out(cache, layer, slot, moves):
    if cache._tiers.links:
        cache.store(layer, slot, moves)
    cache.write(layer, slot, moves)


def read_in(cache, layer, slot, moves):
    cache.read(layer, slot, moves)
    if cache._tiers.links:
        cache.load(layer, slot, moves)


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize(("kv_format", "kv_block_size"), FORMATS)
def test_blocks_come_back_from_disk(make_cache, kv_format, kv_block_size, accelerated):
    """Written from one staging buffer, read into the other, in other places: each layer's own."""
    cache = make_cache(kv_format, kv_block_size, accelerated)
    first = 0 if not accelerated else 2  # staging blocks of sequences on the host come before those on disk
    out = cache.prepare(staging(writes=[Run(8, first, 3), Run(1, first + 4, 2)], disk_start=first))
    back = cache.prepare(
        staging(reads=[Run(2, first, 1), Run(8, first + 1, 3), Run(1, first + 5, 1)], disk_start=first)
    )
    written = []
    for layer in range(LAYERS):
        written.append(fill(cache.staging(0, 0), seed=layer))
        write_out(cache, layer, 0, out)
    for layer in range(LAYERS):
        fill(cache.staging(1, 0), seed=9)
        read_in(cache, layer, 1, back)
        found, sent = cache.staging(1, 0), written[layer]
        assert torch.equal(found[first + 1 : first + 4], sent[first : first + 3])
        assert torch.equal(found[first], sent[first + 5])
        assert torch.equal(found[first + 5], sent[first + 4])
    stride = cache.shape_of(0).disk_block_bytes
    assert stride % 4096 == 0 and stride >= cache.shape_of(0).block_bytes
    assert cache.disk_bytes == LAYERS * DISK_BLOCKS * stride
    assert cache.disk_bytes_written == cache.disk_bytes_read == LAYERS * 5 * stride


@pytest.mark.parametrize(("kv_format", "kv_block_size"), FORMATS)
def test_new_tokens_go_home_to_the_host_and_blocks_come_from_there(make_cache, kv_format, kv_block_size):
    cache = make_cache(kv_format, kv_block_size)
    pool = cache.pools["cpu"][1]
    before, source = fill(pool, seed=1), fill(cache.staging(0, 0), seed=2)
    # Three tokens: of staging blocks 2 and 4, to host blocks 6 and 0.
    new = [2 * kv_block_size, 2 * kv_block_size + 3, 4 * kv_block_size + kv_block_size - 1]
    host_slots = [6 * kv_block_size, 6 * kv_block_size + 3, kv_block_size - 1]
    cache.store(1, 0, cache.prepare(staging(new_slots=new, host_slots=host_slots)))
    changed = before.clone()
    changed[6, :, :, 0], changed[6, :, :, 3] = source[2, :, :, 0], source[2, :, :, 3]
    changed[0, :, :, kv_block_size - 1] = source[4, :, :, kv_block_size - 1]
    assert torch.equal(pool, changed)
    cache.load(1, 1, cache.prepare(staging(host_blocks=[6, 0, 3], disk_start=3)))
    assert torch.equal(cache.staging(1, 0)[:3], changed[[6, 0, 3]])


@pytest.mark.parametrize(("kv_format", "kv_block_size"), FORMATS)
def test_host_and_disk_in_one_buffer(make_cache, kv_format, kv_block_size):
    """One batch with sequences of both: each finds its own."""
    cache = make_cache(kv_format, kv_block_size)
    fill(cache.staging(0, 0), seed=3)
    sent = cache.staging(0, 0).clone()
    write_out(cache, 0, 0, cache.prepare(staging(writes=[Run(5, 4, 2)], disk_start=4)))
    pool = fill(cache.pools["cpu"][0], seed=4)
    read_in(cache, 0, 1, cache.prepare(staging(host_blocks=[4, 2], reads=[Run(5, 3, 2)], disk_start=3)))
    assert torch.equal(cache.staging(1, 0)[:2], pool[[4, 2]])
    assert torch.equal(cache.staging(1, 0)[3:5], sent[4:6])


def open_files_in(folder):
    """What this process has open there, names that are gone too."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what listed them is closed by now
            found.append(os.readlink(link))
    return [target for target in found if target.startswith(str(folder))]


def test_the_file_has_no_name_and_goes_with_the_cache(make_cache, tmp_path):
    cache = make_cache()
    assert list(tmp_path.iterdir()) == [], "a killed process would leave it behind"
    assert len(open_files_in(tmp_path)) == 1
    cache.close()
    assert open_files_in(tmp_path) == []
    cache.close()  # twice does no harm


def test_budgets_hold_for_pools_and_buffers(config):
    shape = kv_shapes(config, 16, "float32")[0]

    def make(budget):
        arenas = {"gpu": Arena("--gpu-memory", budget), "cpu": Arena("--cpu-memory")}
        KVCache(config, 16, "float32", {"gpu": 4}, tiers=Tiers("gpu", arenas, (Link(), Link())), staging_blocks=3)
        return arenas["gpu"].allocated_bytes

    needed = (4 * LAYERS + 2 * 3 + 2 * 3) * shape.block_bytes  # staging buffers, and as much beside the link
    assert make(needed) == needed
    with pytest.raises(BatchgenError, match=r"--gpu-memory .* does not hold KV in transit"):
        make(needed - 1)
    with pytest.raises(BatchgenError, match=r"--gpu-memory .* does not hold the KV pool"):
        make(4 * LAYERS * shape.block_bytes - 1)


def test_a_folder_that_is_not_there(make_cache, tmp_path):
    with pytest.raises(
        BatchgenError, match=r"--offload-dir .*/missing does not take .* of KV: No such file"
    ) as refused:
        make_cache(folder=tmp_path / "missing")
    assert "\n" not in str(refused.value)


@pytest.fixture
def full_disk(tmp_path):
    """A filesystem of 1 MiB. Needs root, as on the machines that test this."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_too_small_shows_at_once(make_cache, full_disk):
    with pytest.raises(BatchgenError) as refused:
        make_cache(disk_blocks=400, folder=full_disk)
    message = str(refused.value)
    assert "\n" not in message and "No space left on device" in message and "--offload-dir" in message
    assert list(full_disk.iterdir()) == [] and open_files_in(full_disk) == []
    assert os.statvfs(full_disk).f_bfree == os.statvfs(full_disk).f_blocks, "the space is not given back"
    make_cache(disk_blocks=100, folder=full_disk)  # 800 KiB


@pytest.mark.parametrize(("call", "verb"), [("pwritev", "write"), ("preadv", "read")])
def test_a_disk_that_fails_later(make_cache, monkeypatch, call, verb):
    cache = make_cache()
    out = cache.prepare(staging(writes=[Run(0, 0, 2)]))
    back = cache.prepare(staging(reads=[Run(0, 0, 2)]))
    write_out(cache, 0, 0, out)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(BatchgenError, match=f"cannot {verb} KV at .*: Input/output error: .*--offload-dir") as failed:
        write_out(cache, 0, 0, out) if verb == "write" else read_in(cache, 0, 0, back)
    assert "\n" not in str(failed.value)
