"""Template fields whose order the user frees: where it can be done, and which order is chosen."""

import random
from itertools import permutations

import pyarrow as pa
import pytest

from batchgen.core.errors import InputError
from batchgen.dataset.field_order import FieldValues, free_lines

SCHEMA = pa.schema([(name, pa.string()) for name in ("brand", "product", "review", "stars")])
STARS = "{% if stars %}Stars: {{ stars }}{% endif %}"
TEMPLATE = f"A review.\nText: {{{{ review }}}}\n{STARS}\nOf {{{{ product }}}}\nBy {{{{ brand }}}}\nGood?"


def test_the_lines_of_the_fields_change_places_and_others_stay():
    free = free_lines(TEMPLATE, ["brand", "product", "review"], SCHEMA)
    assert free.fields == ("review", "product", "brand")
    assert free.arranged(free.fields) == TEMPLATE
    assert free.arranged(["brand", "product", "review"]) == (
        f"A review.\nBy {{{{ brand }}}}\n{STARS}\nOf {{{{ product }}}}\nText: {{{{ review }}}}\nGood?"
    )


def test_a_line_with_a_condition_of_its_own_changes_places_whole():
    free = free_lines(TEMPLATE, ["stars", "review"], SCHEMA)
    assert free.arranged(["stars", "review"]).split("\n")[1].startswith("{% if stars %}")


@pytest.mark.parametrize(
    ("template", "fields", "reason"),
    [
        ("{{ brand }}\n{{ product }}", ["brand"], "from 2 to 8 different columns"),
        ("{{ brand }}\n{{ product }}", ["brand", "brand"], "from 2 to 8 different columns"),
        ("{{ brand }}\n{{ product }}", ["brand", "prodct"], "'prodct' is not a column; did you mean 'product'?"),
        ("{{ brand }} {{ product }}", ["brand", "product"], "brand and product are on one line"),
        ("{{ brand }}\n{{ product }}\n{{ brand }}", ["brand", "product"], "brand must be on exactly one line"),
        ("{{ brand }}\nno more", ["brand", "product"], "product must be on exactly one line"),
        (
            "{% if brand %}\n{{ brand }}\n{% endif %}\n{{ product }}",
            ["product", "brand"],
            "brand must be on exactly one",
        ),
        ("{% if stars %}\n{{ brand }}\n{% endif %}\n{{ product }}", ["product", "brand"], "outside of blocks"),
        ("{{ product }}\n{#\n{{ brand }}\n#}", ["product", "brand"], "brand must be on exactly one line"),
        ("{% set x = brand %}\n{{ product }}\n{{ x }}", ["product", "brand"], "the line of brand sets a variable"),
    ],
)
def test_what_cannot_change_places_is_refused_in_a_line(template, fields, reason):
    with pytest.raises(InputError) as refused:
        free_lines(template, fields, SCHEMA)
    assert reason in str(refused.value) and len(str(refused.value).splitlines()) == 1


def table(count, seed):
    """Rows whose products have a brand each, and a review of their own."""
    rng = random.Random(seed)
    brand_of = {f"product {k} {'x' * 30}": f"brand {k % 7}" for k in range(60)}
    products = [rng.choice(list(brand_of)) for _ in range(count)]
    return pa.record_batch(
        {
            "review": [f"{k} {'good ' * rng.randrange(9)}" for k in range(count)],
            "product": products,
            "brand": [brand_of[product] for product in products],
            "stars": pa.array([rng.choice([1, 2, 3, None]) for _ in range(count)]),
        }
    )


def saved(batch, fields):
    """Characters that sorted rows have in common with the one before, in whole fields."""
    rows = sorted(tuple(str(row[field]) for field in fields) for row in batch.to_pylist())
    total, before = 0, ()
    for row in rows:
        for value, other in zip(row, before, strict=False):
            if value != other:
                break
            total += len(value)
        before = row
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_order_is_the_best_of_all(seed):
    batch = table(500, seed)
    fields = ["review", "product", "brand", "stars"]
    values = FieldValues.of([batch.slice(0, 200), batch.slice(200)], fields)
    order = values.best_order(fields)
    best = max(saved(batch, other) for other in permutations(fields))
    assert saved(batch, order) >= 0.97 * best and order[-1] == "review"
    assert values.distinct[frozenset(["stars"])] == 4 and values.num_rows == 500
    assert values.distinct[frozenset(["product", "brand"])] == values.distinct[frozenset(["product"])]


def test_fields_without_equal_values_or_rows_keep_their_order():
    unique = pa.record_batch({name: [f"{name} {k}" for k in range(20)] for name in ("stars", "brand", "review")})
    fields = ("stars", "brand", "review")
    assert FieldValues.of([unique], fields).best_order(fields) == fields
    assert FieldValues.of([], fields).best_order(fields) == fields


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a", "b"], ["c"], None, ["c"]]),
        pa.array([{"x": 1}, {"x": 2}, None, {"x": 2}]),
        pa.array(["a", "b", None, "b"]).dictionary_encode(),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16, None, b"b" * 16], pa.binary(16))),
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4], None, [3, 4]], pa.list_(pa.int32(), 2))
        ),
    ],
    ids=["lists", "structs", "categories", "extensions", "tensors"],
)
def test_values_of_any_type_are_counted(column):
    batch = pa.record_batch({"review": column, "brand": [1, 2, 3, 4]})
    values = FieldValues.of([batch], ["review", "brand"])
    assert values.distinct[frozenset(["review"])] == 3
    assert values.best_order(["brand", "review"]) == ("review", "brand")
