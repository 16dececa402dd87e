"""Imports lead one way, as docs/architecture.md says."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchgen"


def imports(path):
    """Every batchgen module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "batchgen":
            for name in node.names:
                yield f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "batchgen")


def test_rooms_import_only_rooms_below_them():
    """As pyproject.toml says: `lint-imports` tells what is wrong."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_triton_is_imported_where_a_card_is_used_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if any(m.startswith("batchgen.ops.triton") for m in imports(p))}
    inside = {p.name for p in (PACKAGE / "ops" / "triton").glob("*.py")}
    assert users - inside == {"dispatch.py"}


def test_llguidance_is_imported_where_there_is_a_grammar_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if "import llguidance" in p.read_text()}
    assert users == {"grammar.py"}


def test_an_engine_imports_neither_of_them_before_it_needs_them():
    code = (
        "import sys, batchgen.engine.engine, batchgen.ops.dispatch, batchgen.runtime.sampler, batchgen.cli.commands\n"
        "print({'triton', 'llguidance'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


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
        "import sys, batchgen, batchgen.cli.commands, batchgen.planner.search, batchgen.planner.explain\n"
        "import batchgen.schedule.scheduler, batchgen.schedule.packed_batch\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_reads_ids_in_processes_of_ray_needs_no_torch():
    code = "import sys, batchgen.ray.ids\nsys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
