"""Errors on the wire, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from paceline.errors import InputError, OverloadedError, PacelineError

CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; only the log sees it."""


class ApiError(PacelineError):
    """An answer other than 200 and 400: its status travels with it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


def error_payload(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The body of an error answer, also the payload of an error event inside a stream."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_error_handlers(app: FastAPI) -> None:
    """Let every error that a route raises leave in OpenAI's shape."""

    @app.exception_handler(InputError)
    async def bad_request(_request: Request, error: InputError) -> Response:
        return JSONResponse(error_payload(400, str(error), param=error.param, code=error.code), 400)

    @app.exception_handler(RequestValidationError)
    async def bad_query(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])
        message = f"{param} is {str(first['input'])[:200]!r}: {first['msg']}"
        return JSONResponse(error_payload(400, message, param=param), 400)

    @app.exception_handler(OverloadedError)
    async def overloaded(_request: Request, error: OverloadedError) -> Response:
        headers = {"Retry-After": str(error.retry_after)}
        return JSONResponse(error_payload(503, str(error), code="server_overloaded"), 503, headers)

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return JSONResponse(error_payload(error.status, str(error), code=error.code), error.status, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left_in_mid_body(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 404:
            message, code = f"There is no {request.url.path} here; /docs lists what there is", "not_found"
        elif error.status_code == 405:
            allowed = headers.get("Allow", "")
            message, code = f"{request.url.path} does not take {request.method}; use {allowed}", "method_not_allowed"
        else:
            message, code = str(error.detail), "http_error"
        return JSONResponse(error_payload(error.status_code, message, code=code), error.status_code, headers)
