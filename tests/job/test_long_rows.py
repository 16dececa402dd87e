"""Prompts of 32,768 tokens, chunked, over tiers that are smaller than their KV."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command_line import invoke
from tiny_models import make_tiny_model
from transformers import DynamicCache

import batchgen

LENGTH, OUTPUT, CHUNK = 32_768, 3, 2048
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 65_536}
# About 8 MiB of KV a row with full attention, and the GPU has room for neither row.
DEVICES = ["cpu", "emulated:gpu-memory=6MiB,h2d=4GiB/s,d2h=4GiB/s"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def long(request, tmp_path_factory):
    """A model, two rows, and transformers' greedy tokens of them."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(request.param, folder / "model", **SIZES)
    prompts = [[5 + (i * 7 + row * i // 11) % 400 for i in range(LENGTH - 31 * row)] for row in range(2)]
    pq.write_table(pa.table({"prompt": prompts}), folder / "rows.parquet")
    return str(folder / "model"), folder / "rows.parquet", [greedy(model, prompt) for prompt in prompts]


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


@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_have_the_tokens_of_transformers_wherever_their_kv_is(long, tmp_path, device):
    model, rows, tokens = long
    options = {"max_tokens": OUTPUT, "ignore_eos": True, "dtype": "float32", "token_ids": True, "device": device}
    report = batchgen.run(model, rows, tmp_path / "out.parquet", max_num_batched_tokens=4096, **options)
    assert report["rows_ok"] == 2
    assert pq.read_table(tmp_path / "out.parquet")["token_ids"].to_pylist() == tokens
    assert report["predicted_wall_s"] > 0
    assert report["policy"]["max_num_batched_tokens"] == 4096  # so each prompt was cut into chunks


def test_the_plan_of_long_prompts_has_their_kv_outside_of_a_small_gpu(long):
    model, rows, _ = long
    code, stdout, message = invoke(
        "plan", "-m", model, "-i", rows, "--max-tokens", OUTPUT, "--ignore-eos", "--dtype", "float32", "--device",
        DEVICES[1], "--json", "--progress", "none",
    )  # fmt: skip
    assert code == 0, message
    plan = json.loads(stdout)
    assert plan["prediction"]["total_s"] > 0
    assert sum(count for name, count in plan["policy"]["kv_seqs"].items() if name != "gpu") > 0
