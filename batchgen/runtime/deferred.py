"""A deferred batch on its way through the layers: queries to the CPU, its attention, and the results back.

Queries and results lie in two tables in host memory, [slots, width], with a row for each sequence in flight: its first
heads * head_dim values are used, which layers may differ in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.transfers import Link
from batchgen.schedule.sequence import LogitsRow


@dataclass
class DeferredBatchState:
    """Sequences at the same layer of a token (`schedule.deferred_batches`).

    Attributes:
        rows: rows of logits that they will have.
        positions: positions of their tokens on the compute device, int64 [rows].
        slots: place of each in the tables, in host memory, int64 [rows].
        slots_on_device: these places on the compute device.
        kv_rows: rows of the host's pool, flat, that new K and V go to, by sliding window.
        plans: attention plans by sliding window.
        hidden: activations on the compute device, [rows, hidden].
        sending: (q, k, v) on their way to the CPU.
        attended: results of attention, [rows, heads * head_dim].
        per_layer: what each layer adds of each token, [rows, layers, per_layer_size]; None: layers add nothing.
        width: values of queries and of results of one token in its layer.
    """

    rows: list[LogitsRow]
    positions: Tensor
    slots: Tensor
    slots_on_device: Tensor
    kv_rows: Mapping[int | None, tuple[Tensor, Tensor]]
    plans: Mapping[int | None, ops.PreparedAttention]
    hidden: Tensor | None = None
    sending: tuple[Tensor, Tensor, Tensor] | None = None
    attended: Tensor | None = None
    per_layer: Tensor | None = None
    width: int = 0

    def leave(self, hidden: Tensor, qkv: tuple[Tensor, Tensor, Tensor], width: int) -> None:
        """Leave the micro-batch, and keep what the sequences need until they join one again.

        Args:
            hidden: Activations, [rows, hidden]; they are copied.
            qkv: Queries [rows, heads, head_dim], keys and values; the latter two in the format of the host's KV pool,
                or without any heads in layers that reuse KV.
            width: Width of the tables of queries and of results.
        """
        q, k, v = qkv
        self.hidden = hidden.clone()
        # Kept until compute has waited for the CPU, which has waited for the copies.
        queries = q.flatten(1).contiguous()
        self.width = queries.shape[1]
        if self.width < width:
            queries = F.pad(queries, (0, width - self.width))
        self.sending = queries, k.contiguous(), v.contiguous()

    def send(self, to_host: Link, pool: Tensor, window: int | None, queries: Tensor) -> None:
        """Send new KV to the host's pool of a layer, and queries to their table.

        Args:
            to_host: Link from the accelerator to host memory.
            pool: Host's pool of the layer.
            window: Sliding window of the layer; None: full attention.
            queries: Table of queries, [slots, width].
        """
        assert self.sending is not None, "the batch has not left"
        q, k, v = self.sending
        flat = pool.view(-1, pool.shape[-1])
        for rows, new in zip(self.kv_rows[window], (k, v) if k.numel() else (), strict=k.numel() > 0):
            to_host.scatter(flat, rows, new.view(-1, pool.shape[-1]))
        to_host.scatter(queries, self.slots_on_device, q)

    def attend(
        self, pool: Tensor, window: int | None, tables: tuple[Tensor, Tensor], num_heads: int, **softmax
    ) -> None:
        """Attend on the CPU, from one table to the other.

        Args:
            pool: Host's pool of the layer.
            window: Sliding window of the layer; None: full attention.
            tables: Tables of queries and of results, [slots, width].
            num_heads: Query heads.
            **softmax: Options of `ops.paged_attention`.
        """
        queries, attended = tables
        q = queries[self.slots][:, : self.width].reshape(len(self.slots), num_heads, -1)
        attended[self.slots, : self.width] = ops.paged_attention(q, pool, self.plans[window], **softmax).flatten(1)

    def join(self, from_host: Link, attended: Tensor) -> None:
        """Bring the results to the compute device.

        Args:
            from_host: Link from host memory to the accelerator.
            attended: Table of results, [slots, width].
        """
        assert self.hidden is not None, "the batch has not left"
        rows = self.hidden.new_empty(len(self.rows), attended.shape[1])
        from_host.gather(rows, attended, self.slots_on_device)
        self.attended = rows[:, : self.width]
        self.sending = None


def slices(start: int, deferred_batches: Iterable[DeferredBatchState]) -> Iterator[slice]:
    """Yield the rows of each deferred batch in a micro-batch, one after the other from row `start` on."""
    for deferred_batch in deferred_batches:
        yield slice(start, start + len(deferred_batch.rows))
        start += len(deferred_batch.rows)


def with_deferred(own: Tensor, theirs: list[Tensor]) -> Tensor:
    """The rows of a micro-batch followed by those of the deferred batches that are with it."""
    return torch.cat([own, *theirs]) if theirs else own
