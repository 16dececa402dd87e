"""The program of the process that renders templates, with limits of time and memory that the kernel enforces.

A template is code: one filter, one `*` or one long loop can fill the memory or run for hours. So templates run in a
process of their own with limited address space. The kernel ends the process when a row takes more processor time than
it may. `batchgen.core.templates` starts this process and exchanges messages with it.

Messages in both directions are frames (`batchgen.core.frames`). Messages to this process are pickled by its parent, so
that rows may have values of any type. Messages from this process are text.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import resource
import signal
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import StrictUndefined, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from batchgen.core.frames import NO_MEMORY, read_frame, write_frame


class OverLimit(Exception):
    """A row takes more time or memory than a template may take."""


def environment_of(kind: str) -> ImmutableSandboxedEnvironment:
    """The Jinja environment for a kind of template: "rows" (columns of a row) or "chats" (chat messages of a model)."""
    return _chat_environment() if kind == "chats" else _row_environment()


def _row_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, finalize=lambda value: "" if value is None else value
    )
    environment.filters["tojson"] = _row_to_json
    return environment


def _row_to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of a value, not escaped for HTML as by Jinja's own `tojson` filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment for models' chat templates, equal to that of the transformers library."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _chat_to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """The Jinja block `{% generation %}`, which marks text for training and leaves a prompt unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        said: str = caller()
        return said


def _chat_to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """A replacement of `dict` for templates: it can be called and has `fromkeys`, but no other attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's `namespace` for templates, which refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], args[1:]
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute named {name!r}")


@functools.lru_cache(maxsize=8)
def _compiled(kind: str, text: str) -> jinja2.Template:
    return environment_of(kind).from_string(text)


def describe(kind: str, text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Find the variables that a template uses.

    Args:
        kind: "rows" or "chats".
        text: The template.
        names: Variables that the template will have. They hide Jinja's functions of the same names.

    Returns:
        {"variables": sorted names, "includes": True where the template includes other templates}. For an invalid
            template, {"line": line of the syntax error, "error": message}.
    """
    environment = environment_of(kind)
    for name in set(names) & set(environment.globals):
        del environment.globals[name]
    try:
        tree = environment.parse(text)
        _compiled(kind, text)
    except jinja2.TemplateSyntaxError as error:
        return {"line": error.lineno, "error": str(error.message)}
    except Exception as error:  # nested deeper than Python can follow, or too large
        return {"line": 1, "error": f"{type(error).__name__}: {error}"}
    includes = any(True for _ in meta.find_referenced_templates(tree))
    used = meta.find_undeclared_variables(tree)
    used |= {name.name for name in tree.find_all(nodes.Name) if name.name == "self"}  # Jinja's own, whatever a row has
    return {"variables": sorted(used), "includes": includes}


def _render(kind: str, text: str, variables: Mapping[str, Any], longest: int) -> str:
    rendered = _compiled(kind, text).render(variables)
    if len(rendered) > longest:
        raise OverLimit
    return rendered


class _Limits:
    """Limits of time and memory of this process, enforced by the kernel, on top of what it has already used."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Who has started this process may ignore or block the signal, and that is inherited.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        with open("/proc/self/statm") as file:  # in pages, the whole address space first
            pages = int(file.read().split()[0])
        self._own_bytes = pages * resource.getpagesize()
        self._hard = resource.getrlimit(resource.RLIMIT_AS)[1]

    def set(self, seconds: float, memory_bytes: int) -> None:
        """Set the limits for the next row: SIGPROF ends the process after the time; larger allocations fail.

        Args:
            seconds: Processor seconds for the row.
            memory_bytes: Bytes of memory for the row.
        """
        limit = self._own_bytes + memory_bytes
        if self._hard != resource.RLIM_INFINITY:
            limit = min(limit, self._hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answer each request on standard input with a reply on standard output, until standard input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for whatever libraries print
    limits = _Limits()
    write_frame(replies, b"ready")
    try:
        _answer_all(requests, replies, limits)
    except MemoryError:
        os._exit(NO_MEMORY)


def _answer_all(requests: Any, replies: Any, limits: _Limits) -> None:
    while (frame := read_frame(requests)) is not None:
        asked = pickle.loads(frame)
        limits.set(asked["seconds"], asked["memory_bytes"])
        if "names" in asked:
            found = describe(asked["kind"], asked["text"], asked["names"])
            write_frame(replies, json.dumps(found).encode())
            continue
        rows = io.BytesIO(asked.pop("rows"))
        while (row := read_frame(rows)) is not None:
            limits.set(asked["seconds"], asked["memory_bytes"])
            write_frame(replies, _reply(asked, row))


def _reply(asked: Mapping[str, Any], row: bytearray) -> bytes:
    """The reply for one row: "t" and the rendered text, or "e" with kind and message of the error."""
    try:
        text = _render(asked["kind"], asked["text"], pickle.loads(row), asked["length"])
        return b"t" + text.encode("utf-8", "surrogatepass")
    except Exception as error:  # whatever the expressions of a template can raise
        return b"e" + json.dumps([type(error).__name__, str(error)[:2000]]).encode()
