"""What is left of the decode speed when another process wants one of the cores."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.model import Model
from benchmarks.offline import Contender
from benchmarks.results import Values
from benchmarks.turn import Turn

BATCHES = (1, 8)
_NEW_TOKENS = 32


def busy_turn(contender: Contender, model: Model) -> Turn:
    """The share of the idle speed that is kept, both measured in the same turn, and the two speeds."""
    kinds = ("busy-share", "busy-idle-speed", "busy-speed")
    names = {batch: [f"{model.name} {kind} {batch}" for kind in kinds] for batch in BATCHES}

    def run() -> Values:
        idle = contender.decode(BATCHES, _NEW_TOKENS)
        with busy_core():
            busy = contender.decode(BATCHES, _NEW_TOKENS)
        values: dict[str, float] = {}
        for batch, (share, before, after) in names.items():
            values |= {share: busy[batch] / idle[batch], before: idle[batch], after: busy[batch]}
        return values

    return Turn(contender.engine, tuple(name for each in names.values() for name in each), run, contender.needs)


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing but compute, on the last core that we may use."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(loop.pid, {max(os.sched_getaffinity(0))})
        yield
    finally:
        loop.kill()
        loop.wait()
