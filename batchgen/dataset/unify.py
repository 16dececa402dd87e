"""Unification of column types over several files: the narrowest type that holds all values unchanged."""

from __future__ import annotations

import pyarrow as pa

from batchgen.dataset.column_types import is_list


def unify_schemas(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Unify the schemas of two files with the same columns; the result has the first file's order of columns.

    Compatible types are: texts of all kinds (32 and 64 bits, views, dictionaries); integers, floats, decimals and times
    of several widths; lists of all kinds; and objects. Null is compatible with every type. A column is nullable where
    it is in one of the files. Numbers that would be written differently are not compatible: an integer and a float, or
    decimals of different scales.

    Raises:
        pa.ArrowException: A column's types are not compatible.
    """
    return pa.schema([_unified(field, second.field(field.name)) for field in first])


def _unified(a: pa.Field, b: pa.Field) -> pa.Field:
    nullable = a.nullable or b.nullable
    if a.type == b.type:
        return pa.field(a.name, a.type, nullable)
    plain = [pa.field(a.name, without_views(field.type, dictionaries=False), nullable) for field in (a, b)]
    _check_numbers(a.name, *(field.type for field in plain))
    merged = pa.unify_schemas([pa.schema([field]) for field in plain], promote_options="permissive")
    return merged.field(0)


def without_views(kind: pa.DataType, *, dictionaries: bool = True) -> pa.DataType:
    """The type without views of texts and bytes, at any depth.

    Args:
        kind: The type.
        dictionaries: False to take dictionary encoding away, too.
    """
    if pa.types.is_dictionary(kind):
        values = without_views(kind.value_type, dictionaries=dictionaries)
        return pa.dictionary(kind.index_type, values, kind.ordered) if dictionaries else values
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type, dictionaries=dictionaries)) for field in kind])
    of_items = {
        pa.types.is_list: pa.list_,
        pa.types.is_large_list: pa.large_list,
        pa.types.is_fixed_size_list: lambda item: pa.list_(item, kind.list_size),
    }  # fmt: skip
    for is_kind, make in of_items.items():
        if is_kind(kind):
            return make(kind.value_field.with_type(without_views(kind.value_type, dictionaries=dictionaries)))
    return kind


def _check_numbers(name: str, a: pa.DataType, b: pa.DataType) -> None:
    """Raise pa.ArrowTypeError where no type can hold the numbers of both types unchanged.

    Args:
        name: Name of the column.
        a: The type in the first file.
        b: The type in the second file.
    """
    if is_list(a) and is_list(b):
        _check_numbers(name, a.value_type, b.value_type)
    elif pa.types.is_struct(a) and pa.types.is_struct(b):
        for field in a:
            if (index := b.get_field_index(field.name)) >= 0:
                _check_numbers(f"{name}.{field.name}", field.type, b.field(index).type)
    elif _is_number(a) and _is_number(b):
        whole = [pa.types.is_integer(kind) for kind in (a, b)]
        wide = any(pa.types.is_uint64(kind) for kind in (a, b)) and any(
            pa.types.is_signed_integer(kind) for kind in (a, b)
        )
        decimals = [pa.types.is_decimal(kind) for kind in (a, b)]
        rescaled = decimals[0] != decimals[1] or (all(decimals) and a.scale != b.scale)  # 1.50 becomes 1.5, or 1.5000
        if whole[0] != whole[1] or wide or rescaled:
            raise pa.ArrowTypeError(f"column {name} is {a} and {b}")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
