"""Imports lead one way, as docs/design.md says."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "batchgen"
PARTS = ("core", "ops", "models", "planner", "runtime", "dataset", "output")
# What each room may import, beside itself.
BELOW = {
    "core": (),
    "ops": ("core",),
    "models": ("core", "ops"),
    "planner": ("core", "ops", "models"),
    "runtime": ("core", "ops", "models"),
    "dataset": ("core",),
    "output": ("core",),
    "engine": PARTS,
    "profiler": (*PARTS, "engine"),
    "job": (*PARTS, "engine", "profiler"),
} | dict.fromkeys(("cli", "hf_datasets", "lmeval", "helm"), (*PARTS, "engine", "profiler", "job"))
NO_ROOM = {"", "__main__", "_version"}
# Modules that are elsewhere than in their room.
ELSEWHERE = {
    "planner.shipped": "profiler",
    "with_datasets": "hf_datasets",
}


def is_module(name):
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists() or name.endswith("._kernels")


def imports(path):
    """Every batchgen module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "batchgen":
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if is_module(inner) else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "batchgen")


def room_of(name):
    """The room of a module, named as within the package; None for what belongs to no room."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in ELSEWHERE:
            return ELSEWHERE[".".join(parts[:end])]
    return None if name in NO_ROOM else parts[0]


def against_the_order():
    """(module, what it imports) wherever the one's room may not know the other's."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").strip(".")
        for name in imports(path):
            name = name.removeprefix("batchgen").strip(".")
            here, there = room_of(module), room_of(name)
            if None not in (here, there) and here != there and there not in BELOW[here]:
                found.add((module, name))
    return found


def test_rooms_import_only_rooms_below_them():
    assert not against_the_order()


def test_triton_is_imported_where_a_card_is_used_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if any(m.startswith("batchgen.ops.triton") for m in imports(p))}
    inside = {p.name for p in (PACKAGE / "ops" / "triton").glob("*.py")}
    assert users - inside == {"dispatch.py"}
    code = "import sys, batchgen.engine.engine, batchgen.ops.dispatch\nsys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_llguidance_is_imported_where_there_is_a_grammar_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if "import llguidance" in p.read_text()}
    assert users == {"grammar.py"}
    code = "import sys, batchgen.engine.engine, batchgen.runtime.sampler, batchgen.cli.commands\nsys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_what_helm_itself_loads_needs_helm():
    def packages(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                yield from (name.split(".")[0] for name in names)

    users = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "helm" in packages(p)}
    assert users == {"helm/client.py", "helm/runner.py", "helm/tokenizer.py"}


def test_planning_and_scheduling_need_no_torch():
    code = (
        "import sys, batchgen, batchgen.cli.commands, batchgen.planner.search, batchgen.planner.explain, batchgen.runtime.scheduling.scheduler, batchgen.runtime.batch\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
