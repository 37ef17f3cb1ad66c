"""``n`` answers to one prompt."""

import pytest

from paceline.engine.sampling import SamplingParams, choice_seed
from paceline.errors import InputError
from tests.engine.drive import Answer, check_clean, collect, make_engine, run
from tests.engine.fake_executor import FakeExecutor

PROMPT = list(range(2, 40))


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 7, "n": 3, "ignore_eos": True} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 38])
def test_each_choice_is_what_a_request_with_its_seed_says(length: int, caching: bool) -> None:
    engine = make_engine(FakeExecutor(), enable_prefix_caching=caching)
    request = engine.submit(PROMPT[:length], params())
    answers = run(engine)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
    for index, choice in enumerate(request.choices):
        assert choice.seed == choice_seed(7, index)
        alone = make_engine()
        alone.submit(PROMPT[:length], params(n=1, seed=choice.seed), request_id="r")
        assert run(alone)["r"].token_ids == answers[choice.request_id].token_ids


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    engine.submit(PROMPT, params())
    engine.step()
    engine.step()
    assert [batch.num_tokens for batch in executor.batches] == [len(PROMPT), 3]
    # One full block for all, one partly filled for each.
    assert engine.stats().kv_blocks_used == 4
    run(engine)
    assert engine.stats().prompt_tokens == len(PROMPT)


def test_a_choice_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    executor = FakeExecutor()
    executor.script[7] = [0]
    engine = make_engine(executor)
    request = engine.submit(PROMPT, params(ignore_eos=False, max_tokens=8))
    executor.script[request.all_forks[1].seed] = list(b"abcdefgh")
    answers = run(engine)
    assert answers[request.request_id].last.finish_reason == "stop"
    assert answers[request.all_forks[1].request_id].text == "abcdefgh"


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_choice_can_be_aborted_at_any_time(step: int, which: int) -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16)
    request = engine.submit(PROMPT, params())
    expected = make_engine()
    twin = expected.submit(PROMPT, params())
    right = run(expected)
    answers: dict[str, Answer] = collect([])
    for _ in range(step):
        collect(engine.step(), answers)
    engine.abort(request.choices[which].request_id)
    while engine.has_work:
        collect(engine.step(), answers)
    check_clean(engine)
    for index, (choice, other) in enumerate(zip(request.choices, twin.choices, strict=True)):
        answer = answers[choice.request_id]
        if index == which:
            assert answer.last.finish_reason == "abort"
        else:
            assert answer.token_ids == right[other.request_id].token_ids


def test_a_prompt_that_fails_fails_for_all_choices() -> None:
    executor = FakeExecutor()
    executor.poison.add(PROMPT[3])
    engine = make_engine(executor)
    request = engine.submit(PROMPT, params())
    engine.submit([50], params(n=1), request_id="good")
    answers = run(engine)
    assert [answers[choice.request_id].last.finish_reason for choice in request.choices] == ["error"] * 3
    assert answers["good"].last.finish_reason == "length"


def test_nothing_is_drawn_with_max_tokens_0() -> None:
    with pytest.raises(InputError, match="n is 2"):
        SamplingParams(n=2, max_tokens=0)
