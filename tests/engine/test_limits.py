"""Timeouts, the queue's limit, and what may not be generated."""

import pytest

from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError, OverloadedError
from tests.engine.drive import GREEDY, make_engine, run
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import say

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def test_a_request_is_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    for module in ("engine", "door", "generation"):
        monkeypatch.setattr(f"paceline.engine.{module}.perf_counter_ns", lambda: now)
    engine = make_engine(max_num_seqs=1)
    engine.submit([65], LONG, request_id="running", timeout=2.5)
    engine.submit([66], LONG, request_id="waiting", timeout=1.5)
    engine.submit([67], GREEDY, request_id="patient")
    assert {output.request_id for output in engine.step()} == {"running"}
    now = 2_000_000_000
    (end, _) = engine.step()
    assert (end.request_id, end.finish_reason) == ("waiting", "timeout")
    assert end.error is not None
    assert end.error.startswith("not finished after 2.0 s, with 0 tokens generated")
    now = 2_500_000_000
    end = engine.step()[0]
    assert (end.request_id, end.finish_reason) == ("running", "timeout")
    assert end.usage is not None
    assert end.usage.completion_tokens == 2
    assert run(engine)["patient"].last.finish_reason == "length"


def test_the_engine_has_a_timeout_of_its_own() -> None:
    engine = make_engine(request_timeout=1e-9)
    engine.submit([65], LONG, request_id="r")
    engine.submit([65], GREEDY, request_id="its own", timeout=1000)
    answers = run(engine)
    assert answers["r"].last.finish_reason == "timeout"
    assert answers["its own"].last.finish_reason == "length"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e7, True])
def test_a_timeout_is_a_number_of_seconds(timeout: float) -> None:
    with pytest.raises(InputError, match="timeout is"):
        make_engine().submit([65], GREEDY, timeout=timeout)


def test_too_many_waiting_requests_are_refused() -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=1)
    for number in range(3):
        engine.submit([65, number + 2], LONG)
    with pytest.raises(OverloadedError, match="1 requests wait already, at most 1 may") as caught:
        engine.submit([66], GREEDY)
    assert caught.value.retry_after >= 1
    engine.step()
    with pytest.raises(OverloadedError):
        engine.submit([66], GREEDY)
    run(engine)
    engine.submit([66], GREEDY, request_id="later")
    assert run(engine)["later"].last.finish_reason == "length"


def test_nobody_may_wait_at_all() -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=0)
    for number in range(2):
        engine.submit([65, number + 2], LONG)
    with pytest.raises(OverloadedError):
        engine.submit([66], GREEDY)
    run(engine)


def test_the_end_is_banned_before_min_tokens() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    engine.submit([65], SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=[9]))
    run(engine)
    assert [sorted(batch.bias_ids.tolist()) for batch in executor.batches][:4] == [[0, 9]] * 3 + [[]]


def test_a_stop_string_counts_from_min_tokens_on() -> None:
    answer, _ = say(b"a.b.c.d", max_tokens=7, min_tokens=4, stop=["."])
    assert (answer.text, answer.last.stop_reason) == ("a.b.c", ".")


def test_min_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="min_tokens is 600"):
        make_engine().submit([65], SamplingParams(max_tokens=None, min_tokens=600))
    with pytest.raises(InputError, match="min_tokens 3 is above max_tokens 2"):
        SamplingParams(max_tokens=2, min_tokens=3)


def test_the_token_that_would_complete_a_bad_word_is_banned() -> None:
    executor = FakeExecutor()
    executor.script[1] = b"xabxab"
    engine = make_engine(executor)
    engine.submit([65], SamplingParams(seed=1, max_tokens=6, bad_words=["abc", "z"]))
    run(engine)
    banned = [bytes(sorted(batch.bias_ids.tolist())) for batch in executor.batches]
    assert banned == [b"z", b"z", b"z", b"cz", b"z", b"z"]


@pytest.mark.parametrize("words", [[""], [" "], [5], ["a"] * 1025])
def test_bad_words_are_words(words: list[str]) -> None:
    with pytest.raises(InputError, match="bad_words"):
        SamplingParams(bad_words=words)


def test_the_prefix_cache_can_be_emptied_at_any_time() -> None:
    prompt = list(range(2, 102))
    engine = make_engine()
    engine.submit(prompt, LONG, request_id="running")
    engine.step()
    engine.reset_prefix_cache()
    engine.submit(prompt, GREEDY, request_id="cold")
    answers = run(engine)
    assert answers["cold"].last.usage is not None
    assert answers["cold"].last.usage.cached_tokens == 0
    engine.submit(prompt, GREEDY, request_id="warm")
    warm = run(engine)["warm"]
    assert warm.last.usage is not None
    assert warm.last.usage.cached_tokens == 96
    engine.reset_prefix_cache()
    engine.submit(prompt, GREEDY, request_id="cold again")
    cold = run(engine)["cold again"]
    assert cold.last.usage is not None
    assert cold.last.usage.cached_tokens == 0
    assert cold.token_ids == warm.token_ids
