"""What Python takes of a step, next to the kernels: see step_overhead.py."""

import sys
from pathlib import Path

from benchmarks.command import json_lines
from benchmarks.model import Model
from benchmarks.results import OURS, Values
from benchmarks.turn import Turn

BATCHES = (1, 8, 32)
_PROGRAM = Path(__file__).with_name("step_overhead.py")


def python_turn(model: Model) -> Turn:
    """Milliseconds of a step outside the executor."""
    names = {batch: f"{model.name} python {batch}" for batch in BATCHES}

    def run() -> Values:
        (figures,) = json_lines([sys.executable, str(_PROGRAM), str(model.path)])
        return {name: figures[str(batch)]["python_us"] / 1000 for batch, name in names.items()}

    return Turn(OURS, tuple(names.values()), run)
