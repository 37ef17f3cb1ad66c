"""What every executor promises, on tiny random models; sampling is in test_contract_sampling.py."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paceline.errors import ExecutorError
from paceline.executors.base import RowStatus
from tests.executors.batches import Row, Sequence, logits_of_all, make_batch
from tests.executors.conftest import AnyExecutor, Build
from tests.executors.float64_model import reference_logits
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS

LENGTH = 300  # crosses blocks of 32 and the native executor's partition of 256
TABLE = list(range(LENGTH // 32 + 1))


def tokens(n: int = LENGTH) -> list[int]:
    return np.random.default_rng(7).integers(0, 150, n).tolist()


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.fixture(scope="module")
def model(build: Build) -> AnyExecutor:
    return build(tiny_weights(tiny_spec()))


@cache
def expected_logits(name: str) -> np.ndarray:
    return np.asarray(reference_logits(tiny_weights(TINY_SPECS[name]), tokens()))


@pytest.mark.parametrize("name", TINY_SPECS)
def test_logits_are_those_of_the_float64_model(build: Build, name: str) -> None:
    model = build(tiny_weights(TINY_SPECS[name]))
    assert_close(logits_of_all(model, tokens(), 128, TABLE), expected_logits(name), 1e-4)


@pytest.mark.parametrize("name", ["grouped", "alternating-windows"])
def test_logits_do_not_depend_on_chunks_or_company(build: Build, name: str) -> None:
    ids, model = tokens(), build(tiny_weights(TINY_SPECS[name]))
    expected = logits_of_all(model, ids, LENGTH, TABLE)
    for chunk in (7, 100):
        assert_close(logits_of_all(model, ids, chunk, TABLE), expected)

    # Chunks of many lengths at many depths, in blocks that are scattered and were used before.
    scattered = [40, 3, 22, 17, 55, 9, 31, 12, 60, 44]
    logits_of_all(model, ids[:250], 250, scattered)
    for position in range(250, 300, 10):
        others = [Sequence([5, 6, 7], [50]), Sequence([9], [51]), Sequence(ids[:70], [48, 49, 52]), Sequence([8], [53])]
        sequence = Sequence(ids[position : position + 10], scattered, position)
        rows = [Row(2, token) for token in range(10)]
        got = model.logits(make_batch([*others[:2], sequence, *others[2:]], rows))
        assert_close(got, expected[position : position + 10])


def test_keys_and_values_are_rounded_before_any_query_reads_them(build: Build) -> None:
    """Else a token would see others of its own chunk unrounded: logits would depend on the chunks."""
    weights, ids = tiny_weights(tiny_spec()), tokens(64)
    exact, model = logits_of_all(build(weights), ids, 64, TABLE), build(weights, kv_dtype="f16")
    at_once, one_by_one = logits_of_all(model, ids, 64, TABLE), logits_of_all(model, ids, 1, TABLE)
    rounding = np.abs(at_once - exact).mean()
    assert 0 < rounding < 1e-3 * np.abs(exact).max()
    assert np.abs(at_once - one_by_one).mean() < rounding / 10


def test_running_a_batch_again_gives_the_same(model: AnyExecutor) -> None:
    batch = make_batch([Sequence(tokens(40), TABLE), Sequence([7], [20])])
    np.testing.assert_array_equal(model.logits(batch), model.logits(batch))


def test_copied_blocks_serve_as_the_originals(model: AnyExecutor) -> None:
    """Copies happen one after another: block 21 ends as what block 0 was, though block 20 lies between."""
    ids = tokens(50)
    expected = logits_of_all(model, ids, 50, TABLE)[-1]
    logits_of_all(model, ids[:49], 49, [0, 1])
    batch = make_batch([Sequence(ids[49:], [21, 1], 49)], copies=[(3, 21), (0, 20), (20, 21)])
    assert_close(model.logits(batch)[0], expected)


def test_a_batch_without_rows_only_fills_the_cache(model: AnyExecutor) -> None:
    ids = tokens(50)
    expected = logits_of_all(model, ids, 50, TABLE)[-1]
    result = model.execute(make_batch([Sequence(ids[:49], [5, 6])], []))
    sizes = [a.size for a in (result.token_ids, result.status, result.logprobs, result.top_ids, result.top_logprobs)]
    assert sizes == [0] * 5
    assert_close(model.logits(make_batch([Sequence(ids[49:], [5, 6], 49)]))[0], expected)


def test_rows_come_in_the_order_asked_for(model: AnyExecutor) -> None:
    sequences = [Sequence([1, 2, 3], [0]), Sequence([4, 5], [1])]
    in_order = model.logits(make_batch(sequences, [Row(0, 0), Row(0, 2), Row(1, 1)]))
    other = model.logits(make_batch(sequences, [Row(1, 1), Row(0, 2), Row(0, 0), Row(0, 2)]))
    assert_close(other, in_order[[2, 1, 0, 1]])


def test_what_another_request_left_in_a_block_does_not_leak(build: Build) -> None:
    """NaN in a freed block must stay invisible: 0 times NaN is NaN."""
    poisoned = tiny_weights(tiny_spec(tied=False))
    poisoned.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)[149] = np.nan
    model = build(poisoned)
    clean = logits_of_all(model, [1, 2, 3], 3, [0])
    batch = make_batch([Sequence([149] * 32, [0]), Sequence([4], [1])], [Row(0, num_logprobs=1), Row(1)])
    result = model.execute(batch)
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.token_ids[0] == result.top_ids[0, 0] == -1
    assert np.isnan(result.logprobs[0])
    np.testing.assert_array_equal(logits_of_all(model, [1, 2, 3], 3, [0]), clean)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_later_token_of_the_same_chunk_does_not_reach_back(build: Build, kv_dtype: str, poison: float) -> None:
    """Causality holds for NaN and for values beyond f16, too: prompt logprobs must not depend on the chunking."""
    poisoned = tiny_weights(tiny_spec(tied=False))
    poisoned.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)[149] = poison
    # values of token 149 alone leave float16's range: the norms before them make all embeddings alike
    poisoned.tensors["blk.0.attn_v.weight"].data.view(np.float32)[...] *= 1e6 if poison == 1e30 else 1
    model = build(poisoned, kv_dtype=kv_dtype)
    ids = [1, 2, 3, 4, 149]
    at_once, one_by_one = logits_of_all(model, ids, 5, [0])[:4], logits_of_all(model, ids, 1, [0])[:4]
    np.testing.assert_allclose(at_once, one_by_one, rtol=0, atol=1e-4)
    assert np.isfinite(at_once[0]).all() or poison == 1e30


@pytest.mark.parametrize(("kv_dtype", "status"), [("f32", RowStatus.OK), ("f16", RowStatus.NON_FINITE)])
def test_a_value_beyond_the_type_of_the_cache_is_not_hidden(build: Build, kv_dtype: str, status: RowStatus) -> None:
    weights = tiny_weights(tiny_spec())
    weights.tensors["blk.0.attn_v.weight"].data.view(np.float32)[...] *= 1e7
    result = build(weights, kv_dtype=kv_dtype).execute(make_batch([Sequence([1, 2], [0])]))
    assert result.status.tolist() == [status]


def test_a_key_beyond_the_type_of_the_cache_is_not_hidden(build: Build) -> None:
    """Infinities of both signs make a score NaN. Token 149 alone has such keys, and values of everyday size."""
    weights = tiny_weights(replace(tiny_spec(layers=1, tied=False), pre_norms=False))
    weights.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)[149] *= 1e6
    weights.tensors["blk.0.attn_v.weight"].data.view(np.float32)[...] *= 1e-6
    for position in (0, 20, 35):  # a score's place in its vector makes no difference
        ids = [token % 149 for token in tokens(40)]
        ids[position] = 149
        batch = make_batch([Sequence(ids, [0, 1])], [Row(0, i) for i in range(40)])
        expected = [RowStatus.OK] * position + [RowStatus.NON_FINITE] * (40 - position)
        assert build(weights, kv_dtype="f16").execute(batch).status.tolist() == expected


def test_a_soft_cap_does_not_hide_what_is_not_finite(build: Build) -> None:
    weights = tiny_weights(replace(TINY_SPECS["soft-caps"], tied_embeddings=False))
    weights.tensors["token_embd.weight"].data.view(np.float32).reshape(150, 64)[149] = np.nan
    batch = make_batch([Sequence([1, 149], [0])], [Row(0, 0), Row(0, 1)])
    assert build(weights).execute(batch).status.tolist() == [RowStatus.OK, RowStatus.NON_FINITE]


def test_two_sequences_cannot_write_one_block(model: AnyExecutor) -> None:
    with pytest.raises(ExecutorError, match="two sequences write the same block"):
        model.execute(make_batch([Sequence([1, 2], [3]), Sequence([4], [3])]))
    # Reading the same block is what the prefix cache does.
    model.execute(make_batch([Sequence([1] * 32, [3])]))
    model.execute(make_batch([Sequence([1], [3, 4], 32), Sequence([2], [3, 5], 32)]))


def test_threads_that_share_an_executor_take_turns(model: AnyExecutor) -> None:
    ids = tokens(60)
    expected = [model.logits(make_batch([Sequence(ids, [2 * i, 2 * i + 1])]))[0] for i in range(2)]

    def run(i: int) -> None:
        for _ in range(20):
            got = model.logits(make_batch([Sequence(ids, [2 * i, 2 * i + 1])]))[0]
            np.testing.assert_array_equal(got, expected[i])

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run, i) for i in range(2)]:
            future.result(timeout=60)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


CONTRADICTIONS = [
    ({"token_ids": i32(150, 1)}, r"token out of range \(150, limit 150\)"),
    ({"token_ids": i32(1, -1)}, "token out of range"),
    ({"block_tables": i32(64)[None]}, r"block out of range \(64, limit 64\)"),
    ({"block_tables": i32(-1)[None]}, "block out of range"),
    ({"block_tables": np.zeros((2, 1), np.int32)}, "block_tables and context_len differ in length"),
    ({"context_len": i32(40)}, "block table is too short"),
    ({"context_len": i32(1)}, "shorter than the query"),
    ({"positions": i32(1, 2)}, "positions must run up"),
    ({"positions": i32(0)}, "positions has another length than token_ids"),
    ({"query_start": i32(0, 3)}, "query_start must end"),
    ({"query_start": i32(1, 2)}, "query_start must begin with 0"),
    ({"query_start": i32(0, 1, 2)}, "query_start must have one entry more than context_len"),
    ({"logits_rows": i32(2)}, "logits row out of range"),
    ({"target_ids": i32(150)}, "target out of range"),
    ({"num_logprobs": i32(151)}, "num_logprobs out of range"),
    ({"temperature": f32(np.nan)}, "temperature"),
    ({"temperature": f32()}, "a sampling parameter has another length"),
    ({"presence": f32(np.nan)}, "a penalty is not finite"),
    ({"repetition": f32(0)}, "a repetition penalty not above 0"),
    ({"top_p": f32(np.nan)}, "top_p or min_p is NaN"),
    ({"bias_start": i32(0, 1), "bias_ids": i32(3), "bias": f32(np.nan)}, "a bias is NaN"),
    ({"bias_start": i32(0, 1), "bias_ids": i32(150), "bias": f32(1)}, "token out of range"),
    ({"seen_start": i32(0, 2), "seen_ids": i32(3), "seen_output_count": i32(1)}, "seen_start"),
    ({"seen_start": i32(), "seen_ids": i32(3), "seen_output_count": i32(1)}, "seen_start"),
    ({"mask_row": i32(0)}, "mask out of range"),
    ({"mask_row": i32(0), "masks": np.zeros((1, 4), np.uint32)}, r"masks have the wrong width \(4, limit 5\)"),
    ({"adapter": i32(1)}, "adapters are not supported"),
    ({"seed": np.array([], np.uint64)}, "seed"),
    ({"bias_ids": i32(0)}, "bias"),
    ({"block_copies": i32(0, 64)[None]}, "copied block out of range"),
    ({"block_copies": i32(0, 1, 2)[None]}, "block_copies must be pairs"),
    ({"token_ids": np.array([1, 2], np.int64)}, "token_ids has the wrong dtype"),
    ({"block_tables": i32(0)}, "block_tables has the wrong dtype, dimensions"),
    ({"token_ids": i32(1, 5, 2, 5)[::2]}, "token_ids has the wrong dtype, dimensions or layout"),
]


@pytest.mark.parametrize(("replaced", "message"), CONTRADICTIONS)
def test_a_batch_that_contradicts_itself_is_refused(
    model: AnyExecutor, replaced: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ExecutorError, match=message):
        model.execute(make_batch([Sequence([1, 2], [0])], **replaced))
    assert model.execute(make_batch([Sequence([1, 2], [0])])).status.tolist() == [0]


def test_a_sequence_without_tokens_is_refused(model: AnyExecutor) -> None:
    with pytest.raises(ExecutorError, match="a sequence has no tokens"):
        model.execute(make_batch([Sequence([1, 2], [0]), Sequence([], [1])], [Row(0)]))


def test_a_batch_beyond_the_budget_or_the_context_is_refused(build: Build) -> None:
    model = build(tiny_weights(tiny_spec()), max_batched_tokens=8, max_model_len=64)
    with pytest.raises(ExecutorError, match=r"number of tokens \(9, limit 8\)"):
        model.execute(make_batch([Sequence([1] * 9, [0])]))
    with pytest.raises(ExecutorError, match="context_len is beyond the model's"):
        model.execute(make_batch([Sequence([1], [0, 1, 2], 64)]))
    assert model.max_batched_tokens == 8


def test_the_pool_is_described(model: AnyExecutor) -> None:
    geometry, spec = model.kv_geometry, model.spec
    assert (geometry.block_size, geometry.num_blocks) == (32, 64)
    assert geometry.bytes_per_block == 32 * 2 * spec.num_layers * spec.kv_size * 4


def test_a_closed_executor_says_so(build: Build) -> None:
    model = build(tiny_weights(tiny_spec()))
    model.close()
    model.close()
    for run in (model.execute, model.logits):
        with pytest.raises(ExecutorError, match="closed"):
            run(make_batch([Sequence([1], [0])]))
