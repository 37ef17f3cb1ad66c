"""When to send: closed-loop concurrency, that is, a fixed number of slots that each send again when answered."""

import asyncio
import gc
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import uvloop

from paceline.bench.client import Connection, Endpoint, Exchange, connect, tls_context

PROGRESS_INTERVAL_S = 0.5
"""Drawing costs the event loop time, so it is rare."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request whose bytes are ready to be written."""

    id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a cell has come."""

    done: int
    failed: int
    total: int
    warming_up: bool


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """The measured exchanges of a cell, in the order in which they were started."""

    exchanges: list[Exchange]
    interrupted: bool


@dataclass(slots=True)
class _Round:
    """Requests that the slots share out among themselves, and what became of them."""

    requests: Sequence[PreparedRequest]
    warming_up: bool
    exchanges: list[Exchange] = field(default_factory=list)
    done: int = 0
    failed: int = 0

    def end(self, exchange: Exchange) -> None:
        self.done += 1
        self.failed += exchange.failure is not None or exchange.http_status >= 300

    def progress(self) -> Progress:
        return Progress(self.done, self.failed, len(self.requests), self.warming_up)


@dataclass(slots=True)
class _Slot:
    """One of the concurrent users; its connection is opened before the measured time and kept."""

    endpoint: Endpoint
    tls: ssl.SSLContext | None
    timeout_s: float
    keep_connection: bool = True
    connection: Connection | None = None

    async def open(self) -> None:
        if self.connection is None or not self.connection.reusable:
            self.connection = await connect(self.endpoint, self.tls, self.timeout_s)

    async def run(self, work: Iterator[PreparedRequest], round_: _Round) -> None:
        """Sends one request after the other until `work`, which the slots share, is used up."""
        for request in work:
            exchange = Exchange(request.id, scheduled_ns=perf_counter_ns())
            round_.exchanges.append(exchange)
            await self._exchange(request.payload, exchange)
            round_.end(exchange)

    async def _exchange(self, payload: bytes, exchange: Exchange) -> None:
        try:
            await self.open()
        except (OSError, TimeoutError) as error:
            exchange.fail("connect_error", f"cannot connect to {self.endpoint.authority}: {error or 'timed out'}")
            return
        except asyncio.CancelledError:
            exchange.fail("interrupted", "stopped by the user")
            raise
        assert self.connection is not None
        await self.connection.send(payload, exchange, self.timeout_s)
        if self.connection.was_closed_before(exchange):
            # It would happen again, so from now on each request has a connection of its own.
            self.keep_connection = False
            exchange.reconnect()
            await self._exchange(payload, exchange)
        elif not self.keep_connection:
            self.connection.close()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def run_closed_loop(
    endpoint: Endpoint,
    *,
    warmup: Sequence[PreparedRequest],
    measured: Sequence[PreparedRequest],
    concurrency: int,
    timeout_s: float,
    on_progress: Callable[[Progress], None],
) -> CellOutcome:
    """Measures one cell: opens the connections, warms up, then keeps `concurrency` requests in flight.

    Ctrl-C ends it early; what was in flight then is recorded as interrupted.
    """
    # uvloop halves the client's CPU time, and what it takes from a read to its stamp falls to a quarter.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_cell(endpoint, warmup, measured, concurrency, timeout_s, on_progress))


async def _run_cell(
    endpoint: Endpoint,
    warmup: Sequence[PreparedRequest],
    measured: Sequence[PreparedRequest],
    concurrency: int,
    timeout_s: float,
    on_progress: Callable[[Progress], None],
) -> CellOutcome:
    tls = tls_context(endpoint)
    slots = [_Slot(endpoint, tls, timeout_s) for _ in range(concurrency)]
    warmup_round, measured_round = _Round(warmup, warming_up=True), _Round(measured, warming_up=False)
    try:
        with _sigint_as_event() as interrupted:
            await _run_round(slots, warmup_round, interrupted, on_progress)
            if not interrupted.is_set():
                # A connection that fails here is tried once more, and recorded, when its slot sends.
                await asyncio.gather(*(slot.open() for slot in slots), return_exceptions=True)
                with frozen_garbage_collection():
                    await _run_round(slots, measured_round, interrupted, on_progress)
            return CellOutcome(measured_round.exchanges, interrupted.is_set())
    finally:
        for slot in slots:
            slot.close()


async def _run_round(
    slots: Sequence[_Slot], round_: _Round, interrupted: asyncio.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Sends all requests of the round over the slots; an interrupt cancels what is in flight."""
    work = iter(round_.requests)
    everything = asyncio.gather(*(slot.run(work, round_) for slot in slots))
    stop = asyncio.create_task(interrupted.wait())
    either: set[asyncio.Future[Any]] = {everything, stop}
    while not everything.done() and not stop.done():
        await asyncio.wait(either, timeout=PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        on_progress(round_.progress())
    stop.cancel()
    everything.cancel()
    with suppress(asyncio.CancelledError):
        await everything


@contextmanager
def _sigint_as_event() -> Iterator[asyncio.Event]:
    """Turns the first SIGINT into an event; a second one is a KeyboardInterrupt, as always."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def on_interrupt() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (ValueError, RuntimeError):
        # Not in the main thread: whoever runs us there has Ctrl-C.
        yield interrupted
        return
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def frozen_garbage_collection() -> Iterator[None]:
    """A collection over many live objects takes milliseconds, which would be charged to the server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
