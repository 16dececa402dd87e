"""Structured output of models that think: the grammar begins with the answer, the thoughts before it are free."""

import json
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.request import ChatOptions, Request, SamplingParams
from batchgen.schedule.block_manager import BlockManager

BEGIN, END = "<think>", "</think>"
MESSAGES = [{"role": "user", "content": "The ferry left"}]
# As DeepSeek-R1's, Qwen3's and others': what follows the assistant's head.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if opens %}<think>\n"
    "{% elif enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED, SWITCHED_OFF = ChatOptions({"opens": True}), ChatOptions({"enable_thinking": False})
REGEX = "[a-f]{6}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("thinker")
    make_tiny_model("llama", path, vocab_size=520)
    tokenizer = make_tiny_tokenizer(path, chat_template=TEMPLATE)
    tokenizer.add_tokens([BEGIN, END])
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(model):
    with engine_of(model) as engine:
        yield engine


def engine_of(model, **options):
    return batchgen.Engine(model, **{"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 8, **options})


def ids_of(engine):
    return tuple(engine.parts.tokenizer.token_id(tag) for tag in (BEGIN, END))


def ask(engine, chat, **sampling):
    given = {"regex": REGEX, "max_tokens": 80, "temperature": 1.0, "n": 12, "ignore_eos": True, **sampling}
    (completion,) = engine.generate([Request(MESSAGES, SamplingParams(**given), chat=chat)])
    assert completion.error is None and engine.used_kv_blocks == 0
    return completion.samples


def test_thoughts_that_the_prompt_begins_are_free_and_the_answer_follows_the_grammar(engine):
    _, end = ids_of(engine)
    samples = ask(engine, OPENED, logit_bias={end: 3.5})
    answered = [sample for sample in samples if sample.finish_reason == "stop"]
    assert len(answered) > 3 and len({sample.token_ids.index(end) for sample in answered}) > 3
    for sample in answered:
        at = sample.token_ids.index(end)
        assert re.fullmatch(REGEX, sample.text)
        assert sample.reasoning == engine.parts.tokenizer.decode(sample.token_ids[:at]).strip()
    for sample in samples:
        if end not in sample.token_ids:
            assert (sample.text, sample.finish_reason) == ("", "length") and sample.reasoning


def test_a_model_may_begin_thoughts_itself_or_answer_at_once(engine):
    begin, end = ids_of(engine)
    thinks = ask(engine, ChatOptions(), logit_bias={begin: 100.0, end: 3.5})
    assert {sample.token_ids[0] for sample in thinks} == {begin}
    assert all(re.fullmatch(REGEX, sample.text) for sample in thinks if sample.finish_reason == "stop")
    answers = ask(engine, ChatOptions(), logit_bias={begin: -100.0})
    assert all(re.fullmatch(REGEX, sample.text) and sample.reasoning is None for sample in answers)
    either = ask(engine, ChatOptions(), logit_bias={begin: 1.0, end: 6.0}, n=60)
    assert len({sample.reasoning is None for sample in either}) == 2


def test_without_thoughts_the_grammar_begins_with_the_text(engine):
    """Where thinking is switched off, where a text is no chat, and where thoughts are not told apart."""
    begin, _ = ids_of(engine)
    sampling = SamplingParams(regex=REGEX, max_tokens=20, logit_bias={begin: 100.0})
    requests = [
        Request(MESSAGES, sampling, chat=SWITCHED_OFF),
        Request("The ferry left", sampling),
        Request(MESSAGES, sampling, chat=OPENED, reasoning_apart=False),
    ]
    for completion in engine.generate(requests):
        assert re.fullmatch(REGEX, completion.text) and completion.samples[0].reasoning is None


def test_a_stop_string_in_thoughts_stops_nothing_and_the_end_of_text_ends_them(engine):
    _, end = ids_of(engine)
    samples = ask(engine, OPENED, logit_bias={end: 3.5}, stop=["e", "d"])
    stopped = [sample for sample in samples if sample.stop is not None]
    assert stopped and all("e" not in sample.text and "d" not in sample.text for sample in samples)
    assert any(set("ed") & set(sample.reasoning) for sample in stopped)
    eos = next(iter(engine.parts.eos_token_ids))
    samples = ask(engine, OPENED, logit_bias={eos: 100.0}, ignore_eos=False)
    assert {(sample.text, sample.finish_reason, len(sample.token_ids)) for sample in samples} == {("", "stop", 1)}


def test_preempted_samples_keep_their_place_before_or_in_the_grammar(engine, model):
    rng = random.Random(1)
    _, end = ids_of(engine)

    def rows():
        for i in range(12):
            chat = (OPENED, SWITCHED_OFF, ChatOptions())[i % 3]
            messages = [{"role": "user", "content": " ".join(rng.choices(["ferry", "left", "two", "pier"], k=9))}]
            sampling = SamplingParams(
                regex=REGEX if i % 2 else None, max_tokens=40, temperature=1.0, logit_bias={end: 3.5}, seed=i
            )
            yield Request(messages, sampling, id=i, chat=chat)

    given = list(rows())
    expected = {c.index: c.samples for c in engine.generate(given)}
    tight = engine_of(model, max_model_len=192, expected_output_len=1)
    tight._pools = {"cpu": BlockManager(20, 16)}
    assert {c.index: c.samples for c in tight.generate(given)} == expected
    assert tight.stats.preempted > 1


def test_a_job_that_is_stopped_in_thoughts_goes_on_in_them(model, tmp_path, monkeypatch):
    table = pa.table({"prompt": [f"The ferry to pier {i}" for i in range(6)]})
    pq.write_table(table, tmp_path / "in.parquet")
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a"]}
    tokenizer = make_tiny_tokenizer(tmp_path)
    tokenizer.add_tokens([BEGIN, END])
    options = {
        "dtype": "float32", "chat": True, "chat_template_kwargs": {"opens": True}, "max_tokens": 120,
        "temperature": 1.0, "ignore_eos": True, "json_schema": schema,
        "logit_bias": {tokenizer.convert_tokens_to_ids(END): 3.5}, "flush_interval": 0.01, "cpu_memory": "4GiB",
    }  # fmt: skip
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    batchgen.run(model, tmp_path / "in.parquet", whole, **options)
    schedule, sweeps = batchgen.engine.engine.Scheduler.schedule, 0

    def interrupted(self):
        nonlocal sweeps
        sweeps += 1
        if sweeps == 12:
            raise KeyboardInterrupt
        return schedule(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(batchgen.engine.engine.Scheduler, "schedule", interrupted)
        batchgen.run(model, tmp_path / "in.parquet", parts, **options)
    batchgen.run(model, tmp_path / "in.parquet", parts, **options)
    rows = pq.read_table(parts).to_pylist()
    assert rows == pq.read_table(whole).to_pylist()
    answered = [row for row in rows if row["finish_reason"] == "stop"]
    assert answered and all(json.loads(row["text"])["a"] in ("red", "blue") for row in answered)


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"


def test_the_grammar_of_a_model_with_channels_is_that_of_its_final_channel(tmp_path):
    """The model is made to say what gpt-oss would: a thought, and then a message that the grammar decides."""
    make_tiny_model("gpt_oss", tmp_path, vocab_size=640)
    tokenizer = make_tiny_tokenizer(tmp_path, chat_template=HARMONY)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(tmp_path)
    script = "<|channel|>analysis<|message|>It left.<|end|><|start|>assistant<|channel|>final<|message|>"
    said = tokenizer.encode(script, add_special_tokens=False)
    with engine_of(str(tmp_path)) as engine:
        sample, masks = engine.parts.sample, []

        def follow(logits, sequences):
            """Make the next token of the script the likeliest; the masks of its last tokens are noted."""
            for row, sequence in zip(logits, sequences, strict=True):
                at = sequence.num_generated
                masks.append((at, int((~np.unpackbits(sequence.constraint.mask().view(np.uint8)).astype(bool)).sum())))
                if at < len(said):
                    row[said[at]] = 1e4
            return sample(logits, sequences)

        object.__setattr__(engine.parts, "sample", follow)
        (completion,) = engine.generate([Request(MESSAGES, SamplingParams(regex=REGEX, max_tokens=60))])
    (answer,) = completion.samples
    assert answer.token_ids[: len(said)] == tuple(said)
    assert re.fullmatch(REGEX, answer.text) and answer.reasoning == "It left." and answer.finish_reason == "stop"
    forbidden = dict(masks)
    assert forbidden[0] > 500, "it must name a channel"
    assert all(forbidden[at] == 0 for at in range(1, len(said))) and forbidden[len(said)] > 0
