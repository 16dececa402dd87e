"""Imports lead one way, as docs/design.md says."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "batchgen"
VOCABULARY = (
    "attention_plan", "constraint", "device", "direct_io", "draws", "errors", "formats", "hardware", "kernels", "machine", "model_config", "ops",
    "policy", "quant", "reference", "request", "rope", "units", "host_copy", "workload",
)  # fmt: skip


def imports(path):
    """Every batchgen module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "batchgen":
            yield node.module if node.module != "batchgen" else "batchgen." + node.names[0].name
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "batchgen")


def users(folder, forbidden):
    return {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for name in imports(path)
        if name.startswith(forbidden)
    }


def test_planner_and_runtime_do_not_know_each_other():
    assert users("planner", "batchgen.runtime") == set()
    assert users("runtime", "batchgen.planner") == set()


def test_the_rooms_below_do_not_know_the_front_doors():
    doors = ("batchgen.cli", "batchgen.commands", "batchgen.job", "batchgen.engine", "batchgen.loading", "batchgen.report", "batchgen.helm")
    for folder in ("planner", "runtime", "dataset", "output"):
        assert users(folder, doors) == set()
    assert users("dataset", "batchgen.output") == users("output", "batchgen.dataset") == set()


def test_the_vocabulary_knows_only_itself():
    files = [PACKAGE / f"{name}.py" for name in VOCABULARY] + sorted((PACKAGE / "triton_kernels").glob("*.py"))
    for path in files:
        known = {m.split(".")[1] for m in imports(path)}
        assert known <= {*VOCABULARY, "triton_kernels", "_kernels", "_version"}, f"{path.name} imports {known}"


def test_triton_is_imported_where_a_card_is_used_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if any(m.startswith("batchgen.triton_kernels") for m in imports(p))}
    inside = {p.name for p in (PACKAGE / "triton_kernels").glob("*.py")}
    assert users - inside == {"ops.py"}
    code = "import sys, batchgen.engine, batchgen.ops\nsys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_llguidance_is_imported_where_there_is_a_grammar_and_nowhere_else():
    users = {p.name for p in PACKAGE.rglob("*.py") if "import llguidance" in p.read_text()}
    assert users == {"constraint.py"}
    code = "import sys, batchgen.engine, batchgen.runtime.sampler, batchgen.commands\nsys.exit('llguidance' in sys.modules)"
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
        "import sys, batchgen, batchgen.commands, batchgen.planner.search, batchgen.planner.explain, batchgen.runtime.scheduler, batchgen.runtime.batch\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
