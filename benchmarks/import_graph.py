"""Counts what imports what, between the rooms of the package and inside each of them.

    python benchmarks/import_graph.py                      # the files as they are
    python benchmarks/import_graph.py --revision 5889c39   # those of a revision

A room is what a reader finds directly in `batchgen/`: a package or a module. At two levels the packages inside packages
are rooms too. `__main__` and `_version` are not counted. The order is that of the import rules in pyproject.toml; a
module of another revision is put where git finds it today.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_COUNTED = ("", "__main__", "_version")
Graph = dict[str, set[str]]


def read_modules(revision: str | None) -> dict[str, str]:
    """The text of every module, by its name within the package; a package is named after its folder."""
    if revision is None:
        texts = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "batchgen").rglob("*.py")}
    else:
        listed = _git("ls-tree", "-r", "--name-only", revision, "batchgen/").split()
        texts = {path: _git("show", f"{revision}:{path}") for path in listed if path.endswith(".py")}
    return {_module(path): text for path, text in texts.items()}


def imports_of(modules: Mapping[str, str]) -> Graph:
    """Module -> the modules it imports, inside functions and for type checkers too."""
    return {name: set(_imported(text, modules)) - {name} for name, text in modules.items()}


def rooms_of(modules: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The rooms at the first level, and the packages inside them."""
    counted = [name for name in modules if name.split(".")[0] not in NOT_COUNTED]
    first = {name.split(".")[0] for name in counted}
    inner = {name.rpartition(".")[0] for name in counted} - first - {""}
    return first, inner


def collapse(graph: Graph, depth: int, under: str = "") -> Graph:
    """The arrows between what lies in `under`, with names cut to `depth` parts below it."""
    prefix = f"{under}." if under else ""

    def cut(name: str) -> str | None:
        if not name.startswith(prefix) or name.split(".")[0] in NOT_COUNTED:
            return None
        return ".".join(name.removeprefix(prefix).split(".")[:depth])

    found: Graph = {}
    for name, imported in graph.items():
        here = cut(name)
        if here is not None:
            found.setdefault(here, set()).update(
                there for other in imported if (there := cut(other)) not in (None, here)
            )
    return found


def cycles_of(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def layers() -> list[list[str]]:
    """The order of the rooms, from the highest to the lowest, as the import rules have it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = next(rule for rule in rules if rule["id"] == "rooms")
    return [[name.strip() for name in layer.split("|")] for layer in rooms["layers"]]


def against_the_order(graph: Graph, room_of: Mapping[str, str | None]) -> list[str]:
    """Imports of a module by one in a lower room, or in a room beside it."""
    level = {room: number for number, layer in enumerate(layers()) for room in layer}
    found = []
    for name, imported in graph.items():
        for other in imported:
            here, there = room_of.get(name), room_of.get(other)
            if here in level and there in level and here != there and level[here] >= level[there]:
                found.append(f"{name} -> {other}")
    return sorted(found)


def rooms_today(modules: Mapping[str, str], revision: str | None) -> dict[str, str | None]:
    """Module -> the room in which it lies in the files as they are; None where git finds it nowhere."""
    if revision is None:
        return {name: name.split(".")[0] for name in modules}
    now: dict[str, str | None] = {}
    renamed = _git("diff", "--find-renames=30%", "-l0", "--diff-filter=R", "--name-status", revision, "--", "batchgen/")
    for line in renamed.splitlines():
        _, old, new = line.split("\t")
        if old.endswith(".py") and new.endswith(".py"):
            now[_module(old)] = _module(new).split(".")[0]
    return {name: now.get(name, name.split(".")[0]) for name in modules}


def count(revision: str | None = None) -> dict:
    """What the table in docs/architecture.md shows."""
    modules = read_modules(revision)
    graph = imports_of(modules)
    first, inner = rooms_of(modules)
    packages = {name for name in first if any(other.startswith(f"{name}.") for other in modules)}
    top = collapse(graph, 1)
    inside = {package: cycles_of(collapse(graph, 1, package)) for package in sorted(packages | inner)}
    return {
        "modules": len([name for name in modules if name.split(".")[0] not in NOT_COUNTED]),
        "rooms": len(first),
        "packages": len(packages),
        "packages_at_two_levels": len(packages | inner),
        "arrows": sum(len(others) for others in top.values()),
        "cycles": cycles_of(top),
        "cycles_inside": {name: found for name, found in inside.items() if found},
        "against_the_order": against_the_order(graph, rooms_today(modules, revision)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--revision", metavar="REV", help="a git revision [default: the files as they are]")
    print(json.dumps(count(parser.parse_args().revision), indent=1))


def _module(path: str) -> str:
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts and parts[-1] == "__init__" else parts)


def _imported(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "batchgen":
            base = node.module.removeprefix("batchgen").strip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield inner if inner in modules else base
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("batchgen").strip(".") for a in node.names if a.name.split(".")[0] == "batchgen"
            )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
