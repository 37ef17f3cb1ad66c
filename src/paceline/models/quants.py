"""GGML tensor types: their block layouts, and reference dequantization to float32."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class QuantType(IntEnum):
    """Tensor types by their number in the GGUF format (ggml/include/ggml.h, ``enum ggml_type``)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    BF16 = 30


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model file, still in its stored type."""

    name: str
    shape: tuple[int, ...]
    """Row-major: a linear layer's weight is (outputs, inputs); blocks run along the last axis."""
    type: QuantType
    data: NDArray[np.uint8]
    """The stored bytes, 1-D; usually a read-only view of the mapped file."""
