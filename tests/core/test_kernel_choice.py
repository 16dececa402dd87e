"""A choice of kernels out of a file: read whole, or refused in a line before a job starts."""

import json

import pytest

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, read_profile
from batchgen.core.kernel_choice import KernelChoice, Measured
from batchgen.profiler.shipped import shipped_profile

HEADS = "4/2 heads of 16 bfloat16"
CHOICE = KernelChoice(
    {"64x64 bfloat16": Measured("torch", {"torch": {"16 tokens": 5e9}}, {"amx": "why"})},
    {HEADS: Measured("scalar")},
    "avx2",
)
REFUSED = {
    "torch attends": {"attention": {HEADS: {"isa": "torch"}}},
    "torch by default": {"default": "torch"},
    "rates that are text": {"linear": {"8x8 float32": {"isa": "avx2", "rates": {"avx2": {"16 tokens": "fast"}}}}},
    "rates that are a list": {"linear": {"8x8 float32": {"isa": "avx2", "rates": [1]}}},
    "an infinite rate": {"linear": {"8x8 float32": {"isa": "avx2", "rates": {"avx2": {"16 tokens": float("inf")}}}}},
    "refused without a reason": {"linear": {"8x8 float32": {"isa": "avx2", "refused": {"torch": None}}}},
    "a set that is no text": {"linear": {"8x8 float32": {"isa": 7}}},
    "no set": {"linear": {"8x8 float32": {}}},
    "another field": {"linears": {}},
    "a list": {"attention": []},
}  # fmt: skip


def test_it_is_the_same_after_json():
    assert KernelChoice.from_json(json.loads(json.dumps(CHOICE.to_json()))) == CHOICE
    assert KernelChoice.from_json({}) == KernelChoice()


@pytest.mark.parametrize("why", REFUSED)
def test_refused_when_read(why, tmp_path):
    values = CHOICE.to_json() | REFUSED[why]
    with pytest.raises(InputError, match="not a choice of kernels") as caught:
        KernelChoice.from_json(values)
    assert "\n" not in str(caught.value)
    profile = shipped_profile("zen4").to_json() | {"kernels": values}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    with pytest.raises(InputError, match="not a choice of kernels"):
        read_profile(tmp_path / "profile.json")
    assert HardwareProfile.from_json(profile | {"kernels": CHOICE.to_json()}).kernels == CHOICE
