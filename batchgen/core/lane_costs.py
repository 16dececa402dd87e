"""Predicted seconds of computation and of CPU attention in one sweep, by which a running job chooses its sweeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaneCosts:
    """Predicted seconds of one sweep of all layers, linear in what the sweep has. All 0 where they are not known.

    Attributes:
        sweep_s: Seconds of each sweep beside its Steps.
        next_batch_s: Seconds beside its Steps that a sweep takes longer for each micro-batch after its first.
        transfer_s: Seconds in which the weights of a sweep come from other tiers, beside computation.
        batch_s: Seconds of computation of each micro-batch, however few tokens it has.
        token_s: Seconds of computation for each token, attention not included.
        row_s: Seconds of logits and sampling for each token that is sampled.
        prompt_key_s: Seconds of computation for each pair of a prompt's token and a token that it attends to.
        gpu_seq_s: Seconds of attention on the GPU for each sequence that decodes.
        gpu_key_s: Seconds of attention on the GPU for each token that a decoding sequence attends to.
        cpu_batch_s: Seconds of CPU attention of each micro-batch, however few sequences it has.
        cpu_seq_s: Seconds of CPU attention for each sequence.
        cpu_key_s: Seconds of CPU attention for each token that a sequence attends to.
        streamed_key_s: Seconds in which the KV of one token comes over the link.
        sent_seq_s: Seconds in which queries and results of a sequence with CPU attention pass the link.
    """

    sweep_s: float = 0.0
    next_batch_s: float = 0.0
    transfer_s: float = 0.0
    batch_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0
    prompt_key_s: float = 0.0
    gpu_seq_s: float = 0.0
    gpu_key_s: float = 0.0
    cpu_batch_s: float = 0.0
    cpu_seq_s: float = 0.0
    cpu_key_s: float = 0.0
    streamed_key_s: float = 0.0
    sent_seq_s: float = 0.0


NOT_KNOWN = LaneCosts()
