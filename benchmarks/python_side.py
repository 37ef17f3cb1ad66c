"""What Python takes of a step, next to the kernels: see step_overhead.py."""

import sys
from pathlib import Path

from benchmarks.command import json_lines
from benchmarks.model import Model
from benchmarks.results import OURS, Values
from benchmarks.turn import Turn

BATCHES = (1, 8, 32)
_PROGRAM = Path(__file__).with_name("step_overhead.py")


def python_turn(model: Model, threads: int) -> Turn:
    """Milliseconds of a step outside the executor, without HTTP and with a stream for each request."""
    kinds = ("python", "python-http")
    names = {batch: [f"{model.name} {kind} {batch}" for kind in kinds] for batch in BATCHES}

    def run() -> Values:
        (figures,) = json_lines([sys.executable, str(_PROGRAM), str(model.path), "--threads", str(threads)])
        values: dict[str, float] = {}
        for batch, (alone, served) in names.items():
            values[alone] = figures[str(batch)]["python_us"] / 1000
            values[served] = figures["http"][str(batch)]["python_us"] / 1000
        return values

    return Turn(OURS, tuple(name for each in names.values() for name in each), run)
