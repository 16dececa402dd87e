"""The tier of each group of tensors of each layer, and what a sweep has to bring over for it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.core.dtypes import INT4
from batchgen.core.plan import VOCABULARY_CHUNKS, Policy, spread_layers
from batchgen.models.config import ModelConfig
from batchgen.schedule.step_graph import Streams


@dataclass(frozen=True)
class WeightResidency:
    """The tier of every tensor of a model.

    Attributes:
        layers: for each layer, group -> tier.
        head: tier of the output matrix.
        weight_format: name of a dtype, or one of `PACKED_FORMATS`.
        embeddings: tier of the input embeddings, where these are not the output matrix too.
        expert_layers: for each layer, whether it has a mixture of experts.
        on_demand_tokens: most tokens of a sweep in which experts on disk are read on demand, where the host computes.
        packed_tokens: most tokens of a sweep in which an accelerator multiplies 4-bit weights as they are stored.
    """

    layers: tuple[Mapping[str, str], ...]
    head: str
    weight_format: str
    embeddings: str = "cpu"
    expert_layers: tuple[bool, ...] = ()
    on_demand_tokens: int = 0
    packed_tokens: int = 0

    @classmethod
    def in_memory(cls, config: ModelConfig, dtype: str, tier: str = "cpu") -> WeightResidency:
        """Everything in one tier."""
        layers = tuple(dict.fromkeys(config.layer_tensors, tier) for _ in range(config.num_layers))
        return cls(layers, tier, dtype, embeddings=tier)

    @classmethod
    def of_policy(cls, policy: Policy, config: ModelConfig) -> WeightResidency:
        """The residency of a policy: each group of tensors spread evenly over the layers."""
        spread = [spread_layers(counts) for counts in policy.weight_layers.values()]
        layers = tuple(dict(zip(policy.weight_layers, tiers, strict=True)) for tiers in zip(*spread, strict=True))
        with_experts = tuple(map(config.has_experts, range(config.num_layers)))
        ends = policy.head_tier, policy.weight_format, policy.embedding_tier
        return cls(layers, *ends, with_experts, policy.on_demand_tokens, policy.packed_tokens)

    def tier_of_embeddings(self, config: ModelConfig) -> str:
        """The tier of the input embeddings."""
        return self.head if config.tied_embeddings else self.embeddings

    def of_layers(self, layers: Sequence[int]) -> WeightResidency:
        """The residency of a model that has only these layers."""
        experts = tuple(self.expert_layers[j] for j in layers) if self.expert_layers else ()
        return replace(self, layers=tuple(self.layers[j] for j in layers), expert_layers=experts)

    def streams(
        self,
        compute_tier: str,
        kv_on_device: Sequence[bool] = (),
        state_layers: Sequence[int] = (),
        kv_sources: Sequence[int] = (),
        *,
        embeds: bool = True,
        has_head: bool = True,
        makes_logits: bool = True,
        choosing: Sequence[bool] = (),
    ) -> Streams:
        """The data that is brought to the compute device in every sweep.

        Args:
            compute_tier: Tier of the device's own memory.
            kv_on_device: For each layer, whether KV that is streamed in others is on the device; empty: in none.
            state_layers: Numbers of the state layers.
            kv_sources: For each layer, the layer whose KV it attends to; empty: each attends to its own.
            embeds: Whether this is the first stage of a pipeline.
            has_head: Whether this is its last stage.
            makes_logits: Whether the head multiplies by an output matrix.
            choosing: For each layer, whether decoding tokens choose pages of their KV; empty: in none.
        """
        away = [{tier for tier in groups.values() if tier != compute_tier} for groups in self.layers]
        accelerated = compute_tier == "gpu"
        brings_head = self.head != compute_tier and has_head and makes_logits
        # An accelerator's host would have to wait for what its router chooses.
        on_demand_tokens = 0 if accelerated else self.on_demand_tokens
        return Streams(
            accelerated=accelerated,
            weights=tuple(bool(tiers) for tiers in away),
            disk_weights=tuple("disk" in tiers for tiers in away),
            dequantized=self.weight_format == INT4,
            vocabulary_chunks=VOCABULARY_CHUNKS if brings_head else 0,
            kv_on_device=tuple(kv_on_device),
            state_layers=tuple(state_layers),
            kv_sources=tuple(kv_sources),
            on_demand=tuple(map(self._has_experts_on_disk, range(len(self.layers)))) if on_demand_tokens else (),
            on_demand_tokens=on_demand_tokens,
            packed_tokens=self.packed_tokens,
            receives=not embeds,
            sends=not has_head,
            choosing=tuple(choosing),
        )

    def _has_experts_on_disk(self, layer: int) -> bool:
        return self.expert_layers[layer] and "disk" in (self.layers[layer]["up"], self.layers[layer]["down"])
