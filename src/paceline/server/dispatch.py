"""Between the engine's thread and the event loop: one hand-over per step, one mailbox per HTTP request."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput
from paceline.engine.sampling import SamplingParams
from paceline.server.errors import ApiError
from paceline.server.metrics import RequestClock, ServerMetrics


class Mailbox:
    """The engine requests of one HTTP request (``n`` per prompt) and their outputs as they come.

    Iterating gives lists of (index of the choice, output): everything that was ready at once. It ends after the last
    output of every choice. The first ``n`` choices are the first prompt's. All methods belong to the event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready = asyncio.Event()
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._unfinished: set[str] = set()
        self.seeds: list[int] = []
        """The seed of each choice's draws: the one asked for, or the one that was drawn for it."""
        self.disconnected = False
        """The client went away, so the rest is for nobody."""

    def add(self, request_id: str, seed: int) -> None:
        self._unfinished.add(request_id)
        self.seeds.append(seed)

    def deliver(self, index: int, output: RequestOutput) -> None:
        self._outputs.append((index, output))
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        self._ready.set()

    def abort(self) -> None:
        """Free what the unfinished requests hold, within one step; harmless when all are finished."""
        for request_id in self._unfinished:
            self._engine.abort(request_id)

    def disconnect(self) -> None:
        self.disconnected = True
        self.abort()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        while self._unfinished or self._outputs:
            await self._ready.wait()
            self._ready.clear()
            outputs, self._outputs = self._outputs, []
            yield outputs


class _Route:
    """Where a request's outputs go, and the clock they are timed against."""

    __slots__ = ("clock", "index", "mailbox")

    def __init__(self, mailbox: Mailbox, index: int, clock: RequestClock) -> None:
        self.mailbox = mailbox
        self.index = index
        self.clock = clock


class Dispatcher:
    """Submits to the engine and brings its outputs back to the event loop."""

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._routes: dict[str, _Route] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the engine; its outputs come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._sink)

    async def stop(self) -> None:
        """Refuse new requests and end all others, so that their streams end; calling it twice is harmless."""
        if self._stopping:
            return
        self._stopping = True
        # Off the loop, which has to go on delivering the last outputs while the engine's thread is joined.
        await asyncio.to_thread(self._engine.stop)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        response_id: str,
        arrived: float,
        priority: int,
        cache_salt: str,
        timeout: float | None,
    ) -> Mailbox:
        """Queue every prompt; ``arrived`` (``perf_counter`` seconds) is when the HTTP request came.

        Raises:
            InputError: the engine refuses a prompt; the others are aborted.
            OverloadedError: too many requests wait; the other prompts are aborted.
            ApiError: the server is stopping (503).
        """
        if self._stopping:
            raise stopping_error()
        mailbox = Mailbox(self._engine)
        try:
            for number, prompt_ids in enumerate(prompts):
                # The engine may answer before submit returns, but its outputs only reach the loop after this call.
                request = self._engine.submit(
                    prompt_ids,
                    params,
                    request_id=f"{response_id}-{number}",
                    priority=priority,
                    cache_salt=cache_salt,
                    timeout=timeout,
                )
                for choice in request.choices:
                    self._routes[choice.request_id] = _Route(mailbox, len(mailbox.seeds), RequestClock(arrived))
                    mailbox.add(choice.request_id, choice.seed)
        except BaseException:
            mailbox.abort()
            raise
        return mailbox

    def _sink(self, outputs: list[RequestOutput]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs, time.perf_counter())

    def _deliver(self, outputs: list[RequestOutput], now: float) -> None:
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            if output.finish_reason is not None:
                del self._routes[output.request_id]
            self._metrics.observe(route.clock, output, now)
            route.mailbox.deliver(route.index, output)


def stopping_error() -> ApiError:
    return ApiError(503, "The server is stopping; send the request again when it is back", code="server_stopping")
