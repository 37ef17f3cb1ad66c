"""Rotary position embedding (Su et al., RoFormer, https://arxiv.org/abs/2104.09864) and the ways to stretch it."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): fast dimensions stay, slow ones are divided, others blended."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Dimensions that turn more often than this within the original context stay as they are."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are divided by the factor."""
    magnitude: float = 1.0
    """cos and sin are multiplied by this."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How the queries and keys of a layer are rotated."""

    theta: float
    """Base of the inverse frequencies theta^(-2i/dim)."""
    dim: int
    """Leading dimensions of each head that are rotated; even."""
    pairing: Literal["interleaved", "half"]
    """Which dimensions rotate together: (2i, 2i+1), or (i, i + dim/2)."""
    scaling: LinearScaling | YarnScaling | None = None
    frequency_divisors: tuple[float, ...] = ()
    """One for each of the dim/2 frequencies, or none: GGUF's form of Llama 3's scaling (``rope_freqs.weight``)."""

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling) else 1.0

    def inverse_frequencies(self) -> Float64:
        """Radians per position of each pair of dimensions, float64 [dim/2]."""
        frequencies = self.theta ** (-np.arange(0, self.dim, 2) / self.dim)
        if self.frequency_divisors:
            frequencies = frequencies / np.array(self.frequency_divisors)
        match self.scaling:
            case LinearScaling(factor):
                return frequencies / factor
            case YarnScaling() as yarn:
                kept = self._kept_by_yarn(yarn)
                return frequencies * kept + frequencies / yarn.factor * (1 - kept)
        return frequencies

    def _kept_by_yarn(self, yarn: YarnScaling) -> Float64:
        """How much of each frequency stays unscaled, 1 to 0 (the ramp of YaRN's section 3.2)."""
        low = max(floor(self._dimension_turning(yarn.beta_fast, yarn.original_context)), 0)
        high = min(ceil(self._dimension_turning(yarn.beta_slow, yarn.original_context)), self.dim - 1)
        ramp = (np.arange(self.dim // 2) - low) / max(high - low, 0.001)
        return 1.0 - np.clip(ramp, 0.0, 1.0)

    def _dimension_turning(self, times: float, context: int) -> float:
        """The (fractional) pair of dimensions that turns so many times within a context."""
        return self.dim * log(context / (times * 2 * pi)) / (2 * log(self.theta))
