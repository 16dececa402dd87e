"""The frequencies of rotary positions (RoPE), and their scaling for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from batchgen.core.errors import InputError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of a model: the base of the frequencies, and their scaling for longer contexts.

    Attributes:
        theta: Base of the frequencies.
        kind: Kind of scaling, one of ROPE_KINDS.
        factor: Ratio of the longer context to the original one.
        low_freq_factor, high_freq_factor: Bounds of the frequencies that are blended (llama3).
        original_max_position: Context length before scaling, in tokens (llama3, yarn, longrope).
        beta_fast, beta_slow: Numbers of rotations between which frequencies are blended (yarn).
        attention_factor: Factor of cos and sin (yarn, longrope). None: it is computed from `factor`.
        mscale, mscale_all_dim: Weights in that computation (yarn).
        truncate: Whether the bounds of the blended pairs are rounded to whole numbers (yarn).
        factors: Divisor of each frequency, head_dim // 2 numbers (the tensor `rope_freqs` of a GGUF); or None.
        short_factors, long_factors: Divisors of each frequency for contexts within original_max_position, and for
            longer contexts (longrope); or None.
        rotated: Number of values at the beginning of a head that are rotated. None: all; 0: none.
        share: Share of a head's pairs of values that are rotated, those with the highest frequencies (proportional).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    rotated: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise InputError(f"rope_type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.theta > 1 or not self.factor > 0:
            raise InputError(f"rope_theta {self.theta} and factor {self.factor} must be above 1 and above 0")
        if self.kind in ("llama3", "yarn", "longrope") and not self.original_max_position:
            raise InputError(f"rope_type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "longrope" and (self.short_factors is None or self.long_factors is None):
            raise InputError("rope_type 'longrope' needs short_factor and long_factor")
        if self.rotated is not None and (self.rotated < 0 or self.rotated % 2):
            raise InputError(f"rotary positions need an even number of rotated values, not {self.rotated}")
        if not 0 < self.share <= 1:
            raise InputError(f"partial_rotary_factor must be above 0 and at most 1, not {self.share}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise InputError("rope_type 'llama3' needs high_freq_factor above low_freq_factor")

    def inv_freq(self, head_dim: int, context: int = 0) -> tuple[float, ...]:
        """Radians per position of each rotated pair of values: at most head_dim // 2 float32 numbers.

        The computation follows transformers operation by operation in float32. Powers are correctly rounded. Those of
        torch may differ in the last place between instruction sets.

        Args:
            head_dim: Number of values in one head.
            context: Longest context of the sequences, in tokens. It selects the divisors of longrope.
        """
        if self.rotated == 0:
            return ()
        head_dim = self.rotated or head_dim
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
        powers = np.power(self.theta, exponents.astype(np.float64)).astype(np.float32)  # [head_dim / 2]
        freqs: np.ndarray = 1.0 / powers
        if self.kind == "proportional":
            freqs = freqs[: int(self.share * head_dim // 2)] / self.factor
        elif self.kind == "linear":
            freqs = freqs / self.factor
        elif self.kind == "llama3":
            freqs = self._llama3(freqs)
        elif self.kind == "yarn":
            freqs = self._yarn(powers, head_dim)
        elif self.kind == "longrope":
            factors = self.long_factors if context > self._original else self.short_factors
            freqs = 1.0 / (np.array(factors, dtype=np.float32) * powers)
        if self.factors is not None:
            freqs = freqs / np.array(self.factors, dtype=np.float32)
        return tuple(freqs.tolist())

    def row_order(self, head_dim: int) -> tuple[int, ...]:
        """An order of a head's values in which value i is rotated together with value i + head_dim / 2."""
        rotated = self.rotated or head_dim
        half, rest = rotated // 2, (head_dim - rotated) // 2
        first = (*range(half), *range(rotated, rotated + rest))
        return (*first, *range(half, rotated), *range(rotated + rest, head_dim))

    @property
    def _original(self) -> int:
        assert self.original_max_position is not None, "kinds that scale with it have it"
        return self.original_max_position

    def _llama3(self, freqs: np.ndarray) -> np.ndarray:
        """Frequencies scaled as in Llama 3: low ones divided by `factor`, high ones kept, those between blended."""
        context = self._original
        low, high = self.low_freq_factor, self.high_freq_factor
        wavelengths = 1 / freqs * (2 * math.pi)  # torch divides a number by a tensor in these two steps
        smooth = (1 / wavelengths * context - low) / (high - low)
        blended = (1 - smooth) * freqs / self.factor + smooth * freqs
        kept_or_blended = np.where(wavelengths < context / high, freqs, blended)
        return np.where(wavelengths > context / low, freqs / self.factor, kept_or_blended)

    def _yarn(self, powers: np.ndarray, head_dim: int) -> np.ndarray:
        """Frequencies scaled by YaRN: fast ones kept, slow ones divided by `factor`, others blended.

        A pair of values is fast if it makes more than `beta_fast` rotations in the original context, and slow if fewer
        than `beta_slow`.

        Args:
            powers: theta to the power of 2 i / head_dim, for each pair i.
            head_dim: Number of values in one head.
        """

        def correction_dim(rotations: float) -> float:
            turns = self._original / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = correction_dim(self.beta_fast), correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # the ramp must not divide by zero
        ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        blended: np.ndarray = 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept
        return blended

    def attention_scaling(self) -> float:
        """Factor of cos and sin, whose square is a factor of the attention scores; 1 except for yarn and longrope."""
        if self.kind == "longrope":
            if self.attention_factor is not None:
                return self.attention_factor
            return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self._original))
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._yarn_mscale(self.mscale) / self._yarn_mscale(self.mscale_all_dim)
        return self._yarn_mscale(1.0)

    def _yarn_mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


# The positions of layers that do not rotate queries and keys (SmolLM3).
NO_ROPE = RopeConfig(theta=1e4, rotated=0)


def rotates_part(rope: RopeConfig | None, part: str) -> bool:
    """True for a part whose rows belong to heads of which only some values are rotated (`RopeConfig.row_order`).

    Norms of queries and keys are among them.
    """
    rotates = ("q", "k", "qkv", "q_norm", "k_norm")
    return rope is not None and rope.rotated is not None and part.split(".")[0] in rotates
