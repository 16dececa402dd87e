"""Refuses docstrings that cannot be read alone.

    python .ci/language.py                    # the package
    python .ci/language.py batchgen/planner   # a part of it

A docstring, and each entry of its sections (`Args:`, `Attributes:`, ...), is a sentence with a subject and a verb, or a
noun phrase that names the thing. So it does not begin with a word that leans on the line above, and does not send the
reader to another docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEANING = re.compile(
    r"(Of|As|Those|That of|The same|Whether|What|How|Which|Where|Likewise|Also|Ditto|Beside)\b", re.IGNORECASE
)
ELSEWHERE = re.compile(r"\b[Aa]s of `|\b[Aa]s in `|\bthe same as `|[Ss]ee above\b")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: +(.*)$")


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Line and fault of each docstring of a file that cannot be read alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                line = node.body[0].lineno
                yield from ((line + offset, fault) for offset, fault in faults_of(text))


def faults_of(docstring: str) -> Iterator[tuple[int, str]]:
    """Line within a docstring, and fault."""
    section = None
    for offset, line in enumerate(docstring.splitlines()):
        stripped = line.strip()
        if found := SECTION.match(line):
            section = found[1]
        elif section and line and not line.startswith(" "):
            section = None
        begins = stripped if offset == 0 else None
        if section and line.startswith("    ") and not line.startswith("     "):
            entry = ENTRY.match(stripped)
            begins = entry[2] if entry else stripped if section in ("Returns", "Yields") else None
        leaning = LEANING.match(begins) if begins else None
        if leaning and not (offset and leaning[0] == "Whether"):  # of an argument or attribute that is true or false
            yield offset, f"begins with {leaning[0]!r}: {begins[:60]!r}"
        if elsewhere := ELSEWHERE.search(line):
            yield offset, f"sends the reader elsewhere with {elsewhere[0]!r}: {stripped[:60]!r}"


def main() -> None:
    roots = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parents[1] / "batchgen"]
    files = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    found = [f"{path}:{line}: {fault}" for path in files for line, fault in faults(path)]
    print("\n".join(found))
    if found:
        sys.exit(
            f"{len(found)} docstrings cannot be read alone: begin with the noun that names the thing,"
            " or with a sentence"
        )


if __name__ == "__main__":
    main()
