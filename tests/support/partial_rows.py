"""Partial completions made from row numbers, and their comparison."""

import numpy as np

from batchgen.core.partial import PartialCompletion, PartialSample


def partial_of(row, tokens=5, samples=1, logprobs=None):
    rng = np.random.default_rng(row)
    made = []
    for _ in range(samples):
        token_ids = rng.integers(0, 1000, tokens).astype(np.int32)
        made.append(PartialSample(token_ids, None if logprobs is None else rng.normal(size=(tokens, 1 + 2 * logprobs))))
    return PartialCompletion(row, bytes(range(16)), tuple(made))


def assert_equal(found, wanted):
    assert (found.row, found.digest, len(found.samples)) == (wanted.row, wanted.digest, len(wanted.samples))
    for sample, same in zip(found.samples, wanted.samples, strict=True):
        assert sample.token_ids.dtype == np.int32 and np.array_equal(sample.token_ids, same.token_ids)
        assert (sample.logprobs is None) == (same.logprobs is None)
        if same.logprobs is not None:
            assert len(sample.logprobs) == len(same.logprobs)
            assert np.array_equal(sample.logprobs.ravel(), same.logprobs.ravel())
