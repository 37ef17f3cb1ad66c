import sys

import pytest

from paceline.engine import trace
from paceline.engine.sampling import SamplingParams
from tests.engine.drive import GREEDY, make_engine, run
from tests.engine.fake_executor import FakeExecutor

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def test_every_step_is_recorded_with_its_phases_and_who_computed_what() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=16)
    engine.submit(range(2, 42), SamplingParams(max_tokens=3, ignore_eos=True), request_id="a")
    engine.step()
    engine.submit([65], GREEDY, request_id="b")
    run(engine)
    steps = engine.recorder.steps()
    assert [step.number for step in steps] == list(range(1, engine.stats().steps + 1))
    assert [dict(zip(s.request_ids, zip(s.first, s.num_tokens, strict=True), strict=True)) for s in steps[:4]] == [
        {"a": (0, 16)},
        {"a": (16, 16)},
        {"a": (32, 8), "b": (0, 1)},
        {"a": (40, 1), "b": (1, 1)},
    ]
    for step in steps:
        assert step.started <= step.scheduled <= step.executed <= step.committed
        assert 0 <= step.text_ns <= step.committed - step.executed
        assert step.blocks_used + step.blocks_free == engine.stats().kv_blocks_total
    assert steps[3].text_ns > 0
    assert steps[3].request_ids is steps[4].request_ids
    assert [step.number for step in engine.recorder.steps(2)] == [steps[-2].number, steps[-1].number]


def test_an_end_is_recorded_with_its_times_and_reason() -> None:
    engine = make_engine()
    engine.submit([65] * 5, SamplingParams(max_tokens=3, ignore_eos=True), request_id="a")
    run(engine)
    (record,) = engine.recorder.requests()
    assert record.first_scheduled is not None
    assert record.first_token is not None
    assert record.finished is not None
    assert record.arrived <= record.first_scheduled <= record.first_token <= record.finished
    assert (record.request_id, record.finish_reason) == ("a", "length")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 3, 0)


def test_a_preemption_is_recorded_where_it_happened() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4), max_num_seqs=2)
    engine.submit([65] * 32, SamplingParams(max_tokens=50, ignore_eos=True), request_id="old")
    engine.submit([66] * 32, SamplingParams(max_tokens=50, ignore_eos=True), request_id="young")
    run(engine)
    assert next(step.preempted for step in engine.recorder.steps() if step.preempted) == ("young",)


def test_memory_is_bounded() -> None:
    engine = make_engine(FakeExecutor(num_blocks=64), max_num_seqs=8, max_model_len=400)
    for number in range(8):
        engine.submit([65 + number], SamplingParams(max_tokens=300, ignore_eos=True))
    run(engine)
    (step, other) = engine.recorder.steps()[-2:]
    # Ids are shared with the step before; the rest is a few bytes per request.
    size = sum(map(sys.getsizeof, (step, step.first, step.num_tokens, step.num_draft)))
    assert size < 1000
    assert step.request_ids is other.request_ids


def test_the_number_of_steps_kept_and_of_their_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "STEPS_KEPT", 10)
    monkeypatch.setattr(trace, "ROWS_KEPT", 35)
    engine = make_engine(max_num_seqs=8)
    engine.submit([65], LONG)
    run(engine)
    assert len(engine.recorder.steps()) == 10
    for number in range(8):
        engine.submit([65 + number], LONG)
    run(engine)
    steps = engine.recorder.steps()
    assert [step.number for step in steps] == list(range(engine.stats().steps - 3, engine.stats().steps + 1))
    assert sum(len(step.request_ids) for step in steps) == 32


def test_those_that_a_bug_or_a_stop_ends_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit([65], LONG, request_id="a")
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
        engine.step()
    engine.submit([65], LONG, request_id="b")
    engine.step()
    engine.stop()
    ended = engine.recorder.requests()
    assert [(record.request_id, record.finish_reason) for record in ended] == [("a", "error"), ("b", "abort")]
    assert all(record.finished is not None for record in ended)


def test_the_state_tells_who_waits_for_what() -> None:
    engine = make_engine(FakeExecutor(num_blocks=6), max_num_seqs=3)
    engine.submit([65] * 70, SamplingParams(max_tokens=20, ignore_eos=True), request_id="runs")
    engine.submit([66] * 120, SamplingParams(max_tokens=20, ignore_eos=True), request_id="large")
    engine.submit([67], LONG, request_id="behind")
    engine.step()
    state = engine.state()
    assert [request.request_id for request in state.running] == ["runs"]
    assert [(request.request_id, request.waits_for) for request in state.waiting] == [
        ("large", "KV cache: it needs 4 blocks more than are cached for it, 3 are free"),
        ("behind", "large is before it"),
    ]
    assert (state.running[0].private_blocks, state.running[0].shared_blocks) == (3, 0)
    assert (state.pool.used, state.pool.wasted_slots) == (3, 3 * 32 - 71)
    assert engine.stats().kv_slots_wasted == 3 * 32 - 71
    assert [record.request_id for record in state.unfinished] == ["runs", "large", "behind"]
    run(engine)
    assert engine.state().running == engine.state().waiting == ()


def test_the_state_tells_of_seats_and_of_choices_that_wait() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    engine.submit([65] * 40, SamplingParams(max_tokens=5, n=2, ignore_eos=True), request_id="first")
    engine.submit([66], LONG, request_id="second")
    engine.step()
    assert [(request.request_id, request.waits_for) for request in engine.state().waiting] == [
        ("second", "a place: max_num_seqs 1 are running"),
        ("first:1", "the first token of first"),
    ]
    run(engine)
