"""GGML tensor types: their block layouts, and reference dequantization to float32."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]


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

    @property
    def block(self) -> "BlockSize":
        """How many elements are stored together, and in how many bytes."""
        return _BLOCKS[self]


@dataclass(frozen=True, slots=True)
class BlockSize:
    """A block never crosses a row, so a row's length is a multiple of ``elements``."""

    elements: int
    bytes: int


_BLOCKS = {
    QuantType.F32: BlockSize(1, 4),
    QuantType.F16: BlockSize(1, 2),
    QuantType.BF16: BlockSize(1, 2),
    QuantType.Q4_0: BlockSize(32, 2 + 16),
    QuantType.Q4_1: BlockSize(32, 2 + 2 + 16),
    QuantType.Q5_0: BlockSize(32, 2 + 4 + 16),
    QuantType.Q5_1: BlockSize(32, 2 + 2 + 4 + 16),
    QuantType.Q8_0: BlockSize(32, 2 + 32),
}

UNREADABLE_TYPES = {
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of the other types in ``enum ggml_type``, so that an error can say what the file holds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model file, still in its stored type."""

    name: str
    shape: tuple[int, ...]
    """Row-major: a linear layer's weight is (outputs, inputs); blocks run along the last axis."""
    type: QuantType
    data: NDArray[np.uint8]
    """The stored bytes, 1-D; usually a read-only view of the mapped file."""


def dequantize(tensor: Tensor) -> Float32:
    """The tensor's values, float32 of ``tensor.shape``; always a fresh array.

    The formulas and bit layouts are those of ``dequantize_row_*`` in ggml/src/ggml-quants.c.
    """
    blocks = tensor.data.reshape(-1, tensor.type.block.bytes)
    return _DECODERS[tensor.type](blocks).reshape(tensor.shape)


def _f32(blocks: UInt8) -> Float32:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: UInt8) -> Float32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: UInt8) -> Float32:
    """bfloat16 is the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: UInt8) -> Float32:
    return _scale(blocks) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: UInt8) -> Float32:
    return _scale(blocks) * (_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(blocks: UInt8) -> Float32:
    return _scale(blocks) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks[:, 2:])


def _q5_0(blocks: UInt8) -> Float32:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _scale(blocks) * (codes.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(blocks: UInt8) -> Float32:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _scale(blocks) * codes.astype(np.float32) + _scale(blocks[:, 2:])


def _scale(blocks: UInt8) -> Float32:
    """The float16 at the start of each block, as a column."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _nibbles(packed: UInt8) -> UInt8:
    """16 bytes to 32 codes: the low halves are elements 0-15, the high halves 16-31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: UInt8) -> UInt8:
    """4 bytes to 32 values, 0 or 16: bit i belongs to element i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


_DECODERS: dict[QuantType, Callable[[UInt8], Float32]] = {
    QuantType.F32: _f32,
    QuantType.F16: _f16,
    QuantType.BF16: _bf16,
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.Q8_0: _q8_0,
}
