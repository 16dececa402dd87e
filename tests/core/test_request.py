"""Limits of one request: a value that would take all memory, or that arithmetic does not hold, is refused by name."""

import pytest

from batchgen.core.errors import InputError
from batchgen.core.request import MOST_RESULT_BYTES, MOST_SAMPLES, MOST_STOPS, SamplingParams

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**8),
        ("n", HUGE),
        ("n", MOST_SAMPLES + 1),
        ("stop", ["x"] * (MOST_STOPS + 1)),
        ("stop_token_ids", list(range(MOST_STOPS + 1))),
        ("top_k", 2**63),
        ("logprobs", 10**6),
        ("temperature", HUGE),
        ("top_p", HUGE),
        ("min_p", HUGE),
        ("repetition_penalty", HUGE),
        ("repetition_penalty", 1e300),  # infinite in 32 bits
        ("repetition_penalty", 1e-300),  # and zero
        ("presence_penalty", -HUGE),
        ("frequency_penalty", HUGE),
        ("logit_bias", {"1": HUGE}),
        ("logit_bias", {str(i): 1e9 for i in range(10_000)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_machine_does_not_have_is_refused_by_name_in_a_line(name, value):
    with pytest.raises(InputError) as raised:
        SamplingParams(**{"temperature": 1.0, name: value})
    assert str(raised.value).startswith(name) and len(str(raised.value)) < 500


def test_what_people_ask_for_is_taken():
    SamplingParams(n=MOST_SAMPLES, temperature=1, stop=["x"] * MOST_STOPS, top_k=-1, repetition_penalty=2)
    SamplingParams(max_tokens=10**30, seed=-(2**70), logit_bias={str(i): -100 for i in range(1000)})


@pytest.mark.parametrize(
    ("sampling", "prompts", "fits"),
    [
        (SamplingParams(max_tokens=131_072, logprobs=100), 1, True),
        (SamplingParams(max_tokens=4096, n=128, temperature=1.0, logprobs=20), 1, True),
        (SamplingParams(max_tokens=4096, n=MOST_SAMPLES, temperature=1.0), 1, True),
        (SamplingParams(max_tokens=4096, n=MOST_SAMPLES, temperature=1.0, logprobs=0), 2, False),
        (SamplingParams(max_tokens=131_072, n=128, temperature=1.0, logprobs=100), 1, False),
    ],
)
def test_results_that_could_take_all_memory_are_refused(sampling, prompts, fits):
    if fits:
        sampling.check_result_size(prompts)
    else:
        with pytest.raises(InputError, match="lower n, max_tokens or logprobs"):
            sampling.check_result_size(prompts)
    assert MOST_RESULT_BYTES <= 4 << 30


def test_numbers_stay_as_they_were_given():
    """Manifests of jobs have them: 0 and 0.0 would be two jobs."""
    assert isinstance(SamplingParams(temperature=0).to_json()["temperature"], int)
