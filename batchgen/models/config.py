"""The configuration of a model: its shape, its family's switches, and its counts of weights, bytes and FLOPs.

One class describes all families. A family is a set of values of its switches. Nothing here reads a file or imports
torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypedDict

from batchgen.core.attention_budget import CHOSEN_PAGES, DENSE_LAYERS, AttentionBudget
from batchgen.core.errors import InputError
from batchgen.core.kernel_choice import attention_key, linear_key
from batchgen.core.typed_json import read_typed
from batchgen.models.rope import NO_ROPE, RopeConfig
from batchgen.models.state_layers import DeltaNet, ShortConv, StateShape
from batchgen.models.stated_numbers import require_positive

DTYPES = ("float32", "bfloat16", "float16")
Norm = Literal["rms", "layer"]
NormPlace = Literal["inputs", "outputs", "both", "sums"]
RouterActivation = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh", "swiglu_oai"]
# Activations of a gate, which linear layers compute together with the product that follows.
_GATES = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
# Fields of stages, of block formats and of few families, which are left out of JSON where they have their defaults.
_SELDOM_STATED = (
    "first_layer", "model_layers", "layer_formats", "end_formats", "logit_scale", "unrotated_layers",
    "state", "state_layers", "output_gate", "global_head_dim", "global_kv_heads", "shared_kv_layers", "value_norm",
    "keys_are_values", "layer_scale", "mlp_beside_experts", "per_layer_size", "norm_place", "projection_norms",
    "shared_gate", "query_growth", "query_growth_period", "router_activation", "expert_bias", "routed_scale",
    "head_bias", "sparsemixer_jitter", "hidden_output", "causal", "embed_norm", "token_types", "bare_first_layer",
)  # fmt: skip


class AttentionShape(NamedTuple):
    """The shape of the attention of one layer.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads.
        head_dim: Number of values in one head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        """Number of values in the queries of one token, all heads together; also the width of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of values in the keys of one token, all heads together. The token's values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Number of values in the queries, keys and values of one token."""
        return self.q_size + 2 * self.kv_size


class Ends(TypedDict):
    """The ends of a model that are here, as arguments of `WeightResidency.streams`.

    Attributes:
        embeds: Whether tokens are embedded here.
        has_head: Whether the layers' last norm is here.
        makes_logits: Whether the head multiplies by an output matrix.
    """

    embeds: bool
    has_head: bool
    makes_logits: bool


class LayerKind(NamedTuple):
    """The choices that decide the size of a layer's tensors.

    Attributes:
        has_experts: Whether the layer has a mixture of experts instead of one MLP.
        attention: Shape of its attention; None: it is a state layer.
        owns_kv: Whether it has KV of its own, and so projects keys and values.
        keys_are_values: Whether its values are its keys, which are projected once.
        is_dense: Whether its MLP has the width `dense_size`.
        is_bare: Whether the input of its attention has no norm.
    """

    has_experts: bool
    attention: AttentionShape | None
    owns_kv: bool
    keys_are_values: bool
    is_dense: bool
    is_bare: bool


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of a language model, a decoder or an encoder, or of a pipeline stage of one.

    Attributes:
        architecture: Name of the model's class in transformers, such as "LlamaForCausalLM".
        family: Name of the family, one of the values of `families.ARCHITECTURES`.
        num_layers: Number of decoder layers.
        hidden_size: Width of the hidden states.
        intermediate_size: Width of the MLP; in a mixture of experts, of the MLP of each expert.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads.
        head_dim: Number of values in one head.
        vocab_size: Number of rows of the token embedding.
        max_position: Longest context, in tokens.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        norm_eps: Number that a norm adds to the mean square or to the variance.
        activation: Activation of the MLP: "silu", "relu", "gelu", "gelu_tanh" or "swiglu_oai".
        gated_mlp: Whether the MLP multiplies the activated gate with an up projection.
        qkv_bias, out_bias, mlp_bias: Whether these linear layers have biases.
        qk_norm: Whether each head's queries and keys are normed.
        projection_norms: Whether the queries of all heads are normed together, and so are the keys (Olmo 2).
        tied_embeddings: Whether the token embedding is also the output matrix.
        rope: Rotary positions. None: position embeddings are learned, and the embedding of a position is in row
            position + `position_offset`.
        windows: Sliding window of each layer: the number of positions that a token attends to, its own included. None:
            all positions.
        embed_size: Width of the token embedding. If it differs from hidden_size, a projection follows the embedding,
            and another one precedes the output matrix.
        position_offset: Number of rows of the position embedding before the row of position 0.
        norm_place: Place of the norms of attention and MLP: "inputs", "outputs" before the residual add (Olmo 2),
            "both" (Gemma 2), or "sums" after the residual add (OPT-350m).
        final_norm: Whether there is a norm after the last layer.
        bos_token_id: Token that begins a text; None: there is none.
        eos_token_ids: Tokens that end a text.
        dtype: Dtype of the weights that the checkpoint states.
        local_rope: Rotary positions of layers with a sliding window, if they differ from `rope`; None: all layers use
            `rope`.
        embedding_scale: Factor of token embeddings.
        logit_scale: Factor of logits, before `logit_softcap`.
        unrotated_layers: Numbers of layers that do not rotate queries and keys (SmolLM3).
        query_scale: Factor of queries. None: head_dim ** -0.5.
        query_growth, query_growth_period: Growth of queries with their positions (Ministral 3). A query at position p
            is multiplied by 1 + query_growth * ln(1 + floor(p / query_growth_period)). 0: queries do not grow.
        attention_softcap, logit_softcap: Caps. An attention score or logit x becomes cap * tanh(x / cap). 0: no cap.
        num_experts: Number of experts of a layer: MLPs of which a router chooses some for each token. 0: one MLP.
        experts_per_token: Number of experts that the router chooses for each token.
        norm_topk: Whether the weights of a token's chosen experts are scaled to a sum of 1.
        shared_expert_size: Width of the shared expert, which all tokens go through. 0: there is none.
        shared_gate: Whether the shared expert's result is weighted by a gate of its own (Qwen2-MoE).
        dense_layers: Numbers of layers with one MLP whose width is `dense_size`: in a model whose other layers have
            experts, or other widths.
        dense_size: Width of the MLP of `dense_layers`.
        router_bias: Whether the router has a bias.
        head_bias: Whether the output matrix has a bias.
        sparsemixer_jitter: Half of the largest relative distance of a router's score from the largest one at which it
            counts, where two experts are chosen one after the other (SparseMixer, Phi-3.5-MoE). None: experts are
            chosen by a softmax over all scores.
        router_activation: Function of the router's results that gives the weights of experts: "softmax" or "sigmoid".
        expert_bias: Whether each expert has a summand that counts when experts are chosen, and not in their weights
            (LFM2-MoE).
        routed_scale: Factor of the weights of a token's chosen experts.
        sinks: Whether each head has an attention sink: a further score that is part of the softmax's sum but has no
            value (gpt-oss).
        first_layer: Number in the whole model of the first layer of this pipeline stage (`stage`).
        model_layers: Number of layers of the whole model, if this is a pipeline stage. 0: this is the whole model.
        state: Shape of the model's state layers, which keep a state of fixed size for each sequence and have no KV.
            None: all layers attend.
        state_layers: Numbers of the state layers.
        output_gate: Whether the result of attention is multiplied by the sigmoid of a gate, which is projected together
            with queries, keys and values, and comes before them.
        global_head_dim: `head_dim` of layers without a sliding window, if it differs (Gemma 4). 0: it does not.
        global_kv_heads: `num_kv_heads` of layers without a sliding window, if it differs. 0: it does not.
        shared_kv_layers: Number of the last layers that have no keys and values of their own. Each attends to those of
            the last layer before them that, like it, has a sliding window or has none (Gemma 4).
        value_norm: Whether each head's values are normed, without a weight.
        keys_are_values: Whether values are the keys, before their norm and rotation, in layers without a sliding
            window. Such a layer projects them once.
        layer_scale: Whether the output of each layer is multiplied with a number of the layer.
        mlp_beside_experts: Whether the inputs of the shared expert, of the experts and of the router have norms of
            their own, and so have the results of both (Gemma 4).
        per_layer_size: Width of the embedding that each layer has of each token (Gemma 4's per-layer embeddings). 0:
            there is none.
        hidden_output: Whether the model gives the hidden states after its last norm, and no logits: it has no output
            matrix.
        causal: Whether a token attends to those before it alone. False: to all of its sequence, or to those of its
            sliding window on both sides (encoders).
        embed_norm: Whether hidden states are normed before the first layer (BERT).
        token_types: Number of types of tokens, whose embeddings are added to those of tokens. Token ids of type t are
            raised by t * vocab_size. 0: tokens have no types.
        bare_first_layer: Whether the input of the first layer's attention has no norm (ModernBERT).
        layer_formats: For each layer, the block format (`core.dtypes.BLOCK_FORMATS`) of matrices by their role
            (`layouts.role`), if matrices differ in format. Matrices without an entry are stored as numbers.
        end_formats: Block formats of "embed" and "lm_head"; those without an entry are stored as numbers.

    Raises:
        InputError: The numbers cannot describe a model.
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
    norm_place: NormPlace = "inputs"
    projection_norms: bool = False
    final_norm: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    local_rope: RopeConfig | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    unrotated_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    query_growth: float = 0.0
    query_growth_period: int = 0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False
    shared_expert_size: int = 0
    shared_gate: bool = True
    dense_layers: tuple[int, ...] = ()
    dense_size: int = 0
    router_bias: bool = False
    head_bias: bool = False
    sparsemixer_jitter: float | None = None
    router_activation: RouterActivation = "softmax"
    expert_bias: bool = False
    routed_scale: float = 1.0
    sinks: bool = False
    state: StateShape | None = None
    state_layers: tuple[int, ...] = ()
    output_gate: bool = False
    global_head_dim: int = 0
    global_kv_heads: int = 0
    shared_kv_layers: int = 0
    value_norm: bool = False
    keys_are_values: bool = False
    layer_scale: bool = False
    mlp_beside_experts: bool = False
    per_layer_size: int = 0
    hidden_output: bool = False
    causal: bool = True
    embed_norm: bool = False
    token_types: int = 0
    bare_first_layer: bool = False
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
        if len(self.windows) != self.num_layers:
            raise InputError(f"layer_types: {len(self.windows)} do not fit {self.num_layers} layers")
        for window in self.windows:
            if window is not None:
                require_positive("sliding_window", window)
        self._check_layers()
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

    def _check_layers(self) -> None:
        """Check what differs between layers. Raises InputError."""
        for rope, head_dim in ((self.rope, self.global_head_dim or self.head_dim), (self.local_rope, self.head_dim)):
            if rope is not None:
                _check_rope(rope, head_dim)
        if self.num_heads % (self.global_kv_heads or 1):
            raise InputError(
                f"num_attention_heads {self.num_heads} is not a multiple of the {self.global_kv_heads} key and value"
                " heads of layers without a window"
            )
        if bool(self.state_layers) != (self.state is not None):
            raise InputError(
                "layer_types: layers with linear attention, and its sizes, must both be stated, or neither"
            )
        if any(map(self.has_state, self._sharing_layers)):
            raise InputError("layer_types: each layer that shares keys and values must have attention")
        if self.shared_kv_layers and None in map(self._kv_source, self._sharing_layers):
            raise InputError(
                f"num_kv_shared_layers {self.shared_kv_layers}: each of these layers needs an earlier one of its kind"
            )

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values, from which `from_json` makes an equal configuration."""
        defaults = {field.name: field.default for field in fields(self)}
        values = {k: v for k, v in asdict(self).items() if k not in _SELDOM_STATED or v != defaults[k]}
        for rope in filter(None, (values["rope"], values["local_rope"])):
            if rope["share"] == 1:
                del rope["share"]
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelConfig:
        """The configuration that JSON values from `to_json` describe.

        Raises:
            InputError: The numbers cannot describe a model.
            ValueError: The value is not from `to_json`.
        """
        config: ModelConfig = read_typed(cls, value, "the configuration")
        return config

    def first_layers(self, count: int) -> ModelConfig:
        """The configuration of a model that has only the first `count` layers of this one."""
        return self._of_layers(0, count)

    def stage(self, first: int, stop: int) -> ModelConfig:
        """The configuration of a pipeline stage that has layers [first, stop) of this model.

        The stage with layer 0 also has the embeddings. The stage with the last layer also has the final norm and output
        matrix.
        """
        return replace(self._of_layers(first, stop), first_layer=first, model_layers=self.num_layers)

    def _of_layers(self, first: int, stop: int) -> ModelConfig:
        dense, unrotated, states = (
            tuple(layer - first for layer in layers if first <= layer < stop)
            for layers in (self.dense_layers, self.unrotated_layers, self.state_layers)
        )
        return replace(
            self,
            num_layers=stop - first,
            windows=self.windows[first:stop],
            layer_formats=self.layer_formats[first:stop],
            unrotated_layers=unrotated,
            state=self.state if states else None,
            state_layers=states,
            shared_kv_layers=max(0, stop - max(first, self.num_layers - self.shared_kv_layers)),
            dense_layers=dense,
            dense_size=self.dense_size if dense else 0,
        )

    @property
    def embeds(self) -> bool:
        """True for the whole model and for the first pipeline stage: the input is tokens, not activations."""
        return self.first_layer == 0

    @property
    def has_head(self) -> bool:
        """True for the whole model and for the last pipeline stage: the output is logits, not activations."""
        return self.model_layers in (0, self.first_layer + self.num_layers)

    @property
    def ends(self) -> Ends:
        """The ends of the model that are here."""
        return {"embeds": self.embeds, "has_head": self.has_head, "makes_logits": not self.hidden_output}

    @property
    def has_embeddings(self) -> bool:
        """True where the token embedding is used: to embed tokens, or as the tied output matrix."""
        return self.embeds or (self.has_head and self.tied_embeddings and not self.hidden_output)

    @property
    def output_size(self) -> int:
        """Number of logits of a token; 0: the model gives hidden states."""
        return 0 if self.hidden_output else self.vocab_size

    @property
    def num_token_ids(self) -> int:
        """Number of token ids, those of all types of tokens included."""
        return self.vocab_size * max(1, self.token_types)

    def without_logits(self) -> ModelConfig:
        """The configuration of the same layers that give hidden states: the output matrix is left out."""
        ends = tuple(end for end in self.end_formats if end[0] != "lm_head")
        return replace(
            self, hidden_output=True, tied_embeddings=True, head_bias=False, logit_scale=1.0, end_formats=ends
        )

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Rotary positions of layer number `layer`; None: position embeddings are learned."""
        if layer in self.unrotated_layers:
            return NO_ROPE
        return self.rope if self.windows[layer] is None or self.local_rope is None else self.local_rope

    @property
    def rotary_shapes(self) -> frozenset[tuple[RopeConfig | None, int]]:
        """Rotary positions and values of a head, of every kind of layer that attends."""
        return frozenset((self.rope_of(j), self.attention_of(j).head_dim) for j in self.attention_layers)

    @property
    def rotary_position_bytes(self) -> int:
        """Bytes of a position in rotary tables: cos and sin in fp32 of each pair of a head's values."""
        return sum(2 * 4 * (head_dim // 2) for rope, head_dim in self.rotary_shapes if rope is not None)

    def has_state(self, layer: int) -> bool:
        """True where layer number `layer` keeps a state for each sequence, and has no attention."""
        return layer in self.state_layers

    def attention_of(self, layer: int) -> AttentionShape:
        """The shape of the attention of layer number `layer`, which is not a state layer."""
        return self.attention_within(self.windows[layer])

    def attention_within(self, window: int | None) -> AttentionShape:
        """The shape of the attention of layers with a sliding window, in positions, or without one (None)."""
        if window is not None:
            return self._attention
        return AttentionShape(
            self.num_heads, self.global_kv_heads or self.num_kv_heads, self.global_head_dim or self.head_dim
        )

    def kv_source(self, layer: int) -> int:
        """The number of the layer whose keys and values layer number `layer` attends to: its own, mostly."""
        source = self._kv_source(layer)
        assert source is not None, f"layer {layer} has no keys and values"
        return source

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose KV it attends to; empty where each attends to its own."""
        return tuple(map(self.kv_source, range(self.num_layers))) if self.shared_kv_layers else ()

    def owns_kv(self, layer: int) -> bool:
        """True where layer number `layer` has keys and values of its own."""
        return layer in self.kv_layers

    def _kv_source(self, layer: int) -> int | None:
        if layer not in self._sharing_layers:
            return layer
        has_window = self.windows[layer] is not None
        alike = (j for j in self.kv_layers if (self.windows[j] is not None) == has_window)
        return max(alike, default=None)

    @property
    def _sharing_layers(self) -> range:
        return range(self.num_layers - self.shared_kv_layers, self.num_layers)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have keys and values of their own."""
        return tuple(j for j in range(self.num_layers - self.shared_kv_layers) if not self.has_state(j))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend, to keys and values of their own or of another layer."""
        return (*self.kv_layers, *self._sharing_layers)

    @property
    def has_channels(self) -> bool:
        """True where the model marks its reasoning and its answer as channels (gpt-oss; `tokenizers/harmony.py`).

        Other reasoning models put their reasoning between tags (`tokenizers/thinking.py`).
        """
        return self.family == "gpt_oss"

    @property
    def input_norms(self) -> bool:
        """True where the inputs of attention and of MLP are normed."""
        return self.norm_place in ("inputs", "both")

    @property
    def output_norms(self) -> bool:
        """True where the outputs of attention and of MLP are normed before the residual add."""
        return self.norm_place in ("outputs", "both")

    @property
    def _norms_of_layer(self) -> int:
        """Number of norms of a layer, without those of queries and keys."""
        return 4 if self.norm_place == "both" else 2

    @property
    def attention_scale(self) -> float:
        """Factor of queries, by which attention scores are scaled."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def mlp_activation(self) -> str:
        """Name of the MLP's activation as an argument of `ops.linear`, such as "silu_mul"."""
        return f"{self.activation}_mul" if self.gated_mlp else self.activation

    def qk_norm_sizes(self, shape: AttentionShape) -> tuple[int, int]:
        """Number of weights of the norm of queries, and of the norm of keys; 0 where there is none.

        Args:
            shape: Shape of the layer's attention.
        """
        if self.projection_norms:
            return shape.q_size, shape.kv_size
        return (shape.head_dim, shape.head_dim) if self.qk_norm else (0, 0)

    @property
    def _attention(self) -> AttentionShape:
        """The shape of attention in layers with a sliding window; in most models, of all layers (`attention_of`)."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def q_size(self) -> int:
        """`AttentionShape.q_size` of layers with a sliding window; in most models, of all layers."""
        return self._attention.q_size

    @property
    def kv_size(self) -> int:
        """`AttentionShape.kv_size` of layers with a sliding window; in most models, of all layers."""
        return self._attention.kv_size

    @property
    def qkv_size(self) -> int:
        """`AttentionShape.qkv_size` of layers with a sliding window; in most models, of all layers."""
        return self._attention.qkv_size

    def has_experts(self, layer: int) -> bool:
        """True where layer number `layer` has a mixture of experts instead of one MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @cached_property
    def window_layers(self) -> dict[int | None, int]:
        """Number of layers that attend, for each sliding window in positions. Key None: layers without a window."""
        return dict(Counter(self.windows[layer] for layer in self.attention_layers))

    def chooses_pages(self, layer: int) -> bool:
        """True where decoding tokens attend to chosen pages in layer number `layer`, if a job has an attention budget.

        These are layers without a sliding window, but for the first ones of the model.
        """
        if self.has_state(layer) or self.windows[layer] is not None:
            return False
        return self.first_layer + self.kv_source(layer) >= DENSE_LAYERS

    def layer_windows(self, *, chooses: bool) -> tuple[int | None, ...]:
        """For each layer its sliding window, None without one, or CHOSEN_PAGES where it chooses pages.

        Args:
            chooses: Whether the job has an attention budget.
        """
        layers = enumerate(self.windows)
        return tuple(CHOSEN_PAGES if chooses and self.chooses_pages(j) else window for j, window in layers)

    def choosing_layers(self, attention_budget: str) -> tuple[bool, ...]:
        """For each layer, whether decoding tokens choose pages there; empty: they attend to all of them everywhere.

        Args:
            attention_budget: Tokens that a decoding token attends to, as `--attention-budget` states them.
        """
        if AttentionBudget.of(attention_budget) is None:
            return ()
        return tuple(map(self.chooses_pages, range(self.num_layers)))

    @cached_property
    def expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of a layer's weights that one token is multiplied with, as a mean over all layers.

        In a mixture of experts, only the router and the experts that are chosen for the token count.
        """
        return self._matmul_params // self.num_layers

    @cached_property
    def _matmul_params(self) -> int:
        """Number of weights in all layers that one token is multiplied with."""
        total = 0
        for kind, layers in self._kinds.items():
            matrices = sum(math.prod(shape) for shapes in self._matrices(kind).values() for shape in shapes)
            not_chosen = (self.num_experts - self.experts_per_token) * self.expert_params if kind.has_experts else 0
            gates = self._state_gate_params if kind.attention is None else 0
            total += layers * (matrices + gates + self._router_params(kind.has_experts) - not_chosen)
        return total

    @property
    def expert_params(self) -> int:
        """Number of weights in the matrices of one expert."""
        return sum(math.prod(self.matmul_shapes[name]) for name in ("up", "down"))

    @cached_property
    def layer_tensors(self) -> dict[str, int]:
        """Number of weights in each group of a layer's tensors: "qkv", "out", "up" and "down".

        A group is the unit that is placed on a device. A bias belongs to the group of its matrix. Norms belong to
        "qkv". The router belongs to "up". If layers differ in size, this is the largest size of each group.
        """
        kinds = [self._tensors(kind) for kind in self._kinds]
        return {group: max(sizes[group] for sizes in kinds) for group in kinds[0]}

    @property
    def layer_matrices(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Shapes (rows, columns) of the matrices in each group of `layer_tensors`. Rows of experts are stacked.

        If layers differ in size, these are the shapes for the largest size of each group.
        """
        kinds = [(self._tensors(kind), self._matrices(kind)) for kind in self._kinds]
        return {group: max(kinds, key=lambda kind: kind[0][group])[1][group] for group in kinds[0][0]}

    @cached_property
    def _kinds(self) -> dict[LayerKind, int]:
        """Number of layers of each kind."""
        return dict(Counter(map(self.kind_of, range(self.num_layers))))

    def projections(self, layer: int) -> tuple[str, ...]:
        """The parts of the fused projection in layer number `layer`, which attends: "q", "k" and "v", mostly."""
        kind = self.kind_of(layer)
        return ("q", "k", "v")[: 3 - kind.keys_are_values] if kind.owns_kv else ("q",)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of layer number `layer`: layers of one kind have tensors of the same sizes."""
        attention = None if self.has_state(layer) else self.attention_of(layer)
        keys_are_values = self.keys_are_values and self.windows[layer] is None
        is_dense, is_first = layer in self.dense_layers, self.first_layer + layer == 0
        return LayerKind(
            has_experts=self.has_experts(layer),
            attention=attention,
            owns_kv=layer in self.kv_layers,
            keys_are_values=keys_are_values,
            is_dense=is_dense,
            is_bare=self.bare_first_layer and is_first,
        )

    def _tensors(self, kind: LayerKind) -> dict[str, int]:
        """Number of weights in each group of `layer_tensors`, for a layer of a kind."""
        matrices = self._matrices(kind)
        biased = {"qkv": self.qkv_bias, "out": self.out_bias, "up": self.mlp_bias, "down": self.mlp_bias}
        if kind.attention is None:
            biased |= dict.fromkeys(("qkv", "out"), isinstance(self.state, ShortConv) and self.state.bias)
        sizes = {
            group: sum(rows * columns + biased[group] * rows for rows, columns in shapes)
            for group, shapes in matrices.items()
        }
        biases = kind.has_experts * (self.router_bias + self.expert_bias) * self.num_experts
        sizes["up"] += self._router_params(kind.has_experts) + biases
        sizes["qkv"] += (self._norms_of_layer - kind.is_bare) * self._norm_params + self.layer_scale
        if kind.attention is None:
            sizes["qkv"] += self._state_vector_params
        else:
            sizes["qkv"] += sum(self.qk_norm_sizes(kind.attention)[: 1 + kind.owns_kv])
        if kind.has_experts and self.mlp_beside_experts:  # norms of two results and two inputs, scales of results
            sizes["up"] += 4 * self.hidden_size + self.num_experts
        if self.per_layer_size:
            sizes["qkv"] += self.hidden_size
        return sizes

    @property
    def _state_vector_params(self) -> int:
        """Number of weights of a state layer outside of its fused projections: convolution, gates and norm."""
        if isinstance(self.state, DeltaNet):
            vectors = 2 * self.state.value_heads + self.state.value_dim
            return self._state_gate_params + self.state.kernel * self.state.channels + vectors
        return 0 if self.state is None else (self.state.kernel + self.state.bias) * self.state.channels

    @property
    def _state_gate_params(self) -> int:
        """Number of weights by which a Gated DeltaNet projects the two gates of each value head."""
        return 2 * self.state.value_heads * self.hidden_size if isinstance(self.state, DeltaNet) else 0

    def _matrices(self, kind: LayerKind) -> dict[str, tuple[tuple[int, int], ...]]:
        """Shapes of the matrices in each group of `layer_tensors`, for a layer of a kind."""
        shapes = self.matmul_shapes
        matrices: dict[str, tuple[tuple[int, int], ...]] = {
            "qkv": ((self._projected_size(kind), self.hidden_size),),
            "out": ((self.hidden_size, self._mixed_size(kind)),),
        }
        for group in ("up", "down"):
            rows, columns = shapes[group]
            if not kind.has_experts:
                matrices[group] = (shapes[f"dense_{group}"] if kind.is_dense else (rows, columns),)
            elif self.shared_expert_size:
                matrices[group] = ((self.num_experts * rows, columns), shapes[f"shared_{group}"])
            else:
                matrices[group] = ((self.num_experts * rows, columns),)
        if width := self.per_layer_size:
            matrices["up"] += ((width, self.hidden_size),)
            matrices["down"] += ((self.hidden_size, width),)
        return matrices

    def _projected_size(self, kind: LayerKind) -> int:
        """Number of rows of the fused projection before attention, or before the update of the state."""
        if kind.attention is None:
            assert self.state is not None, "a state layer has a shape"
            return self.state.projected_size
        gate = kind.attention.q_size if self.output_gate else 0
        if not kind.owns_kv:
            return gate + kind.attention.q_size
        return gate + kind.attention.qkv_size - kind.keys_are_values * kind.attention.kv_size

    def _mixed_size(self, kind: LayerKind) -> int:
        """Number of values that attention, or the update of the state, gives for one token."""
        if kind.attention is None:
            assert self.state is not None, "a state layer has a shape"
            return self.state.out_size
        return kind.attention.q_size

    def projected_size(self, layer: int) -> int:
        """Number of rows of the fused projection in layer number `layer`: queries, keys and values, mostly."""
        return self._projected_size(self.kind_of(layer))

    def sent_width(self, layer: int) -> int:
        """Number of values of a token that the CPU gets to attend in layer number `layer`, or to update its state.

        Keys and values are not among them: they go to their place in the KV.
        """
        return self.projected_width(layer) if self.has_state(layer) else self.attention_of(layer).q_size

    def projected_width(self, layer: int) -> int:
        """Number of values that the projections of layer number `layer` give for a token before it is mixed.

        It is `projected_size`, and for a Gated DeltaNet the two gates of each value head too.
        """
        return self.state.projected_width if self.state and self.has_state(layer) else self.projected_size(layer)

    def mixed_size(self, layer: int) -> int:
        """Number of values that layer number `layer` gives for a token by its attention or the update of its state."""
        return self._mixed_size(self.kind_of(layer))

    @property
    def column_sections(self) -> int:
        """Number of equal sections of the columns of a state layer's output projection, each with all key heads."""
        if isinstance(self.state, DeltaNet) and self.state.out_by_member:
            return self.state.value_heads // self.state.key_heads
        return 1

    @cached_property
    def widest_projected(self) -> int:
        """The largest `projected_size` of all layers."""
        return max(map(self._projected_size, self._kinds))

    @cached_property
    def widest_mixed(self) -> int:
        """The largest `mixed_size` of all layers."""
        return max(map(self._mixed_size, self._kinds))

    def _router_params(self, experts: bool) -> int:
        """Number of weights that choose experts: one row for each expert, and one for the gate of a shared expert."""
        gate = self.shared_expert_size > 0 and self.shared_gate
        return (self.num_experts + gate) * self.hidden_size if experts else 0

    @cached_property
    def matmul_shapes(self) -> dict[str, tuple[int, int]]:
        """N and K of each matrix product of a layer, by name. For experts, N and K of one expert.

        "shared_up" belongs to the shared expert. "dense_up" belongs to `dense_layers`. "qkv" and "out" are those of the
        kind of layers with the largest ones; `linear_shapes` has those of all kinds.
        """
        shapes = {
            "qkv": (self.widest_projected, self.hidden_size),
            "out": (self.hidden_size, self.widest_mixed),
        }
        widths = {"": self.intermediate_size, "shared_": self.shared_expert_size, "dense_": self.dense_size}
        for kind, width in widths.items():
            if width:
                shapes[f"{kind}up"] = ((2 if self.gated_mlp else 1) * width, self.hidden_size)
                shapes[f"{kind}down"] = (self.hidden_size, width)
        return shapes

    @property
    def widest_mlp(self) -> int:
        """Width of the widest MLP of the model."""
        return max(self.intermediate_size, self.shared_expert_size, self.dense_size)

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """Distinct shapes (rows, columns) of the matrices of a layer and of the output matrix."""
        projections = (
            shape for kind in self._kinds for group in ("qkv", "out") for shape in self._matrices(kind)[group]
        )
        mlps = (shape for name, shape in self.matmul_shapes.items() if name not in ("qkv", "out"))
        output = [] if self.hidden_output else [(self.vocab_size, self.embed_size)]
        return tuple(dict.fromkeys([*projections, *mlps, *output]))

    def kernel_keys(self, dtype: str) -> list[str]:
        """Keys by which a `KernelChoice` names the matrices and the attention of this model.

        Args:
            dtype: Compute dtype.
        """
        linear = [linear_key(*shape, dtype) for shape in self.linear_shapes]
        attention = dict.fromkeys(map(self.attention_of, self.attention_layers))
        return [*linear, *(attention_key(*shape, dtype) for shape in attention)]

    @cached_property
    def params_per_layer(self) -> int:
        """Number of weights of one layer, biases and norms included.

        If layers differ in size, this is the sum of the largest sizes of the groups (`layer_tensors`).
        """
        return sum(self.layer_tensors.values())

    @property
    def embedding_params(self) -> int:
        """Number of weights before the first layer: token and position embeddings, and the projection after them."""
        if not self.has_embeddings:
            return 0
        positions = 0 if self.rope else (self.max_position + self.position_offset) * self.hidden_size
        positions += self.token_types * self.hidden_size + self.embed_norm * self._norm_params
        per_layer = self.per_layer_width * self.hidden_size + self.per_layer_size
        return self.vocab_size * self.embed_size + positions + self._projection_params + per_layer

    @property
    def per_layer_width(self) -> int:
        """Number of values in the embeddings that all layers together have of one token; 0: they have none."""
        return self.num_layers * self.per_layer_size

    @property
    def per_layer_params(self) -> int:
        """Number of weights in the table of per-layer embeddings, which is read by row and never held whole."""
        return self.vocab_size * self.per_layer_width

    @property
    def head_params(self) -> int:
        """Number of weights after the last layer: final norm, projection, sinks and an untied output matrix."""
        output = 0 if self.tied_embeddings else self.vocab_size * self.embed_size
        output += self.head_bias * self.vocab_size
        sinks = self.sinks * self.num_layers * self.num_heads
        if not self.has_head:
            return sinks
        return self.final_norm * self._norm_params + self._projection_params + sinks + output

    @property
    def num_params(self) -> int:
        """Number of all weights. A tied embedding counts once."""
        return self.embedding_params + self.per_layer_params + self.layer_params + self.head_params

    @property
    def held_params(self) -> int:
        """Number of weights that are held in a memory or brought from disk: all but those that are read by row."""
        return self.num_params - self.per_layer_params

    @property
    def layer_params(self) -> int:
        """Number of weights of all layers together."""
        return sum(layers * sum(self._tensors(kind).values()) for kind, layers in self._kinds.items())

    @property
    def _norm_params(self) -> int:
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def _projection_params(self) -> int:
        return 0 if self.embed_size == self.hidden_size else self.embed_size * self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all weights, at `dtype_bytes` bytes for each."""
        return self.num_params * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one token in all layers, at `dtype_bytes` bytes for each number."""
        return sum(2 * self.attention_of(layer).kv_size for layer in self.kv_layers) * dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """FLOPs of the forward pass of one token, logits included.

        Args:
            context: Number of positions that the token attends to, its own included.
        """
        weights = self._matmul_params + self.per_layer_width * self.hidden_size
        weights += self.output_size * self.embed_size + 2 * self._projection_params
        seen = 0
        for layer in self.attention_layers:
            window = self.windows[layer]
            seen += self.attention_of(layer).q_size * (context if window is None else min(context, window))
        return 2 * weights + 4 * seen + len(self.state_layers) * self._state_flops

    @property
    def _state_flops(self) -> int:
        """FLOPs of one token in one state layer, outside of its projections: the convolution and the rank-one update.

        The update of a value head's matrix S takes 7 operations for each of its numbers: decay, Sᵀk, S + k δᵀ and Sᵀq.
        """
        if self.state is None:
            return 0
        convolution = 2 * self.state.kernel * self.state.channels
        return convolution + 7 * math.prod(self.state.matrix_shape)

    def elementwise_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of activations that one token reads and writes in one layer, outside of matrix products and attention.

        If layers differ in how they mix tokens, this is the mean over them. Each operation reads each operand once and
        writes its result once, at `dtype_bytes` bytes for each number. The operations, with (operands, results):

            both norms, and the norms of queries and keys    (1, 1)
            rotary embedding of queries and keys             (1, 1)
            scaling of queries, without rotary embedding     (1, 1)
            storing keys and values in the KV                (1, 1)
            output gate of attention                         (2, 1)
            convolution of a state layer                     (1, 1)
            gated norm, or gate, of a state layer's result   (2, 1)
            gate of a short convolution's input              (2, 1)
            activation of the MLP                            (gate and up, or up alone; 1)
            both residual adds                               (2, 1)

        The weights of norms and intermediate fp32 values do not count.
        """
        norms = self._norms_of_layer * 2 * self.hidden_size
        mixing = sum(layers * self._mixing_values(kind) for kind, layers in self._kinds.items()) // self.num_layers
        activation = (3 if self.gated_mlp else 2) * self.intermediate_size * max(1, self.experts_per_token)
        activation += 3 * self.shared_expert_size
        activation += 4 * self.hidden_size * self.experts_per_token  # to the experts and back
        residual_adds = 2 * 3 * self.hidden_size
        return (norms + mixing + activation + residual_adds) * dtype_bytes

    def _mixing_values(self, kind: LayerKind) -> int:
        """Numbers that one token reads and writes between a layer's projections, by `elementwise_bytes_per_token`."""
        if kind.attention is None:
            assert self.state is not None, "a state layer has a shape"
            gate = 3 * self.state.channels if isinstance(self.state, ShortConv) else 0
            return gate + 2 * self.state.channels + 3 * self.state.out_size
        q, kv = kind.attention.q_size, kind.attention.kv_size if kind.owns_kv else 0
        norms = (self.qk_norm or self.projection_norms) * 2 * (q + kv)
        rotary = 2 * (q + kv) if self.rope else 2 * q
        return norms + rotary + 2 * 2 * kv + self.output_gate * 3 * q


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if head_dim % 2:
        raise InputError(
            f"rotary positions need an even head_dim (or hidden_size / num_attention_heads), not {head_dim}"
        )
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
