"""Linear layers against numpy, on every instruction set of this machine."""

import numpy as np
import pytest

from paceline import _native
from paceline.models.quants import QuantType, Tensor, dequantize
from tests.executors.tiny import random_stored


def available() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            found.append(_native.isa(name))
        except ValueError:
            continue
    return found


ISAS = available()
QUANTIZED = [QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0]
# On both sides of every tile size.
ROWS = [1, 2, 3, 5, 7, 8, 9, 12, 13, 17, 40]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_extreme_codes_multiply_exactly(isa: str, kind: QuantType) -> None:
    """All codes at their ends against ±127: one step of saturation at 16 bits would show as a wrong integer."""
    rng = np.random.default_rng(0)
    n, k = 37, 64
    blocks = rng.choice(np.array([0, 255], np.uint8), (n * k // 32, kind.block.bytes))
    blocks[: n // 2] = 255
    one, zero = np.float16(1).tobytes(), np.float16(0).tobytes()
    blocks[:, :2] = np.frombuffer(one, np.uint8)
    if kind in (QuantType.Q4_1, QuantType.Q5_1):
        blocks[:, 2:4] = np.frombuffer(zero, np.uint8)
    weights = dequantize(Tensor("w", (n, k), kind, blocks.reshape(-1)))
    # ±127 in every group keeps the activation scale at exactly 1
    rows = rng.choice(np.array([-127, 127], np.float32), (40, k))
    rows[0], rows[1] = 127, -127
    expected = rows.astype(np.float64) @ weights.astype(np.float64).T
    for count in ROWS:
        got = _native.linear(int(kind), n, k, blocks.reshape(-1), rows[:count], isa)
        np.testing.assert_array_equal(got, expected[:count])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*QUANTIZED, QuantType.F32, QuantType.F16, QuantType.BF16])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (50, 96), (7, 1600)])
def test_a_linear_layer_is_the_product_of_what_is_stored(isa: str, kind: QuantType, n: int, k: int) -> None:
    rng = np.random.default_rng(1)
    stored = random_stored(rng, (n, k), kind)
    weights = dequantize(Tensor("w", (n, k), kind, stored)).astype(np.float64)
    rows = rng.standard_normal((40, k)).astype(np.float32)
    quantized = kind in QUANTIZED
    inputs = int8_rounded(rows) if quantized else rows.astype(np.float64)
    expected = inputs @ weights.T
    got = _native.linear(int(kind), n, k, stored, rows, isa)
    assert np.abs(got - expected).max() <= 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*QUANTIZED, QuantType.F32])
def test_a_row_has_the_same_bits_in_every_tile(isa: str, kind: QuantType) -> None:
    rng = np.random.default_rng(2)
    n, k = 50, 1600
    stored = random_stored(rng, (n, k), kind)
    rows = rng.standard_normal((40, k)).astype(np.float32)
    alone = np.concatenate([_native.linear(int(kind), n, k, stored, rows[i : i + 1], isa) for i in range(40)])
    for count in ROWS:
        np.testing.assert_array_equal(_native.linear(int(kind), n, k, stored, rows[:count], isa), alone[:count])


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_does_not_vanish_in_quantization(isa: str) -> None:
    stored = random_stored(np.random.default_rng(3), (16, 64), QuantType.Q4_1)
    for poison in (np.nan, np.inf, -np.inf):
        rows = np.ones((2, 64), np.float32)
        rows[0, 40] = poison
        got = _native.linear(int(QuantType.Q4_1), 16, 64, stored, rows, isa)
        assert not np.isfinite(got[0]).any()
        assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_tiny_activations_stay_finite(isa: str, kind: QuantType) -> None:
    """127 / 3e-37 is infinite in float32."""
    stored = random_stored(np.random.default_rng(3), (16, 64), kind)
    rows = np.zeros((1, 64), np.float32)
    rows[0, 40] = 3e-37
    got = _native.linear(int(kind), 16, 64, stored, rows, isa)
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
