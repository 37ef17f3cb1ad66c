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
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
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
    QuantType.Q2_K: BlockSize(256, 16 + 64 + 2 + 2),
    QuantType.Q3_K: BlockSize(256, 32 + 64 + 12 + 2),
    QuantType.Q4_K: BlockSize(256, 2 + 2 + 12 + 128),
    QuantType.Q5_K: BlockSize(256, 2 + 2 + 12 + 32 + 128),
    QuantType.Q6_K: BlockSize(256, 128 + 64 + 16 + 2),
    QuantType.IQ4_NL: BlockSize(32, 2 + 16),
}

UNQUANTIZED = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})
"""Types whose elements are floats, each by itself."""

UNREADABLE_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
"""Names of the other types that ``enum ggml_type`` has or had, so that an error can say what the file holds."""


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
    return _scale(blocks) * (_fields(blocks[:, 2:], 16, 4).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(blocks: UInt8) -> Float32:
    return _scale(blocks) * _fields(blocks[:, 4:], 16, 4).astype(np.float32) + _scale(blocks[:, 2:])


def _q5_0(blocks: UInt8) -> Float32:
    codes = _fields(blocks[:, 6:], 16, 4) | _fifth_bits(blocks[:, 2:6])
    return _scale(blocks) * (codes.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(blocks: UInt8) -> Float32:
    codes = _fields(blocks[:, 8:], 16, 4) | _fifth_bits(blocks[:, 4:8])
    return _scale(blocks) * codes.astype(np.float32) + _scale(blocks[:, 2:])


def _q2_k(blocks: UInt8) -> Float32:
    factors, codes = blocks[:, :16], _fields(blocks[:, 16:80], 32, 2)
    return _by_run(codes, _scale(blocks[:, 80:]) * (factors & 15), _scale(blocks[:, 82:]) * (factors >> 4))


def _q3_k(blocks: UInt8) -> Float32:
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << np.uint8(2)
    factors = _fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << np.uint8(4)
    signed = factors.astype(np.int8) - np.int8(32)
    return _by_run(codes.astype(np.int8) - np.int8(4), _scale(blocks[:, 108:]) * signed)


def _q4_k(blocks: UInt8) -> Float32:
    factors, minima = _factors_and_minima(blocks[:, 4:16])
    return _by_run(_fields(blocks[:, 16:], 32, 4), _scale(blocks) * factors, _scale(blocks[:, 2:]) * minima)


def _q5_k(blocks: UInt8) -> Float32:
    factors, minima = _factors_and_minima(blocks[:, 4:16])
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _by_run(codes, _scale(blocks) * factors, _scale(blocks[:, 2:]) * minima)


def _q6_k(blocks: UInt8) -> Float32:
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << np.uint8(4)
    return _by_run(codes.astype(np.int8) - np.int8(32), _scale(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))


def _iq4_nl(blocks: UInt8) -> Float32:
    return _scale(blocks) * _IQ4_NL_VALUES[_fields(blocks[:, 2:], 16, 4)]


_IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # ggml/src/ggml-common.h: kvalues_iq4nl


def _scale(blocks: UInt8) -> Float32:
    """The float16 at the start of each block, as a column."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _fields(packed: UInt8, stretch: int, bits: int) -> UInt8:
    """Codes of ``bits`` bits, in the elements' order.

    A stretch of bytes holds elements that follow one another in its lowest fields, those after them in the next higher
    fields, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, stretch) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _fifth_bits(packed: UInt8) -> UInt8:
    """4 bytes to 32 values, 0 or 16: bit i belongs to element i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _factors_and_minima(packed: UInt8) -> tuple[UInt8, UInt8]:
    """Eight factors and eight minima of 6 bits from 12 bytes (ggml-quants.c: get_scale_min_k4)."""
    factors, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.hstack([factors & 63, rest & 15 | factors >> 6 << 4]),
        np.hstack([minima & 63, rest >> 4 | minima >> 6 << 4]),
    )


def _by_run(codes: UInt8 | NDArray[np.int8], scales: Float32, minima: Float32 | None = None) -> Float32:
    """A K-quant's values: each of its runs of 16 or 32 codes has a scale and, where given, a minimum to subtract."""
    values = scales[:, :, None] * codes.astype(np.float32).reshape(*scales.shape, -1)
    if minima is not None:
        values -= minima[:, :, None]
    return values


_DECODERS: dict[QuantType, Callable[[UInt8], Float32]] = {
    QuantType.F32: _f32,
    QuantType.F16: _f16,
    QuantType.BF16: _bf16,
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.Q8_0: _q8_0,
    QuantType.Q2_K: _q2_k,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q5_K: _q5_k,
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_NL: _iq4_nl,
}
