"""Drafts of a checkpoint's MTP module: as transformers' layers make them, accepted where they are right."""

import copy
from dataclasses import replace

import pytest
import torch
from mtp_checkpoints import add_mtp
from test_partials import SAMPLING, assert_same, prompts_of, requests_of, undisturbed
from test_token_identity import policy_of
from tiered import CPU, make_parts
from tiny_models import make_tiny_model

from batchgen.core.request import SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.files import read_config, resolve_model
from batchgen.models.mtp import load_mtp, mtp_bytes
from batchgen.runtime.mtp import MtpProposer
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("qwen3_5", "qwen3_next")
SEQUENCES = 6


def checkpoint(family, path, *, planted):
    """A tiny model with an MTP module; returns the transformers model and the number of the layer that it copies."""
    model = make_tiny_model(family, path)
    number = model.config.get_text_config().layer_types.index("full_attention")
    prefix = "model.language_model" if hasattr(model.model, "language_model") else "model"
    add_mtp(path, f"{prefix}.layers.{number}", planted=planted)
    return model, number


def module_of(path):
    files = resolve_model(str(path))
    return load_mtp(files, read_config(files), torch.float32)


def parts_of(path, stores, tier="memory"):
    return make_parts(path, CPU, policy_of(path, tier, "float32", "continuous", 1), stores, longest_tokens=80)


def proposer_of(path, parts):
    return MtpProposer(module_of(path), parts.executor.weights, max_num_seqs=SEQUENCES, max_positions=128)


@torch.no_grad()
def drafts_of_transformers(model, number, module, tokens, first, hidden, most):
    """Drafts of one sequence by the layer of transformers that the module has a copy of.

    Args:
        tokens: Tokens of the sequence.
        first: Position of the first hidden state.
        hidden: Hidden states of consecutive positions, [rows, hidden]; the last one is before the last token.
    """
    inner = getattr(model.model, "language_model", model.model)
    layer, end = inner.layers[number], copy.deepcopy(inner.norm)
    rms = torch.nn.functional.rms_norm
    eps = module.config.norm_eps
    states, ids, drafts = list(hidden), list(tokens[first + 1 :]), []
    for _ in range(most):
        embedded = inner.embed_tokens(torch.tensor(ids))
        size = (embedded.shape[1],)
        both = (
            rms(embedded, size, module.embedding_norm, eps),
            rms(torch.stack(states), size, module.hidden_norm, eps),
        )
        x = (torch.cat(both, dim=1) @ module.projection.T)[None]
        positions = torch.arange(first, first + len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        out = layer(x, position_embeddings=inner.rotary_emb(x, positions), attention_mask=mask)
        out = end(out[0] if isinstance(out, tuple) else out)[0]
        drafts.append(int(model.lm_head(out[-1]).argmax()))
        ids.append(drafts[-1])
        states.append(out[-1])
    return drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_layer_of_transformers(family, tmp_path):
    model, number = checkpoint(family, tmp_path / "model", planted=False)
    module, rng = module_of(tmp_path / "model"), torch.Generator().manual_seed(3)
    parts = parts_of(tmp_path / "model", tmp_path)
    proposer = proposer_of(tmp_path / "model", parts)
    prompts = [torch.randint(1, 200, (length,), generator=rng).tolist() for length in (5, 9, 3)]
    generated = torch.randint(1, 200, (3, 6), generator=rng).tolist()
    hidden = torch.randn(3, 6, module.config.hidden_size, generator=rng)
    sequences = [
        Sequence(row, row, 0, list(prompt), SamplingParams(max_tokens=50)) for row, prompt in enumerate(prompts)
    ]
    seen = [0, 0, 0]
    # Sequence -> tokens that it has generated: one at a time, several, a sequence that begins later.
    for known in ({0: 1, 1: 1}, {0: 2, 1: 4}, {1: 5, 2: 1}, {0: 6, 1: 6, 2: 3}):
        for i, count in known.items():
            sequences[i].tokens[len(prompts[i]) :] = generated[i][:count]
            rows = [(sequences[i], len(prompts[i]) - 1 + k) for k in range(count + 2)]
            if i == 1:
                proposer.take(rows[seen[i] : count], hidden[i, seen[i] : count])
            for k in range(seen[i], count) if i != 1 else ():  # sweeps with two drafts that are refused
                refused = torch.randn(2, module.config.hidden_size, generator=rng)
                proposer.take(rows[k : k + 3], torch.cat((hidden[i, k : k + 1], refused)))
            seen[i] = count
        proposer.begin([sequences[i] for i in known])
        for i, count in known.items():
            first = len(prompts[i]) - 1
            wanted = drafts_of_transformers(model, number, module, sequences[i].tokens, first, hidden[i, :count], 4)
            assert proposer.propose(sequences[i], 4).tokens == wanted
    for sequence in sequences:
        proposer.ended(sequence)
    assert len(proposer._free) == SEQUENCES
    parts.executor.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_a_module_that_knows_the_model_saves_sweeps_and_changes_no_sample(family, kind, tmp_path):
    path = tmp_path / "model"
    checkpoint(family, path, planted=True)
    found = {}
    for drafts in (False, True):
        parts = parts_of(path, tmp_path, "memory and disk")
        proposer = proposer_of(path, parts)
        parts.executor.context.take_hidden = proposer.take if drafts else None
        made = (lambda proposer=proposer: Drafting([proposer], always=3)) if drafts else 0
        with Engine.from_parts(parts, drafts=made) as engine:
            found[drafts] = undisturbed(engine, requests_of(prompts_of(), SAMPLING[kind])), engine.stats
        assert len(proposer._free) == SEQUENCES
    assert_same(found[True][0], found[False][0])
    stats = found[True][1]
    assert stats.drafted_tokens > 0
    if kind == "greedy":
        assert stats.accepted_tokens > 0.9 * stats.drafted_tokens
        assert stats.sweeps < 0.8 * found[False][1].sweeps


@pytest.mark.parametrize("drafts", [None, 4])
def test_an_engine_whose_weights_stream_keeps_the_module_where_drafts_are_asked_for(tmp_path, drafts):
    path = tmp_path / "model"
    checkpoint("qwen3_5", path, planted=True)
    parts = make_parts(
        path, CPU, policy_of(path, "memory and disk", "float32", "continuous", 1), tmp_path, longest_tokens=80,
        drafts=drafts,
    )  # fmt: skip
    with Engine.from_parts(parts, drafts=drafts) as engine:
        undisturbed(engine, requests_of(prompts_of(), SAMPLING["greedy"]))
        assert (parts.executor.context.take_hidden is None) == (drafts is None)


@pytest.mark.parametrize("ends", [{"embedding_tier": "disk"}, {"embedding_tier": "disk", "head_tier": "disk"}])
def test_drafts_where_the_embeddings_are_on_disk(ends, tmp_path):
    """The module reads their rows too; where the output matrix is on disk, it does not draft."""
    path = tmp_path / "model"
    checkpoint("qwen3_5", path, planted=True)
    policy = policy_of(path, "memory and disk", "float32", "continuous", 1)
    found = {}
    for name, of_ends, drafts in (("plain", {}, 0), ("drafted", ends, 4)):
        parts = make_parts(path, CPU, replace(policy, **of_ends), tmp_path, longest_tokens=80, drafts=drafts)
        with Engine.from_parts(parts, drafts=drafts) as engine:
            found[name] = undisturbed(engine, requests_of(prompts_of(), SAMPLING["greedy"]))
            has_module = parts.executor.context.take_hidden is not None
        assert has_module == bool(drafts and "head_tier" not in of_ends)
    assert_same(found["drafted"], found["plain"])


def test_checkpoints_without_a_module_have_none(tmp_path):
    make_tiny_model("qwen3_5", tmp_path / "plain")
    files = resolve_model(str(tmp_path / "plain"))
    assert load_mtp(files, read_config(files), torch.float32) is None
    assert mtp_bytes(files, read_config(files), "float32") == 0
    checkpoint("qwen3_5", tmp_path / "with", planted=False)
    files = resolve_model(str(tmp_path / "with"))
    module = load_mtp(files, read_config(files), torch.float32)
    weights = [*module.layer.values(), module.projection]
    assert 0 < sum(t.nbytes for t in weights) <= mtp_bytes(files, read_config(files), "float32")
