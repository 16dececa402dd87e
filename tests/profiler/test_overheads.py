"""What the engine itself costs: measured on an engine without a tokenizer, which a machine's first run depends on."""

from batchgen.profiler.overheads import _engine, _requests


def test_the_engine_that_is_measured_runs():
    with _engine("cpu", 1) as engine:
        completions = list(engine.generate(_requests(3, 2)))
    assert [(c.error, len(c.samples[0].token_ids)) for c in completions] == [(None, 2)] * 3
