"""How far a run has come: a bar where standard error is a terminal, now and then a plain line where it is not."""

import sys
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from paceline.bench import load

_LINE_INTERVAL_S = 10.0


class RunProgress(Protocol):
    """What a run reports while it runs."""

    def say(self, message: str) -> None: ...

    def start_cell(self, title: str) -> None: ...

    def update(self, progress: load.Progress) -> None: ...


class ProgressBar:
    """A bar. It is drawn only when told to, not by a thread that would take the interpreter from the event loop."""

    def __init__(self, stream: TextIO) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[state]}"), console=Console(file=stream), auto_refresh=False
        )
        self._task: TaskID | None = None
        self._warming_up = False

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        self._progress.console.print(message, markup=False, highlight=False)

    def start_cell(self, title: str) -> None:
        self._task = self._progress.add_task(title, total=None, state="")
        self._warming_up = False

    def update(self, progress: load.Progress) -> None:
        assert self._task is not None
        if self._warming_up and not progress.warming_up:
            self._progress.reset(self._task)
        self._warming_up = progress.warming_up
        state = "warming up" if progress.warming_up else f"{progress.failed} failed" if progress.failed else ""
        self._progress.update(self._task, completed=progress.done, total=progress.total, state=state)
        self._progress.refresh()


class ProgressLines:
    """Dated plain lines for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._next_line = 0.0

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def say(self, message: str) -> None:
        print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S} {message}", file=self._stream, flush=True)

    def start_cell(self, title: str) -> None:
        self._title = title
        self._next_line = 0.0

    def update(self, progress: load.Progress) -> None:
        finished = progress.done == progress.total and not progress.warming_up
        if not finished and monotonic() < self._next_line:
            return
        self._next_line = monotonic() + _LINE_INTERVAL_S
        what = "warm-up" if progress.warming_up else "requests"
        self.say(f"{self._title}: {progress.done}/{progress.total} {what}, {progress.failed} failed")


def open_progress(stream: TextIO | None = None) -> ProgressBar | ProgressLines:
    """A context manager: the bar for a terminal, the lines for everything else; by default on standard error."""
    stream = stream or sys.stderr
    return ProgressBar(stream) if stream.isatty() else ProgressLines(stream)
