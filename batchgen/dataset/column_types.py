"""Tests of column types: text, token ids, and chat messages."""

from __future__ import annotations

import difflib
import json

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.dataset.binary_text import is_binary

# A JSON document that has its rows in a list under one key has few others.
_MOST_KEYS_OF_A_DOCUMENT = 5
# What may stand between the fields of CSV files, the likelier first.
DELIMITERS = (";", "\t", "|", ",")


def value_type(schema: pa.Schema, column: str, flag: str) -> pa.DataType:
    """The Arrow type of a column's values. Raises InputError where the schema has no such column.

    Args:
        schema: The input's columns.
        column: Name of the column.
        flag: The command-line option that names the column, for the error message.
    """
    if column not in schema.names:
        raise InputError(f"{flag} {column!r}: no such column{closest(column, schema)}")
    column_type = schema.field(column).type
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def closest(name: str, schema: pa.Schema) -> str:
    """The end of an error message that suggests a column's name: "; did you mean ...? (columns: ...)"."""
    by_lower = {column.lower(): column for column in schema.names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return (f"; did you mean {by_lower[close[0]]!r}?" if close else "") + listed(schema)


def listed(schema: pa.Schema) -> str:
    """The end of an error message that lists the columns: " (columns: ...)", with a hint where they look wrong."""
    text = f" (columns: {', '.join(schema.names)})"
    if is_unsplit(schema):
        return f"{text}; if its header was read as one column, give --csv-delimiter"
    for field in schema:
        if (
            is_list(field.type)
            and pa.types.is_struct(field.type.value_type)
            and len(schema) <= _MOST_KEYS_OF_A_DOCUMENT
        ):
            command = f"jq -c '.[{json.dumps(field.name)}][]'"
            return f"{text}; if {field.name!r} has the rows, write one of them a line, as {command} does"
    return text


def is_unsplit(schema: pa.Schema) -> bool:
    """True where the only column looks like the header of several, which were not taken apart."""
    return len(schema) == 1 and any(delimiter in schema.names[0] for delimiter in DELIMITERS)


def is_text(column_type: pa.DataType) -> bool:
    """True where an Arrow type is text, or binary, which is decoded from UTF-8."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, is_binary)
    return any(test(column_type) for test in tests)


def is_list(column_type: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(column_type) for test in tests)


def is_token_list(column_type: pa.DataType) -> bool:
    return is_list(column_type) and pa.types.is_integer(column_type.value_type)


def is_message_list(column_type: pa.DataType) -> bool:
    return {"role", "content"} <= _fields_of_items(column_type) or is_sharegpt(column_type)


def is_sharegpt(column_type: pa.DataType) -> bool:
    """True where an Arrow type is a list of ShareGPT messages, {from, value}."""
    names = _fields_of_items(column_type)
    return {"from", "value"} <= names and "role" not in names


def _fields_of_items(column_type: pa.DataType) -> set[str]:
    """The field names of the structs in a list type; the empty set for other types."""
    if not is_list(column_type) or not pa.types.is_struct(column_type.value_type):
        return set()
    item = column_type.value_type
    return {item.field(i).name for i in range(item.num_fields)}
