"""The columns of a JSON schema: the Arrow type of each property of its object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.output.json_columns import JsonColumns
from batchgen.runtime.json_schema import Schema, read_schema, resolved

_SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_JSON = pa.string()  # of values that no other type holds


def json_columns(json_schema: str) -> JsonColumns:
    """The columns of the answers that follow a JSON schema.

    Strings, integers, numbers and booleans are columns of 64 bits or of text, arrays are lists, and objects whose
    properties are named are structs. What may be null is so in any column. Everything else, such as values of several
    types, objects with any names, and schemas that contain themselves, is JSON text.

    Args:
        json_schema: Text of the schema.

    Raises:
        InputError: The schema is not of an object, or names no properties.
    """
    root = read_schema(json_schema)
    properties = _properties(root, root)
    if not properties:
        raise InputError(
            "--json-columns needs a schema of an object, whose properties become columns: give one with properties, or"
            " leave --json-columns out"
        )
    return JsonColumns(tuple((name, _type(schema, root, ()) or _JSON) for name, schema in properties.items()))


def _properties(schema: Schema, root: Schema, depth: int = 0) -> dict[str, Schema]:
    """The properties of an object with their schemas; none for a schema of other values."""
    if not isinstance(schema, dict) or depth > 8:
        return {}
    own = schema.get("properties")
    properties = dict(own) if isinstance(own, dict) and schema.get("type", "object") == "object" else {}
    parts = [resolved({"$ref": schema["$ref"]}, root)] if isinstance(schema.get("$ref"), str) else []
    for part in (*parts, *_list(schema, "allOf")):
        properties = _properties(part, root, depth + 1) | properties
    return properties


def _type(schema: Schema, root: Schema, inside: tuple[str, ...]) -> pa.DataType | None:
    """The Arrow type of all values that a schema allows; None where that is null alone.

    Args:
        schema: The schema.
        root: The schema to which references lead.
        inside: The references that lead to the schema.
    """
    if not isinstance(schema, dict):
        return _JSON
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = resolved({"$ref": reference}, root)
        is_known = reference not in inside and target != {"$ref": reference}
        return _type(target, root, (*inside, reference)) if is_known else _JSON
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _common(_type_of_value(value) for value in values)
    variants = _list(schema, "anyOf") or _list(schema, "oneOf")
    if variants:
        return _common(_type(each, root, inside) for each in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _common(_type({**schema, "type": each}, root, inside) for each in kind)
    if kind == "null":
        return None
    if kind == "array":
        items = _list(schema, "prefixItems") + [
            schema[name] for name in ("items",) if isinstance(schema.get(name), dict)
        ]
        return pa.list_(_common(_type(each, root, inside) for each in items) or _JSON) if items else _JSON
    properties = _properties(schema, root) if kind in (None, "object") else {}
    if properties:
        return pa.struct([(name, _type(each, root, inside) or _JSON) for name, each in properties.items()])
    if kind is None and len(parts := _list(schema, "allOf")) == 1:
        return _type(parts[0], root, inside)
    return _SCALARS.get(kind, _JSON) if isinstance(kind, str) else _JSON


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _type_of_value(value: Any) -> pa.DataType | None:
    kinds = ((type(None), None), (bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()))
    return next((kind for python, kind in kinds if isinstance(value, python)), _JSON)


def _common(types: Iterable[pa.DataType | None]) -> pa.DataType | None:
    """The type that holds the values of several types; None where all are null."""
    distinct = {kind for kind in types if kind is not None}
    if distinct == {pa.int64(), pa.float64()}:
        return pa.float64()
    return distinct.pop() if len(distinct) == 1 else _JSON if distinct else None
