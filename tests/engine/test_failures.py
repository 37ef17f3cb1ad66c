"""One failing request never harms another."""

import logging

import pytest

from paceline.engine.sampling import SamplingParams
from paceline.executors.base import RowStatus
from tests.engine.drive import GREEDY, make_engine, run
from tests.engine.fake_executor import ByteDecoder, FakeExecutor

POISON = 200


def test_a_request_that_fails_in_the_executor_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    prompts = {"a": [65, 66], "b": [67, 68, 69], "bad": [70, POISON]}
    alone = {}
    for name in "ab":
        engine = make_engine()
        engine.submit(prompts[name], GREEDY, request_id=name)
        alone[name] = run(engine)[name].token_ids
    executor = FakeExecutor()
    executor.poison.add(POISON)
    engine = make_engine(executor)
    for name, prompt in prompts.items():
        engine.submit(prompt, GREEDY, request_id=name)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        answers = run(engine)
    bad = answers["bad"].last
    assert (bad.finish_reason, bad.text, bad.error) == ("error", "", "the executor failed: a poisoned token")
    assert bad.usage is not None
    assert {name: answers[name].token_ids for name in "ab"} == alone
    assert "bad" in caplog.text
    assert "one by one" in caplog.text


def test_a_request_that_fails_once_in_the_executor_goes_on() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    engine.submit([65], GREEDY, request_id="a")
    engine.step()

    def fail_once() -> None:
        executor.before_step = lambda: None
        raise MemoryError

    executor.before_step = fail_once
    assert run(engine)["a"].last.finish_reason == "length"


def test_a_request_that_fails_later_keeps_its_text_so_far() -> None:
    executor = FakeExecutor()
    executor.script[1] = [97, 98, POISON, 99]
    executor.poison.add(POISON)
    engine = make_engine(executor)
    engine.submit([65], SamplingParams(seed=1, max_tokens=10), request_id="a")
    answer = run(engine)["a"]
    assert answer.token_ids == [97, 98, POISON]
    assert answer.last.finish_reason == "error"


@pytest.mark.parametrize("status", [RowStatus.NON_FINITE, RowStatus.NOTHING_ALLOWED])
def test_a_bad_row_ends_its_request_and_nothing_of_the_step_is_cached(status: RowStatus) -> None:
    executor = FakeExecutor()
    executor.bad_status[7] = status
    engine = make_engine(executor)
    engine.submit(list(range(2, 80)), SamplingParams(seed=7), request_id="bad")
    engine.submit([65], GREEDY, request_id="good")
    answers = run(engine)
    assert answers["bad"].last.finish_reason == "error"
    assert answers["bad"].last.error
    assert answers["good"].last.finish_reason == "length"
    assert engine.stats().kv_blocks_cached == 0


def test_a_token_that_cannot_be_decoded_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    executor.script |= {1: [97, 201], 2: [98] * 16}

    def token_bytes(self: ByteDecoder, token_id: int) -> bytes:
        return {97: b"a", 98: b"b"}[token_id]

    monkeypatch.setattr(ByteDecoder, "token_bytes", token_bytes)
    engine = make_engine(executor)
    engine.submit([65], SamplingParams(seed=1), request_id="bad")
    engine.submit([65], SamplingParams(seed=2), request_id="good")
    answers = run(engine)
    assert (answers["bad"].last.finish_reason, answers["bad"].text) == ("error", "a")
    assert "201" in (answers["bad"].last.error or "")
    assert answers["good"].text == "b" * 16


def test_a_bug_in_a_step_ends_what_runs_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    prompt = list(range(2, 80))
    engine.submit(prompt, GREEDY, request_id="running")
    engine.step()

    def bug(*_: object) -> None:
        engine.submit(prompt, GREEDY, request_id="arrives meanwhile")
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "paceline.engine"):
        patch.setattr(engine._scheduler, "commit", bug)
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("running", "error")
    assert "a bug" in (output.error or "")
    assert "ZeroDivisionError" in caplog.text
    # With fresh state: nothing is cached, and the request that came in meanwhile is served.
    answer = run(engine)["arrives meanwhile"]
    assert answer.last.finish_reason == "length"
    assert answer.last.usage is not None
    assert answer.last.usage.cached_tokens == 0


def test_what_ended_before_the_bug_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit([65], GREEDY, request_id="aborted")
    engine.submit([66], GREEDY, request_id="running")
    engine.step()
    engine.abort("aborted")
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
    assert {output.request_id: output.finish_reason for output in engine.step()} == {
        "aborted": "abort",
        "running": "error",
    }


def test_requests_that_can_never_run_are_not_waited_for_in_vain() -> None:
    engine = make_engine(FakeExecutor(num_blocks=2), max_model_len=64)
    # A block that nobody gives back.
    engine._pool._blank.pop()
    request = engine.submit([65] * 40, SamplingParams(max_tokens=2))
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == (request.request_id, "error")
    assert "none of 1 requests can be scheduled" in (output.error or "")
    # The pool is new, so the lost block is back.
    request = engine.submit([65] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
    assert run(engine)[request.request_id].last.finish_reason == "length"
