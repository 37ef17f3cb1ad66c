"""The HTTP server process: uvicorn on a socket that is bound already, and an end that lets no stream hang."""

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.address import address_error
from paceline.server.service import Service

_BACKLOG = 2048
_INTERRUPTED = 130


class HttpServer(uvicorn.Server):
    """Serves an app of ``create_app`` until SIGINT, SIGTERM or ``should_exit``.

    The first signal ends every stream with an error event, frees the blocks and returns from ``run``; a second SIGINT
    ends the process at once.
    """

    def __init__(self, app: FastAPI, *, on_ready: Callable[[], None]) -> None:
        # Logs go to the root logger's handlers, in our format; requests are logged by RequestLog.
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                log_config=None,
                access_log=False,
                backlog=_BACKLOG,
                lifespan="on",
                server_header=False,
                headers=[("Server", f"paceline/{__version__}")],
            )
        )
        self._service: Service = app.state.service
        self._on_ready = on_ready
        self.stopped_by: str | None = None
        """Name of the signal that ended it, such as ``SIGTERM``."""
        self.failure: PacelineError | None = None
        """Why it ended, if it could not go on."""

    def run_on(self, listener: socket.socket) -> None:
        """
        Raises:
            InputError: another program began to listen on the same address since ``bind``.
        """
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise address_error(host, port, error) from None
        self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits until every connection is done, and a stream is only done when its request ends.
        await self._service.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(_INTERRUPTED)
        # Not uvicorn's own: it would raise the signal again after an orderly end, and that is not a failure.
        self.should_exit = True
        self.stopped_by = self.stopped_by or signal.Signals(sig).name
