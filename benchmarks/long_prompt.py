"""Eight streams are running when a long prompt comes in: the pauses within them, and the prompt's own first token."""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from time import perf_counter_ns

import numpy as np
import uvloop

from benchmarks.command import BenchmarkError
from benchmarks.model import PROMPT_TOKENS, Model
from benchmarks.peers_home import Peers
from benchmarks.results import OURS, Values
from benchmarks.server import SERVED_NAME, Server
from benchmarks.serving import LLAMA_SERVER, Start, llama_server, our_server, vllm_server
from benchmarks.turn import Turn
from paceline.bench.answer import Answer, error_message, read_stream
from paceline.bench.api import Dialect
from paceline.bench.client import Endpoint, Exchange, connect, encode_post
from paceline.bench.load import frozen_garbage_collection
from paceline.loading import open_model

STREAMS = 8
LONG_TOKENS = 3300
WITH_TARGET = f"{OURS} --target-itl 50ms"

_STREAM_TOKENS = 1500
"""More than any of them gets: they are cut off once the long prompt is answered."""
_EVENTS_BEFORE = 32
"""Of each stream, when the long prompt is sent."""
_LONG_NEW_TOKENS = 16
"""In which the streams go on, so that the last pause has its end."""
_CONTEXT = 5120
_LIMIT_S = 300
_POLL_S = 0.005
_WORDS = re.findall(
    r"\w+",
    """time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend""",
)
_QUESTION = "Write a long story, with many people in it, in which these words come up:"

_DIALECT = Dialect("openai-chat", SERVED_NAME, "stream", 0.0, ignore_eos=True, stream_usage=False)


def long_prompt_turns(model: Model, peers: Peers) -> list[Turn]:
    """ITL of the streams while the prompt is computed, and its TTFT; each server with room for nine requests."""
    slots = STREAMS + 1

    def ours(*options: str) -> Server:
        return our_server(model, peers.threads, "--kv-memory", "1GiB", *options)

    def turn(engine: str, start: Start, *needed: str) -> Turn:
        names = [f"{model.name} long-prompt {kind}" for kind in ("itl-p50", "itl-p99", "itl-max", "ttft")]

        def run() -> Values:
            with start() as server:
                server.seconds_to_first_token()
                return dict(zip(names, measure(server.url, chat_prompt(model)), strict=True))

        return Turn(engine, tuple(names), run, needed)

    return [
        turn(OURS, ours),
        turn(WITH_TARGET, lambda: ours("--target-itl", "50ms")),
        turn(LLAMA_SERVER, lambda: llama_server(model, peers, "-np", slots, "-c", slots * _CONTEXT), "llama"),
        turn("vLLM", lambda: vllm_server(model, peers), "vllm"),
    ]


def chat_prompt(model: Model) -> Callable[[int], str]:
    """Makes messages that the model's chat template turns into so many tokens; no two begin alike."""
    opened = open_model(str(model.path))
    template = opened.chat_template
    assert template is not None

    def num_tokens(text: str) -> int:
        return len(template.encode([{"role": "user", "content": text}]))

    def prompt(tokens: int) -> str:
        words = random.choices(_WORDS, k=tokens - num_tokens("") - len(opened.tokenizer.encode(f" {_QUESTION}")))
        text = " ".join([*words[:8], _QUESTION, *words[8:]])
        if num_tokens(text) != tokens:
            raise BenchmarkError(f"a prompt that was to have {tokens} tokens has {num_tokens(text)}")
        return text

    return prompt


def measure(url: str, prompt: Callable[[int], str]) -> tuple[float, float, float, float]:
    """p50, p99 and maximum of the pauses within the streams, in ms, and the long prompt's TTFT in s.

    Raises:
        BenchmarkError: a request failed, or ended too early.
    """
    endpoint = Endpoint.from_url(url)

    def payload(tokens: int, new_tokens: int) -> bytes:
        return encode_post(endpoint, _DIALECT.path, _DIALECT.body(prompt(tokens), new_tokens), None)

    # Warms the server up: the first one of this length takes some servers longer.
    warm_up = payload(LONG_TOKENS, 1)
    streams = [payload(PROMPT_TOKENS, _STREAM_TOKENS) for _ in range(STREAMS)]
    late = payload(LONG_TOKENS, _LONG_NEW_TOKENS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, frozen_garbage_collection():
        runner.run(_collide(endpoint, [], warm_up))
        running, long = runner.run(_collide(endpoint, streams, late))
    sent, first = long.sent_ns, _answer(long).events[0][0]
    found = [pause for each in running for pause in pauses(_answer(each), sent, first)]
    p50, p99 = np.percentile(found, (50, 99)).tolist()
    return p50, p99, max(found), (first - sent) / 1e9


async def _collide(endpoint: Endpoint, streams: Sequence[bytes], late: bytes) -> tuple[list[Exchange], Exchange]:
    """Start the streams, send ``late`` when all of them are well under way, and stop them when it has its answer."""
    connections = [await connect(endpoint, None, _LIMIT_S) for _ in (*streams, late)]
    exchanges = [Exchange(number, perf_counter_ns()) for number in range(len(connections))]
    *running, long = exchanges
    tasks = [
        asyncio.create_task(connection.send(payload, exchange, _LIMIT_S))
        for connection, payload, exchange in zip(connections, streams, running, strict=False)
    ]
    try:
        while any(len(each.reads) < _EVENTS_BEFORE for each in running):
            await asyncio.sleep(_POLL_S)
            _check_running(running)
        await connections[-1].send(late, long, _LIMIT_S)
        _check_running(running)
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for connection in connections:
            connection.close()
    return running, long


def _check_running(streams: Sequence[Exchange]) -> None:
    """
    Raises:
        BenchmarkError: one of them has ended.
    """
    for stream in streams:
        if stream.end_ns:
            num_events = len(_answer(stream).events)
            raise BenchmarkError(f"a stream ended before the long prompt was answered, after {num_events} events")


def _answer(exchange: Exchange) -> Answer:
    """
    Raises:
        BenchmarkError: there is no content in it.
    """
    if exchange.http_status != 200:
        raise BenchmarkError(f"a request was answered {exchange.http_status}: {error_message(exchange.body)}")
    answer = read_stream(exchange.reads)
    if answer.status not in ("ok", "incomplete") or not answer.events:
        raise BenchmarkError(f"a request has no answer: {answer.error or exchange.failure}")
    return answer


def pauses(answer: Answer, begin: int, end: int) -> list[float]:
    """Milliseconds between events, of all pauses that reach into the time from ``begin`` to ``end``."""
    stamps = [ns for ns, _ in answer.events]
    return [(after - before) / 1e6 for before, after in pairwise(stamps) if after > begin and before < end]
