"""The flight recorder as Chrome's trace-event JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.engine.trace import RequestRecord, StepRecord

_ENGINE, _REQUESTS = 1, 2
_STEPS = 1

Event = dict[str, Any]


def trace_events(steps: Sequence[StepRecord], requests: Iterable[RequestRecord], now: int) -> list[Event]:
    """One track of steps with their phases, counters, and a track for each request that the steps' time saw.

    ``now`` (``perf_counter_ns``) ends what is still under way.
    """
    if not steps:
        return []
    begin = steps[0].started
    events = [
        _name("process_name", _ENGINE, 0, "engine"),
        _name("thread_name", _ENGINE, _STEPS, "steps"),
        _name("process_name", _REQUESTS, 0, "requests"),
    ]
    for step in steps:
        events += _step_events(step)
    seen = [request for request in requests if (request.finished or now) >= begin]
    tracks = {request.request_id: track for track, request in enumerate(seen, 1)}
    for request in seen:
        events += _request_events(request, tracks[request.request_id], now)
    for step in steps:
        events += _chunk_events(step, tracks)
    events += _preemption_events(steps, tracks, {request.request_id: request.finished or now for request in seen})
    return events


def _step_events(step: StepRecord) -> Iterator[Event]:
    tokens, draft = sum(step.num_tokens), sum(step.num_draft)
    about = {
        "step": step.number,
        "requests": len(step.request_ids),
        "tokens": tokens,
        "proposed tokens": draft,
        "preempted": list(step.preempted),
        "blocks used": step.blocks_used,
        "blocks free": step.blocks_free,
        "text ms": step.text_ns / 1e6,
    }
    title = f"{tokens} tokens of {len(step.request_ids)}"
    yield _span(title, _ENGINE, _STEPS, step.started, step.committed, about)
    yield _span("schedule", _ENGINE, _STEPS, step.started, step.scheduled)
    yield _span("execute", _ENGINE, _STEPS, step.scheduled, step.executed)
    yield _span("commit", _ENGINE, _STEPS, step.executed, step.committed)
    yield _counter("KV blocks", step.started, {"used": step.blocks_used, "free": step.blocks_free})
    yield _counter("requests", step.started, {"running": step.running, "waiting": step.waiting})


def _request_events(request: RequestRecord, track: int, now: int) -> Iterator[Event]:
    end = request.finished or now
    scheduled, first_token = request.first_scheduled or end, request.first_token or end
    about = {
        "prompt tokens": request.prompt_tokens,
        "cached tokens": request.cached_tokens,
        "output tokens": request.output_tokens,
        "preemptions": request.preemptions,
        "ended": request.finish_reason,
    }
    yield _name("thread_name", _REQUESTS, track, request.request_id)
    yield _span(request.request_id, _REQUESTS, track, request.arrived, end, about)
    yield _span("queued", _REQUESTS, track, request.arrived, scheduled)
    if request.first_scheduled is not None:
        yield _span("prefill", _REQUESTS, track, scheduled, first_token)
    if request.first_token is not None:
        yield _span("decode", _REQUESTS, track, first_token, end)


def _chunk_events(step: StepRecord, tracks: dict[str, int]) -> Iterator[Event]:
    """What each request computed; single tokens are left to the span around them."""
    rows = zip(step.request_ids, step.first, step.num_tokens, step.num_draft, strict=True)
    for request_id, first, num_tokens, num_draft in rows:
        if num_tokens > 1 and request_id in tracks:
            about = {"from": first, "tokens": num_tokens, "proposed": num_draft, "step": step.number}
            title = f"{num_tokens} tokens"
            yield _span(title, _REQUESTS, tracks[request_id], step.scheduled, step.executed, about)


def _preemption_events(steps: Iterable[StepRecord], tracks: dict[str, int], ends: dict[str, int]) -> Iterator[Event]:
    """From the step that took a request's blocks to the one that lets it compute again, or to its end."""
    since: dict[str, int] = {}
    for step in steps:
        since |= {request_id: step.started for request_id in step.preempted if request_id in tracks}
        for request_id in since.keys() & step.request_ids if since else ():
            yield _span("preempted", _REQUESTS, tracks[request_id], since.pop(request_id), step.scheduled)
    for request_id, begin in since.items():
        yield _span("preempted", _REQUESTS, tracks[request_id], begin, ends[request_id])


def _span(name: str, process: int, track: int, begin: int, end: int, about: Event | None = None) -> Event:
    return {
        "name": name,
        "ph": "X",
        "ts": begin / 1e3,
        "dur": max(end - begin, 0) / 1e3,
        "pid": process,
        "tid": track,
        "args": about or {},
    }


def _counter(name: str, at: int, values: Event) -> Event:
    return {"name": name, "ph": "C", "ts": at / 1e3, "pid": _ENGINE, "tid": 0, "args": values}


def _name(kind: str, process: int, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
