"""Jobs that score: columns in, columns out, choices, whole texts, resume, and one clear line for every mistake."""

import json
import math
import random
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from processes import batchgen as batchgen_process
from processes import start_batchgen
from transformers import AutoTokenizer

import batchgen
from batchgen import InputError
from batchgen.cli import commands
from batchgen.core.errors import BatchgenError

CLOSE = 1e-4
WORDS = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate"]


@pytest.fixture(scope="module")
def model(tiny_models):
    """(path, transformers model, its tokenizer)."""
    path, hf = tiny_models("llama")
    return str(path), hf, AutoTokenizer.from_pretrained(path)


def pair(tokenizer, context, continuation):
    """Tokens as lm_eval has them."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    own, whole = tokenizer.encode(stripped), tokenizer.encode(stripped + continuation)
    return own, whole[len(own) :]


def logprobs_of(hf, context, continuation):
    """Of each token of the continuation; and whether all are the argmax."""
    with torch.inference_mode():
        logits = hf(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
    found = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return found.tolist(), logits.argmax(-1).tolist() == list(continuation)


def run(model, table, output, **options):
    """(report, rows) of a job over a dict of columns."""
    path = output.with_suffix(".in.parquet")
    pq.write_table(pa.table(table), path)
    options = {"task": "score", "dtype": "float32", "prompt_column": "context", **options}
    report = batchgen.run(model[0], str(path), output, **options)
    read = {".parquet": pq.read_table, ".jsonl": None}[output.suffix]
    return report, read(output).to_pylist() if read else [json.loads(s) for s in output.read_text().splitlines()]


def texts(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def test_a_column_of_continuations(model, tmp_path):
    rng = random.Random(0)
    contexts = ["The ferry left ", "A restaurant by the quay served", None, "", "Name: "] + [texts(rng, 9)] * 3
    continuations = [
        ["at noon", " late"],
        [" fish"],
        ["x"],
        ["The", "Still, people came"],
        None,
        ["one", "two"],
        [],
        ["", "x"],
    ]
    report, rows = run(
        model, {"context": contexts, "continuations": continuations}, tmp_path / "out.parquet",
        continuations_column="continuations", logprobs=2,
    )  # fmt: skip
    assert (report["rows_ok"], report["rows_failed"], report["generated_tokens"]) == (4, 4, 0)
    assert [row["error"] for row in rows] == [
        None, None, "column 'context' is null", None, "column 'continuations' is null", None,
        "column 'continuations' has no continuations", "column 'continuations' has an empty continuation",
    ]  # fmt: skip
    _, hf, tokenizer = model
    scored = 0
    for row, context, own in zip(rows, contexts, continuations, strict=True):
        assert list(row)[:2] == ["context", "continuations"] and row["continuations"] == own
        if row["error"]:
            assert row["logprobs"] is row["is_greedy"] is row["num_tokens"] is row["token_logprobs"] is None
            continue
        for i, text in enumerate(own):
            before, after = pair(tokenizer, context, text) if context else ([0], tokenizer.encode(text))
            expected, greedy = logprobs_of(hf, before, after)
            assert row["logprobs"][i] == pytest.approx(sum(expected), abs=CLOSE * len(after))
            assert (row["is_greedy"][i], row["num_tokens"][i]) == (greedy, len(after))
            assert [t["token_id"] for t in row["token_logprobs"][i]] == after
            assert [t["logprob"] for t in row["token_logprobs"][i]] == pytest.approx(expected, abs=CLOSE)
            assert all(len(t["top"]) == 2 for t in row["token_logprobs"][i])
            scored += len(after)
        assert row["prompt_tokens"] == len(before if context else [])
    assert report["scored_tokens"] == scored


@pytest.mark.parametrize("shape", ["text", "ids", "lists of ids"])
def test_other_kinds_of_columns(model, tmp_path, shape):
    rng = random.Random(1)
    _, hf, tokenizer = model
    contexts = [[rng.randrange(4, 500) for _ in range(20)] for _ in range(3)]
    asked = [[[rng.randrange(4, 500) for _ in range(5)] for _ in range(2)] for _ in range(3)]
    if shape == "text":
        contexts = ["The captain's dog", "Nobody slept", "Children counted"]
        column = [" slept", " much", " seconds"]
        expected = [[pair(tokenizer, c, t)] for c, t in zip(contexts, column, strict=True)]
    else:
        column = [own[0] for own in asked] if shape == "ids" else asked
        expected = [[(c, t) for t in own] for c, own in zip(contexts, asked, strict=True)]
        expected = [own[:1] for own in expected] if shape == "ids" else expected
    _, rows = run(model, {"context": contexts, "after": column}, tmp_path / "out.parquet", continuations_column="after")
    for row, own in zip(rows, expected, strict=True):
        assert row["logprobs"] == pytest.approx([sum(logprobs_of(hf, *p)[0]) for p in own], abs=CLOSE * 10)


def test_a_conversation_is_a_context(model, tmp_path):
    _, hf, tokenizer = model
    messages = [{"role": "user", "content": "Which day has two sailings?"}]
    context = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    _, rows = run(
        model,
        {"messages": [messages]},
        tmp_path / "out.parquet",
        prompt_column=None,
        choices=["Monday", "none of them"],
    )
    expected = [sum(logprobs_of(hf, *pair(tokenizer, context, text))[0]) for text in ("Monday", "none of them")]
    assert rows[0]["logprobs"] == pytest.approx(expected, abs=CLOSE * 10)


@pytest.mark.parametrize("from_column", [False, True])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_choices(model, tmp_path, from_column, suffix):
    _, hf, tokenizer = model
    rng = random.Random(2)
    contexts = [texts(rng, rng.randrange(1, 30)) for _ in range(20)] + [None]
    choices = [["lemons", "one of them", "blue"]] * 21
    if from_column:
        choices = [rng.sample(WORDS, rng.randrange(1, 6)) for _ in range(21)]
    given = {"choices_column": "answers"} if from_column else {"choices": choices[0]}
    table = {"text": contexts, "answers": choices}
    _, rows = run(
        model, table, tmp_path / f"out{suffix}", prompt_column=None,
        prompt_template="Text: {{ text.upper() }}\nAnswer: ", chat=False,
        **given,
    )  # fmt: skip
    assert rows[20]["error"] and rows[20]["choice"] is rows[20]["choice_index"] is None
    for row, context, own in zip(rows[:20], contexts, choices, strict=False):
        prompt = f"Text: {context.upper()}\nAnswer: "
        expected = [sum(logprobs_of(hf, *pair(tokenizer, prompt, text))[0]) for text in own]
        assert row["logprobs"] == pytest.approx(expected, abs=CLOSE * 10)
        assert row["choice_index"] == max(range(len(own)), key=expected.__getitem__)
        assert row["choice"] == own[row["choice_index"]]
    assert len({row["choice"] for row in rows[:20]}) > 1


def test_whole_texts_in_windows(model, tmp_path):
    """Every token once, given what a window of the model's context has before it."""
    _, hf, tokenizer = model
    rng = random.Random(3)
    contexts = [texts(rng, count) for count in (1, 5, 100, 170, 400, 900)] + ["", None]
    report, rows = run(model, {"context": contexts}, tmp_path / "out.parquet", logprobs=0)
    lengths = []
    for row, text in zip(rows[:6], contexts, strict=False):
        tokens = tokenizer.encode(text)
        before, total = [0, *tokens], []
        for start in range(0, len(tokens), 512):
            stop = min(start + 512, len(tokens))
            total += logprobs_of(hf, before[max(0, stop - 512) : start + 1], tokens[start:stop])[0]
        lengths.append(len(tokens))
        assert row["num_tokens"] == row["prompt_tokens"] == len(tokens) == len(row["token_logprobs"])
        assert [t["token_id"] for t in row["token_logprobs"]] == tokens
        assert [t["logprob"] for t in row["token_logprobs"]] == pytest.approx(total, abs=CLOSE)
        assert row["logprob"] == pytest.approx(sum(total), abs=CLOSE * len(tokens))
        assert row["perplexity"] == pytest.approx(math.exp(-sum(total) / len(total)), rel=CLOSE)
    assert max(lengths) > 3 * 512 and any(length % 512 for length in lengths)
    assert [row["error"] for row in rows[6:]] == ["the prompt is empty", "column 'context' is null"]
    assert rows[6]["perplexity"] is rows[6]["logprob"] is None
    assert report["scored_tokens"] == sum(lengths)


def test_overlong_contexts(model, tmp_path):
    rng = random.Random(4)
    contexts = [[rng.randrange(4, 500) for _ in range(count)] for count in (508, 509, 700)]
    after = [[[5, 6, 7, 8, 9], [5]]] * 3
    table = {"context": contexts, "after": after}
    _, rows = run(model, table, tmp_path / "a.parquet", continuations_column="after")
    assert rows[0]["error"] is None and "the context has 509 tokens" in rows[1]["error"]
    _, cut = run(model, table, tmp_path / "b.parquet", continuations_column="after", on_overlong="truncate-left")
    for row, context in zip(cut, contexts, strict=True):
        expected = [sum(logprobs_of(model[1], context[-508:], c)[0]) for c in after[0]]
        assert row["logprobs"] == pytest.approx(expected, abs=CLOSE * 10)
    assert cut[0]["logprobs"] == pytest.approx(rows[0]["logprobs"], abs=CLOSE)


def test_sampling_parameters_of_a_rows_own(model, tmp_path):
    """Structs or JSON: what a row gives replaces the job's, the rest stays."""
    own = [{"max_tokens": 3}, None, {"max_tokens": None, "seed": 5}, {"max_tokens": 2, "temperature": 0.0}]
    options = {"task": "generate", "prompt_column": "p", "max_tokens": 6, "temperature": 0.9, "ignore_eos": True}
    prompts = ["The ferry left"] * 4
    _, rows = run(model, {"p": prompts, "s": own}, tmp_path / "a.parquet", sampling_column="s", **options)
    assert [row["generated_tokens"] for row in rows] == [3, 6, 6, 2]
    plain = run(model, {"p": prompts}, tmp_path / "b.parquet", **options)[1]
    other = run(model, {"p": prompts}, tmp_path / "c.parquet", **options | {"seed": 5})[1]
    greedy = run(model, {"p": prompts}, tmp_path / "d.parquet", **options | {"temperature": 0.0})[1]
    assert rows[1]["text"] == plain[1]["text"] and rows[2]["text"] == other[2]["text"] != plain[2]["text"]
    assert greedy[3]["text"].startswith(rows[3]["text"]) and rows[3]["text"]
    bad = [
        '{"max_tokens": 0}', '{"max_tokens": 1.5}', '{"temprature": 1}', "{", "[1]", '{"n": 2}', '{"logprobs": 1}',
        '{"stop": [1]}', '{"temperature": "hot"}', '{"stop": ["e"], "max_tokens": 4}',
    ]  # fmt: skip
    _, rows = run(model, {"p": ["x"] * 10, "s": bad}, tmp_path / "e.parquet", sampling_column="s", **options)
    words = [
        "max_tokens must be at least 1", "max_tokens must be an integer", "'temprature' is no sampling parameter",
        "not valid JSON", "not an object", "give it -n", "give it --logprobs", "stop must be",
        "temperature must be a number",
    ]  # fmt: skip
    for row, word in zip(rows, words, strict=False):
        assert word in row["error"]
    assert rows[9]["error"] is None


@pytest.mark.slow
def test_a_killed_job_goes_on(model, tmp_path):
    """kill -9 at three moments: the output is that of a job nobody disturbed, and finished rows are not run again."""
    rng = random.Random(5)
    contexts = [texts(rng, rng.randrange(1, 60)) for _ in range(300)]
    contexts[17] = None
    table = pa.table({"context": contexts, "n": range(300)})
    pq.write_table(table, tmp_path / "in.parquet")

    def job(output):
        return [
            "run", "-m", model[0], "-i", tmp_path / "in.parquet", "-o", output, "--task", "score",
            "--prompt-column", "context", "--choices", " yes", "--choices", " no", "--choices", " nobody knows",
            "--dtype", "float32", "--flush-interval", "0.1s", "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
            "--progress", "none", "--cpu-memory", "4GiB", "--report", tmp_path / "report.json",
        ]  # fmt: skip

    whole, killed, log = tmp_path / "whole.parquet", tmp_path / "killed.parquet", tmp_path / "log"
    assert batchgen_process(job(whole), log) == 0, log.read_text()
    safe = 0
    for _ in range(3):
        process = start_batchgen(job(killed), log)
        parts = tmp_path / "killed.parquet.batchgen" / "parts"
        while process.is_alive():
            if parts.exists() and len(list(parts.glob("part-*.parquet"))) > safe:
                break
            time.sleep(0.01)
        process.kill()
        process.join()
        safe = len(list(parts.glob("part-*.parquet")))
    assert safe > 0
    assert batchgen_process(job(killed), log) == 0, log.read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows_resumed"] > 0 and report["rows_ok"] == 299
    expected, found = pq.read_table(whole).to_pylist(), pq.read_table(killed).to_pylist()
    for a, b in zip(expected, found, strict=True):
        assert (a["context"], a["n"], a["choice"], a["error"]) == (b["context"], b["n"], b["choice"], b["error"])
        assert a["logprobs"] == pytest.approx(b["logprobs"], abs=CLOSE) if a["logprobs"] else b["logprobs"] is None


def test_what_is_scored_decides_the_job(model, tmp_path):
    table = {"context": ["The ferry"], "more": [[" left"]]}
    run(model, table, tmp_path / "out.parquet", choices=["a", "b"])
    for options, word in (
        ({"choices": ["a", "c"]}, "continuations.choices"),
        ({"continuations_column": "more"}, "continuations.column"),
        ({"choices": ["a", "b"], "logprobs": 1}, "sampling.logprobs"),
        ({"task": "generate"}, 'task was "score", now not set'),
    ):
        with pytest.raises(InputError, match="made with other settings") as error:
            run(model, table, tmp_path / "out.parquet", **options)
        assert word in str(error.value)
    assert run(model, table, tmp_path / "out.parquet", choices=["a", "b"])[0]["state"] == "already complete"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--choices", "yes"], ["--choices needs two or more texts"]),
        (["--continuations-column", "list"], ["--continuations-column is for scoring"]),
        (["--task", "score", "--choices", "yes"], ["two or more"]),
        (["--task", "score", "--choices", "yes", "--choices", "yes"], ["differ"]),
        (["--task", "score", "--choices", "", "--choices", "yes"], ["non-empty"]),
        (["--task", "score", "--choices", "a", "--choices", "b", "--choices-column", "list"], ["exclude each other"]),
        (["--task", "score", "--continuations-column", "Lst"], ["'Lst'", "did you mean 'list'"]),
        (["--task", "score", "--continuations-column", "number"], ["holds int64", "list of texts"]),
        (["--task", "score", "--choices-column", "q"], ["holds string", "lists of texts"]),
        (["--task", "score", "--temperature", "1"], ["--temperature has no meaning"]),
        (["--task", "score", "--max-tokens", "3"], ["--max-tokens has no meaning"]),
        (["--task", "score", "--sampling-column", "own"], ["--sampling-column has no meaning"]),
        (["--task", "score", "--drafts", "4"], ["--drafts has no meaning"]),
        (["--task", "score", "--chat"], ["give --continuations-column or --choices"]),
        (["--sampling-column", "own"], ["'heat'", "none of max_tokens"]),
        (["--sampling-column", "number"], ["holds int64", "structs, or JSON"]),
        (["--prompt-column", "ids", "--chat"], ["token ids", "leave out --chat"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_mistakes_get_one_clear_line(model, tmp_path, args, words):
    table = {
        "q": ["x"], "list": [["a", "b"]], "number": [1], "ids": [[5]],
        "own": pa.array([{"max_tokens": 1, "heat": 2.0}]),
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    column = [] if "--prompt-column" in args else ["--prompt-column", "q"]
    line = ["run", "-m", model[0], "-i", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet", *column, *args]
    result = CliRunner().invoke(commands.cli, [str(a) for a in line])
    assert isinstance(result.exception, BatchgenError) and result.exception.exit_code == 2, result.output
    message = str(result.exception)
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "out.parquet.batchgen").exists()


def test_dry_run_shows_what_is_scored(model, tmp_path):
    pq.write_table(pa.table({"q": ["The ferry left"]}), tmp_path / "in.parquet")
    line = ["run", "-m", model[0], "-i", tmp_path / "in.parquet", "-o", tmp_path / "o.parquet", "--prompt-column", "q"]
    line += ["--task", "score", "--choices", " late", "--choices", " early", "--dry-run"]
    result = CliRunner().invoke(commands.cli, [str(a) for a in [*line, "--no-chat"]])
    assert result.exit_code == 0
    assert "The ferry left\n-> late\n-> early" in result.stdout.replace("->  ", "-> ")
    result = CliRunner().invoke(commands.cli, [str(a) for a in line])
    assert "The ferry left<|im_end|>\n<|im_start|>assistant\n-> \n late\n-> \n early" in result.stdout
    assert not (tmp_path / "o.parquet.batchgen").exists()
