"""Values out of JSON: each of the type that its dataclass declares, or a line that names the place."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from batchgen.core.typed_json import read_typed


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 1.5


@dataclass(frozen=True)
class Outer:
    name: str
    on: bool
    inner: Inner
    table: Mapping[str, Inner] = field(default_factory=dict)
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    maybe: int | None = None
    anything: Any = None
    made: int = field(default=0, init=False)


VALUES = {
    "name": "a", "on": True, "inner": {"size": 3}, "table": {"x": {"size": 4, "rate": 2}},
    "pair": [5, 6], "many": ["b", "c"], "maybe": None, "anything": {"deep": [1, None]},
}  # fmt: skip


def test_nested_values_have_the_types_that_are_declared():
    made = read_typed(Outer, VALUES)
    assert made == Outer("a", True, Inner(3), {"x": Inner(4, 2.0)}, (5, 6.0), ("b", "c"), None, {"deep": [1, None]})
    assert type(made.table["x"].rate) is float and type(made.pair[1]) is float
    values = json.loads(json.dumps(asdict(made)))
    del values["made"]
    assert read_typed(Outer, values) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "job.name must be a text, not 3"),
        ({"on": 1}, "job.on must be true or false, not 1"),
        ({"inner": {"size": True}}, "job.inner.size must be a whole number, not True"),
        ({"inner": {"size": 3.0}}, "job.inner.size must be a whole number, not 3.0"),
        ({"inner": {"size": 2**60}}, "job.inner.size must be a whole number, not 1152921504606846976"),
        ({"inner": {"size": 3, "rate": "1"}}, "job.inner.rate must be a number, not '1'"),
        ({"inner": {"size": 3, "rate": True}}, "job.inner.rate must be a number, not True"),
        ({"inner": {"size": 3, "rate": float("nan")}}, "job.inner.rate must be a number, not nan"),
        ({"inner": {"size": 3, "rate": 10**400}}, "job.inner.rate must be a number, not 1000"),
        ({"inner": {}}, "job.inner lacks 'size'"),
        ({"inner": None}, "job.inner must be an object, not None"),
        ({"inner": {"size": 3, "sise": 4}}, "job.inner has no field 'sise'"),
        ({"made": 1}, "job has no field 'made'"),
        ({"table": []}, "job.table must be an object, not []"),
        ({"table": {"x": 1}}, "job.table.x must be an object, not 1"),
        ({"table": {1: {"size": 4}}}, "a name in job.table must be a text, not 1"),
        ({"pair": [1]}, "job.pair must have 2 values, not 1"),
        ({"pair": "ab"}, "job.pair must be a list, not 'ab'"),
        ({"many": ["b", 1]}, "job.many[1] must be a text, not 1"),
        ({"maybe": "1"}, "job.maybe must be a whole number, not '1'"),
        ({"name": ["x" * 99]}, "job.name must be a text, not ['xxx"),
    ],
)
def test_what_is_of_another_kind_is_named_with_its_place(change, message):
    with pytest.raises(ValueError) as caught:
        read_typed(Outer, VALUES | change, "job")
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 120


def test_a_literal_is_one_of_its_texts():
    kind = Literal["rms", "layer"]
    assert read_typed(kind, "rms") == "rms"
    with pytest.raises(ValueError, match="norm must be one of rms, layer, not 'batch'"):
        read_typed(kind, "batch", "norm")
