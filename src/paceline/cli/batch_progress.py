"""How far a batch has come: a bar where standard error is a terminal, now and then a plain line where it is not."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, strftime

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.1


@dataclass(slots=True)
class Tally:
    """How far a batch has come."""

    total: int = 0
    """Lines of the file."""
    skipped: int = 0
    """Lines whose results were there before."""
    done: int = 0
    """Lines that have a result, the skipped ones too."""
    failed: int = 0
    """Lines done that have a failure for a result."""
    first_failure: str | None = None
    """What went wrong first, in this run."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    began: float | None = None
    """When the first request was sent (``monotonic`` seconds)."""
    ended: float | None = None

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or reason

    @property
    def seconds(self) -> float:
        if self.began is None:
            return 0.0
        return (monotonic() if self.ended is None else self.ended) - self.began

    @property
    def tokens_per_second(self) -> float:
        """Of output, in this run."""
        return self.output_tokens / self.seconds if self.output_tokens else 0.0


def say(text: str) -> None:
    stamp = "" if sys.stderr.isatty() else strftime("%Y-%m-%d %H:%M:%S ")
    print(f"{stamp}{text}", file=sys.stderr, flush=True)


@contextmanager
def batch_progress() -> Iterator[Callable[[Tally], None]]:
    """A bar on a terminal, else a dated line now and then; both on stderr."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _at_most_every(
            _SECONDS_BETWEEN_LINES, lambda tally: say(f"{tally.done}/{tally.total} requests, {_state(tally)}")
        )


@contextmanager
def _bar() -> Iterator[Callable[[Tally], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    # Drawn between results only: a refresh thread would take the interpreter from the engine.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", state="")

        def draw(tally: Tally) -> None:
            bar.update(task, completed=tally.done, total=tally.total, state=_state(tally))
            bar.refresh()

        yield _at_most_every(_SECONDS_BETWEEN_DRAWINGS, draw)


def _at_most_every(seconds: float, show: Callable[[Tally], None]) -> Callable[[Tally], None]:
    """``show``, but not too often; the first and the last state are always shown."""
    next_time = 0.0

    def show_now_and_then(tally: Tally) -> None:
        nonlocal next_time
        if tally.ended is not None or monotonic() >= next_time:
            next_time = monotonic() + seconds
            show(tally)

    return show_now_and_then


def _state(tally: Tally) -> str:
    return f"{tally.failed} failed, {tally.tokens_per_second:.1f} tok/s"
