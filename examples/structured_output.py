"""Turns listings into records: every answer is JSON that is valid against a schema. Needs the extra `structured`.

python examples/structured_output.py [MODEL]
"""

import sys

import batchgen

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "price_level": {"type": "integer", "minimum": 1, "maximum": 4},
        "outdoor": {"type": "boolean"},
    },
    "required": ["name", "price_level", "outdoor"],
    "additionalProperties": False,
}
LISTINGS = [
    {"listing": "The Anchor, 12 Harbour Road: grilled fish on the quay, cheap"},
    {"listing": "Le Marais, 4 rue des Rosiers: eight courses, two stars"},
]


def main(model: str = "demo") -> list[dict]:
    """Returns a record for each listing. The schema may also be a class of pydantic."""
    options = {"json_schema": SCHEMA, "json_columns": True, "max_tokens": 120}
    table = batchgen.run(model, LISTINGS, prompt_template="Listing: {{ listing }}\nAs JSON: ", **options)
    return table.select(list(SCHEMA["properties"])).to_pylist()


if __name__ == "__main__":
    for record in main(*sys.argv[1:]):
        print(record)
