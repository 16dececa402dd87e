"""Frozen dataclasses with a constructor of their own are the dataclasses that they were."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from batchgen.core.quick_values import quickly_made
from batchgen.core.request import Completion, Prompt, Request, Sample
from batchgen.engine.preparation import Prepared
from batchgen.output.row_result import RowResult


@dataclass(frozen=True)
class Slow:
    a: int
    b: tuple[int, ...] = ()
    c: str | None = None

    def __post_init__(self):
        if self.a < 0:
            raise ValueError("below 0")


@quickly_made
@dataclass(frozen=True)
class Quick(Slow):
    pass


def test_a_value_is_what_the_slow_constructor_makes():
    for given, named in [((1,), {}), ((1, (2,)), {"c": "x"}), ((), {"c": "y", "a": 3})]:
        slow, quick = Slow(*given, **named), Quick(*given, **named)
        assert [getattr(quick, f.name) for f in fields(quick)] == [getattr(slow, f.name) for f in fields(slow)]
        assert hash(quick) == hash(slow) and quick == Quick(*given, **named)
        assert repr(quick).replace("Quick", "Slow") == repr(slow)
    assert replace(Quick(1, c="x"), b=(5,)) == Quick(1, (5,), "x")


def test_what_the_slow_constructor_refuses_is_refused():
    for wrong in [lambda: Quick(), lambda: Quick(1, d=2), lambda: Quick(1, a=1), lambda: Quick(1, (), "x", 4)]:
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="below 0"):
        Quick(-1)
    with pytest.raises(FrozenInstanceError):
        Quick(1).a = 2


@pytest.mark.parametrize("kind", [Request, Sample, Prompt, Completion, Prepared, RowResult])
def test_values_of_rows_keep_their_defaults(kind):
    """The defaults of the constructor are those of the class."""
    required = {f.name: ("x",) for f in fields(kind) if not hasattr(kind, f.name)}
    made = kind(**required)
    for field in fields(kind):
        if field.name not in required:
            assert getattr(made, field.name) == field.default
