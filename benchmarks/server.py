"""A server as a process of its own, on loopback, that ends with its ``with`` block whatever happens."""

import http.client
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Self

import psutil

from benchmarks.command import BenchmarkError, end_session, last_lines

SERVED_NAME = "bench"
_START_LIMIT_S = 240
_POLL_S = 0.002


class Server:
    """
    Args:
        command: the words that start it.
        port: where it will listen.
    """

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str]) -> None:
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._started = monotonic()
        # A session of its own: its helpers are ended with it, and Ctrl-C reaches us first.
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self._process)
        self._log.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def seconds_to_first_token(self) -> float:
        """From the start of the process to the answer to a completion of one token, asked for every 2 ms.

        Raises:
            BenchmarkError: the server ended, or gave none in time.
        """
        while (answer := self._complete()) is None:
            self._check_alive()
            sleep(_POLL_S)
        seconds = monotonic() - self._started
        if answer["usage"]["completion_tokens"] != 1:
            raise BenchmarkError(f"the server was asked for one token and answered {answer}")
        return seconds

    def resident_bytes(self) -> int:
        """Of the process and all its children."""
        process = psutil.Process(self._process.pid)
        return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])

    def _complete(self) -> dict[str, Any] | None:
        """The answer; None while nobody listens or the model is still loading (llama-server: 503)."""
        body = json.dumps({"model": SERVED_NAME, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_LIMIT_S)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (ConnectionError, http.client.HTTPException):
            return None
        except OSError as error:
            raise BenchmarkError(f"the server does not answer: {error}") from error
        finally:
            connection.close()
        if response.status == 503:
            return None
        if response.status != 200:
            raise BenchmarkError(f"the server answered {response.status}: {content[:300]!r}")
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise BenchmarkError(f"the server ended with code {code}: {self._last_words()}")
        if monotonic() - self._started > _START_LIMIT_S:
            raise BenchmarkError(f"the server was not ready after {_START_LIMIT_S} s: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        return last_lines(self._log.read().decode(errors="replace"))


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
