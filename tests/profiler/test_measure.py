"""Measuring a machine into a HardwareProfile, and keeping it."""

import dataclasses
import errno
import itertools
import json
import math
import multiprocessing
import os
import resource
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thorough import quick_or
from timing import undisturbed

from batchgen.core import direct_io
from batchgen.core.async_io import WRITE
from batchgen.core.dtypes import BLOCK_FORMATS, GGUF_FORMATS, KVFormat
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, Rates, read_profile
from batchgen.core.machine import available_memory_bytes
from batchgen.ops import quant
from batchgen.ops.cpp import PackedWeight
from batchgen.profiler import compute as profile_compute
from batchgen.profiler import measure as profile_module
from batchgen.profiler import timing as profile_timing
from batchgen.profiler import transfer as profile_transfer
from batchgen.profiler.cache import Wanted, _keep, load_or_measure, profile_path, recall
from batchgen.profiler.measure import Overheads, add_dequantizing, add_dtypes, add_packed_kv, add_products, measure
from batchgen.profiler.timing import Device, Effort, Trial, last_level_cache_bytes, pieces
from batchgen.profiler.transfer import copy_rates, disk_rates

TINY = Effort(
    widths=(32, 64),
    tokens=(1, 8),
    elementwise_tokens=(64, 512),
    groups=(1, 2),
    batches=(1, 4),
    contexts=(32, 64),
    prefill_contexts=(16, 48),
    point_s=0.001,
    sample_s=0.0002,
    disk_s=0.1,
    disk_bytes=16 << 20,
    pool_bytes=4 << 20,
)
OVERHEADS = Overheads(
    sweep_overhead_s=1e-3,
    batch_overhead_s=4e-4,
    sequence_overhead_s=2e-6,
    issue_overhead_s=3e-5,
    row_overhead_s=3e-4,
    step_overhead_s=4e-5,
    sampling_logits_per_s=5e8,
    load_bytes_per_s=6e8,
)


def tiny_measure(offload_dir, dtypes=("float32",), effort=TINY):
    return measure(device="cpu", offload_dir=offload_dir, dtypes=dtypes, overheads=OVERHEADS, effort=effort)


def leaves(points):
    """The numbers at the bottom of a table's nested points."""
    return [rate for _, rest in points for rate in leaves(rest)] if isinstance(points, tuple) else [points]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return tiny_measure(tmp_path_factory.mktemp("offload"), ("float32", "bfloat16"))


class TestMeasure:
    def test_has_a_full_grid_of_finite_rates_for_every_dtype(self, measured):
        cpu = measured.cpu
        tables = [cpu.gemm_flops_per_s, cpu.prefill_attention_flops_per_s, cpu.decode_attention_bytes_per_s]
        axes = [("width", "tokens"), ("context",), ("group", "batch", "context")]
        for table, names, count in zip(tables, axes, (4, 2, 8), strict=True):
            assert set(table) == {"float32", "bfloat16"}
            for rates in table.values():
                assert rates.axes == names
                found = leaves(rates.points)
                assert len(found) == count
                assert all(math.isfinite(rate) and rate > 1e5 for rate in found)

    def test_single_rates_are_finite_and_sizes_are_those_of_the_machine(self, measured, tmp_path):
        for name in ("dram_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s"):
            assert 1e5 < getattr(measured, name) < 1e14
        assert set(measured.cpu.elementwise_bytes_per_s) == set(measured.cpu.gemm_flops_per_s)
        assert measured.cpu_memory_bytes == pytest.approx(available_memory_bytes(), rel=0.5)
        assert measured.disk_bytes == pytest.approx(
            os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.2
        )

    def test_takes_over_what_the_engine_has_shown(self, measured):
        assert measured.cpu.step_overhead_s == 4e-5
        names = [f.name for f in dataclasses.fields(Overheads) if f.name != "step_overhead_s"]
        assert {name: getattr(measured, name) for name in names} == {name: getattr(OVERHEADS, name) for name in names}

    def test_is_the_same_after_a_round_trip_through_json(self, measured):
        assert HardwareProfile.from_json(json.loads(json.dumps(measured.to_json()))) == measured

    def test_says_what_it_does_and_under_which_circumstances(self, tmp_path, logged):
        profile = tiny_measure(tmp_path)
        assert any(str(tmp_path) in line for line in logged)
        assert any("matrix products in float32" in line for line in logged)
        assert profile.measured["torch"] == torch.__version__
        assert profile.measured["threads"] == torch.get_num_threads()
        assert len(profile.measured["seconds"]) == len(logged)
        assert "core" in profile.name

    def test_cpu_only_profile_has_no_gpu_fields(self, measured):
        assert measured.gpu is measured.h2d_bytes_per_s is measured.d2h_bytes_per_s is measured.gpu_memory_bytes is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"device": "tpu"}, "device 'tpu'.*cpu or cuda"),
            ({"dtypes": ["int3"]}, "dtype 'int3'.*float32"),
            ({"dtypes": []}, "name one or more dtypes"),
        ],
    )
    def test_refuses_what_it_cannot_measure(self, tmp_path, change, message):
        arguments = {"device": "cpu", "offload_dir": tmp_path, "dtypes": ["float32"], "effort": TINY} | change
        with pytest.raises(InputError, match=message):
            measure(**arguments, overheads=OVERHEADS)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_refuses_a_gpu_that_is_not_there(self, tmp_path):
        with pytest.raises(InputError, match=r"no CUDA device.*leave it out"):
            measure(device="cuda", offload_dir=tmp_path, dtypes=["float32"], overheads=OVERHEADS, effort=TINY)

    def test_further_dtypes_leave_the_rest_as_it_was(self, tmp_path):
        before = tiny_measure(tmp_path)
        after = add_dtypes(before, ["float16"], effort=TINY)
        assert set(after.cpu.gemm_flops_per_s) == {"float32", "float16"}
        assert after.cpu.gemm_flops_per_s["float32"] == before.cpu.gemm_flops_per_s["float32"]
        assert after.cpu.elementwise_bytes_per_s["float32"] == before.cpu.elementwise_bytes_per_s["float32"]
        assert after.cpu.step_overhead_s == before.cpu.step_overhead_s
        assert after.disk_read_bytes_per_s == before.disk_read_bytes_per_s

    @pytest.mark.parametrize(("kv_format", "dtype"), [("int4", "float32"), ("int5", "bfloat16"), ("int8", "float32")])
    def test_packed_kv_is_merged_in(self, measured, kv_format, dtype, logged):
        after = add_packed_kv(measured, dtype, kv_format, effort=TINY)
        before, cpu = measured.cpu, after.cpu
        for name in ("prefill_attention_flops_per_s", "decode_attention_bytes_per_s", "elementwise_bytes_per_s"):
            table = getattr(cpu, name)
            assert set(table) == {"float32", "bfloat16", kv_format}
            assert {k: v for k, v in table.items() if k != kv_format} == getattr(before, name)
            assert all(math.isfinite(rate) and rate > 1e4 for rate in leaves(table[kv_format].points))
        assert cpu.gemm_flops_per_s == before.gemm_flops_per_s and cpu.expand_bytes_per_s is None
        assert len(logged) == 3 and all(kv_format in line for line in logged)
        assert set(measured.measured["seconds"]) < set(after.measured["seconds"])
        assert HardwareProfile.from_json(json.loads(json.dumps(after.to_json()))) == after

    def test_the_rate_of_dequantizing_is_merged_in(self, measured, logged):
        after = add_dequantizing(measured, "float32", effort=TINY)
        assert 1e6 < after.cpu.expand_bytes_per_s < 1e13
        assert dataclasses.replace(after.cpu, expand_bytes_per_s=None) == measured.cpu
        assert len(logged) == 1 and "int4" in logged[0]
        assert set(measured.measured["seconds"]) < set(after.measured["seconds"])

    @pytest.mark.parametrize(
        ("packing", "dtype", "key"),
        [("int8", "float32", "int8"), ("int8", "bfloat16", "int8"), ("q4_1", "float32", "q4_1 float32")],
    )
    @pytest.mark.parametrize("as_stored", [False, True])
    def test_products_of_packed_weights_are_merged_in(self, measured, packing, dtype, key, as_stored, logged):
        key = f"{key} in rows" if as_stored else key
        slower = {"sweep_factors": {dtype: {"gemm_few": 2.0, "gemm_many": 2.0}}}
        before = dataclasses.replace(measured, measured=measured.measured | slower)
        model = profile_compute._llama(width=64, heads=4, kv_heads=2, head_dim=16, inner=96)  # rows of whole blocks
        after = add_products(before, dtype, packing, effort=TINY, model=model, as_stored=as_stored)
        table = after.cpu.gemm_flops_per_s
        assert {k: v for k, v in table.items() if k != key} == measured.cpu.gemm_flops_per_s
        assert all(math.isfinite(rate) and rate > 1e4 for rate in leaves(table[key].points))
        assert len(logged) == 1 and packing in logged[0]
        assert HardwareProfile.from_json(json.loads(json.dumps(after.to_json()))) == after

    def test_layers_of_no_certain_model_can_have_any_packed_weights(self):
        for model in profile_compute.subjects_of("cpu", Effort(), None).products:
            for _, columns in model.matmul_shapes.values():
                assert all(columns % values == 0 for values, _ in GGUF_FORMATS.values())

    @pytest.mark.parametrize("weight_format", ["q4_1", "int8", "float32"])
    def test_weights_in_rows_are_multiplied_as_they_lie(self, weight_format, monkeypatch):
        used = []
        monkeypatch.setattr(profile_compute.ops, "linear", lambda x, weight, **_: used.append(weight))
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: trial.run(0) or 1.0)
        model = profile_compute._llama(width=64, heads=4, kv_heads=2, head_dim=16, inner=96)
        pool, device = torch.zeros((4 << 20) // 4), Device("cpu")
        profile_compute.gemm_rates(device, pool, [model], TINY, weight_format, as_stored=True)
        assert used and not any(isinstance(weight, PackedWeight) for weight in used)
        used.clear()
        profile_compute.gemm_rates(device, pool, [model], TINY, weight_format)
        assert used and all(isinstance(weight, PackedWeight) for weight in used)

    @pytest.mark.parametrize("as_stored", [False, True])
    @pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
    def test_depths_that_are_not_whole_blocks_of_a_format_are_timed_as_if_they_were(
        self, weight_format, as_stored, monkeypatch
    ):
        """A GGUF has its matrices of such depths in another format, and may be asked for the rates of each."""
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: trial.run(0) or trial.work)
        model = profile_compute._llama(width=544, heads=4, kv_heads=2, head_dim=40, inner=1376)
        pool = torch.zeros((16 << 20) // 4)
        found = profile_compute.gemm_rates(Device("cpu"), pool, [model], TINY, weight_format, as_stored=as_stored)
        flops = 2 * sum(r * c for r, c in itertools.chain(*model.layer_matrices.values()))
        assert flops <= found.at(width=544, tokens=1) < 2 * flops

    @pytest.mark.parametrize("per_s", quick_or([1e9, 1e14], [1e9, 1e11, 1e14]))
    def test_a_machine_of_any_speed_is_measured_within_a_minute(self, per_s, tmp_path, simulated):
        """Told by the clock of a machine that does `per_s` bytes or FLOPs a second, at most one call a microsecond."""
        clock = simulated(per_s, disk_bytes_per_s=per_s / 50)
        profile = measure(device="cpu", offload_dir=tmp_path, dtypes=["float32"], overheads=OVERHEADS)
        assert 5 < clock.seconds < 60
        assert profile.dram_bytes_per_s == pytest.approx(per_s, rel=0.01)
        assert len(leaves(profile.cpu.decode_attention_bytes_per_s["float32"].points)) == 36

    @undisturbed
    def test_more_tokens_make_better_use_of_weights(self):
        """Measured, not simulated: a layer of 12 million weights is read once for 256 tokens as for one."""
        effort = dataclasses.replace(TINY, tokens=(1, 256), pool_bytes=64 << 20, call_s=60.0)
        device, model = Device("cpu"), profile_compute._llama(width=1024, heads=16, kv_heads=16, head_dim=64)
        gemm = profile_compute.gemm_rates(device, device.pool(torch.float32, effort), [model], effort)
        assert gemm.at(width=1024, tokens=256) > 2 * gemm.at(width=1024, tokens=1)

    @pytest.mark.parametrize("layers", [None, 2])
    def test_weights_of_products_rotate_through_the_whole_pool_or_all_layers(self, layers, monkeypatch):
        """Else they would still be in the caches when they are used again, unless they are there in jobs too."""
        used = []
        monkeypatch.setattr(profile_compute.ops, "linear", lambda x, weight, **_: used.append(weight))
        monkeypatch.setattr(profile_compute.ops, "pack_weight", lambda weight, **_: weight)
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: [trial.run(i) for i in range(99)] and 1.0)
        model, effort = (
            profile_compute._llama(width=64, heads=4, kv_heads=2, head_dim=16),
            dataclasses.replace(TINY, tokens=(1,)),
        )
        pool = torch.zeros((4 << 20) // 4)
        two = dataclasses.replace(model, num_layers=2, windows=model.windows * 2)
        measured = profile_compute.subjects_of("cpu", effort, two) if layers else None
        for as_stored in (False, True):
            used.clear()
            profile_compute.gemm_rates(
                Device("cpu"), pool, [model], effort, as_stored=as_stored, layers=measured and measured.layers
            )
            again = next(i for i in range(1, len(used)) if used[i].data_ptr() == used[0].data_ptr())
            if layers and not as_stored:  # what streams is never there
                assert again == layers * 4
            else:
                assert sum(weight.nbytes for weight in used[:again]) > 0.9 * pool.nbytes

    @pytest.mark.parametrize("weight_format", [None, "int8", "q4_1"])
    def test_making_weights_ready_does_not_take_longer_than_timing_them(self, weight_format, monkeypatch):
        """They are packed once for all numbers of tokens, and few of them are quantized."""
        packed, quantized = [], []
        weight = profile_compute._weight
        monkeypatch.setattr(profile_compute, "_weight", lambda *a, **k: packed.append(1) or weight(*a, **k))
        quantize = profile_compute.int8.quantize
        monkeypatch.setattr(profile_compute.int8, "quantize", lambda x: quantized.append(x.numel()) or quantize(x))
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: trial.run(0) or 1.0)
        model = profile_compute._llama(width=512, heads=8, kv_heads=2, head_dim=64, inner=512)
        pool = torch.zeros((16 << 20) // 4)
        effort = dataclasses.replace(TINY, tokens=(1, 2, 4, 8))
        profile_compute.gemm_rates(Device("cpu"), pool, [model], effort, weight_format)
        matrices = 4 * (pool.numel() // sum(r * c for r, c in itertools.chain(*model.layer_matrices.values())))
        assert len(packed) == matrices
        assert sum(quantized) <= pool.numel() / 4


class Clock:
    """Seconds that a simulated machine has been at work."""

    def __init__(self):
        self.seconds = 0.0
        self._lock = threading.Lock()

    def take(self, seconds):
        with self._lock:
            self.seconds += seconds


@pytest.fixture
def simulated(monkeypatch):
    """A function that has `measure` time everything by a clock of its own, at so much work per second.

    Nothing is computed.
    """

    def simulate(per_s, disk_bytes_per_s):
        clock = Clock()
        fake_time = SimpleNamespace(perf_counter=lambda: clock.seconds, process_time=lambda: 0.0)
        for module in (profile_timing, profile_transfer, profile_module):
            monkeypatch.setattr(module, "time", fake_time)
        current = []
        real_rate = Device.rate

        def rate(self, trial, effort):
            current[:] = [trial]
            return real_rate(self, trial, effort)

        def seconds(self, run, first, count):
            started = clock.seconds
            clock.take(count * max(1e-6, current[0].work / per_s))
            return clock.seconds - started

        def transfer(self, worker, offset, num_bytes=profile_transfer._REQUEST_BYTES):
            clock.take(num_bytes / disk_bytes_per_s)

        def move_small(self, operation, offsets):
            seconds = len(offsets) * profile_transfer._SMALL_BYTES / disk_bytes_per_s
            clock.take(seconds)
            return seconds

        monkeypatch.setattr(profile_transfer._File, "move_small", move_small)
        monkeypatch.setattr(Device, "rate", rate)
        monkeypatch.setattr(Device, "seconds", seconds)
        monkeypatch.setattr(Device, "pool", lambda self, dtype, effort: torch.zeros(1 << 20, dtype=dtype))
        monkeypatch.setattr(profile_compute.ops, "pack_weight", lambda weight, **_: weight)
        monkeypatch.setattr(profile_compute.ops, "prepare_attention", lambda *_, **__: None)
        monkeypatch.setattr(profile_compute, "plan_attention", lambda *_, **__: None)
        monkeypatch.setattr(
            profile_module, "first_touch_rate", lambda effort: clock.take(effort.touch_bytes / per_s) or per_s
        )
        for name in ("read", "write"):
            monkeypatch.setattr(profile_transfer._File, name, transfer)
        return clock

    return simulate


class TestTiming:
    @undisturbed
    def test_rate_is_work_over_the_time_of_one_run(self):
        rate = Device("cpu").rate(Trial(10.0, lambda i: time.sleep(0.005)), TINY)
        assert 10 / 0.02 < rate <= 10 / 0.005

    def test_every_run_gets_the_next_number(self):
        seen = []
        Device("cpu").rate(Trial(1.0, seen.append), TINY)
        assert seen == list(range(len(seen)))
        assert len(seen) > 4

    def test_when_the_time_is_over_a_point_is_two_runs(self):
        seen = []
        Device("cpu").rate(Trial(1.0, seen.append), dataclasses.replace(TINY, until_s=0.0))
        assert seen == [0, 1]

    @undisturbed
    def test_points_that_would_take_too_long_carry_the_last_rate_on(self):
        runs = []

        def trial(size):
            return Trial(float(size), lambda i: (runs.append(size), time.sleep(size * 1e-3)))

        effort = dataclasses.replace(TINY, call_s=0.05)
        points = Device("cpu").rising_rates((1, 10, 100, 1000), trial, effort)
        assert [size for size, _ in points] == [1, 10, 100, 1000]
        assert set(runs) == {1, 10}
        assert points[1][1] == points[2][1] == points[3][1]

    def test_operands_are_spread_over_more_memory_than_the_caches(self):
        assert 0 < last_level_cache_bytes() < 1 << 40
        pool_bytes = Device("cpu").pool_bytes(Effort())
        assert pool_bytes >= min(2 * last_level_cache_bytes(), available_memory_bytes() // 10)
        assert pool_bytes <= available_memory_bytes() // 4

    def test_pieces_of_a_pool_do_not_overlap(self):
        pool = torch.arange(100)
        parts = pieces(pool, 4, 8)
        assert [part.shape for part in parts] == [(4, 8)] * 3
        assert torch.equal(torch.cat([part.flatten() for part in parts]), pool[:96])


FP32 = KVFormat("float32")


class TestAttention:
    """What is timed must be attention, over all the KV that is counted."""

    model = profile_compute._llama(width=64, heads=4, kv_heads=2, head_dim=16)

    @pytest.mark.parametrize(("sequences", "turns"), [([(1, 19), (1, 30)], 2), ([(24, 0)], 4)])
    def test_paged_runs_go_through_the_pool_and_start_over(self, sequences, turns):
        pool = torch.randn(2 * 8 * 2 * 16 * 16)  # K and V of 8 blocks
        run = profile_compute.paged_attention(
            profile_compute.paged_kv(pool, self.model, FP32), FP32, self.model, sequences, pool.dtype
        )
        results = [run(i) for i in range(turns + 1)]
        assert results[0].shape == (sum(new for new, _ in sequences), 2 * 2 * 16)
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(results[:turns], 2))
        assert torch.equal(results[turns], results[0])

    def test_one_plan_serves_all_operands_of_a_point(self, monkeypatch):
        """A GPU's pool holds tens of thousands of blocks: here as many, small ones. Timing is left out."""
        planned, points = [], []
        plan_attention = profile_compute.plan_attention
        monkeypatch.setattr(
            profile_compute, "plan_attention", lambda *a, **k: planned.append(None) or plan_attention(*a, **k)
        )
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: points.append(trial.run(7)) or 1e18)
        models = [profile_compute._llama(width=16 * n, heads=n, kv_heads=1, head_dim=8) for n in (1, 2)]
        pool = torch.zeros(32768 * 2 * 16 * 8, dtype=torch.float32)
        effort = Effort(batches=(1, 8, 64), contexts=(64, 256, 1024, 4096), prefill_contexts=(16, 256))
        profile_compute.decode_rates(Device("cpu"), pool, models, effort)
        profile_compute.prefill_rates(Device("cpu"), pool, models[0], effort)
        assert len(points) == 2 * 3 * 4 + 2
        assert len(planned) == len(points)

    def test_packed_kv_is_attended_to_as_it_is_stored(self, monkeypatch):
        """The bytes that count are those of the packed blocks, and results are those of KV that was packed."""
        pool = torch.randn(64 * 2 * 2 * 16 * 16)
        int5 = KVFormat.of("int5")
        kv = profile_compute.paged_kv(pool, self.model, int5)
        assert kv.dtype == torch.uint8 and kv.shape == (64, 2, 2, 16, 14)
        expanded = quant.dequantize(kv, 16, bits=5)
        sequences = [(1, 19), (1, 30)]
        torch.manual_seed(1)
        packed = profile_compute.paged_attention(kv, int5, self.model, sequences, torch.float32)(3)
        torch.manual_seed(1)
        plain = profile_compute.paged_attention(expanded, FP32, self.model, sequences, torch.float32)(3)
        assert torch.allclose(packed, plain, atol=1e-5)
        works = []
        monkeypatch.setattr(Device, "rate", lambda self, trial, effort: works.append(trial.work) or 1.0)
        for kv_format in (None, "int5"):
            profile_compute.decode_rates(Device("cpu"), pool, [self.model], TINY, kv_format)
        whole, packed_work = works[: len(works) // 2], works[len(works) // 2 :]
        assert [p / w for p, w in zip(packed_work, whole, strict=True)] == pytest.approx([14 / 64] * len(whole))


class TestTransfers:
    @pytest.mark.parametrize("where", ["disk", "memory"])
    def test_disk_is_measured_and_nothing_left_behind(self, tmp_path, where):
        directory = tmp_path if where == "disk" else Path(f"/dev/shm/batchgen-test-{os.getpid()}")
        if where == "memory" and not os.access("/dev/shm", os.W_OK):
            pytest.skip("no /dev/shm")
        try:
            disk = disk_rates(direct_io.make_offload_dir(directory), TINY)
            assert 1e5 < disk.read_bytes_per_s < 1e13 and 1e5 < disk.write_bytes_per_s < 1e13
            assert 0 <= disk.read_overhead_s < 1 and 0 <= disk.write_overhead_s < 1
            assert 0 <= disk.call_overhead_s < 1
            assert list(directory.iterdir()) == []
        finally:
            directory.rmdir()

    def test_works_without_direct_io(self, tmp_path, monkeypatch):
        def refuse(descriptor, command, value=0):
            if value & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0

        monkeypatch.setattr(profile_transfer.fcntl, "fcntl", refuse)
        synced = []
        monkeypatch.setattr(profile_transfer.os, "fsync", synced.append)
        disk = disk_rates(tmp_path, TINY)
        assert disk.read_bytes_per_s > 1e5 and disk.write_bytes_per_s > 1e5
        assert synced
        assert list(tmp_path.iterdir()) == []

    @undisturbed
    @pytest.mark.parametrize("kernel", [True, False], ids=["all at once", "by threads"])
    def test_small_requests_show_what_one_takes_beside_its_bytes(self, kernel, tmp_path, monkeypatch):
        whole, whole_small = profile_transfer._File.write, profile_transfer._File.move_small

        def slow_small(self, operation, offsets):
            return whole_small(self, operation, offsets) + (0.001 * len(offsets) if operation == WRITE else 0.0)

        def slow(self, worker, offset, num_bytes=profile_transfer._REQUEST_BYTES):
            time.sleep(0.004)
            whole(self, worker, offset, num_bytes)

        monkeypatch.setattr(profile_transfer._File, "write", slow)
        monkeypatch.setattr(profile_transfer._File, "move_small", slow_small)
        if not kernel:
            monkeypatch.setattr(profile_transfer, "of_this_thread", lambda: None)
        disk = disk_rates(tmp_path, TINY)
        # Four at a time, so that each takes a quarter of its wait.
        assert 0.0008 < disk.write_overhead_s < 0.004 and disk.read_overhead_s < disk.write_overhead_s

    @undisturbed
    def test_stops_when_its_time_is_up(self):
        runs = []

        def slow(offsets):
            runs.append(offsets)
            time.sleep(0.03)
            return 0.03

        rates = profile_transfer._timed_stretches(slow, [[0]] * 100, 0.05)
        assert len(rates) == len(runs) == 2

    def test_full_disk_names_the_option_and_leaves_nothing(self, tmp_path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, hard))  # a write beyond it fails
        try:
            with pytest.raises(InputError, match="--offload-dir"):
                disk_rates(tmp_path, TINY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []

    def test_unusable_directory_names_the_option(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match=r"--offload-dir .*file/below: .*write to"):
            tiny_measure(tmp_path / "file" / "below")
        with pytest.raises(InputError, match="--offload-dir /proc"):
            tiny_measure(Path("/proc"))

    def test_copies_between_host_and_device(self):
        h2d, d2h = copy_rates(Device("cpu"), TINY, copy_bytes=1 << 20)
        assert 1e6 < h2d < 1e13 and 1e6 < d2h < 1e13


class TestCache:
    @pytest.fixture
    def load(self, tmp_path, monkeypatch, logged):
        """load(dtypes, **changes) -> profile; load.measured: the dtypes of each measurement; load.notes: lines."""
        whole, further = profile_module.measure, profile_module.add_dtypes

        def load(dtypes=("float32",), **changes):
            names = {field.name for field in dataclasses.fields(Wanted)}
            wanted = {name: changes.pop(name) for name in names & set(changes)}
            wanted = Wanted(**({"device": "cpu", "dtypes": dtypes, "effort": TINY} | wanted))
            arguments = {
                "cache_dir": tmp_path / "cache",
                "offload_dir": tmp_path / "offload",
                "refresh": False,
            }
            return load_or_measure(wanted, **(arguments | changes))

        def counted(function):
            def call(*args, **kwargs):
                load.measured.append(tuple(kwargs.get("dtypes") or args[1]))
                return function(*args, **kwargs)

            return call

        load.measured, load.overheads, load.notes, load.busy = [], [], logged, None
        monkeypatch.setattr("batchgen.profiler.cache.contention_reason", lambda *_: load.busy)
        monkeypatch.setattr("batchgen.profiler.cache.measure", counted(whole))
        monkeypatch.setattr("batchgen.profiler.cache.add_dtypes", counted(further))
        monkeypatch.setattr(
            "batchgen.profiler.cache.measure_overheads", lambda device: load.overheads.append(1) or OVERHEADS
        )
        return load

    def kept(self, tmp_path):
        return profile_path(tmp_path / "cache", "cpu", tmp_path / "offload")

    def without_sizes(self, profile):
        return dataclasses.replace(profile, cpu_memory_bytes=1, disk_bytes=1)

    def test_measures_once(self, load):
        first, second = load(), load()
        assert load.measured == [("float32",)] and len(load.overheads) == 1
        assert self.without_sizes(first) == self.without_sizes(second)

    def test_refresh_measures_again(self, load):
        first, second = load(), load(refresh=True)
        assert load.measured == [("float32",)] * 2 and len(load.overheads) == 2
        assert first.cpu.gemm_flops_per_s != second.cpu.gemm_flops_per_s

    def test_a_further_dtype_is_measured_by_itself_and_kept(self, load):
        first = load()
        both = load(("float32", "bfloat16"))
        assert load.measured == [("float32",), ("bfloat16",)] and len(load.overheads) == 1
        assert both.cpu.gemm_flops_per_s["float32"] == first.cpu.gemm_flops_per_s["float32"]
        assert set(load(("bfloat16",)).cpu.gemm_flops_per_s) == {"float32", "bfloat16"}
        assert len(load.measured) == 2

    def test_further_formats_are_measured_when_asked_for_and_kept(self, load):
        first = load()
        assert first.cpu.expand_bytes_per_s is None
        packed = load(weight_formats=("int4",), kv_formats=("int5",))
        assert load.measured == [("float32",)] and len(load.overheads) == 1
        assert packed.cpu.expand_bytes_per_s > 0 and "int5" in packed.cpu.decode_attention_bytes_per_s
        assert packed.cpu.gemm_flops_per_s == first.cpu.gemm_flops_per_s
        count = len(load.notes)
        both = load(weight_formats=("int4",), kv_formats=("int5", "int8"))
        assert "int8" in both.cpu.decode_attention_bytes_per_s
        count, packed = len(load.notes), both
        again = load(weight_formats=("int4",), kv_formats=("int5", "int8"))
        assert len(load.notes) == count and self.without_sizes(again) == self.without_sizes(packed)
        assert load().cpu.expand_bytes_per_s == packed.cpu.expand_bytes_per_s

    def test_products_of_8_bits_are_measured_when_asked_for_and_kept(self, load):
        first = load()
        eight = load(weight_formats=("int8",))
        assert load.measured == [("float32",)] and set(eight.cpu.gemm_flops_per_s) == {"float32", "int8"}
        assert eight.cpu.gemm_flops_per_s["float32"] == first.cpu.gemm_flops_per_s["float32"]
        count = len(load.notes)
        assert (
            self.without_sizes(load(weight_formats=("int8",))) == self.without_sizes(eight) and len(load.notes) == count
        )

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_what_cannot_be_measured_is_refused_before_anything_is(self, load):
        with pytest.raises(InputError, match="no CUDA device"):
            load(device="cuda")
        with pytest.raises(InputError, match="int3"):
            load(("int3",))
        assert not load.overheads

    def test_sizes_are_taken_afresh(self, load, monkeypatch):
        load()
        monkeypatch.setattr(profile_module, "available_memory_bytes", lambda: 1 << 20)
        monkeypatch.setattr(profile_module, "resident_bytes", lambda: 1 << 10)
        assert load().cpu_memory_bytes == (1 << 20) + (1 << 10)
        assert len(load.measured) == 1

    @pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"name": "x"}', "\x00\x01", '{"cpu": 3, "gpu": []}'])
    def test_a_corrupt_file_is_measured_again(self, load, tmp_path, content):
        load()
        self.kept(tmp_path).write_text(content)
        profile = load()
        assert len(load.measured) == 2
        assert any("measured again" in note for note in load.notes)
        assert self.without_sizes(read_profile(self.kept(tmp_path))) == self.without_sizes(profile)

    def test_a_file_cut_short_anywhere_is_measured_again(self, load, tmp_path):
        load()
        whole = self.kept(tmp_path).read_text()
        for share in (0.1, 0.5, 0.99):
            self.kept(tmp_path).write_text(whole[: int(len(whole) * share)])
            load()
        assert len(load.measured) == 4

    def test_an_unwritable_cache_is_no_obstacle(self, load, tmp_path):
        (tmp_path / "file").touch()
        profile = load(cache_dir=tmp_path / "file")
        assert profile.cpu.gemm_flops_per_s
        assert any("cannot be kept" in note for note in load.notes)
        load.notes.clear()
        load(cache_dir=Path("/proc/self"))
        assert any("cannot be kept" in note for note in load.notes)

    def test_nothing_but_the_profile_is_in_the_cache(self, load, tmp_path):
        load()
        assert list((tmp_path / "cache" / "profiles").iterdir()) == [self.kept(tmp_path)]

    def test_each_machine_and_directory_has_its_own(self, load, tmp_path, monkeypatch):
        path = self.kept(tmp_path)
        assert profile_path(tmp_path / "cache", "cpu", tmp_path / "offload" / ".." / "offload") == path
        assert profile_path(tmp_path / "cache", "cpu", tmp_path) != path
        for name, value in (("cpu_name", "another"), ("available_cores", 99)):
            with monkeypatch.context() as patch:
                patch.setattr(profile_module, name, lambda value=value: value)
                assert self.kept(tmp_path) != path

    def test_what_depends_on_no_model_is_measured_once_for_all(self, load, monkeypatch):
        monkeypatch.setattr("batchgen.profiler.cache.calibrated", lambda profile, *_: profile)
        first = load()
        load.notes.clear()
        other = load(model=profile_compute._llama(width=96, heads=6, kv_heads=2, head_dim=16))
        assert load.measured == [("float32",)] * 2 and len(load.overheads) == 1
        assert Overheads.of(other) == Overheads.of(first) == OVERHEADS
        for name in profile_module._MOVING:
            assert getattr(other, name) == getattr(first, name)
        assert not [note for note in load.notes if "disk" in note or "memory" in note]
        load(refresh=True)
        assert len(load.overheads) == 2

    def test_a_busy_machine_is_told_and_noted(self, load):
        load.busy = "other processes took 80%"
        assert load().measured["busy"] == load.busy and "80%" in load.notes[-1]
        assert load().measured["busy"] == load.busy and len(load.measured) == 1
        load.busy = None
        assert "busy" not in load(refresh=True).measured

    def test_only_a_profile_with_all_rates_is_recalled(self, load, tmp_path):
        wanted = Wanted("cpu", ("float32",), effort=TINY)
        where = {"cache_dir": tmp_path / "cache", "offload_dir": tmp_path / "offload"}
        assert recall(wanted, **where) is None
        last = load()
        assert self.without_sizes(recall(wanted, **where)) == self.without_sizes(last)
        assert recall(dataclasses.replace(wanted, kv_formats=("int5",)), **where) is None
        assert recall(dataclasses.replace(wanted, dtypes=("float16",)), **where) is None

    def test_a_profile_that_another_user_may_have_written_is_measured_again(self, load, tmp_path):
        load()
        path = self.kept(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        path.chmod(0o666)
        load()
        assert len(load.measured) == 2 and path.stat().st_mode & 0o777 == 0o600
        assert any("cannot be used" in note and "every user may write to it" in note for note in load.notes)

    def test_it_is_said_that_a_machine_is_measured_once(self, load):
        load()
        assert "once" in load.notes[0]

    def test_several_processes_at_once_leave_a_whole_file(self, measured, tmp_path):
        """Readers never see a piece of a profile while four processes write it over and over."""
        target = tmp_path / "cache" / "profiles" / "cpu.json"

        def write_over_and_over():
            for _ in range(100):
                _keep(measured, target)

        fork = multiprocessing.get_context("fork")  # which imports nothing
        writers = [fork.Process(target=write_over_and_over) for _ in range(4)]
        for process in writers:
            process.start()
        reads = 0
        while any(process.is_alive() for process in writers):
            if target.exists():
                assert read_profile(target) == measured
                reads += 1
        assert [process.exitcode for process in writers] == [0] * 4
        assert reads > 0
        assert list(target.parent.iterdir()) == [target]


def test_rates_are_a_table_of_the_hardware_vocabulary(measured):
    """The planner's look-up works on what was measured, inside and beyond the grid."""
    rates = measured.cpu.rates("decode_attention_bytes_per_s", "float32")
    assert isinstance(rates, Rates)
    assert rates.at(group=4, batch=1000, context=10**6) == rates.at(group=2, batch=4, context=64)
