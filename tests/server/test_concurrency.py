"""Many clients at once; order is judged by what the executor was given, never by the clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model

LONG = {"prompt": "x", "max_tokens": 100_000, "stream": True}


@asynccontextmanager
async def streaming(http: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    """A long stream whose first token has come."""
    async with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.aiter_lines()
        assert '"text":"G"' in await anext(lines)
        yield lines


def patient_server(start_server: StartServer) -> LiveServer:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    return start_server(tiny_model(executor=executor, max_model_len=200_000))


def test_32_clients_that_come_one_after_another_all_stream_at_once(start_server: StartServer) -> None:
    server = patient_server(start_server)

    async def run() -> None:
        async with AsyncExitStack() as streams, httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            opened = [await streams.enter_async_context(streaming(http)) for _ in range(32)]
            # All have their first token, none has ended, and all go on to the next.
            assert server.engine.stats().running == 32
            for lines in opened:
                assert await anext(lines) == ""
                assert '"text":"r"' in await anext(lines)

    asyncio.run(run())
    assert max(server.executor.sequences_per_step) == 32


def test_a_short_request_among_long_ones_finishes_first(start_server: StartServer) -> None:
    server = patient_server(start_server)

    async def run() -> None:
        async with AsyncExitStack() as streams, httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            for _ in range(8):
                await streams.enter_async_context(streaming(http))
            short = await http.post("/v1/completions", json={"prompt": "y", "max_tokens": 4})
            assert short.json()["choices"][0]["finish_reason"] == "length"
            assert server.engine.stats().running == 8

    asyncio.run(run())
    # It shared every one of its steps with the eight, and took no more steps than it had tokens.
    assert server.executor.sequences_per_step.count(9) == 4
