"""OpenAI's endpoints: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from paceline.engine.outputs import RequestOutput, TokenLogprobs
from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError
from paceline.server.body import parse_body, read_body
from paceline.server.dispatch import Mailbox, stopping_error
from paceline.server.errors import CLIENT_CLOSED, ApiError, error_payload
from paceline.server.protocol import MAX_PROMPTS, ChatRequest, CompletionRequest, ExtraFields
from paceline.server.service import Service, new_id
from paceline.server.sse import DONE, ChunkEncoder, EventStream, event, watch_disconnect
from paceline.server.wire import (
    ChatChoice,
    CompletionChoice,
    Echo,
    Payload,
    prompt_logprobs_payload,
    timings_payload,
    usage_payload,
)


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
        if len(request.prompt) * params.n > MAX_PROMPTS:
            raise InputError(
                f"{len(request.prompt)} prompts with n {params.n} are more than the {MAX_PROMPTS} answers that one "
                "request may have",
                param="n",
            )
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
    num_choices: int
    """Of each prompt, one prompt's after the other's."""
    envelope: Payload
    """id, object, created and model: the fields of every event and of the whole body."""
    log: dict[str, Any]
    """The request's state; its ``log_detail`` ends up in the log line."""
    prompt_logprobs: Sequence[list[TokenLogprobs]]
    """Of each prompt, as far as they are computed."""
    finished: dict[int, RequestOutput] = field(default_factory=dict)
    """The last output of each choice that has ended."""

    def take(self, outputs: Sequence[tuple[int, RequestOutput]]) -> None:
        """Note what is news to the whole answer.

        Raises:
            ApiError: the engine failed on a choice (500), gave it up (504), or the server is stopping (503); the other
                choices are aborted.
        """
        for index, output in outputs:
            self.prompt_logprobs[index // self.num_choices].extend(output.prompt_logprobs)
            if output.finish_reason is None:
                continue
            failure = _failure(output)
            if failure is not None:
                self.log["log_detail"] = "client closed the connection" if self.mailbox.disconnected else str(failure)
                self.mailbox.abort()
                raise failure
            self.finished[index] = output
        if len(self.finished) == len(self.choices):
            self.log["log_detail"] = self._summary()

    def usage(self) -> Payload:
        """Of the whole answer, when all of it is there."""
        usages = [output.usage for _, output in sorted(self.finished.items()) if output.usage is not None]
        return usage_payload(usages, self.num_choices)

    def _summary(self) -> str:
        usage, reasons = self.usage(), ", ".join(str(last.finish_reason) for last in self.finished.values())
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return f"{usage['prompt_tokens']} prompt ({cached} cached) + {usage['completion_tokens']} tokens, {reasons}"


def _failure(output: RequestOutput) -> ApiError | None:
    if output.finish_reason == "error":
        return ApiError(500, output.error or "The engine failed on this request", code="generation_failed")
    if output.finish_reason == "timeout":
        # The header keeps OpenAI's clients from trying at once what has just taken too long.
        return ApiError(504, output.error or "timeout", code="request_timeout", headers={"x-should-retry": "false"})
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
            timeout=request.timeout,
        )
    except InputError as error:
        if error.param == "prompt":  # the engine's word for what this endpoint may call otherwise
            error.param = kind.prompt_field
        raise
    prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in prompts]
    answer = _Answer(
        mailbox,
        _choices(service, request, params, prompts, prompt_logprobs),
        params.n,
        {"id": response_id, "object": kind.object, "created": int(time.time()), "model": name},
        http.scope["state"],
        prompt_logprobs,
    )
    if request.stream:
        answer.envelope["object"] = kind.chunk_object
        return EventStream(_events(answer, include_usage=request.include_usage), mailbox.disconnect)
    async with watch_disconnect(http.receive, mailbox.disconnect):
        body = await _whole(answer)
    if body is None:
        return Response(status_code=CLIENT_CLOSED)
    if request.prompt_logprobs is not None:
        _add_prompt_logprobs(body, answer, service)
    return Response(msgspec.json.encode(body), media_type="application/json")


def _choices(
    service: Service,
    request: CompletionRequest | ChatRequest,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]],
) -> list[ChatChoice] | list[CompletionChoice]:
    vocabulary = service.model.tokenizer.vocabulary
    if isinstance(request, ChatRequest):
        return [ChatChoice(index, vocabulary) for index in range(params.n)]
    echoes: list[Echo | None] = [None] * len(prompts)
    if request.echo:
        decode = service.model.tokenizer.decode
        texts = [p if isinstance(p, str) else decode(p, skip_special=False) for p in request.prompt]
        echoes = [
            Echo(text, ids, logprobs, has_logprobs=params.logprobs is not None)
            for text, ids, logprobs in zip(texts, prompts, prompt_logprobs, strict=True)
        ]
    return [CompletionChoice(index, vocabulary, echoes[index // params.n]) for index in range(len(prompts) * params.n)]


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
            answer.take(outputs)
            events = []
            for index, output in outputs:
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


async def _whole(answer: _Answer) -> Payload | None:
    """The body of an answer that is not streamed; None if nobody waits for it any more."""
    texts: list[list[str]] = [[] for _ in answer.choices]
    tokens: list[list[TokenLogprobs]] = [[] for _ in answer.choices]
    try:
        async for outputs in answer.mailbox:
            answer.take(outputs)
            for index, output in outputs:
                texts[index].append(output.text)
                tokens[index].extend(output.logprobs)
    except ApiError:
        if answer.mailbox.disconnected:
            return None
        raise
    choices = [
        choice.whole("".join(texts[index]), tokens[index], answer.finished[index], answer.mailbox.seeds[index])
        for index, choice in enumerate(answer.choices)
    ]
    body = answer.envelope | {"choices": choices, "usage": answer.usage()}
    if len(answer.choices) == 1:
        # Times of several answers at once cannot be told as one.
        last = answer.finished[0]
        assert last.timings is not None
        assert last.usage is not None
        body["timings"] = timings_payload(last.timings, last.usage)
    return body


def _add_prompt_logprobs(body: Payload, answer: _Answer, service: Service) -> None:
    """As in vLLM: in each choice of a completion, beside the choices of a chat."""
    vocabulary = service.model.tokenizer.vocabulary
    reports = [prompt_logprobs_payload(each, vocabulary) for each in answer.prompt_logprobs]
    if isinstance(answer.choices[0], ChatChoice):
        body["prompt_logprobs"] = reports[0]
        return
    for index, choice in enumerate(body["choices"]):
        choice["prompt_logprobs"] = reports[index // answer.num_choices]


def _body_schema(model: type[BaseModel]) -> Payload:
    """The request body for /docs; the routes read it themselves, whatever content type a client names."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
