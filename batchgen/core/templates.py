"""Templates that are rendered in a process with limits of time and memory (`batchgen.core.template_process`).

A process that uses batchgen has one rendering process for all templates. It starts with the first row, and again where
a row has exceeded a limit and so ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import BatchgenError, one_line
from batchgen.core.frames import NO_MEMORY, framed, read_frame, write_frame
from batchgen.core.python_command import python_command

# Rows that go there together: at most so many, and no further once they have so many bytes.
_ROWS, _SENT_BYTES = 64, 1 << 20
_END_S = 1.0  # between the end of its answers and that of the process
Row = Mapping[str, Any] | Exception  # {column: value}, or why there are no values


@dataclass(frozen=True)
class TemplateLimits:
    """The most time, memory and text that a template may take for one row.

    Attributes:
        seconds: Seconds of processor time.
        memory_bytes: Bytes of memory while the row is rendered, the row itself included.
        length: Characters of the rendered text.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    length: int = 64 << 20


DEFAULT_LIMITS = TemplateLimits()


class TemplateFailed(Exception):
    """A template cannot be rendered for a row; the message is one line.

    Attributes:
        kind: Name of the Python exception; "" where a limit was exceeded.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(one_line(text))
        self.kind = kind


@dataclass(frozen=True)
class TemplateUse:
    """The names that a template uses.

    Attributes:
        variables: Variables of the template, sorted.
        includes: True where the template includes other templates.
    """

    variables: tuple[str, ...]
    includes: bool


class TemplateSyntax(Exception):
    """A text is not a valid template.

    Attributes:
        line: Line of the syntax error, from 1.
    """

    def __init__(self, line: int, text: str) -> None:
        super().__init__(one_line(text))
        self.line = line


@dataclass(frozen=True)
class SafeTemplate:
    """A Jinja template that is rendered within limits of time, memory and length.

    Attributes:
        kind: "rows" for a template over the columns of a row: an undefined variable is an error, and null is rendered
            as nothing. "chats" for a model's chat template, rendered as the transformers library does.
        text: The text of the template.
        limits: Limits for one row.
    """

    kind: str
    text: str
    limits: TemplateLimits = DEFAULT_LIMITS

    def use(self, names: Iterable[str] = ()) -> TemplateUse:
        """Find the variables that the template uses.

        Args:
            names: Variables that the template will have. They hide Jinja's functions of the same names.

        Raises:
            TemplateSyntax: The text is not a valid template.
            TemplateFailed: Parsing exceeds the limits of a row.
        """
        found = _renderer.describe(self, tuple(names))
        if "error" in found:
            raise TemplateSyntax(found["line"], found["error"])
        return TemplateUse(tuple(found["variables"]), found["includes"])

    def render(self, rows: Iterable[Row]) -> Iterator[str | Exception]:
        """Render the template for each row, with a few rows read ahead.

        Args:
            rows: The variables of each row. An exception in place of a row is yielded unchanged.

        Yields:
            The rendered text of each row, or a `TemplateFailed`.
        """
        rows = iter(rows)
        while chunk := list(itertools.islice(rows, _ROWS)):
            yield from _renderer.render(self, chunk)


class _Renderer:
    """The connection to the rendering process; one thread uses it at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def describe(self, template: SafeTemplate, names: tuple[str, ...]) -> dict[str, Any]:
        """Have the rendering process find the variables of a template. Raises TemplateFailed.

        Args:
            template: The template.
            names: Variables that the template will have.

        Returns:
            The result of `template_process.describe`.
        """
        with self._lock, self._running() as process:
            process.ask(template, names=names)
            answer = process.answer()
            if answer is None:
                raise _why_ended(process, template.limits)
        found: dict[str, Any] = json.loads(answer)
        return found

    def render(self, template: SafeTemplate, rows: list[Row]) -> list[str | Exception]:
        """Have the rendering process render a template; gives one text or exception per row."""
        results: list[str | Exception] = []
        while len(results) < len(rows):
            results += self._render_some(template, _packed(rows[len(results) :]))
        return results

    def _render_some(self, template: SafeTemplate, rows: list[bytes | Exception]) -> list[str | Exception]:
        """Render rows in order up to the first one that ends the rendering process; gives the results of these rows."""
        results: list[str | Exception] = []
        with self._lock, self._running() as process:
            process.ask(template, rows=b"".join(framed(row) for row in rows if isinstance(row, bytes)))
            for row in rows:
                if isinstance(row, Exception):
                    results.append(row)
                elif (answer := process.answer()) is not None:
                    results.append(_result(answer, template.limits))
                else:
                    results.append(_why_ended(process, template.limits))
                    break
        return results

    def _running(self) -> _Process:
        if self._process is None or self._process.has_ended:
            self._process = _Process()
        return self._process

    def renew(self) -> None:
        """Drop the connection in a forked child, since the rendering process belongs to the parent."""
        self._lock, self._process = threading.Lock(), None

    def close(self) -> None:
        """End the rendering process. The next use starts a new one."""
        if self._process is not None:
            self._process.end()


class _Process:
    """The rendering process. As a context manager, it ends the process where the block raises an exception."""

    def __init__(self) -> None:
        self.has_ended = False
        # A session of its own: Ctrl-C is for the process that has started it.
        self._process = subprocess.Popen(
            python_command("batchgen.core.template_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,  # buffers have locks and contents of their own, which a fork of this process would have, too
        )
        if self.answer() is None:
            raise BatchgenError(
                f"the process that renders templates ended with code {self.end()} as it began: see what it said, and"
                " whether another Python process can start here"
            )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is not None:
            self.end()

    def ask(self, template: SafeTemplate, **question: Any) -> None:
        """Send a question about a template.

        Args:
            template: The template.
            question: Either `names`, to find the template's variables, or framed `rows`, to render them.
        """
        limits = template.limits
        asked = {
            "kind": template.kind,
            "text": template.text,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "length": limits.length,
            **question,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer, either
            write_frame(self._process.stdin, pickle.dumps(asked))

    def answer(self) -> bytearray | None:
        """Read the next answer; None where the process has ended."""
        assert self._process.stdout is not None
        return read_frame(self._process.stdout)

    def end(self, within_s: float = 0.0) -> int:
        """End the process; gives its exit code, or minus the number of the signal that ended it.

        Args:
            within_s: Seconds to wait for the process to end by itself.
        """
        self.has_ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        code = self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what is not sent
                file.close()  # type: ignore[union-attr]
        return code


def _packed(rows: list[Row]) -> list[bytes | Exception]:
    """Pickle the first rows, about `_SENT_BYTES` of them, for one message to the rendering process."""
    packed: list[bytes | Exception] = []
    size_bytes = 0
    for row in rows:
        if isinstance(row, Exception):
            packed.append(row)
            continue
        try:
            sent = pickle.dumps(row)
        except Exception as error:  # objects of any class may stand in rows of Python's own
            packed.append(TemplateFailed(type(error).__name__, str(error)))
            continue
        packed.append(sent)
        size_bytes += len(sent)
        if size_bytes >= _SENT_BYTES:
            break
    return packed


def _result(answer: bytearray, limits: TemplateLimits) -> str | Exception:
    if answer[:1] == b"t":
        return answer[1:].decode("utf-8", "surrogatepass")
    kind, text = json.loads(answer[1:])
    if kind == "MemoryError":
        return _too_large(limits)
    if kind == "OverLimit":
        return TemplateFailed("", f"the row makes more than {limits.length:,} characters of text: shorten its values")
    return TemplateFailed(kind, text)


def _too_large(limits: TemplateLimits) -> TemplateFailed:
    return TemplateFailed(
        "", f"the row takes more than {limits.memory_bytes >> 20:,} MiB to render: shorten its values"
    )


def _why_ended(process: _Process, limits: TemplateLimits) -> TemplateFailed:
    code = process.end(within_s=_END_S)
    if code == NO_MEMORY:
        return _too_large(limits)
    if code == -signal.SIGPROF:
        return TemplateFailed("", f"the row takes longer than {limits.seconds:g} s to render: shorten its values")
    return TemplateFailed("", f"rendering the row ended its process with code {code}: shorten its values")


_renderer = _Renderer()
atexit.register(_renderer.close)
# In a fork the lock is held for ever where another thread of the parent held it.
os.register_at_fork(after_in_child=_renderer.renew)
