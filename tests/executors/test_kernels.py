"""Linear layers against numpy, on every instruction set of this machine."""

import numpy as np
import pytest

from paceline import _native
from paceline.models.quants import QuantType, Tensor, dequantize
from tests.executors.tiny import random_stored, set_scales


def available() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            found.append(_native.isa(name))
        except ValueError:
            continue
    return found


ISAS = available()
FLOATS = [QuantType.F32, QuantType.F16, QuantType.BF16]
QUANTIZED = [kind for kind in QuantType if kind not in FLOATS]
# On both sides of every tile size.
ROWS = [1, 2, 3, 5, 7, 8, 9, 12, 13, 17, 40]
EXTREMES = {
    QuantType.Q4_0: (-8, 7), QuantType.Q4_1: (0, 15), QuantType.Q5_0: (-16, 15), QuantType.Q5_1: (0, 31),
    QuantType.Q8_0: (-128, 127), QuantType.Q2_K: (0, 3), QuantType.Q3_K: (-4, 3), QuantType.Q4_K: (0, 15),
    QuantType.Q5_K: (0, 31), QuantType.Q6_K: (-32, 31), QuantType.IQ4_NL: (-127, 113),
}  # fmt: skip
# Where a K-quant's block has its factors, and bytes that make each factor 1 and each minimum 0.
UNIT_FACTORS = {
    QuantType.Q2_K: (0, [0x01] * 16),
    QuantType.Q3_K: (96, [0x11] * 8 + [0xAA] * 4),  # 33 - 32
    QuantType.Q4_K: (4, [1] * 4 + [0] * 4 + [0x01] * 4),
    QuantType.Q5_K: (4, [1] * 4 + [0] * 4 + [0x01] * 4),
    QuantType.Q6_K: (192, [1] * 16),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_extreme_codes_multiply_exactly(isa: str, kind: QuantType) -> None:
    """All codes at their ends against ±127: one step of saturation at 16 bits would show as a wrong integer."""
    rng = np.random.default_rng(0)
    n, k = 37, max(64, kind.block.elements)
    ends = [0x80, 0x7F] if kind == QuantType.Q8_0 else [0, 255]
    blocks = rng.choice(np.array(ends, np.uint8), (n * k // kind.block.elements, kind.block.bytes))
    blocks[: n // 2] = ends[1]
    set_scales(blocks, kind, np.ones(len(blocks)), centred=False)
    if kind in UNIT_FACTORS:
        at, factors = UNIT_FACTORS[kind]
        blocks[:, at : at + len(factors)] = factors
    weights = dequantize(Tensor("w", (n, k), kind, blocks.reshape(-1)))
    assert (weights.min(), weights.max()) == EXTREMES[kind]
    # ±127 in every group keeps the activation scale at exactly 1
    rows = rng.choice(np.array([-127, 127], np.float32), (40, k))
    rows[0], rows[1] = 127, -127
    expected = rows.astype(np.float64) @ weights.astype(np.float64).T
    for count in ROWS:
        got = _native.linear(int(kind), n, k, blocks.reshape(-1), rows[:count], isa)
        np.testing.assert_array_equal(got, expected[:count])


SHAPES = [(16, 32), (50, 96), (100, 288), (7, 256), (50, 768), (7, 1536), (3, 1600)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [(kind, *shape) for kind in QuantType for shape in SHAPES if shape[1] % kind.block.elements == 0],
)
def test_a_linear_layer_is_the_product_of_what_is_stored(isa: str, kind: QuantType, n: int, k: int) -> None:
    rng = np.random.default_rng(1)
    stored = random_stored(rng, (n, k), kind)
    weights = dequantize(Tensor("w", (n, k), kind, stored)).astype(np.float64)
    rows = rng.standard_normal((40, k)).astype(np.float32)
    inputs = rows.astype(np.float64) if kind in FLOATS else int8_rounded(rows)
    expected = inputs @ weights.T
    got = _native.linear(int(kind), n, k, stored, rows, isa)
    assert np.abs(got - expected).max() <= 3e-5 * np.abs(expected).max()
    np.testing.assert_array_equal(_native.linear(int(kind), n, k, stored, rows[:5], isa), got[:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [QuantType.Q4_0, QuantType.Q5_1, QuantType.Q8_0, QuantType.BF16])
def test_rows_may_be_any_multiple_of_32_wide(isa: str, kind: QuantType) -> None:
    rng = np.random.default_rng(5)
    for k in range(32, 1600, 32):
        stored = random_stored(rng, (17, k), kind)
        weights = dequantize(Tensor("w", (17, k), kind, stored)).astype(np.float64)
        rows = rng.standard_normal((13, k)).astype(np.float32)
        expected = (rows.astype(np.float64) if kind in FLOATS else int8_rounded(rows)) @ weights.T
        got = _native.linear(int(kind), 17, k, stored, rows, isa)
        assert np.abs(got - expected).max() <= 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QuantType)
def test_a_row_has_the_same_bits_in_every_tile(isa: str, kind: QuantType) -> None:
    rng = np.random.default_rng(2)
    n, k = 50, 1536  # more groups than are unpacked at a time
    stored = random_stored(rng, (n, k), kind)
    rows = rng.standard_normal((40, k)).astype(np.float32)
    alone = np.concatenate([_native.linear(int(kind), n, k, stored, rows[i : i + 1], isa) for i in range(40)])
    for count in ROWS:
        np.testing.assert_array_equal(_native.linear(int(kind), n, k, stored, rows[:count], isa), alone[:count])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QuantType)
def test_unpacked_rows_are_what_is_stored(isa: str, kind: QuantType) -> None:
    n, k = 37, 512
    stored = random_stored(np.random.default_rng(4), (n, k), kind)
    unpacked = _native.unpack(int(kind), n, k, stored, isa)
    np.testing.assert_array_equal(unpacked, dequantize(Tensor("w", (n, k), kind, stored)))


@pytest.mark.parametrize("kind", QuantType)
def test_packing_takes_hardly_more_memory_than_the_file(kind: QuantType) -> None:
    n, k = 512, 1536
    stored = n * k // kind.block.elements * kind.block.bytes
    packed = _native.packed_bytes(int(kind), n, k)
    four_bit_codes = {QuantType.Q2_K: 2.0, QuantType.Q3_K: 1.4}  # their 2 and 3 bits are kept in 4
    assert stored <= packed <= four_bit_codes.get(kind, 1.06) * stored


def test_what_cannot_be_packed_is_an_error() -> None:
    nothing = np.zeros(0, np.uint8)
    with pytest.raises(ValueError, match="16 x 288 cannot be packed: the inputs must be a multiple of 256"):
        _native.unpack(int(QuantType.Q4_K), 16, 288, nothing)
    with pytest.raises(ValueError, match="16 x 48 cannot be packed: the inputs must be a multiple of 32"):
        _native.unpack(int(QuantType.F16), 16, 48, nothing)
    with pytest.raises(ValueError, match="no kernel for tensor type 15"):
        _native.packed_bytes(15, 16, 256)
    with pytest.raises(ValueError, match="16 x 32 has 0 bytes instead of 288"):
        _native.unpack(int(QuantType.Q4_0), 16, 32, nothing)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QuantType)
def test_what_is_not_finite_does_not_vanish(isa: str, kind: QuantType) -> None:
    stored = random_stored(np.random.default_rng(3), (16, 256), kind)
    for poison in (np.nan, np.inf, -np.inf):
        rows = np.ones((2, 256), np.float32)
        rows[0, 40] = poison
        got = _native.linear(int(kind), 16, 256, stored, rows, isa)
        assert not np.isfinite(got[0]).any()
        assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_tiny_activations_stay_finite(isa: str, kind: QuantType) -> None:
    """127 / 3e-37 is infinite in float32."""
    stored = random_stored(np.random.default_rng(3), (16, 256), kind)
    rows = np.zeros((1, 256), np.float32)
    rows[0, 40] = 3e-37
    got = _native.linear(int(kind), 16, 256, stored, rows, isa)
    assert np.isfinite(got).all()
    assert np.abs(got).max() < 1e-36


def int8_rounded(rows: np.ndarray) -> np.ndarray:
    """Rows as the int8 activations represent them: per group of 32 round(x * 127 / max|x|) * max|x| / 127."""
    groups = rows.reshape(len(rows), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest))
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(rows.shape)


def test_an_unknown_instruction_set_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"PACELINE_ISA=sse9 is not one of .*baseline"):
        _native.isa("sse9")
