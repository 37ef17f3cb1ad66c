"""When which request is given up."""

from collections.abc import Iterator
from heapq import heappop, heappush

from paceline.engine.generation import Generation


class Deadlines:
    """A heap by time. Whoever has ended stays in it until its time comes, so that an end costs nothing here."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Generation]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, generation: Generation) -> None:
        request = generation.request
        if request.deadline_ns is not None:
            heappush(self._heap, (request.deadline_ns, request.arrival, generation))

    def overdue(self, now_ns: int) -> Iterator[Generation]:
        """Take out those whose time is over."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heappop(self._heap)[2]
