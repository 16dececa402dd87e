"""What a HELM request asks of the engine, and its completions from the engine's results; HELM itself is not needed."""

import json
import random
from types import SimpleNamespace

import pytest

from batchgen.core.errors import RowError
from batchgen.helm.rows import GENERATE, SCORE, answers, wanted
from batchgen.models.files import resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer


def helm_request(**fields):
    """The fields of helm.common.request.Request."""
    fields = {"prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 8} | fields
    defaults = {
        "embedding": False, "num_completions": 1, "top_k_per_token": 1, "stop_sequences": [], "echo_prompt": False,
        "top_p": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "random": None, "messages": None, "multimodal_prompt": None,
        "image_generation_parameters": None, "response_format": None,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | fields))


class Letters:
    """A tokenizer whose tokens are characters, after one that begins the text."""

    def encode(self, text):
        return [0, *map(ord, text)]

    def encode_chat(self, messages):
        return [0, *map(ord, "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")]

    def decode(self, token_ids):
        return "".join("^" if t == 0 else chr(t) for t in token_ids)


def want_of(chat=False, **fields):
    return wanted(helm_request(**fields), Letters(), chat)


def generated(text, tokens, reason):
    positions = [{"token": token, "token_id": 7, "logprob": -0.5 * i, "top": []} for i, token in enumerate(tokens, 1)]
    return {"text": text, "finish_reason": reason, "logprobs": positions, "error": None}


def completion(result, **fields):
    want = want_of(**fields)
    (answer,) = answers(want, {want.generated[0].id: result})
    return answer


def test_sampling_is_the_requests():
    want = want_of(max_tokens=5, temperature=0.7, top_p=0.9, stop_sequences=["\n", "END"])
    (row,) = want.rows
    assert (row.kind, row.prompt) == (GENERATE, "Once upon a time")
    assert row.sampling == {"max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "stop": ["\n", "END"]}


def test_a_schema_goes_with_the_row():
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    (row,) = want_of(response_format=SimpleNamespace(json_schema=schema)).rows
    assert json.loads(row.sampling["json_schema"]) == schema
    assert row.id != want_of().rows[0].id == want_of(response_format=SimpleNamespace(json_schema=None)).rows[0].id


def test_requests_that_ask_the_same_share_a_row_and_no_others():
    base = {"temperature": 1.0, "stop_sequences": ["\n"]}
    same = want_of(**base, top_k_per_token=5).generated[0].id
    assert want_of(**base).generated[0].id == same
    others = [
        {"prompt": "Once"}, {"temperature": 0.5}, {"max_tokens": 9}, {"top_p": 0.5}, {"stop_sequences": []},
        {"random": "1"},
        {"random": "2"}, {"messages": [{"role": "user", "content": "Once"}], "prompt": "", "chat": True},
    ]  # fmt: skip
    ids = [want_of(**(base | other)).generated[0].id for other in others]
    assert len({same, *ids}) == len(others) + 1


def test_sampled_completions_are_rows_of_their_own():
    want = want_of(num_completions=5, temperature=1.0, random="3")
    assert len({row.id for row in want.rows}) == len(want.generated) == 5
    results = {row.id: generated(f"text {k}", ["x"], "length") for k, row in enumerate(want.generated)}
    assert [a.text for a in answers(want, results)] == [f"text {k}" for k in range(5)]
    assert {row.id for row in want_of(num_completions=3, temperature=1.0, random="3").rows} < set(results)


def test_greedy_completions_are_one_row():
    want = want_of(num_completions=3, temperature=0.0, random="3")
    assert len(want.rows) == 1
    assert [a.text for a in answers(want, {want.rows[0].id: generated("same", ["same"], "length")})] == ["same"] * 3


def test_echo_scores_all_tokens_but_the_first():
    want = want_of(prompt="abc", echo_prompt=True, max_tokens=0)
    (row,) = want.rows
    assert (row.kind, row.prompt) == (SCORE, (0, 97, 98, 99))
    result = {
        "logprobs": [{"token": t, "logprob": lp} for t, lp in (("a", -1.0), ("b", -2.0), ("c", -4.0))],
        "error": None,
    }
    (answer,) = answers(want, {row.id: result})
    assert answer.text == "^abc" and answer.finish_reason == "length"
    assert answer.tokens == (("^", 0.0), ("a", -1.0), ("b", -2.0), ("c", -4.0))


def test_echo_before_a_completion_has_both_log_probabilities():
    want = want_of(prompt="a", echo_prompt=True, max_tokens=4, num_completions=2)
    score, generate = {row.kind: row for row in want.rows}[SCORE], want.generated[0]
    results = {
        score.id: {"logprobs": [{"token": "a", "logprob": -3.0}], "error": None},
        generate.id: generated(" b", [" b", "<eos>"], "stop"),
    }
    expected = ("^a b", (("^", 0.0), ("a", -3.0), (" b", -0.5)), "endoftext")
    assert [(a.text, a.tokens, a.finish_reason) for a in answers(want, results)] == [expected] * 2


def test_echo_of_a_single_token_needs_no_engine():
    want = wanted(helm_request(prompt="a", echo_prompt=True, max_tokens=0),
    SimpleNamespace(encode=lambda text: [97], decode=Letters().decode), False)  # fmt: skip
    assert want.rows == ()
    assert [(a.text, a.tokens) for a in answers(want, {})] == [("a", (("a", 0.0),))]


def test_chat_models_get_messages():
    (row,) = want_of(chat=True).rows
    assert row.prompt == ({"role": "user", "content": "Once upon a time"},)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert want_of(chat=True, prompt="", messages=messages).rows[0].prompt == tuple(messages)
    echoed = want_of(chat=True, prompt="", messages=messages, echo_prompt=True, max_tokens=0)
    assert echoed.prompt_text == "^<system>s<user>u<assistant>"


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "stop", "kept", "expected"),
    [
        ([" a", " b"], " a b", "length", ["\n"], 2, "length"),
        ([" a", "\n"], " a", "stop", ["\n"], 1, "stop"),
        ([" a", "\n\n"], " a", "stop", ["\n"], 1, "stop"),
        ([" a", ".\n"], " a.", "stop", ["\n"], 2, "stop"),  # the token's beginning belongs to the text
        ([" a", " E", "N", "D"], " a", "stop", [" END"], 1, "stop"),
        ([" a", " xE", "N", "Dy"], " a x", "stop", ["END"], 2, "stop"),
        ([" a", "<eos>"], " a", "stop", ["\n"], 1, "endoftext"),
        ([" a", "</s>"], " a", "stop", ["s"], 1, "endoftext"),  # a stop string inside the end of text is none
        (["<eos>"], "", "stop", [], 0, "endoftext"),
        (["\n"], "", "stop", ["\n"], 0, "stop"),
        (["\ufffd", "\ufffd", "\n"], "\u00e9", "stop", ["\n"], 2, "stop"),  # two bytes of a character
        (["ab", "c", "abc"], "ab", "stop", ["bc", "cab"], 1, "stop"),
    ],
)
def test_tokens_end_where_the_text_ends(tokens, text, reason, stop, kept, expected):
    answer = completion(generated(text, tokens, reason), stop_sequences=stop)
    assert ([token for token, _ in answer.tokens], answer.finish_reason) == (tokens[:kept], expected)
    assert [logprob for _, logprob in answer.tokens] == [-0.5 * i for i in range(1, kept + 1)]
    assert answer.text == text


def test_tokens_end_where_the_text_ends_with_a_real_tokenizer():
    """Random tokens of a model's vocabulary, stopped as the engine stops them."""
    tokenizer = load_tokenizer(resolve_model("demo"))
    rng = random.Random(0)
    eos = tokenizer.eos_token_ids[0]
    some = [t for t in rng.sample(range(100, tokenizer.vocab_size), 400) if t not in tokenizer.special_ids]
    reasons = set()
    for _ in range(300):
        stop = [tokenizer.decode(rng.choices(some, k=rng.choice((1, 1, 2))))[-3:] for _ in range(2)]
        stop = [s for s in stop if s and "\ufffd" not in s]
        detector, ids, found = tokenizer.stop_detector(stop), [], None
        while found is None and len(ids) < 30:
            ids.append(eos if rng.random() < 0.03 else rng.choice(some))
            if ids[-1] == eos:
                break
            found = detector.push(ids[-1])
        reason = "length" if found is None and ids[-1] != eos else "stop"
        text = detector.text if found else tokenizer.decode(ids[:-1] if ids[-1] == eos else ids)
        answer = completion(generated(text, [tokenizer.token_text(t) for t in ids], reason), stop_sequences=stop)
        texts = [tokenizer.decode(ids[:k]) for k in range(len(ids) + 1)]
        enough = next(k for k, t in enumerate(texts) if len(t.encode()) >= len(text.encode()) and t.startswith(text))
        expected = len(ids) if reason == "length" else enough
        assert len(answer.tokens) == expected, (ids, stop, text)
        assert answer.finish_reason == ("stop" if found else "endoftext" if reason == "stop" else "length")
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "endoftext", "length"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding": True}, "embedding"),
        ({"multimodal_prompt": object()}, "multimodal_prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "", "messages": [{"role": "user", "content": "x"}]}, "apply_chat_template"),
        ({"num_completions": 0}, "num_completions"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(fields, message):
    with pytest.raises(RowError, match=message):
        want_of(**fields)


def test_penalties_are_those_of_the_row():
    (plain,), (given,) = want_of().generated, want_of(presence_penalty=0.5, frequency_penalty=-1).generated
    assert given.sampling == {**plain.sampling, "presence_penalty": 0.5, "frequency_penalty": -1.0}
    assert given.id != plain.id and not plain.sampling.keys() & {"presence_penalty", "frequency_penalty"}


def test_a_failed_row_fails_its_request():
    want = want_of(prompt="ab", echo_prompt=True)
    results = {row.id: {"error": None, "logprobs": []} for row in want.rows}
    results[want.generated[0].id] = {"error": "the prompt has 9 tokens, the context holds 4"}
    with pytest.raises(RowError, match="the context holds 4"):
        answers(want, results)
