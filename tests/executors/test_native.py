"""What the native executor has beyond the contract; that its bits never change is in test_determinism.py."""

import os
from dataclasses import replace

import numpy as np
import pytest
from psutil import Process

from paceline.errors import ExecutorError, ModelFileError
from paceline.executors.native import NativeExecutor
from paceline.models.quants import QuantType
from paceline.models.spec import ModelSpec
from tests.executors.batches import Row, Sequence, logits_of_all, make_batch
from tests.executors.float64_model import reference_logits
from tests.executors.test_kernels import ISAS
from tests.executors.tiny import tiny_spec, tiny_weights

LENGTH = 300  # crosses blocks of 32 and a partition of 256
TABLE = list(range(LENGTH // 32 + 1))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_ISA", request.param)
    return str(request.param)


def tokens(n: int = LENGTH) -> list[int]:
    return np.random.default_rng(7).integers(0, 150, n).tolist()


def executor(spec: ModelSpec | None = None, kind: QuantType = QuantType.F32, **options: object) -> NativeExecutor:
    settings: dict[str, object] = {"num_blocks": 64, "max_model_len": 1024, "kv_dtype": "f32", "threads": 2}
    return NativeExecutor(tiny_weights(spec or tiny_spec(), kind), **(settings | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0])
def test_quantized_weights_stay_close_to_the_float64_model(isa: str, kind: QuantType) -> None:
    """The weights are exact; what differs is the rounding of activations to 8 bits, a fraction of a percent each."""
    expected = reference_logits(tiny_weights(tiny_spec(), kind), tokens(64))
    got = logits_of_all(executor(kind=kind), tokens(64), 64, TABLE)
    error = np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean())
    assert error < 0.05  # unrelated logits differ by 1.4


@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_an_int8_cache_stays_close(isa: str, head_dim: int) -> None:
    """Every key and value is off by up to 1/254 of the largest of its 32 dimensions."""
    spec, ids = tiny_spec(heads=2, kv_heads=1, head_dim=head_dim), tokens()
    expected = reference_logits(tiny_weights(spec), ids)
    model = executor(spec, kv_dtype="int8")
    got = logits_of_all(model, ids, LENGTH, TABLE)
    assert np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()) < 0.03


def test_a_forked_child_is_told_instead_of_hanging() -> None:
    model = executor()
    child = os.fork()
    if child == 0:
        try:
            model.execute(make_batch([Sequence([1], [0])]))
        except ExecutorError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model.execute(make_batch([Sequence([1], [0])]))


def test_a_shape_without_kernels_is_a_clear_error() -> None:
    with pytest.raises(ModelFileError, match="head_dim must be a multiple of 16 up to 256, not 40"):
        executor(tiny_spec(head_dim=40))


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"vocab_size": 2**31 - 16}, {}),
        ({"num_heads": 2**24, "num_kv_heads": 2**22, "head_dim": 256}, {}),
        ({}, {"max_batched_tokens": 2**31 - 1}),
        ({}, {"max_model_len": 2**31 - 1}),
    ],
)
def test_sizes_whose_products_would_overflow_are_refused(changed: dict[str, int], options: dict[str, int]) -> None:
    weights = tiny_weights(tiny_spec())
    absurd = replace(weights, spec=replace(weights.spec, **changed))
    with pytest.raises(ModelFileError, match="beyond all reason"):
        NativeExecutor(absurd, **({"num_blocks": 1, "max_model_len": 64} | options))  # type: ignore[arg-type]


def test_a_penalty_that_overflows_leaves_a_choice(isa: str) -> None:
    """Two logits become infinite: they are equally likely, and nothing else is."""
    ids = [3, 1, 4]
    model = executor()
    raw = model.logits(make_batch([Sequence(ids, [0])]))[0]
    likely = np.argsort(raw)[-2:].tolist()
    rows = [
        Row(0, temperature=1.0, seed=i, repetition=1e-39, seen=dict.fromkeys(likely, 0), **filters)  # type: ignore[arg-type]
        for i in range(20)
        for filters in ({}, {"top_p": 0.99}, {"top_k": 5})
    ]
    assert set(model.execute(make_batch([Sequence(ids, [0])], rows)).token_ids.tolist()) == set(likely)


def test_the_cache_can_be_touched_while_it_is_used() -> None:
    model = executor(num_blocks=4000)
    size = model.kv_geometry.num_blocks * model.kv_geometry.bytes_per_block
    batch = make_batch([Sequence([5, 6, 7], [3999])], [Row(0, 2)])
    expected = model.logits(batch)
    following = model.logits(make_batch([Sequence([8], [3999], 3)], [Row(0)]))
    before = Process().memory_info().rss
    for _ in model.touch_kv():
        np.testing.assert_array_equal(model.logits(make_batch([Sequence([8], [3999], 3)], [Row(0)])), following)
    assert Process().memory_info().rss - before > 0.9 * size
    np.testing.assert_array_equal(model.logits(batch), expected)
