"""The ladder of memory: how tokens of other engines are judged, and how it goes on."""

import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ladder
import random_shapes
import recording
from ladder import Ladder, Shape
from peers.token_accuracy import load_fp32, token_accuracy

PROMPTS = [[5, 9, 31, 7], [12, 40, 3]]
COUNT = 6


@pytest.fixture(scope="module")
def fp32(tiny_models):
    return load_fp32(tiny_models("llama")[0])


def logits_after(fp32, ids):
    with torch.inference_mode():
        return fp32(torch.tensor([ids])).logits[0, -1]


def greedy(fp32, ids, count):
    """The greedy tokens after some tokens."""
    tokens = []
    for _ in range(count):
        tokens.append(int(logits_after(fp32, ids + tokens).argmax()))
    return tokens


def test_a_token_is_judged_after_the_tokens_before_it_and_a_text_may_go_another_way(fp32):
    rows = [(ids, COUNT) for ids in PROMPTS]
    generated = [greedy(fp32, ids, COUNT) for ids in PROMPTS]
    whole = token_accuracy(fp32, rows, generated)
    assert whole.accuracy == pytest.approx(1.0, abs=1e-5) and whole.length == 1.0

    logits = logits_after(fp32, PROMPTS[0] + generated[0][:2])
    second = int(logits.topk(2).indices[1])
    other = [*generated[0][:2], second]
    other += greedy(fp32, PROMPTS[0] + other, COUNT - 3)
    judged = token_accuracy(fp32, rows, [other, generated[1]])
    behind = float(logits.max() - logits[second])
    assert judged.accuracy == pytest.approx(math.exp(-behind / (2 * COUNT)), abs=1e-5)
    assert judged.same == pytest.approx((2 * COUNT - 1) / (2 * COUNT))

    wrong = token_accuracy(fp32, rows, [[token + 1 for token in tokens] for tokens in generated])
    assert wrong.accuracy < 0.99 and wrong.same < 0.5


def test_tokens_that_are_missing_count_in_the_length(fp32):
    rows = [(ids, COUNT) for ids in PROMPTS]
    judged = token_accuracy(fp32, rows, [greedy(fp32, PROMPTS[0], 3), []])
    assert judged.accuracy == pytest.approx(1.0, abs=1e-5) and judged.length == 3 / 12
    assert token_accuracy(fp32, rows, [[], []]).accuracy == 0.0


def test_a_process_with_other_threads_goes_on_with_the_file_and_another_job_does_not(tmp_path, monkeypatch):
    args = Namespace(output=tmp_path / "ladder.json", rows=4, prompt_tokens=8, output_tokens=2, beside=0, limit_s=10)
    for threads in (2, 1):
        monkeypatch.setattr(recording.kernels, "num_threads", lambda threads=threads: threads)
        recording.write(args.output, Ladder(args).result | {"models": {"demo": {"threads": threads}}})
    args.rows = 5
    with pytest.raises(SystemExit, match="another job"):
        Ladder(args)


def test_a_shape_has_its_limits_of_the_gguf_random_rows_and_no_judge(tmp_path, monkeypatch):
    fields, weight_format = random_shapes.SHAPES["llama-3.2-3b"]
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96}
    monkeypatch.setitem(random_shapes.SHAPES, "llama-3.2-3b", (fields | small, weight_format))
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--shapes", "llama-3.2-3b", "--output", str(tmp_path / "out.json")])
    args = ladder._parse()
    assert (args.models, args.rows, args.prompt_tokens, args.output_tokens, args.limit_s) == ([], 32, 32, 16, 300)

    shape = Shape("llama-3.2-3b", tmp_path / "shape")
    shape.write()
    shape.make_rows(args.rows, args.prompt_tokens, args.output_tokens)
    assert shape.weight_bytes == shape.form("gguf").stat().st_size
    assert [len(ids) for ids, count in shape.rows if count == 16] == [32] * 32
    run = Ladder(args)
    run.cells_of(shape)["batchgen/1"] = {"engine": "batchgen", "tokens": "none"}
    run.judge(shape)  # there is no file of these tokens
    assert "accuracy" not in run.cells_of(shape)["batchgen/1"]


def test_models_and_shapes_are_two_jobs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--shapes", "gpt-oss-20b", "--models", "demo"])
    with pytest.raises(SystemExit):
        ladder._parse()
    assert "give one of --models and --shapes at a time" in capsys.readouterr().err
