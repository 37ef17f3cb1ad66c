"""Errors on the wire, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.errors import InputError, PacelineError

Model = TypeVar("Model", bound=BaseModel)

_SHOWN_INPUT = 80
"""Characters of a wrong value that an error message repeats."""


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


def parse_body(model: type[Model], body: bytes) -> Model:
    """Read a JSON body.

    Raises:
        InputError: it is no JSON, or a field is missing or of the wrong type; ``param`` names the first wrong field.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        message = "; ".join(_describe(problem) for problem in problems[:3])
        raise InputError(message, param=_field_path(problems[0]), code=None) from None


def _field_path(problem: ErrorDetails) -> str | None:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    return path.lstrip(".") or None


def _describe(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    if problem["type"] == "json_invalid":
        return f"The body is not valid JSON: {context['error']}"
    field = _field_path(problem) or "The body"
    if problem["type"] == "missing":
        return f"{field}: this field is required"
    reason = str(context["error"]) if problem["type"] == "value_error" else problem["msg"]
    shown = repr(problem["input"])
    if len(shown) > _SHOWN_INPUT:
        shown = shown[:_SHOWN_INPUT] + "…"
    return f"{field}: {reason}, got {shown}"


def add_error_handlers(app: FastAPI) -> None:
    """Let every error that a route raises leave in OpenAI's shape."""

    @app.exception_handler(InputError)
    async def bad_request(_request: Request, error: InputError) -> Response:
        return JSONResponse(error_payload(400, str(error), param=error.param, code=error.code), 400)

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return JSONResponse(error_payload(error.status, str(error), code=error.code), error.status, error.headers)

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
