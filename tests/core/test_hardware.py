"""Hardware profiles as values: interpolation, scaling, JSON, and one clear line for every field that is wrong."""

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import GIB, constant, cpu_box, gpu_box

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, Rates, read_profile

CURVE = Rates(("tokens",), ((1, 1e9), (100, 1e11), (1000, 1e11)))
SURFACE = Rates(("group", "context"), ((1, ((10, 1e9), (1000, 1e11))), (4, ((10, 4e9), (1000, 4e11)))))


class TestRates:
    def test_a_constant_is_the_same_at_every_size(self):
        assert constant(5e9).at() == constant(5e9).at(tokens=7, context=1e6) == 5e9

    def test_between_points_logarithms_are_linear(self):
        assert CURVE.at(tokens=10) == pytest.approx(1e10)
        assert CURVE.at(tokens=math.sqrt(10)) == pytest.approx(1e9 * math.sqrt(10))
        assert CURVE.at(tokens=300) == pytest.approx(1e11)

    def test_points_are_met(self):
        assert [CURVE.at(tokens=x) for x, _ in CURVE.points] == pytest.approx(
            [rate for _, rate in CURVE.points], rel=1e-12
        )

    def test_beyond_the_ends_it_is_what_it_is_there(self):
        assert [CURVE.at(tokens=x) for x in (0.001, 1e9)] == pytest.approx([1e9, 1e11], rel=1e-12)
        assert [Rates(("tokens",), ((7, 3e9),)).at(tokens=x) for x in (1, 7, 70)] == [3e9] * 3

    def test_several_axes(self):
        assert SURFACE.at(group=1, context=100) == pytest.approx(1e10)
        assert SURFACE.at(group=4, context=100) == pytest.approx(4e10)
        assert SURFACE.at(group=2, context=100) == pytest.approx(2e10)
        assert SURFACE.at(group=64, context=1) == pytest.approx(4e9)

    def test_sizes_that_are_no_axis_are_ignored(self):
        assert CURVE.at(tokens=10, width=4096) == CURVE.at(tokens=10)

    @given(st.floats(0.1, 1e4), st.floats(0.1, 1e4))
    def test_a_rising_curve_rises_everywhere(self, a, b):
        low, high = sorted((a, b))
        assert CURVE.at(tokens=low) <= CURVE.at(tokens=high) * (1 + 1e-12)

    @given(st.floats(0.5, 8), st.floats(5, 2000), st.floats(0.1, 10))
    def test_scaled_is_the_same_curve_faster(self, group, context, factor):
        at = {"group": group, "context": context}
        assert SURFACE.scaled(factor).at(**at) == pytest.approx(factor * SURFACE.at(**at))

    @pytest.mark.parametrize("rates", [CURVE, SURFACE, constant(3.5e9)])
    def test_survives_json(self, rates):
        axes = ("tokens", "group", "context")
        assert Rates.from_json(json.loads(json.dumps(rates.to_json())), "x", axes) == rates


class TestScaled:
    def test_numbers(self):
        box = gpu_box().scaled(cpu_memory_bytes=1.5, h2d_bytes_per_s=2)
        assert box.cpu_memory_bytes == 72 * GIB and isinstance(box.cpu_memory_bytes, int)
        assert box.h2d_bytes_per_s == 2.4e10 and box.d2h_bytes_per_s == 1.2e10

    def test_tables_of_the_compute_device(self):
        for box in (gpu_box(), cpu_box()):
            faster = box.scaled(gemm=2, decode_attention=3, expand=4)
            for tokens in (1, 20, 5000):
                rates = [b.compute.gemm_flops_per_s["float16"].at(tokens=tokens) for b in (box, faster)]
                assert rates[1] == pytest.approx(2 * rates[0])
            for kv_format in ("float16", "int5"):
                rates = [b.compute.decode_attention_bytes_per_s[kv_format].at() for b in (box, faster)]
                assert rates[1] == pytest.approx(3 * rates[0])
            assert faster.compute.expand_bytes_per_s == 4 * box.compute.expand_bytes_per_s
            assert faster.compute.elementwise_bytes_per_s == box.compute.elementwise_bytes_per_s

    def test_the_hosts_attention_by_itself(self):
        box = gpu_box().scaled(cpu_decode_attention=2)
        assert box.cpu.decode_attention_bytes_per_s["float16"].at() == 4e10
        assert box.gpu == gpu_box().gpu

    def test_what_is_not_supported_stays_so(self):
        box = gpu_box(gpu=replace(gpu_box().gpu, expand_bytes_per_s=None))
        assert box.scaled(expand=2).gpu.expand_bytes_per_s is None


class TestFormats:
    def test_the_two_16_bit_formats_stand_in_for_each_other(self):
        gpu = gpu_box().gpu
        assert gpu.rates("gemm_flops_per_s", "bfloat16") is gpu.gemm_flops_per_s["float16"]
        assert gpu.has_rates("gemm_flops_per_s", "bfloat16") and not gpu.has_rates("gemm_flops_per_s", "float32")

    def test_a_format_without_rates_is_told_with_those_there_are(self):
        with pytest.raises(InputError, match=r"no gemm_flops_per_s for float32 \(it has float16\): .*--dtype"):
            gpu_box().gpu.rates("gemm_flops_per_s", "float32")


@pytest.mark.parametrize(
    "box",
    [
        gpu_box(),
        gpu_box(shared_cores=True, copy_bytes_per_s=3e10, disk_write_overhead_s=2e-5),
        cpu_box(gguf_load_bytes_per_s=1e9, measured={"threads": 2}),
    ],
)
def test_json_round_trip(box, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(box.to_json()))
    assert read_profile(path) == box


def changed(box, path, value):
    """The profile as JSON values with one field set; ... leaves it out."""
    values = copy.deepcopy(json.loads(json.dumps(box.to_json())))
    inner = values
    *outer, last = path.split("/")
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return values


def complaint(values):
    with pytest.raises(InputError) as caught:
        HardwareProfile.from_json(values)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "field",
    ["name", "cpu", "cpu_memory_bytes", "disk_bytes", "dram_bytes_per_s", "disk_read_bytes_per_s", "load_bytes_per_s",
     "sampling_logits_per_s"],
)  # fmt: skip
def test_missing_fields(field):
    assert complaint(changed(gpu_box(), field, ...)) == f"hardware profile: {field} is missing"


@pytest.mark.parametrize("field", ["dram_byte_per_s", "cpu/gemm", "gpu/step_overhead"])
def test_unknown_fields(field):
    assert complaint(changed(gpu_box(), field, 1.0)) == f"hardware profile: {field.replace('/', '.')} is no field of it"


@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf, "12 GB/s", True, None, [1.0]], ids=repr)
@pytest.mark.parametrize(
    "field",
    ["dram_bytes_per_s", "cpu_memory_bytes", "gpu/gemm_flops_per_s/float16", "gpu/decode_attention_bytes_per_s/int5"],
)
def test_absurd_rates_and_sizes(field, value):
    said = complaint(changed(gpu_box(), field, value))
    assert said == f"hardware profile: {field.replace('/', '.')} must be a number above 0, not {value!r}"


@pytest.mark.parametrize("value", [-1e-3, math.nan, "fast", False, None], ids=repr)
@pytest.mark.parametrize("field", ["sweep_overhead_s", "row_overhead_s", "gpu/step_overhead_s"])
def test_absurd_overheads(field, value):
    assert field.replace("/", ".") in complaint(changed(gpu_box(), field, value))


def test_files_from_before_emulated_devices_have_none():
    old = gpu_box().to_json()
    for name in ("shared_cores", "copy_bytes_per_s", "disk_read_overhead_s", "disk_write_overhead_s"):
        del old[name]
    assert HardwareProfile.from_json(old) == gpu_box()


@pytest.mark.parametrize("value", [1, 0, "yes", None], ids=repr)
def test_shared_cores_is_true_or_false(value):
    said = complaint(changed(gpu_box(), "shared_cores", value))
    assert said == f"hardware profile: shared_cores must be true or false, not {value!r}"


def test_no_overhead_is_none():
    assert HardwareProfile.from_json(changed(gpu_box(), "sweep_overhead_s", 0)).sweep_overhead_s == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"axes": ["tokens"], "points": [[4, 2e9], [1, 2e9]]}, "must ascend"),
        ({"axes": ["tokens"], "points": [[4, 2e9], [4, 3e9]]}, "must ascend"),
        ({"axes": ["tokens"], "points": [[1, 2e9], [0, 2e9]]}, "(a size) must be a number above 0, not 0"),
        ({"axes": ["tokens"], "points": [[1, 2e9], [4, -2]]}, "must be a number above 0, not -2"),
        ({"axes": ["tokens"], "points": [1, 2e9]}, "list of [size, rate] pairs"),
        ({"axes": ["tokens"], "points": [[1, 2e9, 3]]}, "list of [size, rate] pairs"),
        ({"axes": ["tokens"], "points": {"1": 2e9}}, "list of [size, rate] pairs"),
        ({"axes": ["tokens"], "points": []}, "list of [size, rate] pairs"),
        ({"axes": ["width", "tokens"], "points": [[1, 2e9]]}, "list of [size, rate] pairs"),
        ({"axes": ["tokens"]}, "must be a number, or have axes and points"),
        ({"axes": "tokens", "points": [[1, 2e9]]}, "must be a number, or have axes and points"),
        ({"axes": ["token"], "points": [[1, 2e9]]}, "has the axes token; it may have width, tokens"),
        ({"axes": ["context"], "points": [[1, 2e9]]}, "has the axes context; it may have width, tokens"),
        ({"axes": [["tokens"]], "points": [[1, 2e9]]}, "it may have width, tokens"),
        ({"axes": ["tokens", "tokens"], "points": [[1, [[1, 2e9]]]]}, "it may have width, tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tables_of_the_wrong_form(table, words):
    said = complaint(changed(gpu_box(), "gpu/gemm_flops_per_s/float16", table))
    assert said.startswith("hardware profile: ") and "gpu.gemm_flops_per_s.float16" in said and words in said


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gpu_memory_bytes", ..., "'gpu box' needs gpu_memory_bytes"),
        ("h2d_bytes_per_s", None, "'gpu box' needs h2d_bytes_per_s"),
        ("gpu", None, "'gpu box' without a gpu must not have gpu_memory_bytes"),
        ("gpu", ..., "'gpu box' without a gpu must not have gpu_memory_bytes"),
        ("gpu", "an A100", "gpu must be an object of rates"),
        ("cpu", [], "cpu must be an object of rates"),
        ("cpu", None, "cpu must be an object of rates"),
        ("gpu/gemm_flops_per_s", 1e12, "gpu.gemm_flops_per_s must map dtypes to rates"),
        ("gpu/gemm_flops_per_s", ..., "needs gpu.gemm_flops_per_s"),
        ("gpu/elementwise_bytes_per_s", {}, "needs gpu.elementwise_bytes_per_s"),
        ("gpu/expand_bytes_per_s", "slow", "gpu.expand_bytes_per_s must be a number above 0, not 'slow'"),
        ("name", 5, "name must be text, not 5"),
        ("name", None, "name must be text, not None"),
        ("measured", "yesterday", "measured must be an object"),
        ("sources", ["a datasheet"], "sources must be an object"),
    ],
)
def test_fields_that_do_not_go_together(field, value, words):
    assert words in complaint(changed(gpu_box(), field, value))


def test_a_machine_without_gpu_has_no_gpu_memory():
    said = complaint(changed(cpu_box(), "gpu_memory_bytes", 12 * GIB))
    assert said == "hardware profile 'cpu box' without a gpu must not have gpu_memory_bytes"
    said = complaint(changed(cpu_box(), "cpu/decode_attention_bytes_per_s", {}))
    assert said == "hardware profile 'cpu box' needs cpu.decode_attention_bytes_per_s"


@pytest.mark.parametrize("values", [[1], "t4", None, 5], ids=repr)
def test_something_else_altogether(values):
    assert "a hardware profile is a JSON object" in complaint(values)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[]", "a hardware profile is a JSON object"),
        (b"{}", "name is missing"),
    ],
)
def test_files_that_hold_no_profile(tmp_path, content, words):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_profile(path)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read: No such file"):
        read_profile(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_profile(tmp_path)
