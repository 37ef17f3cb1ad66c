"""The ASGI application: routes, errors, and the engine's life inside it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from paceline import __version__
from paceline.server.debug import debug_routes
from paceline.server.errors import ApiError, add_error_handlers
from paceline.server.health import Health
from paceline.server.middleware import ApiKeyGuard, RequestLog
from paceline.server.openai import openai_routes
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.loading import LoadedModel


def create_app(
    model: "LoadedModel",
    *,
    served_names: Sequence[str],
    system_prompt: str | None = None,
    default_sampling: Mapping[str, Any] = MappingProxyType({}),
    api_keys: Sequence[str] = (),
    stall_seconds: float | None = None,
) -> FastAPI:
    """A server of one model. Its lifespan starts and stops the model's engine; it does not close the model.

    ``served_names`` (at least one) are the names that requests may use; ``system_prompt`` opens conversations that
    have no system message; ``default_sampling`` are fields of SamplingParams for requests that do not say; with
    ``api_keys``, everything but ``/health`` needs one of them. An engine that has been in one step for longer than
    ``stall_seconds`` (None: a minute, more with steps of more than 512 tokens) is reported as unhealthy.
    """
    service = Service(model, served_names, system_prompt, default_sampling)
    health = Health(model.engine, stall_seconds)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.dispatcher.start()
        watch = asyncio.create_task(health.watch())
        try:
            yield
        finally:
            watch.cancel()
            await service.stop()

    app = FastAPI(title="Paceline", version=__version__, lifespan=lifespan)
    app.state.service = service
    if api_keys:
        app.add_middleware(ApiKeyGuard, keys=api_keys)
    app.add_middleware(RequestLog)
    add_error_handlers(app)
    app.include_router(openai_routes(service))
    app.include_router(debug_routes(model.engine))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=None)
    async def is_healthy() -> dict[str, str]:
        problem = health.problem()
        if problem is not None:
            raise ApiError(503, problem, code="engine_stalled")
        return {"status": "ok"}

    @app.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache() -> dict[str, str]:
        """Forget every cached prefix (vLLM's name): what is asked for from now on is computed again."""
        model.engine.reset_prefix_cache()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app
