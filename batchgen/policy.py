"""How a job is run: decided before it starts, handed over frozen."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Policy:
    """admission: "continuous" or "static". max_num_seqs: most sequences in flight.
    max_num_batched_tokens: most tokens in one sweep. max_model_len: longest prompt plus output, in tokens.
    block_size: tokens per KV block. num_kv_blocks: KV blocks in the pool, for all layers together.
    share_prefixes: whether rows take over the KV of a prompt prefix that another row has computed.
    """

    admission: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    share_prefixes: bool

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class MemoryPlan:
    """Where the CPU memory budget goes, in bytes: its parts add up to at most `budget_bytes`."""

    budget_bytes: int
    process_bytes: int  # interpreter and libraries
    weights_bytes: int
    activations_bytes: int
    kv_bytes: int

    def to_json(self) -> dict:
        return asdict(self)
