"""Rotary position frequencies and the ways they are scaled for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from batchgen.core.errors import InputError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base frequency and its scaling for longer contexts.

    Attributes:
        theta: Base of the frequencies.
        kind: One of ROPE_KINDS.
        factor: Ratio of the longer context to the original one.
        low_freq_factor, high_freq_factor: Bounds of the blended frequencies (llama3).
        original_max_position: Context length before scaling, in tokens (llama3, yarn, longrope).
        beta_fast, beta_slow: Rotations between which frequencies are blended (yarn).
        attention_factor: Multiplier of cos and sin (yarn, longrope); None: it follows from the factor.
        mscale, mscale_all_dim: Weights of that multiplier (yarn).
        truncate: Whether the bounds of the blended pairs are whole numbers (yarn).
        factors: Divisor per frequency, `head_dim // 2` of them (a GGUF's `rope_freqs` tensor).
        short_factors, long_factors: Divisors per frequency for contexts within original_max_position, and for longer
            ones (longrope).
        rotated: Number of a head's first values that are rotated; None: all.
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

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise InputError(f"rope_type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.theta > 1 or not self.factor > 0:
            raise InputError(f"rope theta {self.theta} and factor {self.factor} must be above 1 and above 0")
        if self.kind in ("llama3", "yarn", "longrope") and not self.original_max_position:
            raise InputError(f"rope_type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "longrope" and (self.short_factors is None or self.long_factors is None):
            raise InputError("rope_type 'longrope' needs short_factor and long_factor")
        if self.rotated is not None and (self.rotated < 2 or self.rotated % 2):
            raise InputError(f"rotary positions need an even number of rotated values, not {self.rotated}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise InputError("rope_type 'llama3' needs high_freq_factor above low_freq_factor")

    def inv_freq(self, head_dim: int, context: int = 0) -> tuple[float, ...]:
        """Radians per position of each rotated pair, float32 values: `head_dim // 2` of them, or `rotated // 2`.

        Follows transformers operation by operation in float32. The powers are correctly rounded, where those of torch
        may be one unit in the last place off, differently on each instruction set.

        Args:
            head_dim: Values of a head.
            context: Longest context of the sequences, in tokens, which longrope's factors are chosen by.
        """
        head_dim = self.rotated or head_dim
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
        powers = np.power(self.theta, exponents.astype(np.float64)).astype(np.float32)  # [head_dim / 2]
        freqs: np.ndarray = 1.0 / powers
        if self.kind == "linear":
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
        """Order of a head's values in which value i is rotated with value i + head_dim / 2."""
        rotated = self.rotated or head_dim
        half, rest = rotated // 2, (head_dim - rotated) // 2
        first = (*range(half), *range(rotated, rotated + rest))
        return (*first, *range(half, rotated), *range(rotated + rest, head_dim))

    @property
    def _original(self) -> int:
        assert self.original_max_position is not None, "kinds that scale with it have it"
        return self.original_max_position

    def _llama3(self, freqs: np.ndarray) -> np.ndarray:
        """Wavelengths beyond the original context are stretched, short ones kept, those between blended."""
        context = self._original
        low, high = self.low_freq_factor, self.high_freq_factor
        wavelengths = 1 / freqs * (2 * math.pi)  # torch divides a number by a tensor in these two steps
        smooth = (1 / wavelengths * context - low) / (high - low)
        blended = (1 - smooth) * freqs / self.factor + smooth * freqs
        kept_or_blended = np.where(wavelengths < context / high, freqs, blended)
        return np.where(wavelengths > context / low, freqs / self.factor, kept_or_blended)

    def _yarn(self, powers: np.ndarray, head_dim: int) -> np.ndarray:
        """Pairs that turn often in the original context are kept, rare ones interpolated, a ramp between."""

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
        """Multiplier on cos and sin (so its square is on the attention scores); 1 except for yarn and longrope."""
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


def rotates_part(rope: RopeConfig | None, part: str) -> bool:
    """True for parts with rows of heads of which only some values are rotated; `RopeConfig.row_order` is for these."""
    return rope is not None and rope.rotated is not None and part.split(".")[0] in ("q", "k", "qkv")
