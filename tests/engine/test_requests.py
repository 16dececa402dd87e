"""Arguments that are given as requests.

One text is one request, and what cannot be a request fails as a row of its own.
"""

from array import array

import numpy as np
import pytest
import torch

import batchgen
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.requests import each_request, each_score_request

TEXT = "The ferry left"
MESSAGES = [{"role": "user", "content": TEXT}]
BAD_PROMPTS = {
    "None": (None, "a prompt must be text, token ids or chat messages, not None"),
    "a number": (5, "not int"),
    "a set": ({5, 6}, "not set"),
    "bytes": (b"text", "not bytes"),
    "fractions": ([1.5], "not a list with float"),
    "truth": ([True], "not a list with bool"),
    "numbers as text": (["5", "6"], "not a list with str"),
    "lists of ids": ([[5], [6]], "not a list with list"),
    "None among ids": ([5, None], "not a list with None"),
    "a message among ids": ([5, *MESSAGES], "not a list with dict"),
    "fractions of numpy": (np.array([1.0, 2.0]), "not a list with float"),
    "fractions of torch": (torch.tensor([1.5]), "not a list with float"),
    "truth of numpy": (np.array([True]), "not a list with bool"),
    "one number of torch": (torch.tensor(5), "not Tensor"),
    "a negative id": ([5, -1], "outside the model's vocabulary"),
    "an id beyond 32 bits": ([5, 1 << 40], "outside the model's vocabulary"),
    "an id beyond the vocabulary": ([5, 512], "outside the model's vocabulary of 512"),
    "half a character": ("a\ud800", "no valid Unicode"),
    "half a character in a message": ([{"role": "user", "content": [{"text": "\udfff"}]}], "no valid Unicode"),
    "nothing": ("", "the prompt is empty"),
    "no ids": ([], "the prompt is empty"),
    "an array of no ids": (np.array([], dtype=np.int64), "the prompt is empty"),
}
SAME_IDS = [
    [5, 6], (5, 6), range(5, 7), array("i", [5, 6]), np.array([5, 6]), torch.tensor([5, 6]), [np.int32(5), np.uint8(6)],
    [torch.tensor(5), 6],
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_models):
    with batchgen.Engine(
        str(tiny_models("llama")[0]),
        dtype="float32",
        cpu_memory="8GiB",
        sampling=SamplingParams(max_tokens=3, ignore_eos=True),
    ) as engine:
        yield engine


def in_order(found):
    return sorted(found, key=lambda result: result.index)


def tokens(completion):
    assert completion.error is None, completion.error
    return [sample.token_ids for sample in completion.samples]


def test_one_text_is_one_prompt(engine):
    (wanted,) = engine.generate([TEXT])
    for given in (TEXT, Request(TEXT), (r for r in [TEXT]), np.array([TEXT])):
        (found,) = engine.generate(given)
        assert tokens(found) == tokens(wanted)
    (found,) = engine.generate(b"text")
    assert "not bytes" in found.error
    (found,) = engine.generate(MESSAGES[0])  # its keys are no prompts
    assert "not dict" in found.error


def test_one_request_to_score_is_one_row(engine):
    (wanted,) = engine.score([ScoreRequest(TEXT, (" at",))])
    (found,) = engine.score(ScoreRequest(TEXT, (" at",)))
    assert found.scores == wanted.scores and found.error is None
    (found,) = engine.score(TEXT)
    assert found.error == "a request to score must be a ScoreRequest, not str"


@pytest.mark.parametrize("given", [None, 5, 1.5])
def test_what_is_no_list_of_requests_is_refused(given, engine):
    for call in (engine.generate, engine.score):
        with pytest.raises(InputError, match="requests must be a list or another iterable"):
            list(call(given))


def test_prompts_that_are_none_fail_alone(engine):
    wanted = tokens(next(iter(engine.generate([TEXT]))))
    bad = [prompt for prompt, _ in BAD_PROMPTS.values()]
    found = in_order(engine.generate([TEXT, *map(Request, bad), TEXT]))
    assert tokens(found[0]) == tokens(found[-1]) == wanted
    for name, completion in zip(BAD_PROMPTS, found[1:-1], strict=True):
        assert BAD_PROMPTS[name][1] in completion.error and not completion.samples, name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Request(TEXT, sampling={"max_tokens": 3}), "sampling must be SamplingParams, not dict"),
        (Request(TEXT, more_prompts="ab"), "more_prompts must be a tuple of prompts, not str"),
        (Request(TEXT, more_prompts=(None,)), "a prompt must be text, token ids or chat messages, not None"),
        (3.5, "a prompt must be text, token ids or chat messages, not float"),
        (object(), "not object"),
    ],
)
def test_a_request_that_is_none_keeps_its_place(given, message):
    first, bad, last = each_request(["a", given, "b"])
    assert (first.prompt, last.prompt) == ("a", "b") and message in bad.error and bad.prompt == ""


@pytest.mark.parametrize("given", SAME_IDS, ids=lambda given: type(given).__module__ + "." + type(given).__name__)
def test_token_ids_come_as_any_sequence_of_integers(given, engine):
    (wanted,), (found,) = engine.generate([Request([5, 6])]), engine.generate([given])
    assert tokens(found) == tokens(wanted) and found.prompt_tokens == 2
    (wanted,), (found,) = engine.score([ScoreRequest([7], ([5, 6],))]), engine.score([ScoreRequest(given, (given,))])
    assert found.error is None and found.scores[0].token_ids == wanted.scores[0].token_ids


def test_requests_to_score_that_are_none_fail_alone(engine):
    good = ScoreRequest(TEXT, (" at",), id="good")
    bad = [ScoreRequest(prompt, ([5],), id=name) for name, (prompt, _) in BAD_PROMPTS.items() if len(str(prompt)) > 2]
    bad += [ScoreRequest([7], (prompt,)) for prompt in (None, 5, [1.5], [True], [1 << 40], [-1], "\ud800", MESSAGES)]
    found = in_order(engine.score([good, *bad, None, TEXT, good]))
    assert found[0].scores == found[-1].scores and found[0].error is None
    assert len(found) == len(bad) + 4
    for request, scored in zip(bad, found[1:], strict=False):
        assert scored.error is not None and not scored.scores, request
        assert request.id is None or scored.id == request.id


def test_none_of_an_iterator_says_that_more_may_take_a_while():
    assert list(each_request(iter([None]))) == [None] and list(each_score_request(iter([None]))) == [None]


def test_none_in_a_list_of_prompts_keeps_its_place(engine):
    """As columns of tables have them: the prompts after it keep their numbers."""
    texts = [TEXT, None, "the ferry"]
    first, missing, last = in_order(engine.generate(texts))
    (alone,) = engine.generate("the ferry")
    assert (first.error, last.error, tokens(last)) == (None, None, tokens(alone))
    assert "must be text, token ids or chat messages, not None" in missing.error
