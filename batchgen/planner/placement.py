"""Where weights, KV and activations are: in whole layers, sequences and micro-batches, and as fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.core.plan import KV_CLASSES
from batchgen.planner.problem import CostInputs, Linear


@dataclass(frozen=True)
class Placement:
    """Where things live, as fractions: each group adds up to 1.

    FlexGen's wg wc wd, cg cc cd, hg hc (4.2) with the KV classes of docs/packages/runtime.md, of the sequences that are not
    deferred, whose number is fixed (`CostInputs.deferral`). Members are numbers, or linear
    expressions. Those below are no fractions: buffers are sized by them.

    Attributes:
        streamed_peak, disk_peak: the largest fraction of any one layer that is not on the GPU, or is on disk.
        staged_blocks: KV blocks of one buffer on the compute device, for sequences that live elsewhere.
        disk_blocks: of one buffer in host memory, for KV from and to disk.
        delegates: 1 if the CPU attends to any sequence for a GPU.
        acts_wait: 1 if the activations of any micro-batch wait in host memory.
        stages: 1 if KV of any sequence comes to the GPU for its attention.
        embed_gpu: 1 if the input embeddings are on the GPU; it counts in memory alone, as the rows that come over
            otherwise are few.
        experts_disk: of the bytes of all experts, those on disk, as a fraction.
    """

    w_gpu: Linear
    w_cpu: Linear
    w_disk: Linear
    kv_gpu: Linear
    kv_cpu: Linear
    kv_streamed: Linear
    kv_disk: Linear
    act_gpu: Linear
    act_cpu: Linear
    head_gpu: Linear
    head_cpu: Linear
    streamed_peak: Linear
    disk_peak: Linear
    staged_blocks: Linear = 0
    disk_blocks: Linear = 0
    delegates: Linear = 0
    acts_wait: Linear = 0
    stages: Linear = 0
    embed_gpu: float = 0
    experts_disk: Linear = 0

    @property
    def w_streamed(self) -> Linear:
        """Weights that come over the bus in every sweep."""
        return self.w_cpu + self.w_disk


@dataclass(frozen=True)
class Counts:
    """A placement in whole things: policy.Policy's weight_layers, kv_seqs, activation_batches, tiers of the head and embeddings, kv_layers."""

    weight_layers: dict[str, tuple[float, float, float]]
    kv_seqs: dict[str, float]
    activation_batches: tuple[float, float]
    head_on_gpu: float
    embeddings_on_gpu: float = 0
    kv_layers: float = 0

    def placement(self, s: CostInputs) -> Placement:
        """Each group as parts of 1, and the buffers that the placement needs."""
        sizes, layers = s.group_bytes, s.model.num_layers

        def weights(tier: int) -> float:
            return sum(self.weight_layers[t][tier] * size for t, size in sizes.items()) / (layers * s.layer_bytes)

        def peak(groups: Mapping[str, int], tiers: Sequence[int]) -> float:
            used = (size for t, size in groups.items() if any(self.weight_layers[t][i] > 0 for i in tiers))
            return sum(used) / sum(groups.values())

        experts = sum(self.weight_layers[group][2] * size for group, size in s.expert_bytes.items())
        kv = {name: self.kv_seqs.get(name, 0) for name in KV_CLASSES}
        staying = self.kv_layers / layers  # of the KV of class "streamed"
        delegates = int(s.on_gpu and kv["cpu"] > 0)
        attends = int(delegates or s.deferred_seqs > 0)  # the CPU
        passing = max(-(-sum(kv[c] for c in staged_classes(s)) // s.equal_parts), attends)
        staged = passing * s.longest_blocks + attends * s.delegated_prompt_blocks
        if s.runtime.attends_disk_kv_on_cpu:
            on_disk = -(-kv["disk"] // s.equal_parts) * s.longest_blocks
        else:
            on_disk = staged if kv["disk"] else 0
        batches = sum(self.activation_batches)
        return Placement(
            w_gpu=weights(0),
            w_cpu=weights(1),
            w_disk=weights(2),
            kv_gpu=kv["gpu"] / s.swept_seqs + staying,
            kv_cpu=kv["cpu"] / s.swept_seqs,
            kv_streamed=kv["streamed"] / s.swept_seqs - staying,
            kv_disk=kv["disk"] / s.swept_seqs,
            act_gpu=self.activation_batches[0] / batches,
            act_cpu=self.activation_batches[1] / batches,
            head_gpu=self.head_on_gpu,
            head_cpu=1 - self.head_on_gpu,
            streamed_peak=peak(s.slot_group_bytes, (1, 2)),
            disk_peak=peak(s.disk_group_bytes, (2,)),
            staged_blocks=staged,
            disk_blocks=on_disk,
            delegates=delegates,
            acts_wait=int(self.activation_batches[1] > 0),
            stages=int(s.on_gpu and any(kv[c] > 0 for c in staged_classes(s))),
            embed_gpu=self.embeddings_on_gpu,
            experts_disk=experts / (layers * sum(s.expert_bytes.values())) if experts else 0,
        )


def staged_classes(s: CostInputs) -> tuple[str, ...]:
    """KV classes of which all KV passes through a staging buffer of the compute device in every sweep."""
    if not s.on_gpu:
        return ("disk",)
    return ("streamed",) if s.runtime.attends_disk_kv_on_cpu else ("streamed", "disk")
