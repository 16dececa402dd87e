"""Count lines of the package by package, and of the folders beside it.

python benchmarks/count_lines.py                            # the files as they are
python benchmarks/count_lines.py --revision REV
python benchmarks/count_lines.py --write d1a564d c6a5c38    # the table of docs/architecture.md
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ENDINGS = (".py", ".h", ".cpp")
CODE = "**the package, code alone**"
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
BESIDE = ("csrc", "benchmarks", "tests/support", "tests", "docs", "recipes", "examples")
TABLE = re.compile(r"(?<=## Lines of code\n\n)(?:.*\n)*?(?=\n)")


def package_of(path: str) -> str | None:
    """The row of the table that a file counts in; None for a file that is not counted."""
    if not path.endswith(ENDINGS):
        return None
    parts = path.split("/")
    if parts[0] == "batchgen":
        return "/".join(parts[:2]).removesuffix(".py") if len(parts) > 2 else "batchgen/*.py"
    return next((folder for folder in BESIDE if path.startswith(f"{folder}/")), None)


def count(revision: str | None = None) -> Counter[str]:
    """Lines of each row of the table, in a git revision or in the files as they are."""
    lines: Counter[str] = Counter()
    if revision is None:
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        texts = {path: (ROOT / path).read_bytes() for path in listed if package_of(path) and (ROOT / path).exists()}
        for path, text in texts.items():
            lines[package_of(path)] += text.count(b"\n")
        return lines
    empty = _git("hash-object", "-t", "tree", "/dev/null").strip()
    for line in _git("diff", "--numstat", "--no-renames", empty, revision).splitlines():
        added, _, path = line.split("\t")
        if row := package_of(path):
            lines[row] += int(added)
    return lines


def code_lines(text: str) -> int:
    """Lines of a Python module without its docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def package_code(revision: str | None = None) -> int:
    """Lines of code of the package, in a git revision or in the files as they are."""
    if revision is None:
        return sum(code_lines(path.read_text()) for path in (ROOT / "batchgen").rglob("*.py"))
    listed = _git("ls-tree", "-r", "--name-only", revision, "batchgen/").splitlines()
    return sum(code_lines(_git("show", f"{revision}:{path}")) for path in listed if path.endswith(".py"))


def table(revisions: list[str]) -> str:
    """The table of docs/architecture.md: a column for each revision and one for the files as they are."""
    counts = [*map(count, revisions), count()]
    packages = sorted({row for found in counts for row in found if row.startswith("batchgen/")})
    rows = [(f"`{name}`", [found[name] for found in counts]) for name in packages]
    rows.append(("**the package**", [sum(found[name] for name in packages) for found in counts]))
    rows.append((CODE, [package_code(revision) for revision in [*revisions, None]]))
    rows += [(f"`{name}/`", [found[name] for found in counts]) for name in BESIDE]
    rows.append(("**all**", [found.total() for found in counts]))
    lines = [
        f"| | {' | '.join([*revisions, 'now'])} |",
        "|---" + "|---:" * len(counts) + "|",
        *(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |" for name, numbers in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--revision", metavar="REV", help="a git revision [default: the files as they are]")
    parser.add_argument("--write", nargs="+", metavar="REV", help="put a table with these revisions into the page")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(TABLE.sub(lambda _: table(args.write), PAGE.read_text(), count=1))
        return
    for name, number in sorted(count(args.revision).items()):
        print(f"{number:7,}  {name}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
