"""Flight recorder: what the last steps did, and when each request came how far."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.engine.chunk import Chunk
from paceline.engine.outputs import FinishReason
from paceline.engine.request import Request

STEPS_KEPT = 4096
ROWS_KEPT = 1 << 18
"""Requests in all kept steps together: some 10 MB. Fewer steps are kept where hundreds of requests run."""
REQUESTS_KEPT = 4096


class StepClock:
    """The moments of one step, ``perf_counter_ns``, and what it spends on text meanwhile."""

    __slots__ = ("committed", "executed", "scheduled", "started", "text_ns")

    def __init__(self, started: int) -> None:
        self.started = self.scheduled = self.executed = self.committed = started
        self.text_ns = 0
        """Turning tokens into text, a part of the commit."""


class StepRecord(NamedTuple):  # a frozen dataclass takes far longer to make
    """One step. Times are ``perf_counter_ns``."""

    number: int
    started: int
    scheduled: int
    """Until here it was decided who computes what."""
    executed: int
    """Until here it was computed."""
    committed: int
    """Until here results were noted and turned into text."""
    text_ns: int
    request_ids: tuple[str, ...]
    first: "array[int]"
    """[requests] position of each one's first token in this step."""
    num_tokens: "array[int]"
    """[requests]"""
    num_draft: "array[int]"
    """[requests] how many of them were only proposed."""
    preempted: tuple[str, ...]
    running: int
    waiting: int
    blocks_used: int
    blocks_free: int


class RequestRecord(NamedTuple):
    """A request that has ended. Times are ``perf_counter_ns``, None for what it never reached."""

    request_id: str
    arrived: int
    first_scheduled: int | None
    first_token: int | None
    finished: int | None
    finish_reason: FinishReason | None
    """None: it has not ended yet."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int


class FlightRecorder:
    """Keeps the last steps and the last requests. The engine's thread writes, any thread reads."""

    def __init__(self) -> None:
        # Append and copy of a deque are atomic under the interpreter's lock.
        self._steps: deque[StepRecord] = deque()
        self._rows = 0
        self._requests: deque[RequestRecord] = deque(maxlen=REQUESTS_KEPT)
        self._request_ids: tuple[str, ...] = ()

    def record_step(
        self,
        number: int,
        clock: StepClock,
        chunks: Sequence[Chunk],
        first: "array[int]",
        *,
        preempted: Iterable[str],
        running: int,
        waiting: int,
        blocks_used: int,
        blocks_free: int,
    ) -> None:
        """``first`` are the positions that the chunks began at."""
        request_ids = tuple([chunk.request.request_id for chunk in chunks])
        if request_ids == self._request_ids:
            request_ids = self._request_ids  # one copy for all steps of the same requests
        self._request_ids = request_ids
        self._steps.append(
            StepRecord(
                number,
                clock.started,
                clock.scheduled,
                clock.executed,
                clock.committed,
                clock.text_ns,
                request_ids,
                first,
                array("i", [chunk.num_tokens for chunk in chunks]),
                array("i", [len(chunk.draft) for chunk in chunks]),
                tuple(preempted),
                running,
                waiting,
                blocks_used,
                blocks_free,
            )
        )
        self._rows += len(chunks)
        while len(self._steps) > STEPS_KEPT or self._rows > ROWS_KEPT:
            self._rows -= len(self._steps.popleft().request_ids)

    def record_end(self, request: Request, reason: FinishReason) -> None:
        self._requests.append(request_record(request, reason))

    def steps(self, last: int = STEPS_KEPT) -> list[StepRecord]:
        """The last steps, oldest first."""
        steps = list(self._steps.copy())
        return steps[-last:] if last < len(steps) else steps

    def requests(self) -> list[RequestRecord]:
        """The last requests that have ended, oldest first."""
        return list(self._requests.copy())


def request_record(request: Request, reason: FinishReason | None) -> RequestRecord:
    return RequestRecord(
        request.request_id,
        request.arrived_ns,
        request.first_scheduled_ns,
        request.first_token_ns,
        request.finished_ns,
        reason,
        len(request.prompt_ids),
        len(request.output_ids),
        request.num_cached_tokens,
        request.num_preemptions,
    )
