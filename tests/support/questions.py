"""Rows with questions and columns of odd types, and how they are answered in tests of Python and `datasets`."""

import datasets

QUESTIONS = ["The ferry left", "A restaurant by the quay", None, "The cook", "When the storm came", ""] * 4
OPTIONS = {"max_tokens": 5, "chat": False, "dtype": "float32", "cpu_memory": "4GiB"}
FEATURES = datasets.Features(
    {
        "q": datasets.Value("string"),
        "kind": datasets.ClassLabel(names=["sea", "land"]),
        "pair": datasets.Translation(languages=["de", "en"]),
        "vector": datasets.Array2D((1, 2), "float32"),
        "when": datasets.Value("timestamp[s]"),
    }
)


def rows(questions=QUESTIONS):
    return {
        "q": questions,
        "kind": [i % 2 for i in range(len(questions))],
        "pair": [{"de": f"d{i}", "en": f"e{i}"} for i in range(len(questions))],
        "vector": [[[i, 0.5]] for i in range(len(questions))],
        "when": list(range(len(questions))),
    }
