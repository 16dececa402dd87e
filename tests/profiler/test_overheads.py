"""The costs of the engine itself, which the first run on any machine measures."""

import dataclasses

from batchgen.profiler import overheads


def test_all_of_it_can_be_measured(monkeypatch):
    """The engine has no tokenizer, and weights are loaded and given back."""
    small = {"_MANY": 2, "_LAYERS": 2, "_OUTPUT_TOKENS": 3, "_PASSING_BYTES": 1 << 10, "_ROWS_OF_ONE_TOKEN": 16}
    for name, value in (small | {"_VOCAB": 64, "_WIDTH": 64, "_ROWS": 64}).items():
        monkeypatch.setattr(overheads, name, value)
    found = dataclasses.asdict(overheads.measure_overheads("cpu"))
    assert all(value >= 0 for value in found.values() if value is not None), found
    assert found["load_bytes_per_s"] > 0 and found["gguf_load_bytes_per_s"] > 0
