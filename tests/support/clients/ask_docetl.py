"""A map of DocETL over rows, by its own way (a function to call) and by a schema: prints the rows of both.

It runs in the environment of clients, which has nothing of this project. The address and the key are in OPENAI_BASE_URL
and OPENAI_API_KEY.
"""

import json
from pathlib import Path

from docetl.api import Dataset, MapOp, Pipeline, PipelineOutput, PipelineStep

SCHEMA = {"kind": "enum[good, bad]", "certain": "boolean"}
MODEL = "openai/demo"


def labelled(output: dict) -> list[dict]:
    """The rows with a label each. output: DocETL's description of what comes out."""
    label = MapOp(
        name="label",
        type="map",
        prompt="Label: {{ input.text }}",
        output=output,
        model=MODEL,
        litellm_completion_kwargs={"temperature": 0, "max_tokens": 60},
    )
    pipeline = Pipeline(
        name="labels",
        datasets={"rows": Dataset(type="file", path="rows.json")},
        operations=[label],
        steps=[PipelineStep(name="label", input="rows", operations=["label"])],
        output=PipelineOutput(type="file", path="labelled.json"),
        default_model=MODEL,
        bypass_cache=True,
    )
    pipeline.run(max_threads=4)
    return json.loads(Path("labelled.json").read_text())


Path("rows.json").write_text(json.dumps([{"id": number, "text": f"row {number}"} for number in range(6)]))
by_function = labelled({"schema": SCHEMA})
by_schema = labelled({"schema": SCHEMA, "mode": "structured_output"})
print(json.dumps({"by_function": by_function, "by_schema": by_schema}))
