"""OpenAI's endpoints: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from paceline.engine.request import RequestOutput, SamplingParams, TokenLogprobs, Usage
from paceline.errors import InputError
from paceline.server.body import parse_body, read_body
from paceline.server.dispatch import Mailbox, stopping_error
from paceline.server.errors import CLIENT_CLOSED, ApiError, error_payload
from paceline.server.protocol import ChatRequest, CompletionRequest, ExtraFields
from paceline.server.service import Service, new_id
from paceline.server.sse import DONE, ChunkEncoder, EventStream, event, watch_disconnect
from paceline.server.wire import ChatChoice, CompletionChoice, Payload, timings_payload, usage_payload


def openai_routes(service: Service) -> APIRouter:
    routes = APIRouter()
    extra_fields = ExtraFields()
    created = int(time.time())

    @routes.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(http: Request) -> Response:
        arrived = time.perf_counter()
        request = parse_body(CompletionRequest, await read_body(http))
        extra_fields.check(request)
        name = service.served_name(request.model)
        params = request.to_sampling_params(service.default_sampling)
        prompts = await service.encode_prompts(request.prompt, parse_special=request.parse_special is not False)
        return await _answer(service, http, request, params, CompletionChoice, name, prompts, arrived)

    @routes.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        arrived = time.perf_counter()
        request = parse_body(ChatRequest, await read_body(http))
        extra_fields.check(request)
        name = service.served_name(request.model)
        params = request.to_sampling_params(service.default_sampling)
        messages = [message.for_template() for message in request.messages]
        prompt = await service.encode_chat(messages, request.chat_template_kwargs or {})
        return await _answer(service, http, request, params, ChatChoice, name, [prompt], arrived)

    @routes.get("/v1/models", response_model=None)
    async def models() -> Payload:
        return {"object": "list", "data": [model_card(name) for name in service.served_names]}

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Payload:
        return model_card(service.served_name(name))

    def model_card(name: str) -> Payload:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "paceline",
            "max_model_len": service.model.engine.config.max_model_len,
        }

    return routes


@dataclass(slots=True)
class _Answer:
    """One answer under way: everything that streaming and not streaming share."""

    mailbox: Mailbox
    choices: Sequence[ChatChoice | CompletionChoice]
    envelope: Payload
    """id, object, created and model: the fields of every event and of the whole body."""
    log: dict[str, Any]
    """The request's state; its ``log_detail`` ends up in the log line."""
    finished: list[tuple[RequestOutput, Usage]] = field(default_factory=list)

    def take(self, output: RequestOutput) -> None:
        """Note an output's end, if it is one.

        Raises:
            ApiError: the engine failed on it (500) or the server is stopping (503); the other prompts are aborted.
        """
        if output.finish_reason is None:
            return
        failure = self._failure(output)
        if failure is not None:
            self.log["log_detail"] = "client closed the connection" if self.mailbox.disconnected else str(failure)
            self.mailbox.abort()
            raise failure
        assert output.usage is not None
        self.finished.append((output, output.usage))
        usage, reasons = self.usage(), ", ".join(str(last.finish_reason) for last, _ in self.finished)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.log["log_detail"] = (
            f"{usage['prompt_tokens']} prompt ({cached} cached) + {usage['completion_tokens']} tokens, {reasons}"
        )

    def usage(self) -> Payload:
        return usage_payload([usage for _, usage in self.finished])

    @staticmethod
    def _failure(output: RequestOutput) -> ApiError | None:
        if output.finish_reason == "error":
            return ApiError(500, output.error or "The engine failed on this request", code="generation_failed")
        if output.finish_reason == "abort":
            return stopping_error()
        return None


async def _answer(
    service: Service,
    http: Request,
    request: CompletionRequest | ChatRequest,
    params: SamplingParams,
    kind: type[ChatChoice] | type[CompletionChoice],
    name: str,
    prompts: list[list[int]],
    arrived: float,
) -> Response:
    response_id = new_id(kind.id_prefix)
    try:
        mailbox = service.dispatcher.submit(
            prompts,
            params,
            response_id=response_id,
            arrived=arrived,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )
    except InputError as error:
        if error.param == "prompt":  # the engine's word for what this endpoint may call otherwise
            error.param = kind.prompt_field
        raise
    answer = _Answer(
        mailbox,
        [kind(index, service.model.tokenizer.vocabulary) for index in range(len(prompts))],
        {"id": response_id, "object": kind.object, "created": int(time.time()), "model": name},
        http.scope["state"],
    )
    if request.stream:
        answer.envelope["object"] = kind.chunk_object
        return EventStream(_events(answer, include_usage=request.include_usage), mailbox.disconnect)
    async with watch_disconnect(http.receive, mailbox.disconnect):
        return await _whole(answer)


async def _events(answer: _Answer, *, include_usage: bool) -> AsyncIterator[bytes]:
    """OpenAI's order: role (chat), text, one finish chunk per choice, usage if asked for, [DONE]."""
    # OpenAI: where usage is asked for, every other chunk has it as null.
    envelope = answer.envelope | {"usage": None} if include_usage else answer.envelope
    encoders = [ChunkEncoder(choice, envelope) for choice in answer.choices]
    opening = b"".join(encoder.opening() for encoder in encoders)
    if opening:
        yield opening
    try:
        async for outputs in answer.mailbox:
            events = []
            for index, output in outputs:
                answer.take(output)
                events.append(encoders[index].output(output))
                if output.finish_reason is not None:
                    events.append(encoders[index].finish(output, answer.mailbox.seeds[index]))
            ready = b"".join(events)
            if ready:
                yield ready
        if include_usage:
            yield event(answer.envelope | {"choices": [], "usage": answer.usage()})
    except ApiError as error:
        yield event(error_payload(error.status, str(error), code=error.code))
    yield DONE


async def _whole(answer: _Answer) -> Response:
    texts: list[list[str]] = [[] for _ in answer.choices]
    tokens: list[list[TokenLogprobs]] = [[] for _ in answer.choices]
    last: dict[int, RequestOutput] = {}
    try:
        async for outputs in answer.mailbox:
            for index, output in outputs:
                answer.take(output)
                texts[index].append(output.text)
                tokens[index].extend(output.logprobs)
                last[index] = output
    except ApiError:
        if answer.mailbox.disconnected:
            return Response(status_code=CLIENT_CLOSED)
        raise
    choices = [
        choice.whole(
            "".join(texts[index]),
            choice.logprobs(tokens[index]) if tokens[index] else None,
            last[index],
            answer.mailbox.seeds[index],
        )
        for index, choice in enumerate(answer.choices)
    ]
    body = answer.envelope | {"choices": choices, "usage": answer.usage()}
    if len(answer.finished) == 1:
        # Times of several prompts at once cannot be told as one.
        output, usage = answer.finished[0]
        assert output.timings is not None
        body["timings"] = timings_payload(output.timings, usage)
    return Response(msgspec.json.encode(body), media_type="application/json")


def _body_schema(model: type[BaseModel]) -> Payload:
    """The request body for /docs; the routes read it themselves, whatever content type a client names."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
