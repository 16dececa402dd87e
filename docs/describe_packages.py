"""Writes the table of modules of every page in docs/packages/: each module with the first line of its docstring.

    python docs/describe_packages.py

`make docs` does this, and a test compares the pages with the committed ones.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGES = Path(__file__).parent / "packages"
PACKAGE = Path(__file__).parents[1] / "batchgen"
CLIENTS = ("api", "cli", "hf_datasets", "lmeval", "helm", "ray")
HEADER = "| module | what it has |\n|---|---|\n"
TABLE = re.compile(re.escape(HEADER) + r"(?:\|.*\n)*")


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("|", "\\|")


def modules_of(page: str) -> dict[str, Path]:
    """Module name -> file, for the package of a page; the page `clients` has several packages."""
    roots = [PACKAGE / name for name in CLIENTS] if page == "clients" else [PACKAGE / page]
    files = [
        path for root in roots for path in ([root.with_suffix(".py")] if not root.is_dir() else root.rglob("*.py"))
    ]
    base = PACKAGE if page == "clients" else PACKAGE / page
    return {str(path.relative_to(base)): path for path in sorted(files) if not path.stem.startswith("_")}


def described(page: Path) -> str:
    """The text of a page with the table made anew."""
    rows = [f"| `{name}` | {summary(path)} |\n" for name, path in modules_of(page.stem).items()]
    text, count = TABLE.subn(lambda _: HEADER + "".join(rows), page.read_text())
    if count != 1:
        raise ValueError(f"{page} has {count} tables of modules: it must have one, with the header\n{HEADER}")
    return text


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(described(page))


if __name__ == "__main__":
    main()
