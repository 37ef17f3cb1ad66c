import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference

from paceline.models.quants import UNREADABLE_TYPES, QuantType, Tensor, dequantize


@pytest.mark.parametrize("kind", QuantType)
def test_equals_the_gguf_package_on_random_bytes_bit_for_bit(kind: QuantType) -> None:
    rows, blocks = 7, 33
    data = np.random.default_rng(kind).integers(0, 256, rows * blocks * kind.block.bytes, dtype=np.uint8)
    data.flags.writeable = False
    shape = (rows, blocks * kind.block.elements)
    with np.errstate(invalid="ignore"):  # random float16 scales include infinities and NaNs
        ours = dequantize(Tensor("t", shape, kind, data))
        theirs = reference(data.reshape(rows, -1), GGMLQuantizationType(kind))
    assert ours.dtype == np.float32
    assert ours.shape == shape
    numbers = ~np.isnan(theirs)  # sign and payload of a NaN mean nothing
    assert np.array_equal(numbers, ~np.isnan(ours))
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])


def test_the_values_are_a_copy() -> None:
    data = np.zeros(8, np.uint8)
    values = dequantize(Tensor("t", (2,), QuantType.F32, data))
    values[0] = 1
    assert not data.any()


def test_numbers_and_block_sizes_are_those_of_ggml() -> None:
    from gguf import GGML_QUANT_SIZES

    for kind in QuantType:
        assert GGMLQuantizationType(kind).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(kind)] == (kind.block.elements, kind.block.bytes)
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    for number, name in UNREADABLE_TYPES.items():
        assert known.get(number, name) == name
    assert known.keys() <= UNREADABLE_TYPES.keys() | set(QuantType)
