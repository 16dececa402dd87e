"""JSON schemas as people have them, rewritten to what llguidance takes.

What is rewritten may allow fewer texts than the schema, never others: a text that follows it is valid against the
schema as it was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.core.errors import InputError, one_line

Schema = Any  # a mapping, or a bool
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
# Beside a schema, what OpenAI's response_format has.
_ENVELOPE = {"name", "schema", "strict", "description", "type"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}


def read_schema(text: str) -> Schema:
    """The schema in a text: by itself, or in OpenAI's `{"name": ..., "schema": ...}`. Raises InputError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"json_schema is not JSON: {one_line(error)}") from error
    if isinstance(schema, dict) and isinstance(schema.get("response_format"), dict) and len(schema) == 1:
        schema = schema["response_format"]
    if isinstance(schema, dict) and schema.get("type") == "json_schema" and isinstance(schema.get("json_schema"), dict):
        schema = schema["json_schema"]
    is_envelope = isinstance(schema, dict) and isinstance(schema.get("schema"), dict) and schema.keys() <= _ENVELOPE
    if is_envelope and schema.get("type") in (None, "json_schema"):
        schema = schema["schema"]
    if not isinstance(schema, dict):
        raise InputError("json_schema is not a schema: it must be a JSON object")
    return schema


def rewritten(schema: Schema, knows_format: Callable[[str], bool]) -> Schema:
    """Rewrite what llguidance would refuse: unknown formats become annotations, and look-ahead goes from patterns.

    The standard has unknown formats as annotations. A pattern with look-ahead becomes patterns without.

    Args:
        schema: The schema.
        knows_format: Tells whether llguidance knows a format.
    """

    def rewrite(part: dict[str, Any]) -> dict[str, Any]:
        name = part.get("format")
        if isinstance(name, str) and not knows_format(name):
            part = {key: value for key, value in part.items() if key != "format"}
        pattern = part.get("pattern")
        if isinstance(pattern, str) and (patterns := without_look_ahead(pattern)) is not None:
            first, *more = patterns
            part = part | {"pattern": first}
            if more:
                part["allOf"] = [*part.get("allOf", ()), *({"pattern": each} for each in more)]
        return part

    return _mapped(schema, rewrite)


def with_exclusive_branches(schema: Schema) -> Schema:
    """Turn each oneOf into an anyOf, where no text of a branch, once narrowed a little, can be valid for another.

    A branch may lose a property that another one requires, and may have to have one that tells it from another. A oneOf
    where that does not suffice stays.
    """

    def rewrite(part: dict[str, Any]) -> dict[str, Any]:
        branches = part.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in part:
            return part
        narrowed = _exclusive([resolved(branch, schema) for branch in branches])
        if narrowed is None:
            return part
        rest = {key: value for key, value in part.items() if key not in ("oneOf", "discriminator")}
        return rest | {"anyOf": narrowed}

    return _mapped(schema, rewrite)


def _mapped(schema: Schema, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Schema:
    """The schema with each mapping in it that is a schema rewritten, from within."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if isinstance(value, list):
                made[key] = [_mapped(each, rewrite) for each in value]
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _mapped(each, rewrite) for name, each in value.items()}
        elif key in _SINGLE:
            made[key] = _mapped(value, rewrite)
    return rewrite(made)


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a local $ref refers to; anything else is as it is."""
    for _ in range(32):  # of references to references
        if not (
            isinstance(schema, dict)
            and isinstance(schema.get("$ref"), str)
            and schema.keys() <= {"$ref", *_ANNOTATIONS}
        ):
            return schema
        pointer, found = schema["$ref"], root
        if pointer != "#" and not pointer.startswith("#/"):
            return schema
        for name in pointer.split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if found is None:
            return schema
        schema = found
    return schema


# Branches that exclude each other.


def _exclusive(branches: list[Schema]) -> list[Schema] | None:
    """The branches, each so narrow that its texts are not valid for any other one; None where that cannot be told."""
    if not all(isinstance(branch, dict) for branch in branches):
        return None
    narrowed = []
    for i, branch in enumerate(branches):
        for j, other in enumerate(branches):
            if i != j and branch is not None:
                branch = _apart(branch, other)
                if branch is None:
                    return None
        if branch.get("enum") != []:
            narrowed.append(branch)
    return narrowed or None


def _apart(branch: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """The branch, without what may be valid for the other one; None where it cannot be told."""
    if not _types(branch) & _types(other):
        return branch
    values = _values(branch)
    if values is not None:
        kept = [value for value in values if not _may_be(value, other)]
        return branch if kept == values else {**_without(branch, "const"), "enum": kept}
    if _types(branch) != {"object"} and not branch.keys() & {"properties", "required"}:
        return None
    branch = branch | {"type": "object"}
    own, theirs = branch.get("properties", {}), other.get("properties", {})
    required, needed = branch.get("required", []), other.get("required", [])
    if any(own.get(name) is False for name in needed):
        return branch
    own = {name: value for name, value in own.items() if value is not False}
    telling = [name for name in own if name in theirs and _disjoint(own[name], theirs[name])]
    if other.get("additionalProperties") is False and not other.get("patternProperties"):
        telling += [name for name in own if name not in theirs]
    if any(name in required for name in telling):
        return branch
    with_value = [name for name in telling if _values(own[name]) is not None]
    if with_value:  # such as pydantic's discriminators, which have a default
        return branch | {"required": [*required, with_value[0]]}
    without = [name for name in needed if name not in required]
    if without:
        return branch | {"properties": {**branch.get("properties", {}), without[0]: False}}
    return branch | {"required": [*required, telling[0]]} if telling else None


_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})


def _types(schema: Schema) -> set[str]:
    """Types of JSON that a schema may allow; an integer is a number."""
    if not isinstance(schema, dict):
        return set(_TYPES) if schema else set()
    given = schema.get("type", [])
    found = {("number" if name == "integer" else name) for name in ([given] if isinstance(given, str) else given)}
    values = _values(schema)
    if values is not None:
        of_values = {_type_of(value) for value in values}
        return of_values & found if found else of_values
    return found or set(_TYPES)


def _type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (type(None), "null"), (str, "string"), (dict, "object"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")


def _values(schema: Schema) -> list[Any] | None:
    """All values that a schema allows, where it lists them."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _may_be(value: Any, schema: Schema) -> bool:
    """Tell whether a value may be valid for a schema, as far as its types and values tell."""
    listed = _values(schema)
    given = schema.get("type") if isinstance(schema, dict) else None
    if given == "integer" and isinstance(value, float) and not value.is_integer():
        return False
    return _type_of(value) in _types(schema) and (listed is None or any(_equal(value, each) for each in listed))


def _equal(a: Any, b: Any) -> bool:
    return _type_of(a) == _type_of(b) and a == b


def _disjoint(one: Schema, other: Schema) -> bool:
    """Tell whether it is certain that no value is valid for both."""
    if not _types(one) & _types(other):
        return True
    for a, b in ((one, other), (other, one)):
        values = _values(a)
        if values is not None and not any(_may_be(value, b) for value in values):
            return True
    return False


def _without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


# Patterns. llguidance's regular expressions have no look-around.

_CLASS = r"(?:\[(?:\\.|[^\]\\])+\]|\\[dDwWsS])"
_NEGATIVE = (
    # What must not come at the beginning, and a pattern that says so.
    (re.compile(rf"\^?({_CLASS})\*\$"), "{inverse}"),  # nothing but these characters
    (re.compile(rf"\^?({_CLASS})\+\$"), "^$|{inverse}"),
    (re.compile(rf"\^?\.\*({_CLASS})"), "^{inverse}*$"),  # any of these characters
    (re.compile(rf"\^?({_CLASS})"), "^(?:$|{inverse})"),  # one of these characters at first
    (re.compile(r"\^?\$"), r"[\s\S]"),  # nothing at all
)
# Of pydantic's decimals: a point anywhere among so many digits, and zeros behind them.
_DIGITS = r"\\d(?:\*|\{0,(\d+)\})"
_DECIMAL = re.compile(rf"\(\?:{_DIGITS}\|\(\?=\[\\d\.\]\{{1,(\d+)\}}0\*\$\){_DIGITS}\\\.{_DIGITS}0\*\$\)$")
_MOST_DIGITS = 64


def without_look_ahead(pattern: str) -> list[str] | None:
    """Patterns that together say what one with look-ahead does, or less; None: there are none that are known to."""
    if "(?=" not in pattern and "(?!" not in pattern:
        return None
    anchor, rest = ("^", pattern[1:]) if pattern.startswith("^") else ("", pattern)
    more: list[str] = []
    while anchor and rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        if end is None:
            return None
        kind, inner, rest = rest[2], rest[3:end], rest[end + 1 :]
        said = f"^(?:{inner})" if kind == "=" else _never(inner)
        if said is None:
            return None
        more.append(said)
    rest = _DECIMAL.sub(_decimal, rest)
    return None if "(?=" in rest or "(?!" in rest else [anchor + rest, *more]


def _never(inner: str) -> str | None:
    for forbidden, said in _NEGATIVE:
        found = forbidden.fullmatch(inner)
        if found:
            characters = found[1] if found.groups() else ""
            return said.replace("{inverse}", _inverse(characters))
    return None


def _inverse(characters: str) -> str:
    """The class of all other characters."""
    if characters.startswith("[^"):
        return "[" + characters[2:]
    return "[^" + characters[1:] if characters.startswith("[") else f"[^{characters}]"


def _closing(text: str) -> int | None:
    """The index at which the parenthesis that begins a text is closed."""
    depth, i, in_class = 0, 0, False
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif in_class:
            in_class = text[i] != "]"
        elif text[i] == "[":
            in_class = True
        else:
            depth += (text[i] == "(") - (text[i] == ")")
            if not depth:
                return i
        i += 1
    return None


def _decimal(found: re.Match[str]) -> str:
    whole, most, before, after = (None if group is None else int(group) for group in found.groups())
    assert most is not None, "the pattern always has it"
    digits = most - 1
    if digits > _MOST_DIGITS:
        return found[0]
    options = [
        f"\\d{{{a}}}\\.\\d{{0,{digits - a if after is None else min(after, digits - a)}}}0*"
        for a in range(min(digits, digits if before is None else before) + 1)
    ]
    return f"(?:\\d{{0,{digits if whole is None else whole}}}|{'|'.join(options)})$"
