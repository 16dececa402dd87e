"""Emulated accelerators as hardware, and what the planner expects of them against what the runtime does."""

import json
import time
from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box
from tiered import CPU, make_parts, make_policy, make_requests
from timing import undisturbed

from batchgen.core.device import Device, parse_device
from batchgen.core.dtypes import INT4, INT5, INT8
from batchgen.core.hardware import HardwareProfile
from batchgen.core.workload import Workload
from batchgen.engine.engine import Engine
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.costs import head_lanes, layer_lanes, moved_bytes, phase_matmul_s
from batchgen.planner.phases import Phase, phases_of
from batchgen.planner.placement import Counts
from batchgen.planner.problem import Problem
from batchgen.planner.search import search
from batchgen.planner.search_space import search_space
from batchgen.profiler.emulated import copy_overhead_s, dedicated_core_profile, emulated_profile, piece_times
from batchgen.runtime.memory.transfers import Link

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = "float32"
EMULATED = Device("emulated", GIB)


def box(**changes):
    """A CPU with rates in fp32, int5 and int8."""
    cpu = cpu_box().cpu
    tables = {
        name: {
            FP32: getattr(cpu, name)["float16"],
            INT5: getattr(cpu, name)["float16"].scaled(0.5),
            INT8: getattr(cpu, name)["float16"].scaled(0.7),
        }
        for name in ("prefill_attention_flops_per_s", "decode_attention_bytes_per_s", "elementwise_bytes_per_s")
    }
    cpu = replace(cpu, gemm_flops_per_s={FP32: cpu.gemm_flops_per_s["float16"]}, **tables)
    return cpu_box(cpu=cpu, **changes)


def emulated_box(**changes):
    """An emulated GPU beside it, not measured."""
    cpu = box()
    values = {"gpu": cpu.cpu, "gpu_memory_bytes": 8 * GIB, "h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 2e9}
    return replace(cpu, **(values | {"shared_cores": True, "copy_bytes_per_s": 2e10} | changes))


class TestProfile:
    @undisturbed
    def test_the_cpus_rates_behind_throttled_links(self):
        cpu = box(cpu_memory_bytes=8 * GIB)
        started = time.perf_counter()
        profile = emulated_profile(cpu, parse_device("emulated:gpu-memory=512MiB,h2d=200MB/s,d2h=50MB/s"))
        assert time.perf_counter() - started < 5
        assert profile.gpu.gemm_flops_per_s == cpu.cpu.gemm_flops_per_s
        assert profile.gpu_memory_bytes == 512 << 20
        assert profile.cpu_memory_bytes == 8 * GIB - (512 << 20)
        # A copy is shorter by what the one before lasted too long.
        assert 0.5 * 2e8 < profile.h2d_bytes_per_s <= 1.01 * 2e8
        assert 0.5 * 5e7 < profile.d2h_bytes_per_s <= 1.01 * 5e7
        assert profile.copy_bytes_per_s > profile.h2d_bytes_per_s
        assert profile.shared_cores and "emulated" in profile.name
        assert HardwareProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile

    @undisturbed
    def test_links_that_are_not_throttled_are_as_fast_as_copies(self):
        assert min(piece_times(None)) < min(piece_times(1e8)) == pytest.approx(1e-8, rel=0.3)

    @undisturbed
    def test_handing_steps_from_lane_to_lane_takes_time(self):
        profile = emulated_profile(box(), EMULATED)
        assert 1e-6 < profile.cpu.waking_overhead_s - box().cpu.waking_overhead_s < 0.1, "for CPU attention"
        assert profile.gpu == box().cpu, "what stays on its lane does not wait for it"


class TestDedicatedCore:
    DEVICE = parse_device("emulated:gpu-memory=512MiB,h2d=2GB/s,slowdown=4,cpu-slowdown=2")

    def test_a_copy_takes_longer_than_its_bytes(self, monkeypatch):
        monkeypatch.setattr(Link, "scatter", lambda *_: time.sleep(2e-3))
        bytes_s = 8 * 512 * 4 / 2e8
        assert copy_overhead_s(EMULATED) >= 2e-3
        assert copy_overhead_s(Device("emulated", GIB, 2e8, 2e8)) >= 2e-3 - bytes_s

    def test_copies_over_a_slow_link_are_few_bytes(self, monkeypatch):
        """Else measuring them would take minutes."""
        sizes = set()
        monkeypatch.setattr(Link, "scatter", lambda self, target, index, source: sizes.add(source.nbytes))
        copy_overhead_s(Device("emulated", GIB, 1e5, 1e5))
        assert max(sizes) <= 1e5 * 1e-3

    def test_rates_of_its_core_slowed_down(self):
        """Everything the device computes takes as many times as long.

        Of the CPU's own rates attention alone is another.
        """
        cpu = box(cpu_memory_bytes=8 * GIB)
        core = cpu.scaled(gemm=0.5, decode_attention=0.5, sampling_logits_per_s=0.5)
        profile = emulated_profile(cpu, self.DEVICE, core)
        assert not profile.shared_cores and profile.copy_bytes_per_s is None
        for name in ("gemm_flops_per_s", "prefill_attention_flops_per_s", "elementwise_bytes_per_s"):
            for key, table in getattr(core.cpu, name).items():
                assert getattr(profile.gpu, name)[key] == table.scaled(1 / 4), name
        attention = "decode_attention_bytes_per_s"
        for key, table in getattr(cpu.cpu, attention).items():
            assert getattr(profile.cpu, attention)[key] == table.scaled(1 / 2)
            assert getattr(profile.gpu, attention)[key] == getattr(core.cpu, attention)[key].scaled(1 / 4)
        assert profile.sampling_logits_per_s == core.sampling_logits_per_s, "the host samples"
        assert profile.gpu.step_overhead_s == 4 * core.cpu.step_overhead_s
        slept = dedicated_core_profile(profile, self.DEVICE, core, 1e-4)
        assert slept.gpu.waking_overhead_s == pytest.approx(4e-4), "after a sleep its core is slower"
        assert slept.cpu.waking_overhead_s - profile.cpu.waking_overhead_s == pytest.approx(2e-4)
        assert HardwareProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def problem(model, hardware, workload, **changes):
    budgets = {"cpu": hardware.cpu_memory_bytes, "disk": hardware.disk_bytes}
    if hardware.gpu:
        budgets["gpu"] = hardware.gpu_memory_bytes
    values = {"compute_format": FP32, "weight_formats": (FP32,), "kv_formats": (FP32,), "budgets": budgets}
    return Problem(hardware=hardware, model=model, workload=workload, **(values | changes))


@pytest.fixture(scope="module")
def llama(tiny_models):
    path = tiny_models("llama", num_key_value_heads=2)[0]
    return path, read_config(resolve_model(str(path)))


class TestSharedCores:
    PHASE = Phase(1, 100, 2, 16, 60)

    def lanes(self, config, hardware, batches, **changes):
        inputs, _ = next(search_space(problem(config, hardware, Workload.uniform(16, 40, 20), **changes)))
        inputs = replace(inputs, num_gpu_batches=batches, max_num_seqs=16)
        layers = dict.fromkeys(config.layer_tensors, (config.num_layers, 0, 0))
        at = Counts(layers, {"gpu": 8, "cpu": 8}, (batches, 0), 1).placement(inputs)
        lanes = layer_lanes(inputs, self.PHASE, at)
        return lanes, max(lanes.values()), moved_bytes(inputs, self.PHASE, at)

    @pytest.mark.parametrize("batches", [1, 2])
    def test_compute_attention_and_copies_add_up(self, llama, batches):
        lanes, seconds, moved = self.lanes(llama[1], emulated_box(), batches)
        assert lanes["cpu_attention"] > 0 and moved["h2d"] > 0 and moved["d2h"] > 0
        together = lanes["compute"] + lanes["cpu_attention"] + (moved["h2d"] + moved["d2h"]) / 2e10
        assert seconds >= lanes["cores"] == pytest.approx(together)
        apart = self.lanes(llama[1], emulated_box(shared_cores=False), batches)
        assert "cores" not in apart[0] and apart[1] < seconds

    def test_copies_of_a_real_accelerator_take_no_cores(self, llama):
        lanes, _, _ = self.lanes(llama[1], emulated_box(copy_bytes_per_s=None), 2)
        assert lanes["cores"] == pytest.approx(lanes["compute"] + lanes["cpu_attention"])

    def test_the_head_needs_cores_too(self, llama):
        inputs, phases = next(search_space(problem(llama[1], emulated_box(), Workload.uniform(16, 40, 20))))
        layers = everywhere(llama[1], llama[1].num_layers, 0, 0)
        at = Counts(layers, {"gpu": inputs.max_num_seqs}, (0, inputs.num_gpu_batches), 0).placement(inputs)
        lanes = head_lanes(inputs, phases[0], at)
        assert lanes["cores"] == pytest.approx(lanes["compute"] + inputs.head_bytes / 2e10)

    def test_the_search_knows(self, llama):
        """Nothing is gained from the CPU attending beside a device that is the CPU."""
        workload = Workload.uniform(64, 40, 20)
        times = [search(problem(llama[1], emulated_box(shared_cores=s), workload)).seconds for s in (True, False)]
        assert times[0] >= times[1]


def everywhere(config, gpu, cpu, disk):
    return dict.fromkeys(config.layer_tensors, (gpu, cpu, disk))


NUM_SEQS, PROMPT, OUTPUT = 16, 40, 33
CASES = {
    "weights from host": (EMULATED, {"weight_layers": (0, 3, 0)}),
    "weights from disk": (EMULATED, {"weight_layers": (1, 0, 2)}),
    "weights from disk to the CPU": (CPU, {"weight_layers": (0, 1, 2)}),
    "4-bit weights": (EMULATED, {"weight_layers": (0, 3, 0), "weight_format": INT4}),
    "8-bit weights": (EMULATED, {"weight_layers": (0, 3, 0), "weight_format": INT8}),
    "streamed": (EMULATED, {"kv_seqs": {"streamed": 8}}),
    "streamed in two batches": (EMULATED, {"kv_seqs": {"streamed": 8}, "gpu_batch_size": 4, "num_gpu_batches": 2}),
    "streamed in 5 bits": (EMULATED, {"kv_seqs": {"streamed": 8}, "kv_format": INT5}),
    "streamed in 8 bits": (EMULATED, {"kv_seqs": {"streamed": 8}, "kv_format": INT8}),
    "attended to by the CPU": (EMULATED, {"kv_seqs": {"cpu": 8}}),
    "attended to by the CPU in 5 bits": (EMULATED, {"kv_seqs": {"cpu": 8}, "kv_format": INT5}),
    "KV on disk": (EMULATED, {"kv_seqs": {"disk": 8}}),
    "5-bit KV on disk": (EMULATED, {"kv_seqs": {"disk": 8}, "kv_format": INT5}),
    "8-bit KV on disk": (EMULATED, {"kv_seqs": {"disk": 8}, "kv_format": INT8}),
    "KV on disk for the CPU": (CPU, {"kv_seqs": {"disk": 8}}),
    "half of it": (EMULATED, {"kv_seqs": {"gpu": 4, "streamed": 4}}),
    "activations and head": (EMULATED, {"activation_batches": (0, 1), "head_tier": "cpu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_predicted_as_they_move(name, llama, tmp_path_factory):
    """Over a whole job, by lane: what the planner charges against what the executor counts."""
    path, config = llama
    device, changes = CASES[name]
    changes = dict(changes)
    if "weight_layers" in changes:
        changes["weight_layers"] = everywhere(config, *changes["weight_layers"])
    policy = make_policy(path, device, share_prefixes=False, max_num_batched_tokens=10_000, **changes)
    prompts = [[5 + (i * 31 + j) % 400 for j in range(PROMPT)] for i in range(NUM_SEQS)]
    parts = make_parts(path, device, policy, tmp_path_factory.mktemp("offload"))
    with Engine.from_parts(parts) as engine:
        assert all(c.error is None for c in engine.generate(make_requests(prompts, [OUTPUT] * NUM_SEQS)))
        parts.executor.lanes.drain()
        moved = parts.executor.bytes_moved
    workload = Workload.uniform(NUM_SEQS, PROMPT, OUTPUT)
    hardware = emulated_box() if device.accelerated else box()
    p = problem(
        config,
        hardware,
        workload,
        weight_formats=(policy.weight_format,),
        kv_formats=(policy.kv_format,),
        max_num_seqs=8,
        num_gpu_batches=policy.num_gpu_batches,
        max_num_batched_tokens=policy.max_num_batched_tokens,
    )
    inputs = next(s for s, _ in search_space(p) if s.admission == "continuous")
    phases = phases_of(workload, "continuous", 8, 10_000)
    counts = Counts(policy.weight_layers, policy.kv_seqs, policy.activation_batches, int(policy.head_tier == "gpu"))
    at = counts.placement(inputs)
    expected: dict[str, float] = {}
    for phase in phases:
        for lane, size in moved_bytes(inputs, phase, at).items():
            expected[lane] = expected.get(lane, 0.0) + phase.sweeps * config.num_layers * size
        if device.accelerated:
            head_s = head_lanes(inputs, phase, at)["h2d"]
            expected["h2d"] += phase.sweeps * head_s * hardware.h2d_bytes_per_s
    assert any(size for lane, size in moved.items())
    for lane, size in moved.items():
        assert expected[lane] == pytest.approx(size, rel=0.12, abs=1000), lane


def test_packing_costs_what_it_was_measured_to_cost(llama):
    """Expanding weights, packing new KV, expanding KV for prompts: each makes a sweep longer by its own rate."""
    config = llama[1]

    def compute_s(weight_format, kv_format, hardware=None):
        p = problem(
            config,
            hardware or box(),
            Workload.uniform(16, 40, 20),
            weight_formats=(weight_format,),
            kv_formats=(kv_format,),
        )
        inputs, _ = next(search_space(p))
        at = Counts(everywhere(config, 0, config.num_layers, 0), {"cpu": inputs.max_num_seqs}, (0, 1), 0).placement(
            inputs
        )
        return layer_lanes(inputs, Phase(1, 100, 2, 0, 0), at)["compute"]

    plain = compute_s(FP32, FP32)
    assert compute_s(INT4, FP32) - plain == pytest.approx(config.params_per_layer * 4 / 1e10)
    packed = box()
    tables = ("prefill_attention_flops_per_s", "elementwise_bytes_per_s")
    without = replace(packed, cpu=replace(packed.cpu, **{t: {FP32: getattr(packed.cpu, t)[FP32]} for t in tables}))
    for packing in (INT5, INT8):
        assert compute_s(FP32, packing, without) == pytest.approx(plain)
        assert compute_s(FP32, packing) > plain * 1.01


def test_products_of_8_bits_cost_what_they_were_measured_to_cost(llama):
    """Where they were not measured, what the dtype's own do."""
    config = llama[1]

    def seconds(weight_format, hardware):
        p = problem(config, hardware, Workload.uniform(16, 40, 20), weight_formats=(weight_format,))
        return phase_matmul_s(next(search_space(p))[0], Phase(1, 100, 2, 0, 0))

    plain = seconds(FP32, box())
    assert seconds(INT8, box()) == plain
    cpu = box().cpu
    faster = cpu.gemm_flops_per_s | {INT8: cpu.gemm_flops_per_s[FP32].scaled(3)}
    assert seconds(INT8, replace(box(), cpu=replace(cpu, gemm_flops_per_s=faster))) == pytest.approx(plain / 3)
