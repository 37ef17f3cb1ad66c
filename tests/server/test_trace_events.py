"""The recorder's steps and requests as spans that Perfetto can draw."""

from collections import defaultdict
from random import Random
from time import perf_counter_ns

import pytest

from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.server.trace_events import Event, trace_events
from tests.engine.drive import make_engine, run
from tests.engine.fake_executor import FakeExecutor

ROUNDING = 0.001
"""Microseconds."""


def check_nesting(events: list[Event]) -> None:
    """In each track spans follow one another or lie in one another; else Perfetto drops some."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for track in spans.values():
        open_ends: list[float] = []
        for begin, end, name in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + ROUNDING:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + ROUNDING, name
            open_ends.append(end)


def events_of(engine: Engine) -> list[Event]:
    unfinished = engine.state().unfinished
    return trace_events(engine.recorder.steps(), [*engine.recorder.requests(), *unfinished], perf_counter_ns())


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def test_no_steps_no_events() -> None:
    engine = make_engine()
    engine.submit([65], SamplingParams(max_tokens=2))
    assert events_of(engine) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_spans_nest(seed: int) -> None:
    random = Random(seed)
    engine = make_engine(FakeExecutor(num_blocks=8), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200)
    ids = [engine.submit([65], SamplingParams(max_tokens=2)).request_id]
    engine.step()  # the trace begins with it: who ended before is not in it
    for _ in range(150):
        if random.random() < 0.2:
            prompt = [65 + random.randrange(4)] * random.randrange(1, 80)
            params = SamplingParams(max_tokens=random.randrange(1, 60), n=random.randrange(1, 3), ignore_eos=True)
            priority = random.randrange(2)
            ids += [choice.request_id for choice in engine.submit(prompt, params, priority=priority).choices]
        if ids and random.random() < 0.05:
            engine.abort(random.choice(ids))
        engine.step()
        if random.random() < 0.1:
            check_nesting(events_of(engine))
    run(engine)
    events = events_of(engine)
    check_nesting(events)
    tracks = {event["args"]["name"] for event in named(events, "thread_name")}
    assert tracks == {"steps", *ids}
    assert len(named(events, "preempted")) == engine.stats().preemptions > 0
    times = [event["ts"] for event in named(events, "KV blocks")]
    assert times == sorted(times)


def test_a_preemption_lasts_until_the_request_computes_again() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4), max_num_seqs=2)
    for name in ("old", "young"):
        engine.submit([65] * 32, SamplingParams(max_tokens=50, ignore_eos=True), request_id=name)
    while not engine.stats().preemptions:
        engine.step()
    (open_span,) = named(events_of(engine), "preempted")
    run(engine)
    (span,) = named(events_of(engine), "preempted")
    assert (span["ts"], span["tid"]) == (open_span["ts"], open_span["tid"])
    steps = engine.recorder.steps()
    at = next(index for index, step in enumerate(steps) if step.preempted == ("young",))
    back = next(step for step in steps[at:] if "young" in step.request_ids)
    assert span["ts"] == steps[at].started / 1e3
    assert span["ts"] + span["dur"] == pytest.approx(back.scheduled / 1e3, abs=ROUNDING)
