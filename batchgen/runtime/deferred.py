"""A deferred batch on its way through the layers: queries to the CPU, its attention, and the results back.

Queries and results lie in two tables in host memory with a row for each sequence in flight. In a state layer the CPU
gets what it updates the state by, in place of queries. Rows are as wide as in any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.models.config import AttentionShape
from batchgen.ops.chosen_attention import PreparedPlan
from batchgen.ops.state_slots import StateSlots
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
        states: state rows in the host's pool, in host memory; None: the model has no state layers.
        hidden: activations on the compute device, [rows, hidden].
        sending: row of the table of queries, and in layers with attention k and v, on their way to the CPU.
        projected: projections that hold the output gate of attention; None: there is no output gate.
        attended: results of attention, [rows, heads * head_dim].
        per_layer: inputs of all layers from per-layer embeddings, [layers, rows, per_layer_size]; None: there are none.
    """

    rows: list[LogitsRow]
    positions: Tensor
    slots: Tensor
    slots_on_device: Tensor
    kv_rows: Mapping[int | None, tuple[Tensor, Tensor]]
    plans: Mapping[int | None, PreparedPlan]
    states: StateSlots | None = None
    hidden: Tensor | None = None
    sending: tuple[Tensor, ...] | None = None
    projected: Tensor | None = None
    attended: Tensor | None = None
    per_layer: Tensor | None = None

    def leave(self, hidden: Tensor, sending: Sequence[Tensor], projected: Tensor | None = None) -> None:
        """Leave the micro-batch, and keep what the sequences need until they join one again.

        Args:
            hidden: Activations, [rows, hidden]; they are copied.
            sending: Rows of the table of queries, then in layers with KV of their own keys and values, in the format of
                the host's KV pool.
            projected: Projections of the layer, if they have an output gate; they are copied.
        """
        self.hidden, self.projected = hidden.clone(), None if projected is None else projected.clone()
        # Kept until compute has waited for the CPU, which has waited for the copies.
        self.sending = tuple(tensor.contiguous() for tensor in sending)

    def send(self, to_host: Link, pool: Tensor | None, window: int | None, queries: Tensor) -> None:
        """Send new KV to the host's pool of a layer, and queries to their table.

        Args:
            to_host: Link from the accelerator to host memory.
            pool: Host's pool of the layer; None: it has no KV of its own.
            window: Sliding window of the layer; None: full attention.
            queries: Table of queries, [slots, width].
        """
        assert self.sending is not None, "the batch has not left"
        q, *kv = self.sending
        if pool is not None:
            flat = pool.view(-1, pool.shape[-1])
            for rows, new in zip(self.kv_rows[window], kv, strict=True):
                to_host.scatter(flat, rows, new.view(-1, pool.shape[-1]))
        to_host.scatter(queries, self.slots_on_device, q)

    def attend(self, tables: tuple[Tensor, Tensor], shape: AttentionShape, attend: Callable[[Tensor], Tensor]) -> None:
        """Attend on the CPU, from one table to the other.

        Args:
            tables: Tables of queries and of results, [slots, width].
            shape: Shape of the layer's attention.
            attend: Function from queries [rows, heads, head_dim] to the results of attention, [rows, heads * head_dim].
        """
        queries, attended = tables
        q = queries[self.slots, : shape.q_size].view(len(self.slots), shape.num_heads, -1)
        attended[self.slots, : shape.q_size] = attend(q)

    def update(self, tables: tuple[Tensor, Tensor], widths: tuple[int, int], mix: Callable[[Tensor], Tensor]) -> None:
        """Update states on the CPU, from one table to the other.

        Args:
            tables: Tables of what states are updated by, and of results, [slots, width].
            widths: Values of a row of each that are of this layer.
            mix: Function that updates the sequences' states by their rows [rows, values] and gives their results.
        """
        (sent, mixed), (sent_width, mixed_size) = tables, widths
        mixed[self.slots, :mixed_size] = mix(sent[self.slots, :sent_width])

    def join(self, from_host: Link, attended: Tensor, size: int) -> Tensor:
        """Bring the results to the compute device.

        Args:
            from_host: Link from host memory to the accelerator.
            attended: Table of results, [slots, width].
            size: Values of a result.

        Returns:
            The results, [rows, size].
        """
        assert self.hidden is not None, "the batch has not left"
        rows = self.hidden.new_empty(len(self.rows), attended.shape[1])
        from_host.gather(rows, attended, self.slots_on_device)
        self.sending = None
        self.attended = rows if size == rows.shape[1] else rows[:, :size].contiguous()
        return self.attended


def slices(start: int, deferred_batches: Iterable[DeferredBatchState]) -> Iterator[slice]:
    """Yield the rows of each deferred batch in a micro-batch, one after the other from row `start` on."""
    for deferred_batch in deferred_batches:
        yield slice(start, start + len(deferred_batch.rows))
        start += len(deferred_batch.rows)


def with_deferred(own: Tensor, theirs: list[Tensor]) -> Tensor:
    """The rows of a micro-batch followed by those of the deferred batches that are with it."""
    return torch.cat([own, *theirs]) if theirs else own
