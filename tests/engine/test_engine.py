from typing import Any

import pytest

from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.outputs import RequestOutput
from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError, PacelineError
from tests.engine.drive import GREEDY, Answer, check_clean, collect, make_engine, run
from tests.engine.fake_executor import ByteDecoder, FakeExecutor


def say(text: bytes, *, prompt: tuple[int, ...] = (65,), **params: object) -> tuple[Answer, Engine]:
    """Run one request whose model says ``text`` over and over."""
    executor = FakeExecutor()
    executor.script[1] = text * 100
    engine = make_engine(executor)
    engine.submit(prompt, SamplingParams(seed=1, **params), request_id="r")  # type: ignore[arg-type]
    return run(engine)["r"], engine


def test_a_request_is_answered_and_accounted_for() -> None:
    answer, engine = say(b"hello ", max_tokens=6, prompt=(1, 2, 3))
    assert answer.text == "hello "
    assert answer.token_ids == list(b"hello ")
    assert len(answer.outputs) == 6
    last = answer.last
    assert (last.finish_reason, last.stop_reason, last.error) == ("length", None, None)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 6, 0)
    assert last.timings is not None
    assert all(output.usage is None and output.timings is None for output in answer.outputs[:-1])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (3, 6, 6)
    assert (stats.running, stats.waiting) == (0, 0)


def test_timings_are_the_gaps_between_the_stamps() -> None:
    engine = make_engine()
    request = engine.submit([65], GREEDY)
    timings = run(engine)[request.request_id].last.timings
    assert timings is not None
    assert request.first_scheduled_ns is not None
    assert request.first_token_ns is not None
    assert request.finished_ns is not None
    assert request.arrived_ns <= request.first_scheduled_ns <= request.first_token_ns <= request.finished_ns
    assert timings.queue_ms == (request.first_scheduled_ns - request.arrived_ns) / 1e6
    assert timings.prefill_ms == (request.first_token_ns - request.first_scheduled_ns) / 1e6
    assert timings.decode_ms == (request.finished_ns - request.first_token_ns) / 1e6


def test_eos_ends_the_text_and_counts() -> None:
    answer, _ = say(b"hi\0more", max_tokens=10)
    assert (answer.text, answer.token_ids) == ("hi", [104, 105, 0])
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)


def test_eos_can_be_ignored() -> None:
    answer, _ = say(b"hi\0more", max_tokens=4, ignore_eos=True)
    assert (answer.text, answer.last.finish_reason) == ("him", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hel")])
def test_a_stop_token_ends_the_text(include: bool, text: str) -> None:
    answer, _ = say(b"hello", stop_token_ids=(ord("l"),), include_stop_str_in_output=include)
    assert (answer.text, answer.token_ids) == (text, list(b"hel"))
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", ord("l"))


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hell")])
def test_a_stop_string_ends_the_text_and_its_tokens_count(include: bool, text: str) -> None:
    answer, engine = say(b"hello", stop=["ll"], include_stop_str_in_output=include)
    assert (answer.text, answer.token_ids) == (text, list(b"hell"))
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", "ll")
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == 4
    # Checked before the next schedule: no fifth step.
    assert engine.stats().steps == 4


def test_a_stop_string_with_the_last_token_is_a_stop() -> None:
    answer, _ = say(b"hello", stop=["ll"], max_tokens=4)
    assert answer.last.finish_reason == "stop"


def test_what_was_held_back_is_flushed_at_the_end() -> None:
    assert say(b"hel\0", stop=["lo"])[0].text == "hel"
    assert say(b"hel", stop=["lo"], max_tokens=3)[0].text == "hel"
    assert say(b"a\xf0\x9f", max_tokens=3)[0].text == "a\ufffd"


def test_tokens_without_text_are_news_too() -> None:
    answer, _ = say("é".encode(), max_tokens=2)
    assert [(output.text, output.token_ids) for output in answer.outputs] == [("", (0xC3,)), ("é", (0xA9,))]


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_max_tokens_is_clamped_to_the_context(max_tokens: int | None) -> None:
    executor = FakeExecutor()
    engine = make_engine(executor, max_model_len=40)
    request = engine.submit(range(1, 11), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    answer = run(engine)[request.request_id]
    assert (len(answer.token_ids), answer.last.finish_reason) == (30, "length")
    assert max(int(batch.context_len.max()) for batch in executor.batches) == 39


def test_no_max_tokens_stays_within_a_pool_smaller_than_the_context() -> None:
    engine = make_engine(FakeExecutor(num_blocks=1), max_model_len=100)
    request = engine.submit(range(1, 31), SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(run(engine)[request.request_id].token_ids) == 3


def test_logprobs_come_with_each_token() -> None:
    answer, _ = say(b"abc", max_tokens=3, logprobs=2)
    assert [[entry.token_id for entry in output.logprobs] for output in answer.outputs] == [[97], [98], [99]]
    assert answer.last.logprobs[0].top == ((99, -1.0), (100, -2.0))
    assert all(output.logprobs == () for output in say(b"abc", max_tokens=3)[0].outputs)


def refused(engine: Engine, prompt: list[int], **params: object) -> InputError:
    with pytest.raises(InputError) as caught:
        engine.submit(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert not engine.has_work
    return caught.value


def test_the_door_refuses_with_the_numbers() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4), max_model_len=150)
    assert refused(engine, []).param == "prompt"
    for prompt in ([5, 256], [-1]):
        error = refused(engine, prompt)
        assert (error.param, str(prompt[-1]) in str(error), "0 to 255" in str(error)) == ("prompt", True, True)
    assert refused(engine, [5], logit_bias={256: 1.0}).param == "logit_bias"
    assert refused(engine, [5], stop_token_ids=[256]).param == "stop_token_ids"
    error = refused(engine, [5] * 150)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert "prompt has 150 tokens, the context holds 150 including at least one generated" in str(error)
    error = refused(engine, [5] * 140, max_tokens=1)
    assert (error.param, error.code) == ("prompt", "kv_cache_exceeded")
    assert "need 5 KV blocks of 32 tokens, the cache has 4" in str(error)
    assert refused(engine, [5] * 140, max_tokens=None).code == "kv_cache_exceeded"
    error = refused(engine, [5] * 100, max_tokens=30)
    assert (error.param, "need 5 KV blocks" in str(error)) == ("max_tokens", True)


def test_what_just_fits_is_taken() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4), max_model_len=150)
    ids = [
        engine.submit([5] * 100, SamplingParams(max_tokens=29, ignore_eos=True)).request_id,
        engine.submit([5] * 128, SamplingParams(max_tokens=1)).request_id,
    ]
    answers = run(engine)
    assert [len(answers[request_id].token_ids) for request_id in ids] == [29, 1]


def test_a_request_id_cannot_be_used_twice_at_once() -> None:
    engine = make_engine()
    engine.submit([65], GREEDY, request_id="a")
    with pytest.raises(InputError, match="'a' is already in use"):
        engine.submit([65], GREEDY, request_id="a")
    run(engine)
    engine.submit([65], GREEDY, request_id="a")
    assert run(engine)["a"].last.finish_reason == "length"


def test_a_seed_is_taken_modulo_2_to_the_64() -> None:
    engine = make_engine()
    assert engine.submit([65], SamplingParams(seed=-1)).seed == 2**64 - 1
    assert engine.submit([65], SamplingParams(seed=2**64 + 5)).seed == 5
    run(engine)


def test_a_drawn_seed_repeats_the_answer() -> None:
    engine = make_engine()
    params = {"temperature": 1.0, "ignore_eos": True}
    first = engine.submit([65], SamplingParams(**params))  # type: ignore[arg-type]
    other = engine.submit([65], SamplingParams(**params))  # type: ignore[arg-type]
    again = engine.submit([65], SamplingParams(seed=first.seed, **params))  # type: ignore[arg-type]
    answers = run(engine)
    assert first.seed != other.seed
    assert answers[first.request_id].token_ids == answers[again.request_id].token_ids
    assert answers[first.request_id].token_ids != answers[other.request_id].token_ids


def test_a_prefix_hit_is_reported_and_changes_nothing() -> None:
    engine = make_engine()
    prompt = list(range(2, 102))
    answers = []
    for name in ("cold", "warm"):
        engine.submit(prompt, GREEDY, request_id=name)
        answers.append(run(engine)[name])
    assert answers[0].token_ids == answers[1].token_ids
    assert [answer.last.usage.cached_tokens for answer in answers if answer.last.usage] == [0, 96]
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (200, 96)
    assert stats.kv_blocks_cached == 3


def test_prefix_caching_can_be_off() -> None:
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        engine.submit(list(range(2, 102)), GREEDY)
        run(engine)
    assert engine.stats().prefix_hits == 0


def test_a_salt_keeps_prefixes_apart() -> None:
    engine = make_engine()
    for salt in ("a", "b", "a"):
        engine.submit(list(range(2, 102)), GREEDY, cache_salt=salt)
        run(engine)
    assert engine.stats().prefix_hits == 96


def test_a_short_request_among_long_ones_finishes_first() -> None:
    engine = make_engine()
    long = [engine.submit([65, i], SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(2, 6)]
    for _ in range(5):
        engine.step()
    short = engine.submit([66], SamplingParams(max_tokens=3, ignore_eos=True))
    finished = [output.request_id for _ in range(3) for output in engine.step() if output.finish_reason]
    assert finished == [short.request_id]
    run(engine)
    assert all(request.finished_ns for request in long)


def abort_output(engine: Engine, request_id: str) -> RequestOutput:
    engine.abort(request_id)
    (output,) = [output for output in engine.step() if output.request_id == request_id]
    assert output.finish_reason == "abort"
    assert output.usage is not None
    assert output.timings is not None
    return output


def test_abort_while_waiting() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit([65], GREEDY, request_id="running")
    engine.submit([66], GREEDY, request_id="waiting")
    engine.step()
    output = abort_output(engine, "waiting")
    assert output.usage is not None
    assert output.usage.completion_tokens == 0
    assert output.timings is not None
    assert output.timings.prefill_ms == output.timings.decode_ms == 0
    assert run(engine).keys() == {"running"}


def test_abort_before_the_first_step() -> None:
    engine = make_engine()
    engine.submit([65], GREEDY, request_id="new")
    assert abort_output(engine, "new").token_ids == ()
    check_clean(engine)


def test_abort_in_the_middle_of_prefill_keeps_full_blocks_cached() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=64)
    engine.submit(list(range(2, 202)), GREEDY, request_id="long")
    assert engine.step() == []
    assert engine.stats().kv_blocks_used == 7
    abort_output(engine, "long")
    check_clean(engine)
    assert engine.stats().kv_blocks_cached == 2


def test_abort_while_decoding_flushes_the_text() -> None:
    executor = FakeExecutor()
    executor.script[1] = b"ab</"
    engine = make_engine(executor)
    engine.submit([65], SamplingParams(seed=1, stop=["</s>"]), request_id="r")
    for _ in range(4):
        engine.step()
    assert abort_output(engine, "r").text == "</"
    check_clean(engine)


def test_abort_while_preempted() -> None:
    engine = make_engine(FakeExecutor(num_blocks=3), max_model_len=90)
    engine.submit([65] * 32, SamplingParams(max_tokens=50, ignore_eos=True), request_id="old")
    engine.submit([66] * 32, SamplingParams(max_tokens=50, ignore_eos=True), request_id="young")
    while not engine.stats().preemptions:
        engine.step()
    assert engine.stats().waiting == 1
    output = abort_output(engine, "young")
    assert output.usage is not None
    assert output.usage.completion_tokens > 0
    assert run(engine).keys() == {"old"}


def test_aborting_the_unknown_the_finished_and_twice_is_harmless() -> None:
    engine = make_engine()
    engine.abort("never seen")
    engine.submit([65], GREEDY, request_id="a")
    engine.submit([66], GREEDY, request_id="b")
    engine.step()
    engine.abort("a")
    engine.abort("a")
    answers = run(engine)
    assert [answers[name].last.finish_reason for name in "ab"] == ["abort", "length"]
    engine.abort("a")
    assert engine.step() == []


def test_an_abort_does_not_hit_a_later_request_of_the_same_id() -> None:
    engine = make_engine()
    engine.abort("a")
    engine.submit([65], GREEDY, request_id="a")
    assert run(engine)["a"].last.finish_reason == "length"


def test_an_abort_that_meets_the_last_token_changes_nothing() -> None:
    engine = make_engine()
    engine.submit([65], SamplingParams(max_tokens=1), request_id="a")
    executor = engine._executor
    assert isinstance(executor, FakeExecutor)
    executor.before_step = lambda: engine.abort("a")
    answers = collect(engine.step())
    executor.before_step = lambda: None
    assert answers["a"].last.finish_reason in ("length", "stop")
    assert engine.step() == []
    # Nor for a request that takes the id over before the abort is looked at.
    engine.submit([65], SamplingParams(max_tokens=1, ignore_eos=True), request_id="a")
    executor.before_step = lambda: engine.abort("a")
    engine.step()
    engine.submit([66], GREEDY, request_id="a")
    executor.before_step = lambda: None
    assert run(engine)["a"].last.finish_reason == "length"


def test_outputs_are_the_same_alone_and_under_pressure() -> None:
    prompts = {f"r{i}": [(i * 31 + j * 7) % 256 for j in range(20 + 9 * i)] for i in range(6)}
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, frequency_penalty=0.5)
    alone = {}
    for name, prompt in prompts.items():
        engine = make_engine()
        engine.submit(prompt, params, request_id=name)
        alone[name] = run(engine)[name].token_ids
    engine = make_engine(FakeExecutor(num_blocks=5), max_num_seqs=6, max_num_batched_tokens=24)
    for name, prompt in prompts.items():
        engine.submit(prompt, params, request_id=name)
    together = run(engine)
    assert engine.stats().preemptions > 0
    assert {name: together[name].token_ids for name in prompts} == alone


@pytest.mark.parametrize(
    "limits",
    [
        {"max_model_len": 1},
        {"max_model_len": 10, "max_num_seqs": 0},
        {"max_model_len": 10, "max_num_seqs": 65, "max_num_batched_tokens": 64},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="max_"):
        EngineConfig(**limits)


def test_a_budget_beyond_the_executor_is_refused() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens is 512, the executor takes at most 100"):
        Engine(FakeExecutor(max_batched_tokens=100), ByteDecoder(), EngineConfig(max_model_len=10))


def test_stop_by_hand_ends_everything_and_refuses_more() -> None:
    engine = make_engine()
    engine.submit([65], GREEDY)
    engine.step()
    engine.stop()
    assert not engine.has_work
    assert engine.step() == []
    check_clean(engine)
    with pytest.raises(PacelineError, match="stopped"):
        engine.submit([65], GREEDY)
