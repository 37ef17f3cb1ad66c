"""Request bodies: how long they may be, and what is told of those that are wrong, in JSON's words."""

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from paceline.errors import InputError
from paceline.server.errors import ApiError

Model = TypeVar("Model", bound=BaseModel)

MAX_BODY_BYTES = 8 << 20
"""Room for a million tokens, as text (about 4 bytes each) or as ids (7). Nothing else is answered while JSON is parsed:
in the worst case, of millions of tiny lists, this is some seconds' work."""

_SHOWN_INPUT = 80
"""Characters of a wrong value that an error message repeats."""

_encode = json.JSONEncoder(ensure_ascii=False).iterencode


async def read_body(http: Request) -> bytearray:
    """
    Raises:
        ApiError: it is longer than MAX_BODY_BYTES (413); what is beyond them is not kept.
    """
    declared = http.headers.get("content-length")  # a number: the HTTP parser refuses anything else
    if declared is not None and int(declared) > MAX_BODY_BYTES:
        raise _too_long(f"{int(declared)} bytes")
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise _too_long(f"more than {MAX_BODY_BYTES} bytes")
    return body


def _too_long(size: str) -> ApiError:
    return ApiError(
        413,
        f"The body has {size}, at most {MAX_BODY_BYTES} are taken; shorten it, or send it as several requests",
        code="request_too_large",
    )


def parse_body(model: type[Model], body: bytes | bytearray) -> Model:
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


def as_json(value: object) -> str:
    """A value as the client spelled it, or the beginning of it: a long one is not encoded to its end."""
    text = ""
    for piece in _encode(value):
        text += piece
        if len(text) > _SHOWN_INPUT:
            return text[:_SHOWN_INPUT] + "…"
    return text


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
    return f"{field}: {reason}, got {as_json(problem['input'])}"
