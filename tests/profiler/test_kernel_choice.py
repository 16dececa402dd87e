"""What each shape runs on: chosen by what was timed, not by its name, and not by noise."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.kernel_choice import TORCH, KernelChoice, Measured
from batchgen.ops import cpp, dispatch, reference
from batchgen.profiler import kernel_choice
from batchgen.profiler.compute import _llama
from batchgen.profiler.kernel_choice import Kernels, Shapes, best_seconds, choose, measure_kernels, rows_depend

MODEL = dataclasses.replace(_llama(width=64, heads=4, kv_heads=2, head_dim=16, inner=96), vocab_size=200)
ONE = Shapes((MODEL,), (MODEL,))
# All that this machine can run, what others have as its plain twin.
SETS = (*cpp.plain_twins(), *cpp.instruction_sets())
KEYS = ["128x64 bfloat16", "64x64 bfloat16", "192x64 bfloat16", "64x96 bfloat16", "200x64 bfloat16"]
HEADS = "4/2 heads of 16 bfloat16"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_SPREAD_BYTES", 1 << 12)


def told(seconds):
    """A timer that runs nothing: seconds(candidate, point), 1 where that is None."""
    return lambda candidate, point, trial: seconds(candidate, point) or 1.0


def measured(seconds, candidates=(*SETS, TORCH), dtype="bfloat16", **options):
    return measure_kernels(ONE, dtype, Kernels(candidates, told(seconds)), **options)


class TestChoose:
    def test_the_first_by_name_unless_another_is_faster_by_more_than_noise(self):
        def rates(second):
            return {"amx": {"16": 100.0, "512": 100.0}, "avx512": {"16": second, "512": second}}

        assert choose(rates(104.9), {}) == "amx"
        assert choose(rates(105.1), {}) == "avx512"
        assert choose(rates(105.1), {"avx512": "refused"}) == "amx"

    def test_all_that_was_timed_counts_alike(self):
        rates = {"amx": {"16": 50.0, "512": 400.0}, "avx512": {"16": 100.0, "512": 150.0}}
        assert choose(rates, {}) == "amx"
        assert choose(rates | {"amx": {"16": 50.0, "512": 200.0}}, {}) == "avx512"

    def test_what_was_given_up_on_is_not_chosen(self):
        assert choose({"amx": {"16": 1.0, "512": 1.0}, "scalar": {"16": 2.0}}, {}) == "amx"

    def test_beside_one_that_is_refused_those_that_were_given_up_on_are_left(self):
        rates = {"amx": {"16": 1.0}, "scalar": {"16": 2.0}, TORCH: {"16": 9.0, "512": 9.0}}
        assert choose(rates, {TORCH: "refused"}) == "scalar"


@pytest.mark.parametrize("fastest", SETS)
def test_each_candidate_is_chosen_where_it_is_the_fastest(fastest):
    choice = measured(lambda candidate, point: 0.5 if candidate == fastest else None)
    assert choice.names() == dict.fromkeys([*KEYS, HEADS], fastest)
    assert set(choice.linear["64x64 bfloat16"].rates) == {*SETS, TORCH} and set(choice.attention[HEADS].rates) == set(
        SETS
    )
    work = 2 * 128 * 64 * 64
    assert choice.linear["64x64 bfloat16"].rates[fastest]["128 tokens"] == pytest.approx(2 * work, rel=1e-3)
    assert ONE.keys("bfloat16") == list(choice.names())


PACKED = dataclasses.replace(ONE, formats=tuple(BLOCK_FORMATS))


def test_rows_of_blocks_run_on_what_is_fastest_at_them_whatever_numbers_run_on():
    """Sets multiply codes in other ways than numbers: one that is fast at these may be slow at those."""
    numbers = measured(lambda candidate, point: 0.5 if candidate == SETS[-1] else 1.0)
    timer = told(lambda candidate, point: 0.5 if candidate == SETS[0] else 1.0)
    choice = measure_kernels(PACKED, "bfloat16", Kernels((*SETS, TORCH), timer), numbers)
    assert set(PACKED.keys("bfloat16")) == set(choice.names())
    assert {choice.linear_isa(64, 64, "bfloat16"), choice.linear_isa(192, 64, "bfloat16")} == {SETS[-1]}
    assert {choice.blocks_isa(name, "bfloat16") for name in BLOCK_FORMATS} == {SETS[0]}
    assert {choice.blocks_isa(name, "float32") for name in BLOCK_FORMATS} == {choice.default}, "not measured"


def test_a_moment_in_which_the_first_is_slow_does_not_decide():
    calls = []

    def seconds(candidate, point):
        calls.append(candidate)
        slow = candidate == SETS[0] and calls.count(candidate) <= 3 * 3  # a whole series of the first shape
        return 1.5 if slow else 1.0

    assert set(measured(seconds).names().values()) == {SETS[0]}


def test_what_is_far_slower_is_not_timed_further():
    timed = []
    choice = measured(
        lambda candidate, point: timed.append((candidate, point)) or (9.0 if candidate == SETS[-1] else 1.0)
    )
    assert {point for candidate, point in timed if candidate == SETS[-1]} == {"16 tokens", "prefill of 512 tokens"}
    assert set(choice.names().values()) == {SETS[0]}


def test_what_is_known_is_not_timed_again():
    known = KernelChoice({"64x64 bfloat16": Measured("scalar")}, {HEADS: Measured("scalar")}, "avx2")
    choice = measured(lambda candidate, point: None, known=known)
    assert choice.names() == dict.fromkeys(KEYS, SETS[0]) | {"64x64 bfloat16": "scalar", HEADS: "scalar"}
    assert measured(lambda candidate, point: pytest.fail("timed"), known=choice) == choice


class TestTorch:
    @staticmethod
    def fast(candidate, point):
        return 0.5 if candidate == TORCH else None

    def test_is_used_only_if_rows_do_not_depend_on_each_other(self, monkeypatch):
        monkeypatch.setattr(kernel_choice, "rows_depend", lambda weight: weight.shape == (64, 96))
        choice = measured(self.fast, dtype="float32")
        names = [key.replace("bfloat16", "float32") for key in KEYS]
        expected = dict.fromkeys(names, TORCH) | {
            "64x96 float32": SETS[0],
            HEADS.replace("bfloat16", "float32"): SETS[0],
        }
        assert choice.names() == expected
        refused = choice.linear["64x96 float32"]
        assert refused.refused == {TORCH: kernel_choice.DEPENDS_ON_ROWS} and refused.rates[TORCH]

    def test_does_not_round_logits(self, monkeypatch):
        monkeypatch.setattr(kernel_choice, "rows_depend", lambda weight: False)
        choice = measured(self.fast)
        assert choice.linear["200x64 bfloat16"].refused == {TORCH: kernel_choice.ROUNDS_LOGITS}
        assert choice.linear["64x64 bfloat16"].isa == TORCH

    def test_is_not_used_unchecked(self, monkeypatch):
        monkeypatch.setattr(kernel_choice, "_CHECKED_BYTES", 100)
        monkeypatch.setattr(kernel_choice, "rows_depend", lambda weight: pytest.fail("checked"))
        choice = measured(self.fast, dtype="float32")
        assert {m.refused[TORCH] for m in choice.linear.values()} == {kernel_choice.NOT_CHECKED}

    def test_the_next_best_is_taken_instead(self, monkeypatch):
        monkeypatch.setattr(kernel_choice, "rows_depend", lambda weight: True)
        choice = measured(lambda candidate, point: {TORCH: 0.4, "scalar": 0.5}.get(candidate), dtype="float32")
        assert set(choice.names().values()) == {"scalar"}

    def test_the_check_finds_what_depends_on_the_number_of_rows_or_on_their_place(self):
        weight = torch.randn(8, 16)
        by_itself = lambda x, w: torch.stack([F.linear(row, w) for row in x])  # noqa: E731
        assert not rows_depend(weight, by_itself)
        assert rows_depend(weight, lambda x, w: by_itself(x, w) * (1 + 1e-6 * (len(x) == 63)))
        last = torch.zeros(512, 1)
        last[255] = 1e-5
        assert rows_depend(weight, lambda x, w: by_itself(x, w) + last[: len(x)])

    @pytest.mark.parametrize("activation", [None, *cpp.GATED])
    def test_in_parts_is_as_at_once(self, activation):
        x, weight = torch.randn(dispatch.TORCH_ROWS + 7, 8), torch.randn(12, 8)
        options = {"activation": activation, "residual": None, "out": None, "out_dtype": None}
        found = dispatch._in_parts(x, weight, None, **options)
        torch.testing.assert_close(found, reference.linear(x, weight, None, **options))

    def test_never_gets_more_rows_than_are_checked(self, monkeypatch):
        """In larger numbers its products may be blocked in another way."""
        counts, rows, linear = [], dispatch.TORCH_ROWS, F.linear

        def by_rows(x, w, bias=None):
            counts.append(len(x))
            return torch.stack([linear(row, w, bias) for row in x]) * (1 + (len(x) > rows))

        monkeypatch.setattr(F, "linear", by_rows)
        x, residual = torch.randn(2 * rows + 3, 16), torch.randn(2 * rows + 3, 8)
        weight, bias = dispatch.bind_weight(torch.randn(16, 16), TORCH), torch.randn(16)
        assert not rows_depend(weight.data, by_rows)
        options = {"activation": "silu_mul", "out_dtype": torch.float64}
        whole = dispatch.linear(x, weight, bias, residual=residual, **options)
        for some in (slice(0, 1), slice(rows - 1, rows + 1), slice(2 * rows, 2 * rows + 3)):
            assert torch.equal(dispatch.linear(x[some], weight, bias, residual=residual[some], **options), whole[some])
        assert max(counts) == rows


@pytest.mark.parametrize("shapes", [ONE, PACKED])
def test_by_the_clock(shapes):
    """The work that is timed is that of jobs, and takes time."""
    choice = measure_kernels(shapes, "bfloat16", Kernels((*cpp.instruction_sets(), TORCH), best_seconds))
    assert list(choice.names()) == shapes.keys("bfloat16") and choice.default == cpp.instruction_sets()[0]
    for own in (*choice.linear.values(), *choice.attention.values()):
        assert own.isa in own.rates
        assert all(1e5 < rate < 1e15 and math.isfinite(rate) for rates in own.rates.values() for rate in rates.values())


@pytest.mark.parametrize("key", ["q4_0 bfloat16", "fp8_g32 float32"])
def test_torch_does_not_read_rows_of_blocks(key):
    with pytest.raises(ValueError, match=f"'{key}' must name an instruction set"):
        KernelChoice({key: Measured(TORCH)})


def test_a_choice_is_the_same_after_json():
    choice = measure_kernels(PACKED, "bfloat16", Kernels((*SETS, TORCH), told(lambda candidate, point: None)))
    assert KernelChoice.from_json(choice.to_json()) == choice
