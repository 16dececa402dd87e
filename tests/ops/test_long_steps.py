"""A Step that launches as many operations as its data need keeps the queue of its stream short, and says how short."""

import random
from collections import Counter
from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import laid_out, paged
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.dtypes import KVFormat
from batchgen.core.request import SamplingParams
from batchgen.models import experts, layers
from batchgen.ops import chosen_attention, int8, torch_attention, torch_pages
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import SweepTables, plan_attention
from batchgen.ops.long_steps import MOST_AT_ONCE, LongStep, note, noted_in
from batchgen.ops.page_choice import choice_in_pool
from batchgen.runtime.sampler import sample
from batchgen.runtime.steps.head import head
from batchgen.runtime.streams import STEP_OPERATIONS
from batchgen.schedule.sequence import Sequence


class Stream:
    """A stream that carries nothing out before it has to. longest: the most operations that its queue has held."""

    def __init__(self):
        self.launched = self.done = self.longest = self.waits = 0

    def launch(self, operations):
        self.launched += operations
        self.longest = max(self.longest, self.launched - self.done)

    def synchronize(self, event):
        self.waits += 1
        self.done = max(self.done, event)

    def step(self):
        return LongStep(lambda: self.launched, self.synchronize)


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_holds_no_more_than_is_said(seed):
    rng, stream = random.Random(seed), Stream()
    step = stream.step()
    most = rng.choice([1, 5, 30, MOST_AT_ONCE])
    for _ in range(rng.choice([1, 3, 100])):
        operations = rng.randint(1, most)
        stream.launch(operations)
        step.note(operations)
        assert stream.longest <= step.most_queued
    assert step.most_queued <= 384, "a queue of 1,024 has as many before it, and a Step's others"


def test_a_step_with_few_operations_does_not_wait():
    stream = Stream()
    step = stream.step()
    with noted_in(step):
        for _ in range(10):
            note(12)
    assert step.most_queued == 120 and stream.waits == 0
    note(12)
    assert step.most_queued == 120, "nothing is noted outside of a Step"


class Launched(TorchDispatchMode):
    """operations: those that a GPU would be given, each by at least one launch."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not (operation.is_view or "empty" in operation.name() or operation.name() == "aten::_reshape_alias"):
            self.operations[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def counted(work):
    """Operations that work() launches; those that it notes."""
    step = Stream().step()
    with Launched() as launched, noted_in(step):
        work()
    return sum(launched.operations.values()), step._total


@pytest.mark.parametrize("kv_format", ["float32", "int8", "int5", "int4"])
def test_attention_notes_all_operations_of_its_parts(kv_format, monkeypatch):
    monkeypatch.setattr(torch_attention, "_MOST_KEYS", 32)  # so that results are merged
    slices, groups, num_blocks = laid_out(4, [(40, 100, True), (1, 90, True), (7, 0, False), (1, 30, True)], 16, 3)
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=16, key_bytes=1024, window=70)
    operands = AttentionOperands(4, 2, 64, 16, torch.float32, KVFormat.of(kv_format))
    prepared = torch_attention.prepare_attention(plan, operands, torch.device("cpu"))
    assert prepared.merges
    kv, _ = paged(torch.randn(num_blocks, 2, 2, 16, 64), kv_format)
    q, bits = torch.randn(sum(s.num_queries for s in slices), 4, 64), KVFormat.of(kv_format).bits
    launched, noted = counted(
        lambda: torch_attention.paged_attention(q, kv, prepared, bits=bits, softcap=2.0, sinks=torch.randn(4))
    )
    assert launched - 8 <= noted, "but for a few at the end"


@pytest.mark.parametrize(
    "activation", [None, "relu", "gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "gelu_mul"]
)
def test_products_of_codes_note_all_their_operations(activation, monkeypatch):
    monkeypatch.setattr(int8, "_VALUES", 64 * 32)
    weight, x = int8.quantize(torch.randn(128, 64)), torch.randn(100, 64)
    columns = 64 if activation and activation.endswith("mul") else 128
    bias, residual = torch.randn(128), torch.randn(100, columns)
    launched, noted = counted(lambda: ops.reference.linear(x, weight, bias, activation=activation, residual=residual))
    assert launched - 8 <= noted
    assert noted > 3 * MOST_AT_ONCE, "several parts"


@pytest.mark.parametrize("weight_format", ["numbers", "int8"])
def test_experts_note_all_their_operations(weight_format, monkeypatch):
    monkeypatch.setattr(ops, "linear", ops.reference.linear)
    config = SimpleNamespace(num_experts=8, intermediate_size=32, mlp_activation="swiglu_oai_mul")
    stored = {"gate_up.weight": torch.randn(8 * 64, 64), "down.weight": torch.randn(8 * 64, 32)}
    if weight_format == "int8":
        stored = {name: int8.quantize(weight) for name, weight in stored.items()}
    weights = stored | {"gate_up.bias": torch.randn(8 * 64), "down.bias": torch.randn(8 * 64)}
    x, chosen = torch.randn(20, 64), torch.stack([torch.randperm(8)[:2] for _ in range(20)])
    launched, noted = counted(lambda: experts.chosen_experts(config, weights, x, torch.rand(20, 2), chosen))
    assert launched - 24 <= noted, "but for what sorts tokens and adds up, once"


def test_logits_note_all_operations_of_their_parts(monkeypatch):
    """With what is done with them: here the choice of tokens, and log-probabilities."""
    matrix = torch.randn(100, 64)
    sampling = SamplingParams(logprobs=3, repetition_penalty=1.5)
    rows = [Sequence(i, i, 0, [i], sampling) for i in range(12)]
    monkeypatch.setattr(layers, "before_logits", lambda config, weights, hidden: hidden)
    monkeypatch.setattr(layers, "logits", lambda config, part, rows, *rest: part @ rows.T)
    context = SimpleNamespace(
        options=SimpleNamespace(makes_logits=True, logit_rows=2),
        config=SimpleNamespace(vocab_size=100, hidden_output=False),
        weights=SimpleNamespace(head={}, vocabulary_chunk=lambda *_: (0, matrix), head_bias=lambda *_: None),
        vocabulary_chunks=False,
        take_hidden=None,
        logits_buffer=lambda *_: None,
        take_logits=lambda sequences, logits, start: sample(logits, sequences),
    )
    batch = SimpleNamespace(hidden=torch.randn(12, 64), packed=SimpleNamespace(logits_rows=rows), joined=())
    launched, noted = counted(lambda: head(context, SimpleNamespace(layer=0, weight_slot=None), batch))
    assert launched - STEP_OPERATIONS <= noted, "but for what every Step may have"
    assert noted > MOST_AT_ONCE, "several parts"


@pytest.mark.parametrize("kv_format", ["float32", "int8", "int5", "int4"])
def test_summaries_of_pages_note_all_their_operations(kv_format, monkeypatch):
    monkeypatch.setattr(torch_pages, "_VALUES", 3 * 2 * 16 * 80)
    kv, _ = paged(torch.randn(10, 2, 2, 16, 80), kv_format)
    summaries, blocks = torch.zeros(10, 2, 2, 80, dtype=torch.bfloat16), torch.arange(8)
    bits = KVFormat.of(kv_format).bits
    launched, noted = counted(lambda: torch_pages.summarise(kv, blocks, summaries, blocks, bits))
    assert launched <= noted
    in_one_part = torch.zeros_like(summaries)
    monkeypatch.undo()
    assert counted(lambda: torch_pages.summarise(kv, blocks, in_one_part, blocks, bits))[1] == noted // 3
    assert torch.equal(in_one_part, summaries) and summaries[:8].any()


@pytest.mark.parametrize("batches", [1, 5])
def test_attention_to_chosen_pages_notes_what_chooses(batches, monkeypatch):
    """With the chosen blocks put into each table of the plan. Queries, keys and results do not matter here."""
    count, pages = 3, 20
    numbers = np.arange(count * pages, dtype=np.int32)
    choice = choice_in_pool(AttentionBudget.of("30%"), np.arange(count), np.full(count, 160), numbers, numbers, 8)
    chosen = torch_pages.TorchPages.of(choice, torch.device("cpu"))
    places = torch.arange(-1, -1 - count * choice.most_pages, -1, dtype=torch.int32)
    plan_type, batch_type = make_dataclass("Plan", ["batches"]), make_dataclass("Batch", ["blocks"])
    monkeypatch.setattr(torch_attention, "TorchAttentionPlan", plan_type)
    plan, q, found = plan_type((batch_type(places),) * batches), torch.randn(count, 4, 64), []
    summaries = torch.randn(count * pages, 2, 2, 64).bfloat16()
    launched, noted = counted(
        lambda: found.append(chosen_attention._with_blocks(plan, chosen.choose(q, summaries).view(-1)))
    )
    assert launched <= noted
    assert all(torch.equal(part.blocks, chosen.choose(q, summaries).view(-1)) for part in found[0].batches)
