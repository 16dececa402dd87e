"""Schemas of pydantic and OpenAI's clients: texts that follow them are valid against the schema as it was given."""

import datetime
import enum
import itertools
import json
import random
import re
from typing import Annotated, Literal

import jsonschema
import numpy as np
import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.runtime.grammar import Grammars, check_grammar
from batchgen.runtime.json_schema import read_schema, without_look_ahead

pytest.importorskip("llguidance")


def decimal_pattern(max_digits=None, places=None):
    """As pydantic 2.10 writes it."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    if max_digits is None:
        return start + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")
    look = rf"(?=[\d.]{{1,{max_digits + 1}}}0*$)"
    if places is None:
        return start + rf"(?:\d{{0,{max_digits}}}|{look}\d*\.\d*0*$)"
    whole = max(0, max_digits - places)
    return start + rf"(?:\d{{0,{whole}}}|{look}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def record(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


INTEGER, TEXT = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "maxLength": 4}
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": decimal_pattern()}]}
CAT = record(["lives"], kind={"const": "cat", "default": "cat"}, lives=INTEGER)
DOG = record(["kind"], kind={"const": "dog"}, name=TEXT)
SCHEMAS = {
    "decimal": record(["price"], price=DECIMAL),
    "decimal as text": {"type": "string", "pattern": decimal_pattern()},
    "decimal, digits and places": {"type": "string", "pattern": decimal_pattern(6, 2), "maxLength": 9},
    "decimal, more places than digits": {"type": "string", "pattern": decimal_pattern(2, 4), "maxLength": 9},
    "path and password": record(
        ["p", "q"], p=TEXT | {"format": "path"}, q=TEXT | {"format": "password", "writeOnly": True}
    ),
    "a property that is called format": record(["format"], format=TEXT | {"format": "binary"}),
    "a default that looks like a schema": record(["a"], a=INTEGER | {"default": {"format": "path"}}),
    "discriminated union": {
        "$defs": {"Cat": CAT, "Dog": DOG},
        **record(["pet"], pet={
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        }),
    },
    "oneOf, what each requires": {"oneOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER), record(["c"], c=TEXT)]},
    "oneOf beside properties": {
        **record(a=INTEGER, b=TEXT), "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False,
    },
    "oneOf, closed records": {"oneOf": [
        record(["a"], a=INTEGER) | {"additionalProperties": False},
        record(["a", "b"], a=INTEGER, b=TEXT) | {"additionalProperties": False},
    ]},
    "oneOf, null": record(["a"], a={"oneOf": [{"type": "null"}, record(["x"], x=INTEGER)]}),
    "oneOf, values": {"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", "c", 1.0, True]}]},
    "oneOf, types": {"oneOf": [INTEGER, TEXT, {"type": "array", "items": INTEGER, "maxItems": 2}]},
    "a pattern over a named property": {
        "type": "object", "properties": {"ab": INTEGER},
        "patternProperties": {"^a[a-c]$": {"type": "number", "maximum": 50}},
        "required": ["ab"], "additionalProperties": False,
    },
    "OpenAI's": {"name": "pet", "strict": True, "schema": record(["lives"], lives=INTEGER)},
    "OpenAI's response format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": record(["a"], a=INTEGER)},
    },
    "OpenAI's text format": {"type": "json_schema", "name": "n", "schema": record(["a"], a=INTEGER)},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    made = Grammars(lambda: json.dumps(tokenizer), 512, [0])
    yield made, tokenizer
    made.close()


def texts_of(grammars, schema, count, seed):
    """Whole texts, each token drawn from those that the grammar allows."""
    from tokenizers import Tokenizer

    made, tokenizer = grammars
    decoder, rng, found = Tokenizer.from_str(json.dumps(tokenizer)), random.Random(seed), []
    ends = [i for i in range(512) if set(decoder.decode([i])) & set('"}]')]
    for _ in range(count):
        constraint, tokens = made.compile(SamplingParams(json_schema=schema)).start(), []
        for _ in range(150):
            allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[:512]).tolist()
            closing = [token for token in allowed if token == 0 or token in ends]
            token = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
            if token == 0:
                found.append(decoder.decode(tokens))
                break
            tokens.append(token)
            made.advance({constraint: [token]})
            constraint.mask()
            assert constraint.error is None
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_valid_against_the_schema_as_it_was_given(name, grammars):
    schema = read_schema(json.dumps(SCHEMAS[name]))
    texts = texts_of(grammars, SCHEMAS[name], 12, seed=sum(map(ord, name)))
    assert len(texts) >= 4
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("digits", [(), (4, 2), (3,), (None, 2), (2, 4)])
def test_decimals_keep_their_digits(digits):
    """Every number that pydantic's pattern means is there, and nothing that it does not match."""
    pattern = decimal_pattern(*digits)
    patterns = without_look_ahead(pattern)
    found = set()
    for text in map("".join, itertools.chain.from_iterable(itertools.product("+10.", repeat=n) for n in range(7))):
        if all(re.search(each, text) for each in patterns):
            assert re.search(pattern, text), text
            found.add(text)
    most, places = (*digits, None, None)[:2]
    for number in ("1", "+10", "0.1", "10.", ".11", "1.1", "1.10", "0001"):
        whole, _, after = number.strip("+").partition(".")
        whole, after = whole.lstrip("0"), after.rstrip("0")
        room = most is None or (len(whole) <= max(0, most - (places or 0)) and len(whole) + len(after) <= most)
        assert (number in found) == (room and (places is None or len(after) <= places)), number


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"^(?!$).*$", [r"^.*$", r"[\s\S]"]),
        (r"^(?=.*\d)(?=.*[a-z])\w{2,5}$", [r"^\w{2,5}$", r"^(?:.*\d)", r"^(?:.*[a-z])"]),
        (r"^(?!.*[<>])[a-z<>]+$", [r"^[a-z<>]+$", r"^[^<>]*$"]),
        (r"^(?!\d)\w+$", [r"^\w+$", r"^(?:$|[^\d])"]),
        (r"^(?![^a])\w+$", [r"^\w+$", r"^(?:$|[a])"]),
        (r"^(?!_+$)\w+$", None),  # not a class
        (r"^a(?=b)b", None),
        (r"(?<=a)b", None),
        (r"^[a-z]+$", None),
        (r"^[(?=]+$", None),  # characters of a class
    ],
)
def test_look_ahead_at_the_beginning_becomes_further_patterns(pattern, wanted):
    assert without_look_ahead(pattern) == wanted


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            'two schemas of a oneOf; write anyOf, or .*"coerce_one_of": true',
        ),
        ({"oneOf": [record(a=INTEGER), record(a=INTEGER, b=TEXT)]}, "two schemas of a oneOf"),
        ({"type": "string", "pattern": "a(?=b)b"}, "in a pattern, look-around"),
        ([1], "it must be a JSON object"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)  # fmt: skip
def test_what_cannot_be_guaranteed_is_refused_by_name(schema, message):
    with pytest.raises(InputError, match=message):
        check_grammar(SamplingParams(json_schema=json.dumps(schema)))


def test_a_schema_may_allow_what_oneOf_does_not():
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    check_grammar(SamplingParams(json_schema=schema))


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema = '{"items": ' * 900 + "{}" + "}" * 900
    with pytest.raises(InputError, match="json_schema"):
        check_grammar(SamplingParams(json_schema=schema))


def test_schemas_of_pydantic_models_give_what_the_models_take(grammars):
    pydantic = pytest.importorskip("pydantic")
    short = Annotated[str, pydantic.Field(max_length=3)]

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"] = "cat"
        lives: Annotated[int, pydantic.Field(ge=0, le=9)]

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"] = "dog"
        name: short

    class Owner(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
        colour: Colour
        born: datetime.date | None
        password: Annotated[pydantic.SecretStr, pydantic.Field(max_length=3)]
        place: tuple[short, bool]

    texts = texts_of(grammars, Owner.model_json_schema(), 6, seed=3)
    assert len(texts) >= 2
    for text in texts:
        Owner.model_validate_json(text)
