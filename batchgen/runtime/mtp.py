"""Drafts by a model's MTP module, on the host: the next tokens from the last hidden state and the token just drawn.

The module attends to what it has seen of a sequence: the tokens since it began to generate. Its KV is in a pool of its
own, a run of blocks for each sequence, which begins anew when it is full. The head hands it the hidden states of all
rows of logits. Those of refused drafts have no next token, and are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.core.dtypes import KVFormat, dtype_name
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.models import layers
from batchgen.models.mtp import MTP_SEQS, MTP_TOKENS, MtpModule
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, order_sequences, plan_attention
from batchgen.runtime.memory.weights import Weights
from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.sequence import LogitsRow, Sequence

_BLOCKS = MTP_TOKENS // DEFAULT_KV_BLOCK_SIZE
_MOST = 4  # drafts: each further one is from what the module thinks itself
_STRENGTH = 4  # of its proposals: most are right
_MOST_ROWS = 32  # hidden states of a sequence that wait while nothing is drafted


@dataclass
class _Seen:
    """The part of a sequence that the module has seen, and hidden states that it has not.

    Attributes:
        number: Number of its run of blocks.
        num_tokens: Tokens whose KV is in these blocks.
        rows: (position, hidden state) of tokens that the module has not seen.
    """

    number: int
    num_tokens: int = 0
    rows: list[tuple[int, Tensor]] = field(default_factory=list)


class MtpProposer:
    """Proposes what an MTP module thinks most likely."""

    def __init__(self, module: MtpModule, weights: Weights, *, max_num_seqs: int, max_positions: int) -> None:
        """Have seen nothing.

        Args:
            module: The module.
            weights: Weights of the model, of which embeddings and output matrix are used.
            max_num_seqs: The most sequences in flight; others have no drafts of it.
            max_positions: Tokens of the longest sequence.
        """
        config = self._config = module.config
        self._module, self._weights = module, weights
        assert config.rope is not None, "the families with such modules have rotary positions"
        self._rope = layers.rope_table(config.rope, config.head_dim, max_positions + _MOST)
        dtype = weights.dtype
        self._format = KVFormat(dtype_name(dtype))
        num_seqs = min(max_num_seqs, MTP_SEQS)
        shape = num_seqs * _BLOCKS, 2, config.num_kv_heads, DEFAULT_KV_BLOCK_SIZE, config.head_dim
        self._kv = torch.empty(shape, dtype=dtype)
        self._operands = AttentionOperands(
            config.num_heads, config.num_kv_heads, config.head_dim, DEFAULT_KV_BLOCK_SIZE, dtype, self._format
        )
        self._free = list(range(num_seqs - 1, -1, -1))
        self._seen: dict[Sequence, _Seen] = {}
        self._proposed: dict[Sequence, list[int]] = {}

    def take(self, rows: List[LogitsRow], hidden: Tensor) -> None:
        """Take the hidden states before the output matrix.

        Args:
            rows: Rows of logits.
            hidden: Their hidden states, [rows, hidden].
        """
        for (sequence, position), row in zip(rows, hidden.clone(), strict=True):
            of = sequence.drafted or sequence
            if of.targets or position < of.num_prompt - 1:
                continue
            seen = self._seen.get(of)
            if seen is None:
                if not self._free:
                    continue
                seen = self._seen[of] = _Seen(self._free.pop())
            before = [known for known in seen.rows[-_MOST_ROWS:] if known[0] < position]  # without refused drafts
            seen.rows = [*before, (position, row)]

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Draft for all sequences of a sweep at once."""
        self._proposed = {}
        chosen: list[tuple[Sequence, _Seen]] = []
        for sequence in sequences:
            if (seen := self._seen.get(sequence)) is None:
                continue
            seen.rows = [(position, row) for position, row in seen.rows if position + 1 < len(sequence.tokens)]
            # A grammar may have appended tokens, before which no hidden state is known.
            if seen.rows and seen.rows[-1][0] == len(sequence.tokens) - 2:
                chosen.append((sequence, seen))
        if not chosen:
            return
        for _, seen in chosen:
            if seen.num_tokens + len(seen.rows) + _MOST > MTP_TOKENS:
                seen.num_tokens = 0
        counts = [len(seen.rows) for _, seen in chosen]
        tokens = [s.tokens[position + 1] for s, seen in chosen for position, _ in seen.rows]
        positions = [position for _, seen in chosen for position, _ in seen.rows]
        hidden = torch.stack([row for _, seen in chosen for _, row in seen.rows])
        last = np.cumsum(counts) - 1
        hidden = self._forward(chosen, counts, tokens, positions, hidden)[torch.from_numpy(last)]
        for _, seen in chosen:
            seen.num_tokens, seen.rows = seen.num_tokens + len(seen.rows), []
        positions = [positions[i] for i in last]
        drafts = [self._likeliest(hidden)]
        for number in range(1, _MOST):
            positions = [position + 1 for position in positions]
            hidden = self._forward(chosen, [1] * len(chosen), drafts[-1], positions, hidden, ahead=number - 1)
            drafts.append(self._likeliest(hidden))
        for i, (sequence, _) in enumerate(chosen):
            self._proposed[sequence] = [step[i] for step in drafts]

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """The tokens that were drafted for a sequence, at most so many; None: its hidden state is not known."""
        tokens = self._proposed.get(sequence)
        return Proposal(tokens[:most], _STRENGTH) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        seen = self._seen.pop(sequence, None)
        if seen is not None:
            self._free.append(seen.number)

    def _likeliest(self, hidden: Tensor) -> list[int]:
        _, matrix = self._weights.vocabulary_chunk(0, None)
        bias = self._weights.head_bias(0, self._config.vocab_size)
        tokens: list[int] = layers.logits(self._config, hidden, matrix, bias=bias).argmax(1).tolist()
        return tokens

    def _forward(
        self,
        chosen: List[tuple[Sequence, _Seen]],
        counts: List[int],
        tokens: List[int],
        positions: List[int],
        hidden: Tensor,
        ahead: int = 0,
    ) -> Tensor:
        """The module's output, [tokens, hidden], in the order of the tokens.

        Args:
            chosen: Sequences, and what has been seen of each.
            counts: Tokens of each.
            tokens: The tokens, of one sequence after the other.
            positions: Position before each token, at which its hidden state is.
            hidden: Hidden states, [tokens, hidden].
            ahead: Drafts before these tokens, whose KV is there.
        """
        module, config = self._module, self._config
        slices = [
            SequenceSlice(count, seen.num_tokens + ahead, np.arange(seen.number * _BLOCKS, (seen.number + 1) * _BLOCKS))
            for (_, seen), count in zip(chosen, counts, strict=True)
        ]
        tables = SweepTables.of(slices)
        order = order_sequences(tables.num_queries, tables.num_keys, [])
        starts = tables.starts
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
        tables = tables.in_order(order)
        packed = torch.from_numpy(places)
        ids, at = torch.tensor(tokens)[packed], torch.tensor(positions)[packed]
        rows = self._weights.embedding_rows_of(ids.numpy())
        embedded = layers.embed(config, self._weights.embeddings, ids, at, hidden.dtype, rows)
        eps = config.norm_eps
        both = (
            ops.norm(embedded, module.embedding_norm, None, eps),
            ops.norm(hidden[packed], module.hidden_norm, None, eps),
        )
        x = ops.linear(torch.cat(both, dim=1), module.projection)
        plan = plan_attention(
            tables, [], kv_block_size=DEFAULT_KV_BLOCK_SIZE, key_bytes=config.kv_size * x.element_size()
        )
        projected = layers.pre_attention(config, module.layer, x)
        q = ops.rotary_store(
            layers.ungated(config, projected),
            config.num_heads,
            self._kv,
            torch.from_numpy(tables.slots(DEFAULT_KV_BLOCK_SIZE)),
            self._format,
            **layers.rotary_options(config, 0, module.layer, self._rope, at, None),
        )
        attended = ops.paged_attention(q, self._kv, ops.prepare_attention(plan, self._operands))
        attended = layers.gate_attention(config, projected, attended)
        out = layers.post_attention(config, module.layer, x, attended)
        normed = ops.norm(out, module.norm, None, eps)
        result = torch.empty_like(normed)
        result[packed] = normed
        return result
