"""Around every request: an id, the API key, one log line, and an answer even where our code fails."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.errors import error_payload

logger = logging.getLogger("paceline.server")

_POLLED = frozenset({"/health", "/metrics"})
"""Asked every few seconds by machines; logged at debug level."""
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST_ID = 128


class RequestLog:
    """Takes over or makes ``X-Request-Id``, returns it, and logs one line when the answer is out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("Request %s failed; this is a bug in Paceline", request_id)
            if status:
                raise  # The answer has begun: all that is left is to close the connection.
            message = f"Internal error; the server's log has the details under request id {request_id}"
            await JSONResponse(error_payload(500, message, code="internal_error"), 500)(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
            logger.log(
                level,
                "%s %s %d in %.0f ms%s (%s)",
                scope["method"],
                # Not scope["path"]: decoded, it may hold line breaks.
                scope["raw_path"].decode("latin-1")[:200],
                status,
                (time.perf_counter() - began) * 1e3,
                ": " + state["log_detail"] if "log_detail" in state else "",
                request_id,
            )


class ApiKeyGuard:
    """Lets only requests with ``Authorization: Bearer KEY`` through, ``/health`` excepted."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        message = "Missing or wrong API key; send it as 'Authorization: Bearer KEY'"
        payload = error_payload(401, message, code="invalid_api_key")
        await JSONResponse(payload, 401, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared, each in constant time: the time taken tells nothing about the keys.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _request_id(scope: Scope) -> str:
    given = _UNSAFE_IN_ID.sub("", _header(scope, b"x-request-id").decode("latin-1"))[:_LONGEST_ID]
    return given or uuid.uuid4().hex
