"""What was measured: every value of every round, and why a value is missing."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from paceline.errors import InputError

OURS = "paceline"

Values = Mapping[str, float]
"""Metric -> value of one turn."""


class Run(msgspec.Struct, frozen=True):
    """One call of the benchmark that added to the results."""

    command: str
    started: str
    """Date and time, UTC."""
    threads: int
    environment: dict[str, Any]
    versions: dict[str, str]
    """Of all engines: a commit of ours, releases of the peers."""


class Results(msgspec.Struct):
    """Values by metric and engine, in the order of the rounds. A metric is named by model, kind and batch: ``smollm2
    decode 8``; tables.py has the units of the kinds."""

    schema: int = 1
    runs: list[Run] = []
    values: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, dict[str, str]] = {}
    """Metric -> engine -> why its last turn gave no value."""

    def add(self, engine: str, values: Values) -> None:
        for metric, value in values.items():
            self.values.setdefault(metric, {}).setdefault(engine, []).append(value)
            self.failures.get(metric, {}).pop(engine, None)

    def fail(self, engine: str, metrics: tuple[str, ...], reason: str) -> None:
        for metric in metrics:
            self.failures.setdefault(metric, {})[engine] = reason

    def median(self, metric: str, engine: str) -> float | None:
        """None where nothing was measured."""
        values = self.values.get(metric, {}).get(engine)
        return median(values) if values else None

    def best(self, metric: str, engines: tuple[str, ...], *, least: bool = False) -> tuple[str, float] | None:
        """The engine with the highest median, or with the least, of those that have one."""
        medians = [(engine, value) for engine in engines if (value := self.median(metric, engine)) is not None]
        return (min if least else max)(medians, key=lambda pair: pair[1], default=None)

    def save(self, path: Path) -> None:
        """Replaces the file in one go: whoever is interrupted keeps the state before."""
        part = path.with_name(path.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        part.replace(path)


def load_results(path: Path) -> Results:
    """
    Raises:
        InputError: the file is not there, or is no such file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} holds no results of this benchmark: {error}") from error
