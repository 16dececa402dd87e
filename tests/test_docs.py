"""The pages say what is so.

Links lead somewhere, files and functions they name exist, generated parts are up to date.
"""

import ast
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "csrc" / "README.md"],
    key=str,
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*(?:\]\([^)\n]*\)[^\]\n]*)?\]\(([^)\s]+)\)")
TREE = ("batchgen", "benchmarks", "csrc", "docs", "examples", "recipes", "tests")


def load(path):
    """A script that is no part of the package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in their annotations
    spec.loader.exec_module(module)
    return module


def text_of(page):
    """What is left of a page without its code."""
    return CODE.sub("", page.read_text())


def anchors_of(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def defined_in(path):
    """The functions, classes and annotated tables of a Python or C++ file; Python methods as Class.method."""
    if path.suffix != ".py":
        return set(re.findall(r"^(?:struct|class|inline [\w<>*& ]+?) (\w+)\b", path.read_text(), re.MULTILINE))
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(text_of(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{link}: there is no {there}"
        if DOCS in page.parents:
            assert DOCS in there.parents, f"{link} leads out of docs/, where the site has nothing"
        if anchor:
            assert anchor in anchors_of(there), f"{link}: {there.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text()):
        if name.split("/")[0] in TREE:
            assert (ROOT / name).exists(), f"{name} is not in the tree"


def test_pages_that_code_names_exist():
    code = [path for folder in TREE for end in ("*.py", "*.h", "*.cpp") for path in (ROOT / folder).rglob(end)]
    for path in code:
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text()):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_where_is_what():
    table = (DOCS / "index.md").read_text().partition("## Where is what")[2]
    rows = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)`", table, re.MULTILINE)
    assert len(rows) >= 15
    for question, path, function in rows:
        assert function in defined_in(ROOT / path), f"{question} {path} does not define {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_pages_place_in_a_file_are_there(page):
    for name, path in re.findall(r"`([\w.]+)`(?:\s+in\s+|\s+\()`([\w/]+\.(?:py|h|cpp))`", page.read_text()):
        if path.split("/")[0] in TREE:
            there = re.search(rf"\b{name.rpartition('.')[2]}\b", (ROOT / path).read_text())
            assert there, f"{path} has no {name}"


def test_the_page_of_threads_has_every_file_that_starts_one():
    starts = re.compile(r"\b(?:ThreadPoolExecutor|Thread|subprocess\.(?:Popen|run)|std::thread \w+)\(")
    code = [path for folder, end in (("batchgen", "*.py"), ("csrc", "*.cpp")) for path in (ROOT / folder).rglob(end)]
    starting = {str(path.relative_to(ROOT)) for path in code if starts.search(path.read_text())}
    listed = re.findall(r"^\| `([^`]+)` \|", (DOCS / "threads.md").read_text(), re.MULTILINE)
    assert set(listed) == starting


@pytest.mark.parametrize("page", sorted((DOCS / "packages").glob("*.md")), ids=lambda page: page.stem)
def test_package_pages_have_the_docstrings_of_their_modules(page):
    assert page.read_text() == load(DOCS / "describe_packages.py").described(page), (
        "run python docs/describe_packages.py"
    )


def test_every_package_has_a_page():
    pages = load(DOCS / "describe_packages.py")
    packages = {path.parent.name for path in (ROOT / "batchgen").glob("*/__init__.py")}
    assert packages - set(pages.CLIENTS) == {page.stem for page in (DOCS / "packages").glob("*.md")} - {"clients"}


@pytest.mark.parametrize("page", sorted((DOCS / "packages").glob("*.md")), ids=lambda page: page.stem)
def test_package_pages_have_their_parts(page):
    for part in ("**Purpose.**", "| module | what it has |", "**Main values.**", "**Must not ", "**Tests** are in"):
        assert part in page.read_text(), part


def test_the_command_line_page_is_up_to_date():
    from batchgen.cli.commands import cli

    page = (DOCS / "command_line.md").read_text()
    made = load(DOCS / "describe_commands.py").describe(cli)
    assert page == made, "run python docs/describe_commands.py"
    for name, command in cli.commands.items():
        section = made.partition(f"## batchgen {name}\n")[2].partition("\n## ")[0]
        for option in command.params:
            assert f"`{option.opts[-1]}`" in section, f"batchgen {name} {option.opts[-1]}"


def test_the_drawing_is_up_to_date():
    assert (DOCS / "sweep.svg").read_text() == load(DOCS / "draw_sweep.py").draw(), "run python docs/draw_sweep.py"


def test_the_ladder_is_that_of_its_files():
    ladder = load(DOCS / "draw_ladder.py")
    assert (DOCS / "ladder.svg").read_text() == ladder.figure(), "run python docs/draw_ladder.py"
    assert (DOCS / "ladder.md").read_text() == ladder.described(), "run python docs/draw_ladder.py"


def test_the_api_page_has_every_public_name():
    import batchgen

    shown = re.findall(r"^::: batchgen\.(\w+)$", (DOCS / "python_api.md").read_text(), re.MULTILINE)
    assert set(shown) == set(batchgen.__all__) - {"__version__"}
    assert all(getattr(batchgen, name).__doc__ for name in shown)


def test_benchmarks_name_every_result_and_their_commands_exist():
    page = (DOCS / "benchmarks.md").read_text()
    assert set(re.findall(r"`([\w.-]+\.json)`", page)) == {
        p.name for p in (ROOT / "benchmarks" / "results").glob("*.json")
    }
    for script in re.findall(r"`python (benchmarks/\w+\.py|tests/support/\w+\.py)", page):
        assert (ROOT / script).exists()


def test_the_tables_of_benchmarks_are_those_of_their_files():
    described = load(DOCS / "describe_benchmarks.py").described()
    assert (DOCS / "benchmarks.md").read_text() == described, "run python docs/describe_benchmarks.py"


def test_a_result_of_a_machine_without_a_letter_is_shown_too(tmp_path, monkeypatch):
    pages = load(DOCS / "describe_benchmarks.py")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for cpu, letter in (("AMD EPYC 9V74", "D"), ("Some CPU", "-"), ("Intel(R) Xeon(R) Processor", "E")):
        on = {"cpu": cpu, "family": "6", "model": "167"}
        (tmp_path / "result.json").write_text(json.dumps({"machine": on}))
        assert pages.machine_of("result") == letter


def test_figures_that_other_pages_repeat_are_those_of_their_files():
    for page, words in load(DOCS / "describe_benchmarks.py").quotes():
        assert words in page.read_text(), f"{page.name} does not say {words!r}"


def test_gains_of_the_papers_are_those_of_their_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    paper_gains = importlib.import_module("paper_gains")
    tables = paper_gains.markdown(json.loads(paper_gains.result_path("paper_gains").read_text())["cells"])
    assert tables in (DOCS / "neo_apex_check.md").read_text()


def test_the_tables_of_the_papers_are_those_of_their_file():
    described = load(DOCS / "describe_papers.py").described()
    assert (DOCS / "papers.md").read_text() == described, "run python docs/describe_papers.py"


def test_each_mechanism_of_the_papers_has_a_place_and_each_that_is_not_whole_a_reason():
    table = (DOCS / "papers.md").read_text().partition("## What the papers have, and what is here")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {row[0].split()[0] for row in rows} == {"FlexGen", "NEO", "APEX", "Pie"}
    for paper, what, mark, places, reason in rows:
        assert mark in ("works", "in part", "card", "out of scope"), (paper, what, mark)
        assert reason or mark in ("works", "card"), f"{paper}, {what}: say why it is {mark}"
        names = re.findall(r"`([^`]+)`", places)
        assert names or mark == "out of scope", (paper, what)
        assert not [name for name in names if not (ROOT / name).exists()], (paper, what, places)


def test_a_prediction_that_is_far_off_has_a_reason_and_no_other_has(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for rows in importlib.import_module("papers").read_rows().values():
        assert rows and all(bool(row.reason) != row.is_close for row in rows)


def test_the_import_graph_is_as_the_architecture_page_says():
    graph = load(ROOT / "benchmarks" / "import_graph.py")
    now = graph.count()
    assert now["cycles"] == [] and now["cycles_inside"] == {} and now["against_the_order"] == []
    table = (DOCS / "architecture.md").read_text().partition("## Import graph")[2]
    numbers = [int(row) for row in re.findall(r"^\|[^|]+\| \d+ \| (\d+) \|$", table, re.MULTILINE)]
    counted = [now["rooms"], now["packages_at_two_levels"], now["arrows"], 0, 0]
    assert numbers == counted, "put what benchmarks/import_graph.py counts into docs/architecture.md"


def test_the_table_of_lines_has_a_row_for_every_package():
    count_lines = load(ROOT / "benchmarks" / "count_lines.py")
    now = count_lines.count()
    assert now["batchgen/planner"] > 1000 and now["csrc"] > 1000
    table = (DOCS / "architecture.md").read_text().partition("## Lines of code")[2].partition("\n## ")[0]
    assert {name for name in now if name.startswith("batchgen/")} <= set(
        re.findall(r"^\| `([^`]+)` ", table, re.MULTILINE)
    )
    assert count_lines.package_of("tests/support/x.py") == "tests/support"
    assert count_lines.package_of("tests/ops/x.py") == "tests" and count_lines.package_of("README.md") is None


def test_the_types_of_options_are_made_from_the_table_of_options():
    script = load(DOCS / "describe_options.py")
    assert script.OUTPUT.read_text() == script.describe(), "run python docs/describe_commands.py"


def test_cycles_are_found():
    graph = load(ROOT / "benchmarks" / "import_graph.py")
    assert graph.cycles_of({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert graph.cycles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    modules = {"core": "", "core.a": "from batchgen.job import b", "job": "", "job.b": "import batchgen.core.a"}
    arrows = graph.collapse(graph.imports_of(modules), 1)
    assert graph.cycles_of(arrows) == [["core", "job"]]
    assert graph.against_the_order(graph.imports_of(modules), {n: n.split(".")[0] for n in modules}) == [
        "core.a -> job.b"
    ]


def test_the_example_of_the_readme_runs(tiny_models, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    path, _ = tiny_models("llama")
    assert '"demo"' in example
    exec(example.replace('"demo"', repr(str(path))), {})
    printed = capsys.readouterr().out
    assert all(f"{prompt} " in printed for prompt in re.findall(r'"([A-Z][^"]+)"', example))


@pytest.fixture(scope="module")
def tiny_model(tiny_models):
    return str(tiny_models("llama")[0])


def test_example_generate(tiny_model):
    texts = load(ROOT / "examples" / "generate.py").main(tiny_model)
    assert len(texts) == 3 and all(texts)


def test_example_structured_output(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    example = load(ROOT / "examples" / "structured_output.py")
    records = example.main(tiny_model)
    assert len(records) == len(example.LISTINGS)
    assert all(set(record) == set(example.SCHEMA["required"]) for record in records)
    assert all(record["price_level"] in range(1, 5) and record["outdoor"] in (True, False) for record in records)


def test_example_scoring(tiny_model):
    example = load(ROOT / "examples" / "scoring.py")
    answers = example.main(tiny_model)
    assert all(answers[question] in choices for question, choices in example.QUESTIONS.items())


def test_example_datasets_map(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "batchgen"))
    answers, mapped = load(ROOT / "examples" / "datasets_map.py").main(tiny_model)
    assert answers["text"] == mapped["text"] and answers["topic"] == ["maps", "sums"]


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_example_") for name in dir(sys.modules[__name__]) if "test_example_" in name}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested
