"""Programs that print what they measured as JSON."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

TURN_LIMIT_S = 600


class BenchmarkError(PacelineError):
    """A contender, or a tool that measures it, did not work."""


def output(command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = TURN_LIMIT_S) -> str:
    """What a program prints.

    Raises:
        BenchmarkError: it cannot be started, fails, or takes longer than ``timeout`` seconds.
    """
    try:
        # A session of its own: what a script has started is ended with it.
        process = subprocess.Popen(
            command,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise BenchmarkError(f"{_named(command)}: {error}") from error
    with process:
        try:
            printed, complaints = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{_named(command)} took longer than {timeout:.0f} s, and was ended") from None
        finally:
            end_session(process)
    if process.returncode:
        raise BenchmarkError(f"{_named(command)} failed with code {process.returncode}: {last_lines(complaints)}")
    return printed


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started as the first of its session, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def json_lines(command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The JSON objects a program prints, one a line.

    Raises:
        BenchmarkError: as ``output``, or it prints none.
    """
    lines = [line for line in output(command, environment).splitlines() if line.startswith("{")]
    if not lines:
        raise BenchmarkError(f"{_named(command)} printed no figures")
    return [json.loads(line) for line in lines]


def last_lines(text: str, count: int = 3) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-count:])[-500:] or "no message"


def _named(command: Sequence[str]) -> str:
    """The words that tell which program it was, without folders."""
    return " ".join(Path(word).name for word in command[:4])
