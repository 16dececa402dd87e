"""Tests of the report of a run's time, of the names in BUDGET.md, and of the modules that tests find."""

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from budget import listed, longest_first, not_listed, read_budget
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from thorough import THOROUGH

TESTS = Path(__file__).parent


def test_every_line_of_the_budget_names_a_test():
    for test in read_budget():
        path, _, name = test.partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (TESTS.parent / path).read_text(), test


def test_no_script_of_the_benchmarks_has_the_name_of_a_module_of_the_tests():
    """Both folders are on the path, and the one that comes first would hide the other's module."""
    folders = TESTS.parent / "benchmarks", *(TESTS / name for name in ("support", "models", "engine"))
    names = Counter(path.stem for folder in folders for path in folder.glob("*.py"))
    assert names["recording"] and names["tiny_models"] and max(names.values()) == 1, names.most_common(3)


@pytest.fixture
def budget(tmp_path):
    (tmp_path / "BUDGET.md").write_text(
        "# A page\n\n| test | seconds | why |\n|---|---|---|\n"
        "| `tests/a.py::test_x` | 20 | real |\n| `tests/a.py::test_y[1]` | 30 | big |\n"
    )
    return read_budget(tmp_path / "BUDGET.md")


def test_a_test_without_parameters_stands_for_all(budget):
    assert budget == {"tests/a.py::test_x": 20, "tests/a.py::test_y[1]": 30}
    names = ["tests/a.py::test_x[a]", "a.py::test_x", "tests/a.py::test_y[1]", "tests/a.py::test_y[2]"]
    assert [listed(budget, name) for name in names] == [20, 20, 30, None]


def test_the_longest_come_first_and_the_others_as_they_were(budget):
    names = ["tests/a.py::test_b", "tests/a.py::test_x[2]", "tests/a.py::test_a", "tests/a.py::test_y[1]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(items, budget)
    assert [item.nodeid for item in items] == [names[3], names[1], names[0], names[2]]


def test_the_report_names_what_took_long_and_is_not_listed(budget):
    seconds = Counter({"tests/a.py::test_x": 50.0, "tests/b.py::test_long": 11.0, "tests/b.py::test_short": 9.0})
    assert not_listed(seconds, budget) == ["  11.0 s  tests/b.py::test_long"]
    many = Counter({f"tests/b.py::test_{i}": 100.0 + i for i in range(50)})
    lines = not_listed(many, budget)
    assert lines[0] == " 149.0 s  tests/b.py::test_49" and lines[-1] == "and 30 more"
    assert not_listed(Counter(), budget) == []


@pytest.mark.skipif(THOROUGH, reason="draws of make test-all may find more")
def test_draws_do_not_depend_on_the_modules_that_are_loaded(monkeypatch):
    def drawn():
        found = []

        @seed(0)
        @settings(database=None, max_examples=200)
        @given(st.integers())
        def test(number):
            found.append(number)

        test()
        return found

    before = drawn()
    for number, path in enumerate(sorted((TESTS.parent / "benchmarks").glob("*.py"))):
        module = ModuleType(f"loaded_{number}")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert drawn() == before
