"""Prompts of 32,768 tokens, in chunks, with full attention and with a sliding window."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_models import make_tiny_model
from transformers import DynamicCache

import batchgen

LENGTH, OUTPUT, CHUNK = 32_768, 2, 2048
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 65_536}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def long(request, tmp_path_factory):
    """A model, a row, and transformers' greedy tokens of it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(request.param, folder / "model", **SIZES)
    prompt = [5 + (i * 7 + i // 11) % 400 for i in range(LENGTH - 31)]
    pq.write_table(pa.table({"prompt": [prompt]}), folder / "rows.parquet")
    return str(folder / "model"), folder / "rows.parquet", [greedy(model, prompt)]


@torch.inference_mode()
def greedy(model, prompt):
    """The greedy tokens of transformers, which would make a mask of 32,768 by 32,768 of a prompt that is not cut."""
    cache, tokens = DynamicCache(config=model.config), []
    pieces = [prompt[first : first + CHUNK] for first in range(0, len(prompt), CHUNK)]
    while len(tokens) < OUTPUT:
        for piece in pieces:
            logits = model(torch.tensor([piece]), past_key_values=cache, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        pieces = [tokens[-1:]]
    return tokens


def test_long_prompts_have_the_tokens_of_transformers_and_a_predicted_time(long, tmp_path):
    model, rows, tokens = long
    output = tmp_path / "out.parquet"
    options = {"max_tokens": OUTPUT, "ignore_eos": True, "dtype": "float32", "token_ids": True}
    report = batchgen.run(model, rows, output, max_num_batched_tokens=4096, **options)
    assert report["rows_ok"] == 1
    assert pq.read_table(output)["token_ids"].to_pylist() == tokens
    assert report["predicted_wall_s"] > 0
    assert report["policy"]["max_num_batched_tokens"] == 4096  # so the prompt was cut into chunks
