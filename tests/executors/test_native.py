"""The native executor against a float64 forward pass, and its promise of determinism, on tiny random models."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.errors import ExecutorError, ModelFileError
from paceline.executors.native import NativeExecutor
from paceline.models.quants import QuantType
from paceline.models.spec import ModelSpec
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.float64_model import reference_logits
from tests.executors.test_kernels import ISAS
from tests.executors.tiny import tiny_spec, tiny_weights

LENGTH = 300  # crosses blocks of 32 and a partition of 256
TABLE = list(range(LENGTH // 32 + 1))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_ISA", request.param)
    return str(request.param)


def tokens(n: int = LENGTH, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(0, 150, n).tolist()


def executor(spec: ModelSpec | None = None, kind: QuantType = QuantType.F32, **options: object) -> NativeExecutor:
    settings: dict[str, object] = {"num_blocks": 64, "max_model_len": 1024, "kv_dtype": "f32", "threads": 2}
    return NativeExecutor(tiny_weights(spec or tiny_spec(), kind), **(settings | options))  # type: ignore[arg-type]


def logits_of_all(model: NativeExecutor, ids: list[int], chunk: int, table: list[int] = TABLE) -> np.ndarray:
    """Logits of every position, computed in chunks."""
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = [Row(0, token) for token in range(len(part))]
        parts.append(model.logits(make_batch([Sequence(part, table, start)], rows)))
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(),
        tiny_spec(pairing="half"),
        tiny_spec(tied=False),
        tiny_spec(heads=4, kv_heads=4, head_dim=64),
        tiny_spec(heads=8, kv_heads=1, head_dim=32),
        tiny_spec(heads=7, kv_heads=1, head_dim=96),
        tiny_spec(heads=2, kv_heads=1, head_dim=256),
    ],
    ids=["grouped", "half-paired", "untied", "multi-head", "multi-query", "seven-heads", "wide-heads"],
)
def test_logits_are_those_of_the_float64_model(isa: str, spec: ModelSpec) -> None:
    expected = reference_logits(tiny_weights(spec), tokens())
    model = executor(spec)
    assert model.isa == isa
    got = logits_of_all(model, tokens(), 128)
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", [QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0])
def test_quantized_weights_stay_close_to_the_float64_model(isa: str, kind: QuantType) -> None:
    """The weights are exact; what differs is the rounding of activations to 8 bits, a fraction of a percent each."""
    expected = reference_logits(tiny_weights(tiny_spec(), kind), tokens(64))
    got = logits_of_all(executor(kind=kind), tokens(64), 64)
    error = np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean())
    assert error < 0.05  # unrelated logits differ by 1.4


@pytest.mark.parametrize("kind", [QuantType.Q4_1, QuantType.F32])
def test_bits_do_not_depend_on_chunks_threads_or_company(isa: str, kind: QuantType) -> None:
    ids = tokens()
    with_defaults = {"kind": kind, "kv_dtype": "f16"}
    expected = logits_of_all(executor(**with_defaults, threads=1), ids, LENGTH)  # type: ignore[arg-type]
    model = executor(**with_defaults, threads=2)  # type: ignore[arg-type]
    for chunk in (1, 7, 31, 32, 100, LENGTH):
        np.testing.assert_array_equal(logits_of_all(model, ids, chunk), expected)

    # Decoding the last tokens among others at other depths, in blocks that are scattered and were used before.
    scattered = [40, 3, 22, 17, 55, 9, 31, 12, 60, 44]
    logits_of_all(model, ids[:250], 250, scattered)
    for position in range(250, 256):
        others = [Sequence([5, 6, 7], [50], 0), Sequence([9], [51], 20)]
        batch = make_batch([others[0], Sequence([ids[position]], scattered, position), others[1]])
        np.testing.assert_array_equal(model.logits(batch)[1], expected[position])


@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_an_int8_cache_stays_close_and_keeps_its_bits(isa: str, head_dim: int) -> None:
    """Every key and value is off by up to 1/254 of the largest of its 32 dimensions."""
    spec, ids = tiny_spec(heads=2, kv_heads=1, head_dim=head_dim), tokens()
    expected = reference_logits(tiny_weights(spec), ids)
    model = executor(spec, kv_dtype="int8")
    got = logits_of_all(model, ids, LENGTH)
    assert np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()) < 0.03
    for chunk in (1, 33):
        np.testing.assert_array_equal(logits_of_all(model, ids, chunk), got)


def test_running_a_batch_again_gives_the_same(isa: str) -> None:
    model = executor()
    batch = make_batch([Sequence(tokens(40), TABLE)])
    np.testing.assert_array_equal(model.logits(batch), model.logits(batch))


def test_a_copied_block_serves_as_the_original() -> None:
    model, ids = executor(), tokens(50)
    expected = logits_of_all(model, ids, 50)[-1]
    logits_of_all(model, ids[:49], 49, [0, 1])
    batch = make_batch([Sequence(ids[49:], [20, 21], 49)], copies=[(0, 20), (1, 21)])
    np.testing.assert_array_equal(model.logits(batch)[0], expected)


def test_what_another_request_left_in_a_block_does_not_leak(isa: str) -> None:
    """NaN in a freed block must stay invisible: 0 times NaN is NaN."""
    poisoned = tiny_weights(tiny_spec(tied=False))
    embedding = poisoned.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)
    embedding[149] = np.nan
    model = NativeExecutor(poisoned, num_blocks=64, max_model_len=1024, kv_dtype="f32", threads=2)
    clean = logits_of_all(model, [1, 2, 3], 3)
    result = model.execute(make_batch([Sequence([149] * 32, [0]), Sequence([4], [1])]))
    assert result.status.tolist() == [1, 0]
    assert result.token_ids[0] == -1
    np.testing.assert_array_equal(logits_of_all(model, [1, 2, 3], 3), clean)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_a_later_token_of_the_same_chunk_does_not_reach_back(isa: str, kv_dtype: str) -> None:
    """Causality holds for NaN and for values beyond f16, too: prompt logprobs must not depend on the chunking."""
    for poison in (np.nan, 1e30):
        poisoned = tiny_weights(tiny_spec(tied=False))
        poisoned.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)[149] = poison
        value = poisoned.tensors["blk.0.attn_v.weight"].data.view(np.float32)
        value *= 1e6 if poison == 1e30 else 1
        model = NativeExecutor(poisoned, num_blocks=64, max_model_len=1024, kv_dtype=kv_dtype, threads=2)  # type: ignore[arg-type]
        ids = [1, 2, 3, 4, 149]
        np.testing.assert_array_equal(logits_of_all(model, ids, 5)[:4], logits_of_all(model, ids, 1)[:4])
        assert np.isfinite(logits_of_all(model, ids[:1], 1)).all() or poison == 1e30


def test_two_sequences_cannot_write_one_block() -> None:
    model = executor()
    with pytest.raises(ExecutorError, match="two sequences write the same block"):
        model.execute(make_batch([Sequence([1, 2], [3]), Sequence([4], [3])]))
    # Reading the same block is what the prefix cache does.
    model.execute(make_batch([Sequence([1] * 32, [3])]))
    model.execute(make_batch([Sequence([1], [3, 4], 32), Sequence([2], [3, 5], 32)]))


def test_threads_that_share_an_executor_take_turns() -> None:
    model, ids = executor(), tokens(60)
    expected = [model.logits(make_batch([Sequence(ids, [2 * i, 2 * i + 1])]))[0] for i in range(2)]

    def run(i: int) -> None:
        for _ in range(20):
            got = model.logits(make_batch([Sequence(ids, [2 * i, 2 * i + 1])]))[0]
            np.testing.assert_array_equal(got, expected[i])

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run, i) for i in range(2)]:
            future.result(timeout=60)


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


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"token_ids": np.array([150, 1], np.int32)}, "token out of range"),
        ({"token_ids": np.array([1, -1], np.int32)}, "token out of range"),
        ({"block_tables": np.array([[64]], np.int32)}, "block out of range"),
        ({"block_tables": np.array([[-1]], np.int32)}, "block out of range"),
        ({"context_len": np.array([40], np.int32)}, "block table is too short"),
        ({"context_len": np.array([1], np.int32)}, "shorter than the query"),
        ({"positions": np.array([1, 2], np.int32)}, "positions must run up"),
        ({"query_start": np.array([0, 3], np.int32)}, "query_start must end"),
        ({"logits_rows": np.array([2], np.int32)}, "logits row out of range"),
        ({"target_ids": np.array([150], np.int32)}, "target out of range"),
        ({"temperature": np.array([np.nan], np.float32)}, "temperature"),
        ({"presence": np.array([np.nan], np.float32)}, "a penalty is not finite"),
        ({"top_p": np.array([np.nan], np.float32)}, "top_p or min_p is NaN"),
        (
            {
                "bias_start": np.array([0, 1], np.int32),
                "bias_ids": np.array([3], np.int32),
                "bias": np.array([np.nan], np.float32),
            },
            "a bias is NaN",
        ),
        ({"adapter": np.array([1], np.int32)}, "adapters are not supported"),
        ({"seed": np.array([], np.uint64)}, "seed"),
        ({"bias_ids": np.array([0], np.int32)}, "bias"),
        ({"block_copies": np.array([[0, 64]], np.int32)}, "copied block out of range"),
        ({"token_ids": np.array([1, 2], np.int64)}, "token_ids has the wrong dtype"),
        ({"block_tables": np.array([0], np.int32)}, "block_tables has the wrong dtype, dimensions"),
        ({"token_ids": np.array([1, 5, 2, 5], np.int32)[::2]}, "token_ids has the wrong dtype, dimensions or layout"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(replaced: dict[str, np.ndarray], message: str) -> None:
    model = executor()
    with pytest.raises(ExecutorError, match=message):
        model.execute(make_batch([Sequence([1, 2], [0])], **replaced))
    assert model.execute(make_batch([Sequence([1, 2], [0])])).status.tolist() == [0]


def test_a_batch_beyond_the_budget_or_the_context_is_refused() -> None:
    model = executor(max_batched_tokens=8, max_model_len=64)
    with pytest.raises(ExecutorError, match="number of tokens"):
        model.execute(make_batch([Sequence([1] * 9, [0])]))
    with pytest.raises(ExecutorError, match="context_len is beyond the model's"):
        model.execute(make_batch([Sequence([1], [0, 1, 2], 64)]))


def test_a_shape_without_kernels_is_a_clear_error() -> None:
    with pytest.raises(ModelFileError, match="head_dim must be a multiple of 16 up to 256, not 40"):
        executor(tiny_spec(head_dim=40))


def test_a_closed_executor_says_so() -> None:
    model = executor()
    model.close()
    model.close()
    with pytest.raises(ExecutorError, match="closed"):
        model.execute(make_batch([Sequence([1], [0])]))
