"""A turn: one engine's go at one thing. All take turns within each round, as the machine may be shared and drift."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from benchmarks.results import Results, Values
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class Turn:
    engine: str
    metrics: tuple[str, ...]
    """What it measures: the cells that stay empty if it fails."""
    run: Callable[[], Values]
    """Raises an exception: it could not be measured."""
    peers: tuple[str, ...] = ()
    """What ``peers install`` must have installed."""


def take_turns(turns: Sequence[Turn], rounds: int, results: Results, output: Path) -> None:
    """Run all turns ``rounds`` times and save the results after each.

    A turn that fails leaves its cells empty and the others alone. One that never worked is not tried again.
    """
    hopeless: set[int] = set()
    for number in range(1, rounds + 1):
        for place, turn in enumerate(turns):
            if place in hopeless:
                continue
            start = monotonic()
            try:
                results.add(turn.engine, turn.run())
                outcome = f"{monotonic() - start:.0f} s"
            except Exception as error:  # also a program that prints other figures than it should
                outcome = str(error) if isinstance(error, PacelineError) else repr(error)
                results.fail(turn.engine, turn.metrics, outcome)
                if not any(results.values.get(metric, {}).get(turn.engine) for metric in turn.metrics):
                    hopeless.add(place)
            results.save(output)
            what = f"{turn.engine}: {turn.metrics[0]}" + (" …" if len(turn.metrics) > 1 else "")
            print(
                f"round {number} of {rounds}, {place + 1}/{len(turns)}, {what}: {outcome}", file=sys.stderr, flush=True
            )
