"""The configuration of a model: its shape, its family's switches, and every byte and FLOP count that follows.

Families differ by flags, not classes. Nothing here reads a file or imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from batchgen.core.errors import InputError
from batchgen.core.kernel_choice import attention_key, linear_key
from batchgen.core.typed_json import read_typed
from batchgen.models.rope import RopeConfig
from batchgen.models.stated_numbers import require_positive

DTYPES = ("float32", "bfloat16", "float16")
Norm = Literal["rms", "layer"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh", "swiglu_oai"]
# Activations of a gate, which linear layers compute together with the product that follows.
_GATES = ("silu", "gelu_tanh", "swiglu_oai")
# Fields of stages and of block formats, which are left out of JSON where they are empty.
_OFTEN_EMPTY = ("first_layer", "model_layers", "layer_formats", "end_formats")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of a decoder-only model. Raises InputError where the numbers cannot be a model.

    Attributes:
        architecture: Name of the class in transformers.
        family: One of `families.ARCHITECTURES`.
        num_layers: Decoder layers.
        hidden_size: Width of the hidden states.
        intermediate_size: Width of an MLP, or of each expert.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Values of a head.
        vocab_size: Rows of the embedding.
        max_position: Longest context, in tokens.
        norm: "rms" or "layer".
        norm_eps: Number added to the mean square or variance.
        activation: "silu", "relu", "gelu", "gelu_tanh" or "swiglu_oai".
        gated_mlp: Whether the activation is that of a gate.
        qkv_bias, out_bias, mlp_bias: Whether linear layers have biases.
        qk_norm: Whether queries and keys are normed, head by head.
        tied_embeddings: Whether the embedding is the output matrix too.
        rope: Rotary positions; None: positions are learned, and looked up at position + `position_offset`.
        windows: Positions that a token sees in each layer, itself included; None: all of them.
        embed_size: Width of the token embedding; where it differs from hidden_size, projections lead in and out.
        position_offset: Rows of the position embedding before that of position 0.
        norm_first: False puts each norm after its residual add (OPT-350m).
        final_norm: Whether there is a norm before the head.
        bos_token_id: Token that begins a text.
        eos_token_ids: Tokens that end a text.
        dtype: Dtype that the checkpoint states.
        local_rope: Rotary positions of layers with a window, where they differ from those of the others.
        output_norms: Whether the outputs of attention and MLP are normed before they are added (Gemma 2).
        embedding_scale: Factor of embeddings.
        query_scale: Factor of queries; None: head_dim ** -0.5.
        attention_softcap, logit_softcap: Caps; scores and logits x become cap * tanh(x / cap). 0: they stay.
        num_experts: MLPs of which a router chooses some for each token; 0: one MLP.
        experts_per_token: Experts chosen for each token.
        norm_topk: Whether the weights of those chosen add up to 1.
        shared_expert_size: Width of one more expert, which all tokens go through, with a weight by a gate of its own
            (Qwen2-MoE); 0: there is none.
        dense_layers: Layers with one MLP in place of experts.
        dense_size: Width of these MLPs.
        router_bias: Whether the router has a bias.
        sinks: Whether each head has a score that takes its part of the softmax and has no value (gpt-oss).
        first_layer: The model's layer that is the first of this stage of a pipeline (`stage`).
        model_layers: Layers of the whole model, where this is a stage of it; 0: this is the whole model.
        layer_formats: Block formats (`core.dtypes.BLOCK_FORMATS`) of each layer's matrices by role (`layouts.role`),
            where they differ; matrices that are not named are in numbers.
        end_formats: Block formats of "embed" and "lm_head", where they have one.
    """

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm: Norm
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    rope: RopeConfig | None
    windows: tuple[int | None, ...]
    embed_size: int
    position_offset: int = 0
    norm_first: bool = True
    final_norm: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    local_rope: RopeConfig | None = None
    output_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False
    shared_expert_size: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_size: int = 0
    router_bias: bool = False
    sinks: bool = False
    first_layer: int = 0
    model_layers: int = 0
    layer_formats: tuple[tuple[tuple[str, str], ...], ...] = ()
    end_formats: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        sizes = "num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim"
        for name in f"{sizes} vocab_size max_position embed_size".split():
            require_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        for rope in filter(None, (self.rope, self.local_rope)):
            _check_rope(rope, self.head_dim)
        if len(self.windows) != self.num_layers:
            raise InputError(f"layer_types: {len(self.windows)} do not fit {self.num_layers} layers")
        for window in self.windows:
            if window is not None:
                require_positive("sliding_window", window)
        if self.gated_mlp and self.activation not in _GATES:
            raise InputError(
                f"a gate with activation {self.activation!r} is not supported; supported: {', '.join(_GATES)}"
            )
        if self.num_experts and not (self.gated_mlp and 1 <= self.experts_per_token <= self.num_experts):
            raise InputError(f"{self.experts_per_token} of {self.num_experts} experts for each token: that cannot be")
        if self.dense_layers:
            require_positive("intermediate_size", self.dense_size)
        for name in ("attention_softcap", "logit_softcap"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must not be below 0, and is {getattr(self, name)}")
        for token_id in self.eos_token_ids:
            if not isinstance(token_id, int):
                raise InputError(f"eos_token_id must be a token id or a list of them, not {token_id!r}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is not supported; supported: {', '.join(DTYPES)}")

    def to_json(self) -> dict[str, Any]:
        """JSON values from which `from_json` makes the same configuration."""
        values = asdict(self)
        return {k: v for k, v in values.items() if v or k not in _OFTEN_EMPTY}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_json` wrote. Raises InputError, or ValueError where it is something else."""
        config: ModelConfig = read_typed(cls, value, "the configuration")
        return config

    def first_layers(self, count: int) -> ModelConfig:
        """The model with its first `count` layers alone."""
        return self._of_layers(0, count)

    def stage(self, first: int, stop: int) -> ModelConfig:
        """A stage of a pipeline: layers [first, stop).

        The first stage has the embeddings, the last one the head.
        """
        return replace(self._of_layers(first, stop), first_layer=first, model_layers=self.num_layers)

    def _of_layers(self, first: int, stop: int) -> ModelConfig:
        dense = tuple(layer - first for layer in self.dense_layers if first <= layer < stop)
        return replace(
            self,
            num_layers=stop - first,
            windows=self.windows[first:stop],
            layer_formats=self.layer_formats[first:stop],
            dense_layers=dense,
            dense_size=self.dense_size if dense else 0,
        )

    @property
    def embeds(self) -> bool:
        """True where tokens come in here, and not the activations of a stage before."""
        return self.first_layer == 0

    @property
    def has_head(self) -> bool:
        """True where logits come out here, and not the activations for a stage behind."""
        return self.model_layers in (0, self.first_layer + self.num_layers)

    @property
    def has_embeddings(self) -> bool:
        """True where the embeddings are used here: to embed tokens, or as the output matrix."""
        return self.embeds or (self.has_head and self.tied_embeddings)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Rotary positions of a layer; None: its positions are learned."""
        return self.rope if self.windows[layer] is None or self.local_rope is None else self.local_rope

    @property
    def has_channels(self) -> bool:
        """True where the model thinks in a channel of its own before it answers (`tokenizers/harmony.py`).

        Others think between tags (`tokenizers/thinking.py`).
        """
        return self.family == "gpt_oss"

    @property
    def attention_scale(self) -> float:
        """Factor of queries."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def mlp_activation(self) -> str:
        """Name of the MLP's activation in `ops.linear`."""
        return f"{self.activation}_mul" if self.gated_mlp else self.activation

    @property
    def q_size(self) -> int:
        """Numbers in a token's queries of all heads, and in its attention's result."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers in a token's keys of all heads, and as many in its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return self.q_size + 2 * self.kv_size

    def has_experts(self, layer: int) -> bool:
        """True where a layer has a mixture of experts, and not one MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @cached_property
    def window_layers(self) -> dict[int | None, int]:
        """Number of layers with each sliding window; None: those without one."""
        return dict(Counter(self.windows))

    @cached_property
    def expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def matmul_params_per_layer(self) -> int:
        """Weights of one layer that a token is multiplied with, the mean where layers differ.

        Of a mixture those of the router and of the experts chosen count.
        """
        return self._matmul_params // self.num_layers

    @cached_property
    def _matmul_params(self) -> int:
        """Weights of all layers that a token is multiplied with."""
        total = 0
        for experts, layers in self._kinds.items():
            matrices = sum(math.prod(shape) for shapes in self._matrices(experts).values() for shape in shapes)
            not_chosen = (self.num_experts - self.experts_per_token) * self.expert_params if experts else 0
            total += layers * (matrices + self._router_params(experts) - not_chosen)
        return total

    @property
    def expert_params(self) -> int:
        """Weights of one expert that take part in matrix products."""
        return sum(math.prod(self.matmul_shapes[name]) for name in ("up", "down"))

    @cached_property
    def layer_tensors(self) -> dict[str, int]:
        """The number of weights in each tensor of a layer, fused as they are loaded: what can be placed on its own.

        Biases go with their matrix, norms with "qkv". Of each the largest, where layers differ.
        """
        kinds = [self._tensors(experts) for experts in self._kinds]
        return {group: max(sizes[group] for sizes in kinds) for group in kinds[0]}

    @property
    def layer_matrices(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """(rows, columns) of the matrices in each of the `layer_tensors`; experts stand one after the other.

        The rest of a group is biases, norms and what chooses experts.
        """
        kinds = [(self._tensors(experts), self._matrices(experts)) for experts in self._kinds]
        return {group: max(kinds, key=lambda kind: kind[0][group])[1][group] for group in kinds[0][0]}

    @cached_property
    def _kinds(self) -> dict[bool, int]:
        """Number of layers with experts (True) and without (False), where there are any."""
        kinds = {True: self.expert_layers, False: self.num_layers - self.expert_layers}
        return {experts: layers for experts, layers in kinds.items() if layers}

    def _tensors(self, experts: bool) -> dict[str, int]:
        """`layer_tensors` of a layer with experts, or of one without."""
        matrices = self._matrices(experts)
        biased = {"qkv": self.qkv_bias, "out": self.out_bias, "up": self.mlp_bias, "down": self.mlp_bias}
        sizes = {
            group: sum(rows * columns + biased[group] * rows for rows, columns in shapes)
            for group, shapes in matrices.items()
        }
        sizes["up"] += self._router_params(experts) + experts * self.router_bias * self.num_experts
        sizes["qkv"] += (4 if self.output_norms else 2) * self._norm_params + self.qk_norm * 2 * self.head_dim
        return sizes

    def _matrices(self, experts: bool) -> dict[str, tuple[tuple[int, int], ...]]:
        """`layer_matrices` of a layer with experts, or of one without."""
        shapes = self.matmul_shapes
        matrices: dict[str, tuple[tuple[int, int], ...]] = {group: (shapes[group],) for group in ("qkv", "out")}
        for group in ("up", "down"):
            rows, columns = shapes[group]
            if not experts:
                matrices[group] = (shapes.get(f"dense_{group}", (rows, columns)),)
            elif self.shared_expert_size:
                matrices[group] = ((self.num_experts * rows, columns), shapes[f"shared_{group}"])
            else:
                matrices[group] = ((self.num_experts * rows, columns),)
        return matrices

    def _router_params(self, experts: bool) -> int:
        """Weights that choose experts: a row for each, and one that weighs the shared expert."""
        return (self.num_experts + (self.shared_expert_size > 0)) * self.hidden_size if experts else 0

    @cached_property
    def matmul_shapes(self) -> dict[str, tuple[int, int]]:
        """The (N, K) of each matmul of a layer; of experts, that of one of them.

        "shared_up" and "dense_up" are those of the shared expert, and of layers without experts in a model that has
        some.
        """
        shapes = {
            "qkv": (self.qkv_size, self.hidden_size),
            "out": (self.hidden_size, self.q_size),
        }
        widths = {"": self.intermediate_size, "shared_": self.shared_expert_size, "dense_": self.dense_size}
        for kind, width in widths.items():
            if width:
                shapes[f"{kind}up"] = ((2 if self.gated_mlp else 1) * width, self.hidden_size)
                shapes[f"{kind}down"] = (self.hidden_size, width)
        return shapes

    @property
    def widest_mlp(self) -> int:
        """Intermediate size of the widest MLP."""
        return max(self.intermediate_size, self.shared_expert_size, self.dense_size)

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the matrices of a layer and of the output matrix, each once."""
        return tuple(dict.fromkeys([*self.matmul_shapes.values(), (self.vocab_size, self.embed_size)]))

    def kernel_keys(self, dtype: str) -> list[str]:
        """Names that `KernelChoice` has for the shapes."""
        linear = [linear_key(*shape, dtype) for shape in self.linear_shapes]
        return [*linear, attention_key(self.num_heads, self.num_kv_heads, self.head_dim, dtype)]

    @cached_property
    def params_per_layer(self) -> int:
        """Weights of one layer, biases and norms included.

        Where layers differ, those of a layer with the largest of each tensor.
        """
        return sum(self.layer_tensors.values())

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings, and the projection that leads in."""
        if not self.has_embeddings:
            return 0
        positions = 0 if self.rope else (self.max_position + self.position_offset) * self.hidden_size
        return self.vocab_size * self.embed_size + positions + self._projection_params

    @property
    def head_params(self) -> int:
        """Final norm, the projection that leads out, sinks, and the output matrix unless it is the embedding."""
        output = 0 if self.tied_embeddings else self.vocab_size * self.embed_size
        sinks = self.sinks * self.num_layers * self.num_heads
        if not self.has_head:
            return sinks
        return self.final_norm * self._norm_params + self._projection_params + sinks + output

    @property
    def num_params(self) -> int:
        """All weights; a tied embedding counts once."""
        return self.embedding_params + self.layer_params + self.head_params

    @property
    def layer_params(self) -> int:
        """Weights of all layers."""
        return sum(layers * sum(self._tensors(experts).values()) for experts, layers in self._kinds.items())

    @property
    def _norm_params(self) -> int:
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def _projection_params(self) -> int:
        return 0 if self.embed_size == self.hidden_size else self.embed_size * self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all weights at `dtype_bytes` each."""
        return self.num_params * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values one token leaves in the cache, all layers together."""
        return self.num_layers * 2 * self.kv_size * dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """FLOPs of one token and its logits, attending to `context` positions, itself included."""
        weights = self._matmul_params
        weights += self.vocab_size * self.embed_size + 2 * self._projection_params
        seen = sum(context if window is None else min(context, window) for window in self.windows)
        return 2 * weights + 4 * self.q_size * seen

    def elementwise_bytes_per_token(self, dtype_bytes: int) -> int:
        """Activations that one token reads and writes in one layer outside of matrix products and attention.

        Each operation counts its operands once in and its result once out, at `dtype_bytes` a number: two norms
        and the norms of q and k (1 in, 1 out), rotary embedding of q and k or, without it, the scaling of q (1, 1),
        the write of k and v to the cache (1, 1), the activation (gate and up, or up alone, in; one out) and two
        residual adds (2, 1). Weights of the norms and intermediate fp32 values do not count.
        """
        q, kv = self.q_size, self.kv_size
        norms = (4 if self.output_norms else 2) * 2 * self.hidden_size + self.qk_norm * 2 * (q + kv)
        rotary = 2 * (q + kv) if self.rope else 2 * q
        kv_write = 2 * 2 * kv
        activation = (3 if self.gated_mlp else 2) * self.intermediate_size * max(1, self.experts_per_token)
        activation += 3 * self.shared_expert_size
        activation += 4 * self.hidden_size * self.experts_per_token  # to the experts and back
        residual_adds = 2 * 3 * self.hidden_size
        return (norms + rotary + kv_write + activation + residual_adds) * dtype_bytes


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if head_dim % 2:
        raise InputError(f"rotary positions need an even head_dim, not {head_dim}")
    rotated = rope.rotated or head_dim
    if rotated > head_dim:
        raise InputError(f"{rotated} rotated values are more than head_dim {head_dim}")
    for factors in (rope.factors, rope.short_factors, rope.long_factors):
        if factors is not None and len(factors) != rotated // 2:
            raise InputError(f"{len(factors)} rope frequency factors do not fit {rotated} rotated values")
    try:
        usable = all(map(math.isfinite, (*rope.inv_freq(head_dim), rope.attention_scaling())))
    except (ArithmeticError, ValueError):  # roots and logarithms of what has none
        usable = False
    if not usable:
        raise InputError(f"the rope parameters give no frequencies: {rope}")
