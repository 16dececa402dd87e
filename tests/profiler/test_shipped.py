"""The hardware profiles that come with the package: complete, sourced, and within what the hardware can do."""

import itertools
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from batchgen.core.dtypes import KVFormat
from batchgen.core.errors import InputError
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.profiler.shipped import shipped_profile, shipped_profiles

NAMES = ("a100", "a10g", "gh200", "h100", "h200", "rtx3090", "t4", "zen4")
GPU_NAMES = tuple(name for name in NAMES if name != "zen4")
GIB = 1 << 30
# Datasheets: bytes/s of memory, dense 16-bit tensor FLOP/s, fp32 FLOP/s, bytes of memory.
DATASHEET = {
    "t4": (320e9, 65e12, 8.1e12, 16 * GIB),
    "a10g": (600e9, 70e12, 31.5e12, 24 * GIB),
    "rtx3090": (936e9, 71e12, 35.6e12, 24 * GIB),
    "a100": (2039e9, 312e12, 19.5e12, 80 * GIB),
    "h100": (3350e9, 989e12, 67e12, 80 * GIB),
    "h200": (4800e9, 989e12, 67e12, 141 * GIB),
    "gh200": (4000e9, 989e12, 67e12, 96 * GIB),
}
# Of each link in one direction, and the part of it that copies may reach: NVLink has less to add to each packet.
PCIE_4, PCIE_5, NVLINK_C2C = (31.5e9, 0.9), (63e9, 0.9), (450e9, 0.95)
LINKS = {
    "t4": (15.75e9, 0.9), "a10g": PCIE_4, "rtx3090": PCIE_4, "a100": PCIE_4, "h100": PCIE_5, "h200": PCIE_5,
    "gh200": NVLINK_C2C,
}  # fmt: skip
TOKENS = (1, 2, 4, 10, 16, 50, 64, 128, 256, 700, 1024, 4096, 30_000)
GROUPS = (1, 2, 4, 7, 8, 16)
PAGE = Path(__file__).parents[2] / "docs" / "hardware_profiles.md"


def half(name):
    """The 16-bit format a profile's tables are in."""
    return "float16" if name == "t4" else "bfloat16"


def numeric_fields(profile):
    """Paths of every field with a number in it, as in `sources`."""
    tops = [
        f.name
        for f in fields(HardwareProfile)
        if f.name not in ("name", "cpu", "gpu", "kernels", "measured", "sources")
    ]
    yield from (name for name in tops if getattr(profile, name))
    for device in ("cpu", "gpu"):
        rates = getattr(profile, device)
        yield from (f"{device}.{f.name}" for f in fields(ComputeRates) if rates and getattr(rates, f.name))


def assert_non_decreasing(values):
    rounding = 1 - 1e-12  # of the interpolation
    assert all(b >= a * rounding for a, b in itertools.pairwise(values)), values


def test_the_names():
    assert shipped_profiles() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_under_its_name_and_survives_json(name):
    profile = shipped_profile(name)
    assert profile.name == name
    assert (profile.gpu is None) == (name == "zen4")
    assert HardwareProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"'tpu' is no shipped hardware profile: use one of a100, .*, zen4$"):
        shipped_profile("tpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_every_source_a_number(name):
    profile = shipped_profile(name)
    assert set(profile.sources) == set(numeric_fields(profile))
    for field, source in profile.sources.items():
        assert len(source) > 20 and "\n" not in source, field


@pytest.mark.parametrize("name", NAMES)
def test_what_a_plan_can_ask_for_is_there(name):
    profile = shipped_profile(name)
    for number_format in ("float16", "bfloat16", "float32"):
        for kind in ("gemm_flops_per_s", "prefill_attention_flops_per_s", "elementwise_bytes_per_s"):
            assert profile.compute.has_rates(kind, number_format)
    for device in (profile.compute, profile.cpu):
        for number_format in ("float16", "bfloat16", "float32", "int4", "int5", "int8"):
            assert device.has_rates("decode_attention_bytes_per_s", number_format)
    for field in ("sweep_overhead_s", "sequence_overhead_s", "row_overhead_s", "gguf_load_bytes_per_s"):
        assert getattr(profile, field) > 0
    assert profile.compute.expand_bytes_per_s > 0
    assert 1e-5 < profile.compute.step_overhead_s < 1e-3


@pytest.mark.parametrize("name", GPU_NAMES)
def test_products_stay_below_reading_the_weights_and_the_peak(name):
    bandwidth, tensor, fp32, _ = DATASHEET[name]
    gpu = shipped_profile(name).gpu
    for number_format, bytes_per_weight, peak in ((half(name), 2, tensor), ("float32", 4, fp32)):
        table = gpu.gemm_flops_per_s[number_format]
        for tokens in TOKENS:
            assert table.at(tokens=tokens) <= 0.95 * tokens * bandwidth * 2 / bytes_per_weight
            assert table.at(tokens=tokens) <= 0.8 * peak
        assert table.at(tokens=1) >= 0.7 * bandwidth * 2 / bytes_per_weight
        assert_non_decreasing([table.at(tokens=tokens) for tokens in TOKENS])
        prefill = gpu.prefill_attention_flops_per_s[number_format]
        assert prefill.at(context=8192) <= 0.75 * peak
        assert_non_decreasing([prefill.at(context=context) for context in (64, 128, 500, 2048, 8192, 10**5)])


@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_memory_bounds_everything_that_streams(name):
    bandwidth, _, _, memory = DATASHEET[name]
    profile = shipped_profile(name)
    for table in profile.gpu.decode_attention_bytes_per_s.values():
        rates = [table.at(group=group) for group in GROUPS]
        assert max(rates) <= 0.75 * bandwidth
        assert_non_decreasing(rates[::-1])
    for table in profile.gpu.elementwise_bytes_per_s.values():
        assert table.at(tokens=1000) <= 0.85 * bandwidth
    assert profile.gpu.expand_bytes_per_s <= 0.85 * bandwidth / 1.28
    assert 0.85 * memory <= profile.gpu_memory_bytes < memory
    link, reached = LINKS[name]
    assert max(profile.h2d_bytes_per_s, profile.d2h_bytes_per_s) < reached * link


@pytest.mark.parametrize("name", NAMES)
def test_the_host_can_feed_its_own_attention(name):
    profile = shipped_profile(name)
    tables = profile.cpu.decode_attention_bytes_per_s
    for number_format, table in tables.items():
        rates = [table.at(group=group) for group in GROUPS]
        assert max(rates) < profile.dram_bytes_per_s, number_format
        assert_non_decreasing(rates[::-1])
    # In numbers attended to, KV of fewer bits is faster.
    for group in GROUPS:
        formats = map(KVFormat.of, (half(name), "int8", "int5", "int4"))
        plain, int8, int5, int4 = (tables[f.name].at(group=group) / f.row_bytes(64) for f in formats)
        assert plain < int8 < int5 < int4 * 1.001
    assert profile.disk_write_bytes_per_s <= profile.disk_read_bytes_per_s < profile.dram_bytes_per_s


def test_a_later_gpu_is_at_least_as_fast():
    a100, h100, h200 = (shipped_profile(name) for name in ("a100", "h100", "h200"))
    for older, newer in ((a100, h100), (h100, h200)):
        for number_format in ("bfloat16", "float32", "int4", "int5", "int8"):
            for group in GROUPS:
                rates = [p.gpu.decode_attention_bytes_per_s[number_format].at(group=group) for p in (older, newer)]
                assert rates[0] < rates[1]
        for number_format in ("bfloat16", "float32"):
            for tokens in TOKENS:
                rates = [p.gpu.gemm_flops_per_s[number_format].at(tokens=tokens) for p in (older, newer)]
                assert rates[0] <= rates[1]
            for context in (128, 512, 2048, 8192):
                rates = [p.gpu.prefill_attention_flops_per_s[number_format].at(context=context) for p in (older, newer)]
                assert rates[0] <= rates[1]
            elementwise = [p.gpu.elementwise_bytes_per_s[number_format].at(tokens=1000) for p in (older, newer)]
            assert elementwise[0] < elementwise[1]
        assert older.gpu.expand_bytes_per_s < newer.gpu.expand_bytes_per_s
        assert older.h2d_bytes_per_s <= newer.h2d_bytes_per_s
        assert older.gpu_memory_bytes <= newer.gpu_memory_bytes


def test_t4_carries_flexgens_constants():
    t4 = shipped_profile("t4")
    gemm = t4.gpu.gemm_flops_per_s["float16"]
    assert t4.h2d_bytes_per_s == pytest.approx(12.89 * GIB, rel=0.005)
    assert t4.d2h_bytes_per_s == pytest.approx(4.82 * GIB, rel=0.005)
    assert (t4.gpu_memory_bytes, t4.cpu_memory_bytes, t4.disk_bytes) == (15 * GIB, 204 * GIB, 1500 * GIB)
    assert (t4.disk_read_bytes_per_s, t4.disk_write_bytes_per_s) == (1.6e9, 1.3e9)
    assert gemm.at(tokens=64) == pytest.approx(4.3e12)
    assert gemm.at(tokens=48) == pytest.approx(4.3e12, rel=0.1)
    assert gemm.at(tokens=512 * 48) == pytest.approx(21.24e12)
    # They count all pairs of a prompt, we count visible ones: the same seconds for 512 tokens of width 7,168.
    theirs_s = 4 * 512**2 * 7168 / 9.97e12
    ours_s = 4 * 512**2 / 2 * 7168 / t4.gpu.prefill_attention_flops_per_s["float16"].at(context=512)
    assert ours_s == pytest.approx(theirs_s)
    # One step over 600 tokens of 16-bit multi-head KV: 4 bytes, and 4 FLOPs in theirs, per token and channel.
    for device, flops_per_s in ((t4.gpu, 0.079e12), (t4.cpu, 0.0123e12)):
        rate = device.decode_attention_bytes_per_s["float16"].at(group=1)
        assert 4 * 600 * 7168 / rate == pytest.approx(4 * 600 * 7168 / flops_per_s)


def test_eight_zen4_cores_are_no_more_than_four_times_two():
    cpu = shipped_profile("zen4").cpu
    two_cores = {1: 24e9, 16: 310e9, 64: 630e9, 256: 860e9, 1024: 944e9}
    for tokens, rate in two_cores.items():
        table = cpu.gemm_flops_per_s["bfloat16"]
        assert 2 * rate < table.at(tokens=tokens) <= 4.01 * rate
        assert table.at(tokens=tokens) <= tokens * shipped_profile("zen4").dram_bytes_per_s
    assert cpu.gemm_flops_per_s["float32"].at(tokens=1024) == pytest.approx(4 * 210e9, rel=0.01)
    for group, rate in ((1, 18.6e9), (4, 10.7e9), (8, 9.7e9)):
        assert cpu.decode_attention_bytes_per_s["bfloat16"].at(group=group) < 8 * rate


def page_rows():
    """name -> its rows on the page, as lists of cells."""
    rows = {name: [] for name in NAMES}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| `(\w+)` \|", line):
            rows[match[1]].append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_numbers_of_the_file(name):
    sizes, rates = page_rows()[name]
    p = shipped_profile(name)
    gemm = p.compute.gemm_flops_per_s[half(name)]
    shown = [cell for cell in (*sizes[2:], *rates[1].split(","), *rates[2:]) if cell.strip() != "-"]
    values = [
        p.gpu_memory_bytes and p.gpu_memory_bytes / GIB,
        p.cpu_memory_bytes / GIB,
        p.disk_bytes / 1e9,
        *(gemm.at(tokens=tokens) / 1e12 for tokens in (1, 64, 4096)),
        p.compute.decode_attention_bytes_per_s[half(name)].at(group=1) / 1e9,
        p.cpu.decode_attention_bytes_per_s[half(name)].at(group=1) / 1e9,
        p.h2d_bytes_per_s and p.h2d_bytes_per_s / 1e9,
        p.d2h_bytes_per_s and p.d2h_bytes_per_s / 1e9,
        p.dram_bytes_per_s / 1e9,
        p.disk_read_bytes_per_s / 1e9,
        p.disk_write_bytes_per_s / 1e9,
    ]
    assert [float(cell) for cell in shown] == pytest.approx([v for v in values if v is not None], rel=0.003)
