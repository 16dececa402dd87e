"""A processor as of `ray.data.llm`: settings and columns, without Ray."""

import asyncio

import numpy as np
import pytest

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.request import Completion, Sample, SamplingParams
from batchgen.ray.processor import (
    DATA,
    ERROR,
    ProcessorConfig,
    Stage,
    answered,
    build_processor,
    engine_options,
    finished,
    request_of,
    sampling_of,
)


def test_engine_options_of_vllm():
    given = {"max_model_len": 512, "enable_prefix_caching": False, "tensor_parallel_size": 4, "enforce_eager": True}
    assert engine_options(given) == {"max_model_len": 512, "share_prefixes": False}
    with pytest.raises(InputError, match="engine_kwargs has 'loras', which means nothing here"):
        build_processor(ProcessorConfig("demo", {"loras": 1}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_tokens": 16, "temperature": 1.0}),  # as in vLLM
        ({"temperature": 0, "max_tokens": 3, "top_k": -1, "detokenize": False}, {"temperature": 0, "max_tokens": 3}),
        (
            {"stop": ["a", "b"], "top_p": None, "min_tokens": 0},
            {"stop": ("a", "b"), "temperature": 1.0, "max_tokens": 16},
        ),
        ({"logit_bias": {"5": 1.0, "7": None}}, {"logit_bias": {5: 1.0}, "temperature": 1.0, "max_tokens": 16}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+", "temperature": 1.0, "max_tokens": 16}),
    ],
)
def test_sampling_parameters_of_vllm(given, expected):
    assert sampling_of(given)[0] == SamplingParams(**expected)


def test_draws_with_a_seed_are_the_same_and_others_are_not():
    assert sampling_of({"seed": 7}) == sampling_of({"seed": 7})
    assert sampling_of({})[1] != sampling_of({})[1]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({}, "neither prompt nor messages"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "n above 1"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 0}}, "max_tokens must be at least 1"),
        ({"prompt": "a", "sampling_params": {"beam_width": 2}}, "'beam_width', which means nothing here"),
        (
            {"prompt": "a", "sampling_params": {"structured_outputs": {"structural_tag": "x"}}},
            "'structural_tag', which means nothing",
        ),
    ],
)
def test_a_row_that_means_nothing_fails_alone(row, error):
    assert error in request_of(row).error


def test_prompts_as_ray_hands_them_over():
    messages = np.array([{"role": "user", "content": "a", "name": None}], dtype=object)
    assert request_of({"messages": messages}).prompt == [{"role": "user", "content": "a"}]
    assert request_of({"tokenized_prompt": np.array([1, 2]), "prompt": "a"}).prompt == [1, 2]
    assert request_of({"prompt": "a", "messages": None, "tokenized_prompt": None}).prompt == "a"


def test_columns_of_vllm():
    row = {"i": 3, "prompt": "a", "sampling_params": {"max_tokens": 2}}
    done = Completion(0, 0, 5, (Sample("b c", (8, 9), "stop"),))
    expected = {
        "i": 3,
        "prompt": "a",
        "generated_text": "b c",
        "generated_tokens": [8, 9],
        "num_generated_tokens": 2,
        "num_input_tokens": 5,
    }
    assert answered(row, done, False) == expected
    assert answered(row, done, True) == expected | {ERROR: ""}
    failed = Completion(0, 0, 0, error="too long")
    with pytest.raises(BatchgenError, match="a row failed: too long"):
        answered(row, failed, False)
    assert answered(row, failed, True)[ERROR] == "too long"


def test_a_failed_row_goes_past_postprocess():
    failed = {ERROR: "too long", "prompt": "a"}
    assert finished(failed, lambda row: {"answer": row["generated_text"]}, True) == failed
    assert finished({"x": 1, ERROR: ""}, lambda row: {"y": row["x"]}, True) == {"y": 1, ERROR: ""}
    assert finished({"x": 1}, lambda row: {"y": row["x"]}, False) == {"y": 1}


def test_batches_through_a_model(tiny_models):
    path, _ = tiny_models("llama")
    stage = Stage(ProcessorConfig(str(path), {"dtype": "float32", "cpu_memory": "4GiB"}, should_continue_on_error=True))
    greedy = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    rows = [{"prompt": "quay " * n, "sampling_params": greedy, "n": n} for n in (1, 2)] + [{"n": 3}]

    async def both():
        return await asyncio.gather(*(stage({DATA: np.array([row], dtype=object)}) for row in rows))

    try:
        made = [batch[DATA][0] for batch in asyncio.run(both())]
    finally:
        stage.close()
    assert [row["n"] for row in made] == [1, 2, 3]
    assert [row["num_generated_tokens"] for row in made] == [4, 4, 0]
    assert made[0][ERROR] == "" and "neither prompt nor messages" in made[2][ERROR]
