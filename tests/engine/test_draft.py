import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.draft import PromptLookup
from paceline.engine.sampling import SamplingParams
from tests.engine.drive import make_engine, make_request, run
from tests.engine.fake_executor import FakeExecutor


def test_what_followed_the_last_tokens_is_proposed() -> None:
    request = make_request([1, 2, 3, 4, 5, 9, 2, 3])
    assert PromptLookup(8).propose(request, 3) == [4, 5, 9]
    assert PromptLookup(2).propose(request, 3) == [4, 5]


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    assert PromptLookup(1).propose(make_request([7, 1, 2, 3, 50, 1, 2, 60, 7, 1, 2]), 1) == [3]
    assert PromptLookup(1).propose(make_request([1, 2, 50, 1, 2, 60, 1, 2]), 1) == [60]


@pytest.mark.parametrize("prompt", [[], [1], [1, 1], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_is_known(prompt: list[int]) -> None:
    assert PromptLookup(4).propose(make_request(prompt), 4) == []


def test_wrong_proposals_make_the_next_ones_shorter_and_right_ones_longer() -> None:
    lookup, request = PromptLookup(8), make_request([*range(20), 0, 1])
    lookup.learn(8, 2)
    assert len(lookup.propose(request, 8)) == 3
    lookup.learn(3, 3)
    assert len(lookup.propose(request, 8)) == 6
    lookup.learn(6, 6)
    assert len(lookup.propose(request, 8)) == 8
    lookup.learn(8, 0)
    assert len(lookup.propose(request, 8)) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_an_index_that_grows_proposes_what_a_new_one_does(tokens: list[int], steps: list[int]) -> None:
    grown, request = PromptLookup(4), make_request(tokens[:1])
    for length in steps:
        for token_id in tokens[1 + len(request.output_ids) :][:length]:
            request.append_output(token_id)
        assert grown.propose(request, 4) == PromptLookup(4).propose(request, 4)


def test_text_that_repeats_itself_takes_fewer_steps_and_stays_the_same() -> None:
    def say(lookup: int) -> tuple[str, int, int]:
        executor = FakeExecutor()
        executor.script[1] = b"over and over again, " * 8
        engine = make_engine(executor, prompt_lookup_tokens=lookup)
        engine.submit([65], SamplingParams(seed=1, max_tokens=100), request_id="r")
        answer = run(engine)["r"]
        assert len(answer.outputs) == engine.stats().steps
        return answer.text, engine.stats().steps, engine.stats().accepted_tokens

    text, steps, _ = say(0)
    same, fewer, accepted = say(8)
    assert (same, fewer + accepted) == (text, steps)
    assert fewer < 50


def test_a_stop_within_an_accepted_draft_ends_the_text_there() -> None:
    executor = FakeExecutor()
    executor.script[1] = b"abcdefgh abcdefgh abcdefgh"
    engine = make_engine(executor, prompt_lookup_tokens=8)
    engine.submit([65], SamplingParams(seed=1, max_tokens=100, stop=["h abcd"]), request_id="r")
    answer = run(engine)["r"]
    assert (answer.text, answer.last.stop_reason) == ("abcdefg", "h abcd")
    assert answer.token_ids == list(b"abcdefgh abcd")
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == 13


def test_penalties_keep_drafts_away() -> None:
    engine = make_engine(prompt_lookup_tokens=8)
    engine.submit([5, 6] * 20, SamplingParams(max_tokens=50, presence_penalty=1.0))
    run(engine)
    assert engine.stats().draft_tokens == 0
