"""Tables of rotary embeddings grow with the sequences, and are those of the whole context."""

from dataclasses import replace

import pytest
import torch
from tiered import CPU, make_parts, make_policy, make_request, run
from tiny_models import make_tiny_model

from batchgen.engine.loader import plan_load
from batchgen.models.files import read_config, resolve_model
from batchgen.runtime.steps.rope_tables import RopeTables


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt_oss"])
def test_tables_that_grow_are_those_of_the_whole_context(family, tmp_path):
    make_tiny_model(family, tmp_path)
    config = read_config(resolve_model(str(tmp_path)))
    grown, context = RopeTables(config, 3, config.max_position, torch.device("cpu")), config.max_position
    whole = RopeTables(config, context, context, torch.device("cpu"))
    for positions in (5, 17, context // 2, context):
        grown.reserve(positions)
        for layer in config.attention_layers:
            for table, of_all in zip(grown.of(layer), whole.of(layer), strict=True):
                assert positions <= len(table) <= context
                assert torch.equal(table, of_all[: len(table)])


def test_sequences_that_are_longer_than_expected_have_their_tokens(tmp_path):
    make_tiny_model("gemma3", tmp_path / "model")
    policy, found = make_policy(tmp_path / "model", CPU), []
    prompts = [[5 + i % 90 for i in range(count)] for count in (3, 40, 9)]
    for expected in (8, 128):
        parts = make_parts(tmp_path / "model", CPU, policy, tmp_path, longest_tokens=expected)
        found.append(run(parts, prompts, [30, 20, 10])[0])
    assert found[0] == found[1]


def test_rotary_tables_are_planned_as_long_as_the_longest_sequence(tmp_path):
    """Tables for a context of a million tokens would be more than all else that grows with the sequences."""
    make_tiny_model("llama", tmp_path, max_position_embeddings=1 << 20)
    policy = replace(make_policy(tmp_path, CPU), max_model_len=1 << 20)
    requests = [make_request(tmp_path, CPU, policy, tmp_path, longest_tokens=n) for n in (100_000, 200_000)]
    short, long = (plan_load(request).parts["cpu"]["activations"] for request in requests)
    assert long - short == 100_000 * 4 * requests[0].config.head_dim
    parts = make_parts(tmp_path, CPU, policy, tmp_path, longest_tokens=100)
    assert len(parts.executor.context.ropes.of(0)[0]) == 100
    parts.executor.close()
