"""The native executor's attention at every shape of a head."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paceline.executors.native import KVDType, NativeExecutor
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec
from tests.executors.batches import logits_of_all
from tests.executors.float64_model import reference_logits
from tests.executors.test_kernels import ISAS
from tests.executors.tiny import tiny_spec, tiny_weights

LENGTH = 300  # crosses blocks of 32 and a partition of 256
TABLE = list(range(LENGTH // 32 + 1))
IDS = np.random.default_rng(7).integers(0, 150, LENGTH).tolist()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_ISA", request.param)
    return str(request.param)


def attention_spec(head_dim: int, group: int, softcap: float | None) -> ModelSpec:
    kv_heads = 1 if head_dim * group % 32 == 0 else 2  # query heads together are whole groups of 32
    spec = tiny_spec(heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    rope = RopeSpec(theta=10000.0, dim=head_dim, pairing="half")
    return replace(spec, layers=(LayerSpec(rope, window=45), LayerSpec(rope)), attention_softcap=softcap)


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
        weights = tiny_weights(attention_spec(head_dim, group, softcap))
        model = NativeExecutor(weights, num_blocks=len(TABLE), max_model_len=512, kv_dtype=kv_dtype, threads=2)
        got = logits_of_all(model, IDS, LENGTH, TABLE)
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
