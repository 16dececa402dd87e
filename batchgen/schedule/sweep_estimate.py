"""Estimated seconds of a sweep, with and without sequences that the CPU attends to (NEO section 3.2). No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.core.lane_costs import LaneCosts
from batchgen.core.plan import first_batch_cpu_share
from batchgen.schedule.scheduled_sequence import ScheduledSequence


class SweepLoad(NamedTuple):  # one or two for every sweep
    """The part of a sweep that the CPU does not attend to.

    Attributes:
        prompt_tokens: Tokens of prompts.
        prompt_keys: Tokens that these attend to, all together.
        sampled: Tokens that are sampled.
        decodes: Sequences that decode.
        keys: Tokens that these attend to, all together.
    """

    prompt_tokens: int = 0
    prompt_keys: int = 0
    sampled: int = 0
    decodes: int = 0
    keys: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers."""
        return self.prompt_tokens + self.decodes

    @property
    def without_prompts(self) -> SweepLoad:
        """The part without prompts."""
        return SweepLoad(0, 0, self.decodes, self.decodes, self.keys)


def load_of(sweep: Iterable[ScheduledSequence]) -> SweepLoad:
    """The load of sequences of a sweep that the compute device attends to."""
    prompt_tokens = prompt_keys = sampled = decodes = keys = 0
    for one in sweep:
        sampled += one.num_logits
        if one.decodes:
            decodes += 1
            keys += one.num_keys
        else:
            prompt_tokens += one.num_tokens
            prompt_keys += one.prefill_keys
    return SweepLoad(prompt_tokens, prompt_keys, sampled, decodes, keys)


class CpuLoad(NamedTuple):  # some for every sweep
    """Sequences that the CPU attends to in a sweep.

    Attributes:
        seqs: Number of sequences, each with one token.
        keys: Tokens that these attend to, all together.
    """

    seqs: int = 0
    keys: float = 0.0


class SweepSeconds(NamedTuple):  # some for every sweep
    """Estimated seconds of a sweep.

    Attributes:
        total: Seconds of the sweep.
        compute: Seconds of computation.
        cpu_attention: Seconds of attention on the CPU.
        hidden: True where computation never waits for the CPU: T_ca0 <= T_l1 + T_ga0 and T_ca1 <= T_l0.
    """

    total: float
    compute: float
    cpu_attention: float
    hidden: bool


@dataclass(frozen=True)
class BatchCut:
    """The way in which sweeps are cut into micro-batches.

    Attributes:
        num_batches: Micro-batches of a sweep.
        order: "even", "mixed" or "neo": `Policy.batch_order`.
        balance_tokens: `Policy.balance_tokens`, None where micro-batches are equal.
    """

    num_batches: int
    order: str
    balance_tokens: int | None

    @property
    def num_without_cpu(self) -> int:
        """Micro-batches of a sweep in which the CPU attends to nothing."""
        return 1 if self.balance_tokens is not None else self.num_batches

    @property
    def is_asymmetric(self) -> bool:
        """True where the second of two micro-batches has sequences with CPU attention only."""
        return self.balance_tokens is not None or (self.order == "neo" and self.num_batches == 2)


def sweep_seconds(
    costs: LaneCosts,
    cut: BatchCut,
    load: SweepLoad,
    on_cpu: CpuLoad,
    *,
    compute_factor: float = 1.0,
    cpu_factor: float = 1.0,
) -> SweepSeconds:
    """Estimated seconds of a sweep: NEO's T, with what is not in the layers.

    Args:
        costs: Planned seconds of what a sweep may have.
        cut: The way in which sweeps are cut into micro-batches.
        load: The part of the sweep that the CPU does not attend to.
        on_cpu: The part that it attends to.
        compute_factor: Factor on planned seconds of computation.
        cpu_factor: Factor on planned seconds of CPU attention.
    """
    attention_s = compute_factor * (load.decodes * costs.gpu_seq_s + load.keys * costs.gpu_key_s)
    prompts_s = compute_factor * load.prompt_keys * costs.prompt_key_s
    rows_s = compute_factor * (load.sampled + on_cpu.seqs) * costs.row_s
    batch_s, token_s = compute_factor * costs.batch_s, compute_factor * costs.token_s
    batches = cut.num_batches if on_cpu.seqs else cut.num_without_cpu
    if on_cpu.seqs and cut.is_asymmetric:
        batches = 2
    products_s = batches * batch_s + (load.tokens + on_cpu.seqs) * token_s + prompts_s
    compute_s = products_s + attention_s
    attended_s = cpu_factor * (on_cpu.seqs * costs.cpu_seq_s + on_cpu.keys * costs.cpu_key_s)
    cpu_batch_s, sent_s = cpu_factor * costs.cpu_batch_s, on_cpu.seqs * costs.sent_seq_s
    if not on_cpu.seqs:
        layers_s, cpu_s, hidden = compute_s, 0.0, True
    elif batches == 1:
        cpu_s = attended_s + cpu_batch_s
        layers_s, hidden = compute_s + cpu_s + sent_s, False
    elif cut.is_asymmetric:
        tokens, balance = load.tokens + on_cpu.seqs, cut.balance_tokens
        share = 0.0 if balance is None else first_batch_cpu_share(tokens, on_cpu.seqs, balance)
        second_products_s = batch_s + (1 - share) * on_cpu.seqs * token_s  # T_l1
        first_products_s = products_s - second_products_s  # T_l0
        first_cpu_s = share * (attended_s + sent_s) + (cpu_batch_s if share else 0.0)  # T_ca0
        second_cpu_s = (1 - share) * (attended_s + sent_s) + cpu_batch_s  # T_ca1
        layers_s = max(first_products_s, second_cpu_s) + max(second_products_s + attention_s, first_cpu_s)
        hidden = second_cpu_s <= first_products_s and first_cpu_s <= second_products_s + attention_s
        cpu_s = attended_s + (2 if share else 1) * cpu_batch_s
    else:
        cpu_s = attended_s + batches * cpu_batch_s
        layers_s, hidden = max(compute_s, cpu_s + sent_s), cpu_s + sent_s <= compute_s
    between_s = costs.sweep_s + (batches - 1) * costs.next_batch_s
    total_s = max(layers_s, costs.transfer_s) + rows_s + between_s
    return SweepSeconds(total_s, compute_s + rows_s, cpu_s, hidden)
