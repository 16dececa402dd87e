"""Structured output: every text follows its row's grammar, whatever the row shares a batch with.

What cannot be followed is refused.
"""

import itertools
import json
import random
import re
import sys
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from thorough import quick_or
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_sentencepiece_tokenizer, make_tiny_tokenizer

import batchgen
from batchgen.cli.commands import cli
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.output.run_directory import errors_path
from batchgen.runtime.grammar import Grammars
from batchgen.schedule.block_manager import BlockManager

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
ROWS = quick_or(12, 60)  # of a job
INVALID = json.dumps({"type": "object", "properties": 3})


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model) as engine:
        yield engine


def make_engine(model, **options):
    return batchgen.Engine(model, **{"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 16, **options})


def complete(engine, rows):
    found = sorted(engine.generate(rows), key=lambda c: c.index)
    assert engine.used_kv_blocks == 0
    return found


def prompt(rng):
    return [rng.randrange(4, 500) for _ in range(rng.randrange(1, 60))]


def random_schema(rng, depth=0):
    kinds = ["string", "integer", "boolean", "enum", "const", "null", "number", "any_of", "pattern"]
    kind = rng.choice(["object"] * 4 if depth == 0 else kinds + ["object", "array"] * (depth < 3))
    low = rng.randrange(-50, 50)
    if kind == "object":
        names = rng.sample(["a", "b b", "naïve", "d", 'quote"d', "f"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {
        "array": lambda: {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randrange(3)},
        "string": lambda: {"type": "string", "maxLength": rng.randrange(9), "minLength": 0},
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 1000])},
        "boolean": lambda: {"type": "boolean"},
        "enum": lambda: {"enum": ["x", "ü🎉", 3, None, [1, 2]][: rng.randrange(1, 6)]},
        "const": lambda: {"const": {"k": ["v", 1.5]}},
        "null": lambda: {"type": "null"},
        "number": lambda: {"enum": [1.25, -3, 1e6]},
        "any_of": lambda: {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
        "pattern": lambda: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    }[kind]()


def check_random_schemas(engine, count, seed):
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    rows = [
        Request(
            prompt(rng),
            SamplingParams(
                max_tokens=400,
                json_schema=schema,
                temperature=rng.choice([0.0, 0.7, 5.0]),
                top_p=rng.choice([1.0, 0.8]),
                top_k=rng.choice([0, 3]),
                min_p=rng.choice([0.0, 0.05]),
                repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            ),
        )
        for schema in schemas
    ]
    for completion, schema in zip(complete(engine, rows), schemas, strict=True):
        assert completion.error is None
        (sample,) = completion.samples
        assert sample.finish_reason == "stop", sample
        jsonschema.validate(json.loads(sample.text), schema)
        assert "\n" not in sample.text


def test_texts_are_valid_under_random_schemas(engine):
    check_random_schemas(engine, quick_or(30, 60), seed=0)


def test_compact_json_has_no_spaces_between_its_parts(engine):
    rng = random.Random(2)
    for compact in (True, False):
        sampling = SamplingParams(max_tokens=400, json_schema=PERSON, compact_json=compact, temperature=2.0)
        found = complete(engine, [Request(prompt(rng), sampling) for _ in range(4)])
        texts = [completion.text for completion in found]
        written = [json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) for text in texts]
        unescaped = [len(text) == len(same) for text, same in zip(texts, written, strict=True) if "\\" not in text]
        assert unescaped and all(unescaped) == compact


def test_vocabularies_with_bytes_and_of_other_sizes_than_the_logits(tmp_path):
    """As Llama 2's: spaces are part of words, characters may be made of bytes; the model has more tokens than the
    tokenizer, and then fewer."""
    make_tiny_model("llama", tmp_path, bos_token_id=1, eos_token_id=2)
    make_tiny_sentencepiece_tokenizer(tmp_path)
    with make_engine(str(tmp_path)) as engine:
        assert engine.parts.tokenizer.vocab_size < engine.parts.config.vocab_size
        check_random_schemas(engine, 20, seed=1)
        rows = [Request([5, 6], SamplingParams(regex=r"é{2} (🎉|→)", max_tokens=40))]
        assert re.fullmatch("éé [🎉→]", complete(engine, rows)[0].text)
    make_tiny_model("llama", tmp_path)
    tokenizer = make_tiny_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra {i}>" for i in range(40)]})
    tokenizer.save_pretrained(tmp_path)
    with make_engine(str(tmp_path)) as engine:
        assert engine.parts.tokenizer.vocab_size > engine.parts.config.vocab_size
        rng = random.Random(0)
        rows = [Request(prompt(rng), SamplingParams(max_tokens=400, json_schema=PERSON)) for _ in range(8)]
        for completion in complete(engine, rows):
            assert completion.error is None
            jsonschema.validate(json.loads(completion.text), PERSON)


def mixed_rows(seed=0):
    """Grammars of all kinds beside rows without, greedy and drawn, one and two samples."""
    rng = random.Random(seed)
    grammars = [
        {},
        {"json_schema": PERSON},
        {"regex": "(yes|no)( indeed){0,3}"},
        {"json_schema": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 9}},
        {"regex": r"\d{3}-\d{4}"},
        {"json_schema": PERSON, "max_tokens": 7},
        {"regex": "[a-z ]{30}", "stop": ("e",)},
    ]
    ways = [{}, {"temperature": 1.0}, {"temperature": 0.8, "n": 2, "top_p": 0.9}, {"repetition_penalty": 1.2}]
    return [
        Request(prompt(rng), SamplingParams(**{"max_tokens": 60, "logprobs": 2} | grammar | way), id=i)
        for i, (grammar, way) in enumerate(itertools.product(grammars, ways))
    ]


def seen(completion):
    assert completion.error is None
    return [(s.token_ids, s.text, s.finish_reason, s.stop) for s in completion.samples]


def test_rows_of_one_batch_equal_those_alone(engine, model):
    rows = mixed_rows()
    together = [seen(c) for c in complete(engine, rows)]
    with make_engine(model, max_num_seqs=2) as alone:  # the two samples of a row
        assert together == [seen(complete(alone, [row])[0]) for row in rows]
    assert len({str(t) for t in together}) > 20


def test_preempted_rows_keep_their_state_in_the_grammar(engine, model):
    rows = mixed_rows(seed=1)
    expected = [seen(c) for c in complete(engine, rows)]
    with make_engine(model, max_model_len=128, expected_output_len=1) as tight:
        tight._pools = {"cpu": BlockManager(14, 16)}
        assert [seen(c) for c in complete(tight, rows)] == expected
        assert tight.stats.preempted > 3


def test_masks_are_made_while_the_next_sweep_computes(model, monkeypatch):
    computing, too_late = threading.Event(), []
    make = Grammars._advance

    def make_while_computing(self, steps, ahead):
        if not computing.wait(timeout=60):
            too_late.append(steps)
        make(self, steps, ahead)

    monkeypatch.setattr(Grammars, "_advance", make_while_computing)
    with make_engine(model, drafts=0) as engine:  # which are chosen when masks are there
        run = engine.parts.executor.run

        def run_and_tell(batches, on_logits, **options):
            computing.set()
            run(batches, on_logits, **options)
            computing.clear()

        monkeypatch.setattr(engine.parts.executor, "run", run_and_tell)
        (completion,) = complete(engine, [Request([5], SamplingParams(regex="[a-c]{5}", max_tokens=20, logprobs=1))])
        assert re.fullmatch("[a-c]{5}", completion.text) and not too_late
        assert engine.stats.busy_s["masks"] > 0


# Ends.


def test_a_sample_ends_where_its_grammar_does(engine):
    eos = engine.parts.eos_token_ids
    params = SamplingParams(regex="yes|no", max_tokens=50, ignore_eos=True, temperature=2.0, n=5)
    (completion,) = complete(engine, [Request([9, 8], params)])
    for sample in completion.samples:
        assert sample.text in ("yes", "no") and sample.finish_reason == "stop" and sample.stop is None
        assert sample.token_ids[-1] in eos and not eos & set(sample.token_ids[:-1])


def test_other_ends_come_earlier(engine):
    rows = [
        Request([9], SamplingParams(json_schema=PERSON, max_tokens=5)),
        Request([9], SamplingParams(json_schema=PERSON, max_tokens=300, stop='"age"')),
    ]
    cut, stopped = complete(engine, rows)
    assert cut.samples[0].finish_reason == "length" and len(cut.samples[0].token_ids) == 5
    assert stopped.samples[0].stop == '"age"' and stopped.text.startswith("{") and '"age"' not in stopped.text


def test_logprobs_are_the_models_own(engine, tiny_models):
    _, reference = tiny_models("llama")
    ids = [40, 50, 60]
    (completion,) = complete(engine, [Request(ids, SamplingParams(regex="[a-f]{8}", max_tokens=30, logprobs=3))])
    (sample,) = completion.samples
    assert re.fullmatch("[a-f]{8}", sample.text)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([ids + list(sample.token_ids)])).logits[0].log_softmax(-1)
    forbidden = 0
    for i, (token, position) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True), len(ids) - 1):
        assert position.chosen.logprob == pytest.approx(logprobs[i, token].item(), abs=1e-3)
        assert [t.token_id for t in position.top] == logprobs[i].topk(3).indices.tolist()
        forbidden += position.top[0].token_id != token
    assert forbidden > 2, "the model itself would have said something else"


CHOICES = (
    "yes",
    "no",
    "no way",
    " a space before",
    "a+b (c) [d] \\e",
    "tab\tand\nline",
    "naïve – 日本 🎉",
)


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_every_text_is_one_of_the_choices(tmp_path, tokenizer):
    """Whatever characters they have, and where one begins another; a SentencePiece text has no space before it."""
    make_tiny_model("llama", tmp_path, bos_token_id=1, eos_token_id=2)
    if tokenizer == "sentencepiece":
        make_tiny_sentencepiece_tokenizer(tmp_path)
    choices = [text for text in CHOICES if tokenizer == "bytes" or not text.startswith(" ")]
    with make_engine(str(tmp_path)) as engine:
        alone = [Request([9, i], SamplingParams(choice=text, max_tokens=60)) for i, text in enumerate(choices)]
        completions = complete(engine, alone)
        assert [completion.text for completion in completions] == choices
        assert {completion.samples[0].finish_reason for completion in completions} == {"stop"}
        sampling = SamplingParams(choice=choices, temperature=3.0, n=60, max_tokens=60)
        texts = {sample.text for sample in complete(engine, [Request([9], sampling)])[0].samples}
        assert texts <= set(choices) and len(texts) > 4


def test_the_choice_is_the_likeliest_of_the_models_next_tokens(engine, tiny_models):
    """As transformers has them: of choices that are single tokens, greedy takes the one with the largest logit."""
    _, reference = tiny_models("llama")
    rng = random.Random(3)
    tokenizer = engine.parts.tokenizer
    words = [tokenizer.decode([i]) for i in range(300, 500)]
    single = [w for w in words if w and len(tokenizer.encode_batch([w], add_special_tokens=False)[0]) == 1]
    prompts = [prompt(rng) for _ in range(8)]
    # None begins another one: then the first token decides.
    choices = [w for w in single if not any(w != v and (v.startswith(w) or w.startswith(v)) for v in single)][:12]
    completions = complete(engine, [Request(ids, SamplingParams(choice=choices)) for ids in prompts])
    for ids, completion in zip(prompts, completions, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0, -1]
        allowed = engine.parts.grammars.compile(SamplingParams(choice=choices)).start().mask()
        bits = torch.from_numpy(np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)]).bool()
        assert completion.samples[0].token_ids[0] == logits.masked_fill(~bits, -torch.inf).argmax()
        assert completion.text in choices


SUM = """
start: number (" + " number)* " = " number
number: DIGIT+ | "(" start ")"
DIGIT: /[0-9]/
"""


def test_texts_follow_a_context_free_grammar(engine):
    """Parentheses in parentheses are beyond regular expressions."""
    rng = random.Random(4)
    sampling = SamplingParams(grammar=SUM, temperature=2.0, max_tokens=60, n=40)
    samples = complete(engine, [Request(prompt(rng), sampling)])[0].samples
    ended = [sample.text for sample in samples if sample.finish_reason == "stop"]
    assert len(ended) > 5
    for text in ended:
        while (inner := re.sub(r"\([0-9]+(?: \+ [0-9]+)* = [0-9]+\)", "7", text)) != text:
            text = inner
        assert re.fullmatch(r"[0-9]+(?: \+ [0-9]+)* = [0-9]+", text), text


# What is refused.

FREE = Request([7], SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "(a"}, "regex cannot be followed: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[]"}, "must be a JSON object"),
        ({"json_schema": INVALID}, "properties must be an object"),
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"grammar": "start: a\na: b"}, 'grammar cannot be followed: line 2, column 4: unknown name: "b"'),
        ({"grammar": "start: a\na: /[/"}, "line 2, column 4: unclosed character class"),
        ({"grammar": ""}, "grammar cannot be followed: Empty grammar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_followed_is_refused_in_one_line(engine, fields, words):
    sampling = SamplingParams(**fields)
    with pytest.raises(InputError, match=re.escape(words)) as refusal:
        batchgen.Engine("/no/such/model", sampling=sampling)  # before the model is looked at
    assert "\n" not in str(refusal.value)
    rows = [Request([7], sampling), Request([7], SamplingParams(regex="ab", max_tokens=9)), FREE]
    bad, good, free = complete(engine, rows)
    assert bad.error == str(refusal.value) and not bad.samples
    assert good.text == "ab" and free.error is None


def test_values_that_are_no_grammar_are_refused():
    with pytest.raises(InputError, match="exclude each other"):
        SamplingParams(regex="a", json_schema="{}")
    with pytest.raises(InputError, match="regex"):
        SamplingParams(regex=5)
    with pytest.raises(InputError, match="json_schema"):
        SamplingParams(json_schema=[1])
    with pytest.raises(InputError, match="choice must be non-empty texts"):
        SamplingParams(choice=("a", ""))
    with pytest.raises(InputError, match="choice and grammar exclude each other"):
        SamplingParams(choice="a", grammar='start: "a"')


def test_what_no_token_can_begin_is_refused(engine):
    (completion,) = complete(engine, [Request([7], SamplingParams(regex="[^\\x00-\\x{10FFFF}]"))])
    assert "no text is like that" in completion.error


def test_a_grammar_that_grows_too_large_fails_its_row_alone(engine):
    rows = [Request([7], SamplingParams(regex="(a{1000}){1000}", max_tokens=5, temperature=1.0, n=2)), FREE]
    large, free = complete(engine, rows)
    assert "cannot go on" in large.error and "\n" not in large.error and not large.samples
    assert free.error is None and free.samples


def test_a_tokenizer_without_bytes_is_refused_by_name(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_tiny_model("llama", tmp_path)
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="structured output does not work with the model's tokenizer"):
        make_engine(
            str(tmp_path),
            sampling=SamplingParams(regex="a"),
            on_load=lambda *done: pytest.fail("weights were read"),
        )
    with make_engine(str(tmp_path)) as engine:
        assert complete(engine, [Request([1])])[0].error is None


def test_without_llguidance(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for name in [name for name in sys.modules if name.startswith("llguidance.")]:
        monkeypatch.setitem(sys.modules, name, None)
    hint = re.escape("pip install 'llguidance>=1.7'")
    with pytest.raises(InputError, match=hint):
        make_engine(model, sampling=SamplingParams(regex="only here"))
    with make_engine(model) as engine:
        free, bound = complete(engine, [FREE, Request([7], SamplingParams(regex="or here"))])
    assert free.error is None and re.search(hint, bound.error)


# Jobs.


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"The ferry {i}, and then" for i in range(ROWS)]}), path)
    return str(path)


OPTIONS = {"dtype": "float32", "max_tokens": 300, "temperature": 1.0, "max_num_seqs": 4, "flush_interval": 0.01}


def test_a_job_that_was_stopped_goes_on_under_the_same_schema(model, table, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    options = OPTIONS | {"json_schema": PERSON}
    batchgen.run(model, table, whole, **options)
    texts = pq.read_table(whole)["text"].to_pylist()
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)

    schedule, saved = batchgen.engine.engine.Scheduler.schedule, Path(f"{parts}.batchgen", "parts")

    def interrupted(self):
        if any(saved.glob("part-*.parquet")):
            raise KeyboardInterrupt
        return schedule(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(batchgen.engine.engine.Scheduler, "schedule", interrupted)
        batchgen.run(model, table, parts, **options)
    with pytest.raises(InputError, match=r"sampling\.json_schema"):
        batchgen.run(model, table, parts, **options | {"json_schema": PERSON | {"required": []}})
    report = batchgen.run(model, table, parts, **options)
    assert 0 < report["rows_resumed"] < ROWS and report["rows_ok"] == ROWS
    assert report["busy_s"]["masks"] > 0
    assert pq.read_table(parts)["text"].to_pylist() == texts


def command(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args], standalone_mode=False)
    return result.exception


def test_flags(model, table, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    common = ["run", "-m", model, "-i", table, "--dtype", "float32", "--limit", "5", "--progress", "none"]
    assert command(*common, "-o", tmp_path / "a.jsonl", "--json-schema", schema, "--max-tokens", 300) is None
    assert command(*common, "-o", tmp_path / "b.jsonl", "--regex", "[a-c]{3}") is None
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(json.loads(line)["text"]), PERSON)
    for line in (tmp_path / "b.jsonl").read_text().splitlines():
        assert re.fullmatch("[a-c]{3}", json.loads(line)["text"])
    (tmp_path / "g.lark").write_text('start: "a" start "b" | "x"')
    assert command(*common, "-o", tmp_path / "c.jsonl", "--grammar", tmp_path / "g.lark", "--max-tokens", 41) is None
    assert command(*common, "-o", tmp_path / "d.jsonl", "--choices", "red", "--choices", "dark blue") is None
    for line in (tmp_path / "c.jsonl").read_text().splitlines():
        row = json.loads(line)
        depth = row["text"].count("a")
        assert row["text"] == "a" * depth + ("x" + "b" * depth if row["finish_reason"] == "stop" else "")
    for line in (tmp_path / "d.jsonl").read_text().splitlines():
        assert json.loads(line)["text"] in ("red", "dark blue")


def test_rows_have_choices_of_their_own(model, tmp_path):
    choices = [["red", "green"], ["1", "2", "3"], ["x"], None, [""]]
    pq.write_table(pa.table({"prompt": ["The ferry"] * 5, "labels": choices}), tmp_path / "in.parquet")
    options = {"dtype": "float32", "choices_column": "labels"}
    batchgen.run(model, tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert all(row["text"] in row["labels"] for row in rows[:3])
    assert "null" in rows[3]["error"] and "empty" in rows[4]["error"]
    for more in ({"regex": "a"}, {"choices": ("a", "b")}):
        with pytest.raises(InputError, match="exclude each other"):
            batchgen.run(model, tmp_path / "in.parquet", tmp_path / "other.parquet", **options, **more)


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_jobs_are_refused_before_the_model_is_looked_at(table, tmp_path, verb):
    bad = tmp_path / "bad.json"
    bad.write_text(INVALID)
    common = [verb, "-m", "/no/such/model", "-i", table, "--progress", "none"]
    common += ["-o", tmp_path / "out.parquet"] if verb == "run" else []
    for args, words in (
        (["--json-schema", bad], "properties must be an object"),
        (["--json-schema", tmp_path / "missing.json"], "missing.json cannot be read"),
        (["--regex", "a{2,1}"], "repetition"),
        (["--regex", "a", "--json-schema", bad], "exclude each other"),
        (["--grammar", tmp_path / "none.lark"], "--grammar"),
        (["--choices", "a", "--choices", "b", "--regex", "a"], "exclude each other"),
    ):
        error = command(*common, *args)
        assert isinstance(error, InputError) and words in str(error) and "\n" not in str(error)
    assert not (tmp_path / "out.parquet.batchgen").exists()


def test_openai_batches_bring_their_own(model, tmp_path):
    def line(name, **fields):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, **fields}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"

    def schema(text):
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": text}}

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("person", response_format=schema(PERSON)),
        line("bad", response_format=schema({"type": 3})),
        line("free", max_tokens=5),
        line("regex", structured_outputs={"regex": "[xyz]{4}"}),
        line("choice", structured_outputs={"choice": ["red", "blue"]}),
        line("grammar", guided_grammar='start: "a" | "b"'),
    ]
    source.write_text("".join(lines))
    report = batchgen.run(model, source, output, dtype="float32")
    assert (report["rows_ok"], report["rows_failed"]) == (5, 1)
    answers = {a["custom_id"]: a["response"]["body"] for a in map(json.loads, output.read_text().splitlines())}
    texts = {name: body["choices"][0]["message"]["content"] for name, body in answers.items()}
    jsonschema.validate(json.loads(texts["person"]), PERSON)
    assert re.fullmatch("[xyz]{4}", texts["regex"]) and "bad" not in texts
    assert texts["choice"] in ("red", "blue") and texts["grammar"] in ("a", "b")
    assert "type must be" in errors_path(output).read_text()
    with pytest.raises(InputError, match="--regex has no meaning for an OpenAI batch"):
        batchgen.run(model, source, tmp_path / "other.jsonl", regex="a")


def test_rows_of_a_job_bring_their_own(model, tmp_path):
    own = [
        {"json_schema": PERSON},
        {"json_schema": json.dumps(PERSON), "temperature": 0.5},
        {"regex": "[xyz]{4}"},
        None,
        {"json_schema": PERSON, "regex": "[xyz]{4}"},
        {"json_schema": {"type": 3}},
    ]
    table = {"prompt": ["The ferry"] * 6, "own": [o and json.dumps(o) for o in own]}
    options = {"dtype": "float32", "max_tokens": 300, "sampling_column": "own", "regex": "[a-c]{3}"}
    for form in ("text", "struct"):
        if form == "struct":  # where a schema is text: a struct has all rows' fields
            table["own"] = [{"json_schema": None, "regex": None, "temperature": None} | (o or {}) for o in own[1:4]]
            table["prompt"] = ["The ferry"] * 3
        source, output = tmp_path / f"{form}.parquet", tmp_path / f"{form}.out.parquet"
        pq.write_table(pa.table(table), source)
        batchgen.run(model, str(source), output, **options)
        rows = pq.read_table(output).to_pylist()
        people = rows[:2] if form == "text" else rows[:1]
        for row in people:
            jsonschema.validate(json.loads(row["text"]), PERSON)
        regex, free, *wrong = rows[len(people) :]
        assert re.fullmatch("[xyz]{4}", regex["text"]) and re.fullmatch("[a-c]{3}", free["text"])
        if form == "text":
            assert "exclude each other" in wrong[0]["error"] and "type must be" in wrong[1]["error"]


@pytest.mark.slow
def test_the_demo_model_writes_valid_rows():
    with batchgen.Engine("demo", cpu_memory="3GiB") as engine:
        question = "Describe a person who is called {} as JSON with name, age, colour and tags."
        names = ("Ann", "Bo", "Cy", "Di", "Ed", "Flo")[: quick_or(2, 6)]
        rows = [
            Request(
                [{"role": "user", "content": question.format(name)}], SamplingParams(max_tokens=200, json_schema=PERSON)
            )
            for name in names
        ]
        for completion in complete(engine, rows):
            assert completion.samples[0].finish_reason == "stop"
            assert completion.error is None
            jsonschema.validate(json.loads(completion.text), PERSON)
