"""Turns listings into records: every text is JSON that is valid against a schema. Needs the extra `structured`.

python examples/structured_output.py [MODEL]
"""

import json
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
    "The Anchor, 12 Harbour Road: grilled fish on the quay, cheap",
    "Le Marais, 4 rue des Rosiers: eight courses, two stars",
]


def main(model: str = "demo") -> list[dict]:
    """Returns a record for each listing."""
    sampling = batchgen.SamplingParams(max_tokens=120, json_schema=json.dumps(SCHEMA))
    records = [{}] * len(LISTINGS)
    with batchgen.Engine(model, sampling=sampling) as engine:
        for completion in engine.generate(f"Listing: {listing}\nAs JSON: " for listing in LISTINGS):
            records[completion.index] = json.loads(completion.text)
    return records


if __name__ == "__main__":
    for record in main(*sys.argv[1:]):
        print(record)
