"""The commands and the Python that pages show, as a reader would copy them: out of fenced and of indented blocks."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md", "CONTRIBUTING.md", *sorted(
        str(path.relative_to(ROOT)) for folder in ("docs", "recipes", "csrc",
        "examples") for path in (ROOT / folder).rglob("*.md")
    ),
)  # fmt: skip
_SHELL = ("bash", "sh", "shell", "console")
# What a line begins with that is a command, in a block that does not say what it is of.
_PROGRAMS = re.compile(
    r"(?:\w+=\S+ +)*(?:\$ +)?"
    r"(?:batchgen|python3?|make|pip|torchrun|mpirun|srun|sbatch|kubectl|ray|helm-run|lm_eval|curl|wget|git|sudo|apt-get"
    r"|mkdir|cp|mv|cat|systemctl|loginctl|journalctl|crontab|nohup|timeout|cmake|ctest|docker|[\w./-]+\.sh)(?= |$)"
)


@dataclass(frozen=True)
class Command:
    """A command of a page; each of several that are joined by && is one.

    Attributes:
        text: the command with its lines joined, without its comment.
    """

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words that a shell makes of it, but for variables and patterns."""
        return shlex.split(self.text, comments=True)

    @property
    def id(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: str) -> list[Command]:
    """The commands of a page, in its order."""
    found = []
    for language, block in _blocks((ROOT / page).read_text()):
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        shown = lines if language in _SHELL else [line for line in lines if not language and _PROGRAMS.match(line)]
        for line in shown:
            text = _without_comment(line.removeprefix("$ "))
            found += [Command(page, part.strip()) for part in text.split(" && ") if part]
    return found


def python_of(page: str) -> list[str]:
    """The blocks of Python of a page, in its order."""
    return [block for language, block in _blocks((ROOT / page).read_text()) if language == "python"]


def inline_of(page: str) -> list[str]:
    """The commands of batchgen's within a page's sentences and tables."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [code for code in re.findall(r"`([^`\n]+)`", text) if re.match(r"batchgen [a-z]+ .*-", code)]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each block; "" where it does not say, as indented ones."""
    fence = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?:\A|\n\n)((?:    .*\n|\n(?=    ))+)")
    at = [(match.start(), match[1], match[2]) for match in fence.finditer(text)]
    rest = fence.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    at += [(match.start(), "", re.sub(r"^    ", "", match[1], flags=re.MULTILINE)) for match in indented.finditer(rest)]
    return ((language, block) for _, language, block in sorted(at))


def _without_comment(line: str) -> str:
    """A line of a shell up to its comment, which is no `#` within quotes."""
    words = shlex.split(line, comments=True)
    for match in re.finditer(r"(?:^|\s)#", line):
        with contextlib.suppress(ValueError):  # it ends within quotes there
            if shlex.split(line[: match.start()]) == words:
                return line[: match.start()].rstrip()
    return line.rstrip()
