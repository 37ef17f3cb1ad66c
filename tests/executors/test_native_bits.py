"""Equal bits from the native executor for all that a ``ModelSpec`` can say, and its attention at every shape."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paceline.executors.native import KVDType, NativeExecutor
from paceline.models.quants import QuantType
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec
from tests.executors.batches import Row, Sequence, logits_of_all, make_batch
from tests.executors.float64_model import reference_logits
from tests.executors.test_kernels import ISAS
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS

LENGTH = 300  # crosses blocks of 32 and a partition of 256
TABLE = list(range(LENGTH // 32 + 1))
IDS = np.random.default_rng(7).integers(0, 150, LENGTH).tolist()
# Each type of the cache, with weights that read float and int8 activations.
TYPES: list[tuple[KVDType, QuantType]] = [("f32", QuantType.F32), ("f16", QuantType.Q4_1), ("int8", QuantType.Q8_0)]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_ISA", request.param)
    return str(request.param)


def executor(spec: ModelSpec, kv_dtype: KVDType, kind: QuantType = QuantType.F32, threads: int = 2) -> NativeExecutor:
    weights = tiny_weights(spec, kind)
    return NativeExecutor(weights, num_blocks=64, max_model_len=1024, kv_dtype=kv_dtype, threads=threads)


def attention_spec(head_dim: int, group: int, softcap: float | None) -> ModelSpec:
    kv_heads = 1 if head_dim * group % 32 == 0 else 2  # query heads together are whole groups of 32
    spec = tiny_spec(heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    rope = RopeSpec(theta=10000.0, dim=head_dim, pairing="half")
    return replace(spec, layers=(LayerSpec(rope, window=45), LayerSpec(rope)), attention_softcap=softcap)


# A head's share of a row that is no whole number of groups, and one that ends in half a group.
SPECS = TINY_SPECS | {"uneven-heads": attention_spec(48, 1, 1.5), "half-groups": attention_spec(80, 2, None)}


@pytest.mark.parametrize(("kv_dtype", "kind"), TYPES)
@pytest.mark.parametrize("name", SPECS)
def test_no_choice_of_a_model_costs_equal_bits(isa: str, name: str, kv_dtype: KVDType, kind: QuantType) -> None:
    spec = SPECS[name]
    expected = logits_of_all(executor(spec, kv_dtype, kind, threads=1), IDS, LENGTH, TABLE)
    assert np.isfinite(expected).all()
    model = executor(spec, kv_dtype, kind)
    np.testing.assert_array_equal(logits_of_all(model, IDS, 37, TABLE), expected)

    # One token at a time and a few at once, among others, in scattered blocks; what is computed twice is the same.
    scattered = [40, 3, 22, 17, 55, 9, 31, 12, 60, 44]
    for start, count in [(0, 63), (63, 1), (64, 1), (65, 190), (255, 1), (256, 1), (257, 13), (250, 50)]:
        part = Sequence(IDS[start : start + count], scattered, start)
        others = [Sequence([5, 6, 7], [50]), Sequence([9], [51], 20)]
        got = model.logits(make_batch([others[0], part, others[1]], [Row(1, i) for i in range(count)]))
        np.testing.assert_array_equal(got, expected[start : start + count])


# Every width of a head, and every number of query heads to a KV head.
SHAPES = sorted({(dim, 1 + dim // 16 % 8) for dim in range(32, 257, 16)} | {(48, group) for group in range(1, 9)})


@cache
def expected_logits(head_dim: int, group: int, softcap: float | None) -> np.ndarray:
    return np.asarray(reference_logits(tiny_weights(attention_spec(head_dim, group, softcap)), IDS))


@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_attention_of_every_shape_is_that_of_the_float64_model(isa: str, head_dim: int, group: int) -> None:
    softcap = 1.5 if head_dim // 16 % 2 else None
    expected = expected_logits(head_dim, group, softcap)
    rounded: tuple[KVDType, float] = ("f16", 1e-2) if group % 2 else ("int8", 0.1)
    exact: tuple[KVDType, float] = ("f32", 1e-4)
    for kv_dtype, tolerance in (exact, rounded):
        got = logits_of_all(executor(attention_spec(head_dim, group, softcap), kv_dtype), IDS, LENGTH, TABLE)
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
