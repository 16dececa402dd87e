"""The shipped rates of kinds of CPUs."""

import itertools
import json
import math
from dataclasses import replace
from importlib import resources

import pytest

from batchgen.core.dtypes import BLOCK_FORMATS, INT8, KV_CODE_BITS, matmul_key
from batchgen.core.hardware import HardwareProfile
from batchgen.core.knowledge import DECODE, FEW, MANY, OVERHEADS, SPEED, Knowledge, weights_name
from batchgen.profiler import kinds
from batchgen.profiler.kinds import first_knowledge, rates_of_kind, table_of_kind

SETS = ("amx", "zen4", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon", "neon_dot", "scalar")
SIZES = {"cpu_memory_bytes": 1 << 30, "disk_bytes": 1 << 30}
FOLDER = resources.files("batchgen.profiler") / "kinds"


@pytest.fixture
def machine(monkeypatch):
    """machine(instruction set, cores, ids) -> this machine's rates by its kind, with a knowledge."""

    def make(isa="avx2", cores=2, ids=("", 0, 0), known=None):
        monkeypatch.setattr(kinds, "instruction_set", lambda: isa)
        monkeypatch.setattr(kinds, "available_cores", lambda: cores)
        monkeypatch.setattr(kinds, "_cpu_ids", lambda: ids)
        return rates_of_kind(known or first_knowledge(table_of_kind()), None, SIZES)

    return make


def gemm(profile, tokens, key="float32"):
    return profile.cpu.rates("gemm_flops_per_s", key).at(width=2048, tokens=tokens)


@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set_has_all_rates_that_a_plan_needs(machine, isa):
    cpu = machine(isa).cpu
    for dtype, name in itertools.product(("bfloat16", "float16", "float32"), (None, INT8, *BLOCK_FORMATS)):
        for as_stored in (False, True):
            assert cpu.has_rates("gemm_flops_per_s", matmul_key(name or dtype, dtype, as_stored=as_stored))
    for kv_format in ("bfloat16", "float16", "float32", *KV_CODE_BITS):
        assert cpu.has_rates("decode_attention_bytes_per_s", kv_format)
        assert cpu.has_rates("prefill_attention_flops_per_s", kv_format)
        assert cpu.has_rates("elementwise_bytes_per_s", kv_format)
    assert cpu.expand_bytes_per_s > 0


@pytest.mark.parametrize("name", [entry.name for entry in FOLDER.iterdir() if entry.name.endswith(".json")])
def test_every_table_says_where_its_numbers_come_from(name):
    profile = HardwareProfile.from_json(json.loads((FOLDER / name).read_text(encoding="utf-8")))
    assert "benchmarks/kind_of_cpu.py" in profile.sources["cpu"]
    named = {field for field in profile.to_json() if field.endswith(("_per_s", "_s")) and getattr(profile, field)}
    assert named - {"dram_bytes_per_s"} <= set(profile.sources)


def test_products_of_many_tokens_grow_with_the_cores_and_what_memory_bounds_only_to_a_point(machine):
    one, two, many = (machine(cores=cores) for cores in (1, 2, 64))
    assert gemm(two, 1024) == pytest.approx(2 * gemm(one, 1024))
    assert gemm(many, 1024) == pytest.approx(64 * gemm(one, 1024))
    assert gemm(many, 1) == pytest.approx(8 * gemm(one, 1))
    assert many.dram_bytes_per_s == pytest.approx(8 * one.dram_bytes_per_s)


def test_what_is_known_changes_the_rates_of_its_kind_of_work(machine):
    known = Knowledge("t", means={SPEED: math.log(2), FEW: math.log(3), DECODE: math.log(5), OVERHEADS: math.log(7)})
    before, after = machine(), machine(known=known)
    assert gemm(before, 1024) / gemm(after, 1024) == pytest.approx(2)
    assert gemm(before, 1) / gemm(after, 1) == pytest.approx(6)
    assert 2 < gemm(before, 16) / gemm(after, 16) < 6
    tables = [p.cpu.decode_attention_bytes_per_s["float32"].at(group=4, batch=8, context=256) for p in (before, after)]
    assert tables[0] / tables[1] == pytest.approx(10)
    assert after.cpu.step_overhead_s / before.cpu.step_overhead_s == pytest.approx(14)
    assert after.knowledge == known
    one = replace(known, means={weights_name("q4_0 float32"): math.log(2)})
    assert gemm(before, 64) == gemm(machine(known=one), 64)
    assert gemm(before, 64, "q4_0 float32") == pytest.approx(2 * gemm(machine(known=one), 64, "q4_0 float32"))


def test_a_set_without_a_table_is_less_certain_than_its_stand_in(machine):
    machine("avx512")
    tabled = first_knowledge(table_of_kind())
    machine("avx512_vnni")
    parts = {SPEED: 1.0, MANY: 1.0}
    assert first_knowledge(table_of_kind()).deviation(parts) > tabled.deviation(parts)


def test_a_cpu_that_was_measured_elsewhere_has_its_own_factors(machine):
    other = machine("avx512_bf16", ids=("AuthenticAMD", 26, 2))
    assert gemm(other, 1024, "bfloat16") > 1.5 * gemm(machine("avx512_bf16"), 1024, "bfloat16")


def test_this_machine_has_a_kind():
    assert gemm(rates_of_kind(first_knowledge(table_of_kind()), None, SIZES), 64) > 0
