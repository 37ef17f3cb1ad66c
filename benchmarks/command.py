"""Programs that print what they measured as JSON."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

TURN_LIMIT_S = 600


class BenchmarkError(PacelineError):
    """A contender, or a tool that measures it, did not work."""


def output(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float | None = TURN_LIMIT_S
) -> str:
    """What a program prints.

    Raises:
        BenchmarkError: it cannot be started, fails, or takes longer than ``timeout`` seconds.
    """
    try:
        done = subprocess.run(
            command, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{_named(command)}: {error}") from error
    if done.returncode:
        raise BenchmarkError(f"{_named(command)} failed with code {done.returncode}: {last_lines(done.stderr)}")
    return done.stdout


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
