"""The engine on its own thread. Every wait is bounded; nothing is measured."""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import pytest

from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from tests.engine.drive import GREEDY, Answer, check_clean, collect, make_engine
from tests.engine.fake_executor import FakeExecutor

LONG = SamplingParams(max_tokens=None, ignore_eos=True)
WAIT_S = 20


class Inbox:
    """A sink that tests can wait at."""

    def __init__(self) -> None:
        self._steps: queue.Queue[list[RequestOutput]] = queue.Queue()
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.threads: set[str] = set()

    def __call__(self, outputs: list[RequestOutput]) -> None:
        self.threads.add(threading.current_thread().name)
        self._steps.put(outputs)

    def wait_step(self) -> list[RequestOutput]:
        outputs = self._steps.get(timeout=WAIT_S)
        collect(outputs, self.answers)
        return outputs

    def wait_end(self, request_id: str) -> Answer:
        while not self.answers[request_id].outputs or self.answers[request_id].last.finish_reason is None:
            self.wait_step()
        return self.answers[request_id]


@contextmanager
def started(engine: Engine) -> Iterator[Inbox]:
    inbox = Inbox()
    engine.start(inbox)
    try:
        yield inbox
    finally:
        engine.stop()


def test_requests_are_answered_on_the_engines_thread() -> None:
    engine = make_engine()
    with started(engine) as inbox:
        request = engine.submit([65], GREEDY)
        assert inbox.wait_end(request.request_id).last.finish_reason == "length"
    assert inbox.threads == {"paceline-engine"}
    check_clean(engine)


def test_one_call_of_the_sink_has_all_outputs_of_a_step() -> None:
    engine = make_engine()
    ids = [engine.submit([65, i], GREEDY).request_id for i in range(2, 6)]
    with started(engine) as inbox:
        assert [output.request_id for output in inbox.wait_step()] == ids


def test_requests_from_many_threads_all_finish() -> None:
    engine = make_engine(FakeExecutor(num_blocks=8), max_num_seqs=8)
    names = [f"{worker}-{i}" for worker in range(8) for i in range(5)]

    def submit(worker: int) -> None:
        for i in range(5):
            engine.submit([65, worker, i], GREEDY, request_id=f"{worker}-{i}")

    with started(engine) as inbox:
        workers = [threading.Thread(target=submit, args=(worker,)) for worker in range(8)]
        for worker in workers:
            worker.start()
        for name in names:
            assert inbox.wait_end(name).last.finish_reason == "length"
        for worker in workers:
            worker.join(WAIT_S)
    check_clean(engine)


def test_abort_from_another_thread() -> None:
    engine = make_engine()
    with started(engine) as inbox:
        request = engine.submit([65], LONG)
        inbox.wait_step()
        engine.abort(request.request_id)
        assert inbox.wait_end(request.request_id).last.finish_reason in ("abort", "length")
    check_clean(engine)


def test_an_abort_takes_effect_with_the_next_step() -> None:
    executor = FakeExecutor()
    in_step, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def gate() -> None:
        in_step.release()
        assert go_on.acquire(timeout=WAIT_S)

    executor.before_step = gate
    engine = make_engine(executor)
    with started(engine) as inbox:
        request = engine.submit([65], LONG)
        assert in_step.acquire(timeout=WAIT_S)
        engine.abort(request.request_id)
        go_on.release()
        assert inbox.wait_end(request.request_id).last.finish_reason == "abort"
        # The token of the step that was under way, and no other.
        assert len(inbox.answers[request.request_id].token_ids) == 1
    assert len(executor.batches) == 1


def test_stop_aborts_what_runs_waits_and_just_came_in() -> None:
    executor = FakeExecutor()
    in_step, go_on = threading.Event(), threading.Event()

    def gate() -> None:
        in_step.set()
        assert go_on.wait(WAIT_S)

    executor.before_step = gate
    engine = make_engine(executor, max_num_seqs=1)
    inbox = Inbox()
    engine.start(inbox)
    ids = [engine.submit([65], LONG).request_id for _ in range(2)]
    assert in_step.wait(WAIT_S)
    ids.append(engine.submit([66], LONG).request_id)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    while not engine._stopped:
        stopper.join(0.01)
    go_on.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert [inbox.wait_end(request_id).last.finish_reason for request_id in ids] == ["abort"] * 3
    assert not executor.closed
    check_clean(engine)
    with pytest.raises(PacelineError, match="stopped"):
        engine.submit([65], GREEDY)


def test_an_idle_engine_sleeps_and_stops() -> None:
    engine = make_engine()
    with started(engine):
        pass
    assert engine.stats().steps == 0
    assert not any(thread.name == "paceline-engine" for thread in threading.enumerate())


def test_a_stopped_engine_can_be_started_again() -> None:
    engine = make_engine()
    for _ in range(2):
        with started(engine) as inbox:
            request = engine.submit([65], GREEDY)
            assert inbox.wait_end(request.request_id).last.finish_reason == "length"


def test_the_engine_cannot_be_started_twice_or_stepped_from_outside() -> None:
    engine = make_engine()
    with started(engine) as inbox:
        with pytest.raises(PacelineError, match="already started"):
            engine.start(inbox)
        with pytest.raises(PacelineError, match="own thread"):
            engine.step()


def test_the_thread_survives_a_failing_sink_and_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    inbox = Inbox()
    failed = threading.Event()

    def sink(outputs: list[RequestOutput]) -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        inbox(outputs)

    engine.start(sink)
    try:
        request = engine.submit([65], GREEDY)
        assert len(inbox.wait_end(request.request_id).token_ids) == 15
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
            request = engine.submit([66], GREEDY)
            assert inbox.wait_end(request.request_id).last.finish_reason == "error"
        request = engine.submit([67], GREEDY)
        assert inbox.wait_end(request.request_id).last.finish_reason == "length"
    finally:
        engine.stop()


def test_an_idle_engine_sleeps() -> None:
    engine = make_engine()
    with started(engine) as inbox:
        inbox.wait_end(engine.submit([65], GREEDY).request_id)
        woken = threading.Event()
        waiting = engine._mailbox.wait

        def waiting_noted(timeout: float | None = None) -> bool:
            # No time: only a notice of work ends it.
            assert timeout is None
            woken.set()
            return waiting(timeout)

        engine._mailbox.wait = waiting_noted  # type: ignore[method-assign]
        inbox.wait_end(engine.submit([66], GREEDY).request_id)
        assert woken.wait(WAIT_S)
        assert engine.stalled_seconds() == 0
        steps = engine.stats().steps
        assert engine.state().running == ()
        assert engine.stats().steps == steps


def test_the_state_is_taken_between_steps() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    with started(engine) as inbox:
        request = engine.submit([65], LONG)
        inbox.wait_step()
        state = engine.state(timeout=WAIT_S)
        assert [each.request_id for each in state.running] == [request.request_id]
        engine.abort(request.request_id)
        inbox.wait_end(request.request_id)


def test_a_step_that_does_not_end_is_told() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    gate, stuck = threading.Event(), threading.Event()
    with started(engine) as inbox:
        executor.before_step = lambda: (stuck.set(), gate.wait(WAIT_S))[0]  # type: ignore[assignment]
        request = engine.submit([65], GREEDY)
        assert stuck.wait(WAIT_S)
        with pytest.raises(PacelineError, match="in the same step"):
            engine.state(timeout=0.01)
        assert engine.stalled_seconds() > 0
        gate.set()
        inbox.wait_end(request.request_id)


def test_an_engine_that_was_idle_for_long_is_not_stalled_by_its_next_request() -> None:
    engine = make_engine()
    engine._beat_ns = 0  # when the machine started
    before = perf_counter_ns()
    engine.submit([65], GREEDY)
    assert engine.stalled_seconds() * 1e9 <= perf_counter_ns() - before
    engine.stop()


def test_an_errand_of_the_last_request_s_last_step_is_done() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    gate, stuck = threading.Event(), threading.Event()
    with started(engine) as inbox:
        executor.before_step = lambda: (stuck.set(), gate.wait(WAIT_S))[0]  # type: ignore[assignment]
        request = engine.submit([65], SamplingParams(max_tokens=1))
        assert stuck.wait(WAIT_S)
        done = threading.Event()
        engine._between_steps(done.set)
        assert not done.is_set()
        gate.set()
        inbox.wait_end(request.request_id)
        assert done.wait(WAIT_S)


def test_a_thread_that_was_stopped_has_not_died() -> None:
    engine = make_engine()
    with started(engine):
        thread = engine._thread
    assert engine.stalled_seconds() == 0
    engine._thread = thread  # as ``stop`` sees it between the thread's end and its own
    assert engine.stalled_seconds() == 0
