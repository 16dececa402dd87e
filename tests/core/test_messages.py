"""Messages between processes come out as they went in, and nothing else comes out."""

import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from batchgen.core.messages import decode, encode, table_of


@dataclass(frozen=True)
class Inner:
    values: Any


@dataclass(frozen=True, eq=False)
class Outer:
    first: Any
    second: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


TABLE = table_of(Inner, Outer, Pair)


def passed(value):
    return decode(encode(value, TABLE), TABLE)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1,
        float("inf"),
        "ü\ud7ff\0",
        [],
        (),
        {},
        [[0], [1, [2]], (3, (4,))],
        {None: 1, 16: [2], ("a", 1): {}},
        Path("/a/b"),
        Inner(Pair(1, (2, [Inner("x")]))),
    ],
)
def test_values_come_out_as_they_went_in(value):
    found = passed(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint32", "int64", "float32", "float64"])
def test_arrays_come_out_as_they_went_in(dtype):
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3)):
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        found = passed(Inner([array, array.T])).values
        assert found[0].dtype == array.dtype and found[0].flags.writeable
        np.testing.assert_array_equal(found[0], array)
        np.testing.assert_array_equal(found[1], array.T)


def test_one_value_is_one_value_again():
    shared, array = Inner([1]), np.arange(3)
    found = passed([Outer(shared, array), {1: shared, 2: array}, Outer(shared)])
    assert found[0].first is found[1][1] is found[2].first
    assert found[0].second is found[1][2]
    assert found[0] is not found[2]


def test_many_of_a_kind_come_out_as_they_went_in():
    """They are said field by field."""
    first, shared = Inner("said before"), Inner(np.arange(2))
    outers = [Outer(i, shared) for i in range(5)]
    value = [first, (*outers, outers[0]), [first, Inner(1), Inner((Pair(0, 1), Pair(2, 3), Pair(4, 5)))], outers[1]]
    found = passed(value)
    assert [outer.first for outer in found[1]] == [0, 1, 2, 3, 4, 0]
    assert found[1][0] is found[1][5] and found[1][1] is found[3] and found[2][0] is found[0]
    assert len({id(outer.second) for outer in found[1]}) == 1
    assert found[2][2].values == (Pair(0, 1), Pair(2, 3), Pair(4, 5)) and type(found[1]) is tuple
    within = [Outer(1), *outers[:1], Outer(outers[0]), Outer([outers[0]])]
    found = passed([within, outers[1], Pair(within[0], within[2])])
    assert found[0][2].first.first == 0 and found[0][3].first[0].first == 0
    assert found[1].first == 1 and found[2].left.first == 1 and found[2].right.first.first == 0
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3).T, np.array(7, dtype=np.int32), np.zeros((0, 2), np.int32)]
    for there, here in zip(passed(arrays), arrays, strict=True):
        assert there.shape == here.shape and there.dtype == here.dtype and (there == here).all()
    assert [passed([[1], [2], []]), passed([[], (), [[]]])] == [[[1], [2], []], [[], (), [[]]]]


def test_numbers_of_arrays_are_numbers():
    assert passed([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize("value", [object(), len, {1}, b"bytes", np.array(["a"]), np.array([None]), 1j, Exception()])
def test_nothing_else_goes_in(value):
    with pytest.raises(TypeError):
        encode([value], TABLE)


def message(plain, behind=b""):
    text = json.dumps(plain).encode()
    return struct.pack("<Q", len(text)) + text + behind


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 40,
        pickle.dumps(Inner(1)),
        struct.pack("<Q", 3) + b"[0,",
        message([5, "Path", "/"]),  # a kind that is not in the table
        message([5, "Inner"]),
        message([5, "Inner", 1, 2]),
        message([5, "__import__", "os"]),
        message([5, ["Inner"], 1]),
        message([4, "object", 1], b"12345678"),
        message([4, "int64", 2], b"12345678"),
        message([4, "int64", -1], b"12345678"),
        message([4, "int64", 2**62, 2**62]),
        message([4, "int64", 0.5], b"12345678"),
        message([6, 0]),
        message([6, -1]),
        message([99]),
        message([0, [8, "Inner", 2, [[0, 1]], [0, 1]]]),
        message([0, [8, "Inner", 1, [], [0]]]),
        message([0, [8, "object", 1, [[0, 1]], [0]]]),
        message([0, [8, "Inner", 1, [[0, 1]], [1]]]),
        message([0, [7, "int64", [2]]], b"12345678"),
        message([0, [7, "int64", [-1]]], b"12345678"),
        message([0, [7, "object", [1]]], b"12345678"),
        message([]),
        message([2, [[0], 1]]),  # a list as a key
        message([2, 1]),
        struct.pack("<Q", 200_000) + b"[0," * 66_666 + b"  ",
    ],
)
def test_nothing_else_comes_out(content):
    with pytest.raises(ValueError):
        decode(content, TABLE)
