"""Seeing inside: ``/debug/trace`` and ``/debug/state``."""

import asyncio
from time import perf_counter_ns
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from paceline.engine.engine import Engine
from paceline.engine.trace import STEPS_KEPT
from paceline.errors import PacelineError
from paceline.server.errors import ApiError
from paceline.server.trace_events import trace_events


def debug_routes(engine: Engine) -> APIRouter:
    routes = APIRouter()

    @routes.get("/debug/trace")
    async def trace(
        last: Annotated[int, Query(ge=1, le=STEPS_KEPT, description="Steps, from the newest back.")] = 1000,
    ) -> Response:
        """The last steps as trace-event JSON: save it and open it in https://ui.perfetto.dev."""
        # Off the loop: thousands of steps are megabytes.
        return Response(await asyncio.to_thread(_trace, engine, last), media_type="application/json")

    @routes.get("/debug/state")
    async def state() -> Response:
        """Which requests run, which wait and for what, and who holds the KV cache."""
        return Response(await asyncio.to_thread(_state, engine), media_type="application/json")

    return routes


def _trace(engine: Engine, last: int) -> bytes:
    try:
        unfinished = engine.state().unfinished
    except PacelineError:
        unfinished = ()  # stuck: how it came to that is what people want to see
    # After the look: who ends meanwhile is in one of them at least.
    steps, ended = engine.recorder.steps(last), engine.recorder.requests()
    ids = {request.request_id for request in ended}
    requests = [*ended, *(request for request in unfinished if request.request_id not in ids)]
    events = trace_events(steps, requests, perf_counter_ns())
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _state(engine: Engine) -> bytes:
    try:
        state = engine.state()
    except PacelineError as error:
        raise ApiError(503, str(error), code="engine_stalled") from error
    return msgspec.json.encode(
        {
            "running": state.running,
            "waiting": state.waiting,
            "pool": state.pool,
            "stalled_seconds": engine.stalled_seconds(),
        }
    )
