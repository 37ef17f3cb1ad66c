"""Sampling as every executor promises it, held against what the logits themselves say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.executors.base import Batch, RowStatus, StepResult
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.conftest import AnyExecutor, Build
from tests.executors.tiny import tiny_spec, tiny_weights

VOCAB = 150
DRAWS = 4000


@pytest.fixture(scope="module")
def model(build: Build) -> AnyExecutor:
    return build(tiny_weights(tiny_spec(), seed=1), num_blocks=8, max_model_len=128)


@pytest.fixture(scope="module")
def logits(model: AnyExecutor) -> np.ndarray:
    return model.logits(batch([Row(0)]))[0].astype(np.float64)


def batch(rows: list[Row]) -> Batch:
    return make_batch([Sequence([3, 1, 4, 1, 5], [0])], rows, vocab_size=VOCAB)


def run(model: AnyExecutor, rows: list[Row]) -> StepResult:
    return model.execute(batch(rows))


def draws(model: AnyExecutor, **parameters: object) -> Counter[int]:
    rows = [Row(0, seed=11, draw_position=i, **({"temperature": 1.0} | parameters)) for i in range(DRAWS)]  # type: ignore[arg-type]
    return Counter(run(model, rows).token_ids.tolist())


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def assert_distributed(counts: Counter[int], expected: np.ndarray) -> None:
    """No token that has no probability, and no frequency more than 5 standard errors, or 3 draws, off."""
    frequencies = np.array([counts[token] for token in range(VOCAB)]) / DRAWS
    assert not frequencies[expected == 0].any()
    assert (np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 3 / DRAWS).all()


def test_temperature_zero_takes_the_likeliest(model: AnyExecutor, logits: np.ndarray) -> None:
    assert run(model, [Row(0)]).token_ids.tolist() == [logits.argmax()]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(model: AnyExecutor, logits: np.ndarray, temperature: float) -> None:
    assert_distributed(draws(model, temperature=temperature), softmax(logits / temperature))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(model: AnyExecutor, logits: np.ndarray, temperature: float) -> None:
    counts = draws(model, temperature=temperature)
    if temperature < 1:
        assert counts == {int(logits.argmax()): DRAWS}
    else:
        assert_distributed(counts, np.full(VOCAB, 1 / VOCAB))


def test_top_k(model: AnyExecutor, logits: np.ndarray) -> None:
    kept = np.full(VOCAB, -np.inf)
    best = np.argsort(-logits)[:5]
    kept[best] = logits[best]
    assert_distributed(draws(model, top_k=5), softmax(kept))


@pytest.mark.parametrize("top_p", [0.01, 0.4, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_it(model: AnyExecutor, logits: np.ndarray, top_p: float) -> None:
    p = softmax(logits)
    order = np.argsort(-p)
    count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    kept = np.zeros(VOCAB)
    kept[order[:count]] = p[order[:count]]
    assert_distributed(draws(model, top_p=top_p), kept / kept.sum())


def test_a_wide_vocabulary_is_cut_exactly(build: Build) -> None:
    """Against a plain sort, over seeds: what spares sorting everything must not lose or add a token."""
    spec = replace(tiny_spec(layers=1), vocab_size=5000)
    model = build(tiny_weights(spec), num_blocks=4, max_model_len=64)
    prompt = [Sequence([3, 1, 4], [0])]
    logits = model.logits(make_batch(prompt))[0].astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    for temperature in (0.2, 1.0, 5.0):
        p = softmax(logits / temperature)
        for parameters in ({"top_k": 1}, {"top_k": 40}, {"top_k": 4999}, {"top_p": 0.5}, {"top_p": 0.99}):
            if "top_k" in parameters:
                count = int(parameters["top_k"])
            else:
                count = int(np.searchsorted(np.cumsum(p[order]), parameters["top_p"])) + 1
            rows = [Row(0, temperature=temperature, seed=s, **parameters) for s in range(200)]  # type: ignore[arg-type]
            drawn = set(model.execute(make_batch(prompt, rows)).token_ids.tolist())
            assert drawn <= set(order[:count].tolist())
            # What is left after the cut has its whole probability: the likeliest are not missed.
            assert order[0] in drawn or p[order[0]] / p[order[:count]].sum() < 0.05


def test_min_p(model: AnyExecutor, logits: np.ndarray) -> None:
    p = softmax(logits)
    kept = np.where(p >= 0.3 * p.max(), p, 0)
    assert 1 < (kept > 0).sum() < VOCAB
    assert_distributed(draws(model, min_p=0.3), kept / kept.sum())


def test_min_p_then_top_k_then_top_p(model: AnyExecutor, logits: np.ndarray) -> None:
    p = softmax(logits)
    p = np.where(p >= 0.1 * p.max(), p, 0)
    order = np.argsort(-p)
    p[order[8:]] = 0
    p /= p.sum()
    count = int(np.searchsorted(np.cumsum(p[order]), 0.7)) + 1
    p[order[count:]] = 0
    assert_distributed(draws(model, min_p=0.1, top_k=8, top_p=0.7), p / p.sum())


def test_a_draw_depends_on_seed_and_position_alone(model: AnyExecutor) -> None:
    row = {"temperature": 1.5, "seed": 2**64 - 1, "draw_position": 2**40}
    alone = run(model, [Row(0, **row)]).token_ids[0]  # type: ignore[arg-type]
    others = [Row(0, temperature=1.5, seed=s, draw_position=s) for s in range(40)]
    assert run(model, [*others, Row(0, **row), *others]).token_ids[40] == alone  # type: ignore[arg-type]
    by_seed = run(model, [Row(0, temperature=1.5, seed=s) for s in range(200)]).token_ids
    by_position = run(model, [Row(0, temperature=1.5, draw_position=s) for s in range(200)]).token_ids
    assert len(set(by_seed.tolist())) > 20
    assert len(set(by_position.tolist())) > 20


def test_mask_bias_and_their_union_banning_everything(model: AnyExecutor, logits: np.ndarray) -> None:
    result = run(
        model,
        [
            Row(0, allowed=[3, 77]),
            Row(0, bias={9: 100.0}),
            Row(0, bias={int(logits.argmax()): -np.inf}),
            Row(0, allowed=[3], bias={3: -np.inf}),
            Row(0),
        ],
    )
    second = int(np.argsort(-logits)[1])
    assert result.token_ids.tolist()[:3] == [3 if logits[3] > logits[77] else 77, 9, second]
    assert result.status.tolist() == [0, 0, 0, RowStatus.NOTHING_ALLOWED, 0]
    assert result.token_ids[4] == logits.argmax()


def test_ties_go_to_the_lowest_id(model: AnyExecutor, logits: np.ndarray) -> None:
    top = float(logits.max())
    # float32 sums that come out equal: both tokens far above the rest at the same value
    low, high = 20, 90
    bias = {low: float(np.float32(1e9)), high: float(np.float32(1e9))}
    assert top < 1e5
    assert run(model, [Row(0, bias=bias)]).token_ids.tolist() == [low]
    assert draws(model, bias=bias, top_k=1) == {low: DRAWS}
    assert draws(model, bias=bias, top_p=0.0) == {low: DRAWS}
    assert draws(model, bias=bias, temperature=1e-40).keys() == {low, high}  # its inverse is no float32


def test_penalties(model: AnyExecutor, logits: np.ndarray) -> None:
    """Formulas of vLLM: repetition divides or multiplies by sign, for prompt and output; the others for output only."""
    best = int(logits.argmax())
    seen_in_prompt, seen_twice = best, int(np.argsort(-logits)[1])
    adjusted = logits.copy()
    for token in (seen_in_prompt, seen_twice):
        adjusted[token] = adjusted[token] / 1.3 if adjusted[token] > 0 else adjusted[token] * 1.3
    adjusted[seen_twice] -= 0.5 * 2 + 0.25
    parameters = {
        "repetition": 1.3,
        "frequency": 0.5,
        "presence": 0.25,
        "seen": {seen_in_prompt: 0, seen_twice: 2},
    }
    assert_distributed(draws(model, **parameters), softmax(adjusted))


def test_logprobs_are_those_of_the_raw_distribution(model: AnyExecutor, logits: np.ndarray) -> None:
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.argsort(-logits)
    result = run(model, [Row(0, num_logprobs=3, bias={9: 100.0}), Row(0), Row(0, num_logprobs=0, target=17)])
    assert result.token_ids.tolist() == [9, logits.argmax(), 17]
    np.testing.assert_allclose(result.logprobs[[0, 2]], logprobs[[9, 17]], atol=1e-5)
    assert np.isnan(result.logprobs[1])
    assert result.top_ids.tolist() == [order[:3].tolist(), [-1] * 3, [-1] * 3]
    np.testing.assert_allclose(result.top_logprobs[0], logprobs[order[:3]], atol=1e-5)
    assert run(model, [Row(0)]).logprobs.size == 0


def test_a_scored_token_ignores_how_it_would_be_sampled(model: AnyExecutor, logits: np.ndarray) -> None:
    """Neither a ban nor a temperature changes it, and no row without a mask is masked by its neighbours'."""
    banned = Row(0, target=17, allowed=[], bias={17: -np.inf}, temperature=2.0, num_logprobs=0)
    result = run(model, [banned, Row(0, allowed=[3]), Row(0)])
    assert result.token_ids.tolist() == [17, 3, logits.argmax()]
    assert result.status.tolist() == [RowStatus.OK] * 3
    assert result.logprobs[0] == pytest.approx(np.log(softmax(logits)[17]), abs=1e-5)


def test_what_no_row_uses_may_be_left_out(model: AnyExecutor, logits: np.ndarray) -> None:
    nothing = dict.fromkeys(
        ("seen_start", "seen_ids", "seen_output_count", "bias_start", "bias_ids", "mask_row"), np.zeros(0, np.int32)
    )
    empty = nothing | {"bias": np.zeros(0, np.float32), "masks": np.zeros((0, 0), np.uint32)}
    result = model.execute(make_batch([Sequence([3, 1, 4, 1, 5], [0])], [Row(0)] * 3, **empty))
    assert result.token_ids.tolist() == [logits.argmax()] * 3


def test_biases_of_a_token_named_twice_add_up(model: AnyExecutor, logits: np.ndarray) -> None:
    bias = 0.6 * (logits.max() - logits[9])
    assert run(model, [Row(0, bias={9: bias})]).token_ids.tolist() == [logits.argmax()]
    twice = {"bias_start": np.array([0, 2], np.int32), "bias_ids": np.array([9, 9], np.int32)}
    result = model.execute(make_batch([Sequence([3, 1, 4, 1, 5], [0])], bias=np.full(2, bias, np.float32), **twice))
    assert result.token_ids.tolist() == [9]


def test_results_have_the_types_of_the_contract(model: AnyExecutor) -> None:
    for rows in ([Row(0, num_logprobs=2)], [Row(0)], []):
        result = run(model, rows)
        kinds = [result.token_ids, result.status, result.logprobs, result.top_ids, result.top_logprobs]
        assert [array.dtype for array in kinds] == [np.int32, np.uint8, np.float32, np.int32, np.float32]
        assert [array.ndim for array in kinds] == [1, 1, 1, 2, 2]
