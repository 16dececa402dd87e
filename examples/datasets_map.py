"""A `datasets.Dataset` in and one out: as a job, which survives a crash, and as a function for `Dataset.map`.

python examples/datasets_map.py [MODEL]
"""

import sys

import datasets

import batchgen


def main(model: str = "demo") -> tuple[datasets.Dataset, datasets.Dataset]:
    """Returns both results; their texts are equal. The job keeps its file in the cache directory for a week."""
    rows = datasets.Dataset.from_dict({"q": ["The capital of France is", "Two plus two is"], "topic": ["maps", "sums"]})
    answers = batchgen.run(model, rows, prompt_column="q", max_tokens=8)
    function = batchgen.MapFunction(model, prompt_column="q", max_tokens=8)
    mapped = rows.map(function, batched=True)
    function.close()
    return answers, mapped


if __name__ == "__main__":
    print(main(*sys.argv[1:])[0].to_list())
