"""Who computes which tokens in the next step."""

from bisect import insort
from contextlib import suppress
from time import perf_counter_ns
from typing import NamedTuple

from paceline.engine.blocks import BlockPool
from paceline.engine.config import EngineConfig
from paceline.engine.request import Request
from paceline.engine.stats import Counters


class Chunk(NamedTuple):
    """A request's share of a step: its next ``num_tokens`` tokens from ``request.num_computed_tokens`` on."""

    request: Request
    num_tokens: int
    samples: bool
    """It reaches the last known token, so that the next one is sampled behind it."""


class Scheduler:
    """Lets every request's ``num_computed_tokens`` catch up with its ``num_tokens``, a token budget per step.

    That is the one invariant, vLLM v1's. Chunked prefill, prefix hits, decoding and coming back after a preemption are
    all cases of it. Blocks for all known tokens are taken when a request starts to run, so only a decoding request can
    find the pool empty, and at most one running request at a time is part-way through its prefill.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters) -> None:
        self.config = config
        self.pool = pool
        self.counters = counters
        self.running: list[Request] = []
        """In order of arrival, so the first is the oldest."""
        self.preempted: list[Request] = []
        """In (priority, arrival) order, as the next."""
        self.waiting: list[Request] = []

    @property
    def num_requests(self) -> int:
        return len(self.running) + len(self.preempted) + len(self.waiting)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or aborted, in whatever state it is, and free its blocks."""
        for queue in (self.running, self.preempted, self.waiting):
            with suppress(ValueError):
                queue.remove(request)
                break
        self.pool.free(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only if there are no requests."""
        self._reserve_slots()
        # Tokens of decoding requests come first, so that no prefill delays them by more than one step's budget.
        chunks = [Chunk(request, 1, samples=True) for request in self.running if request.num_pending_tokens == 1]
        budget = self.config.max_num_batched_tokens - len(chunks)
        for request in self.running:
            if request.num_pending_tokens > 1 and budget:
                chunks.append(_next_chunk(request, budget))
                budget -= chunks[-1].num_tokens
        # Preempted ones go before waiting ones: somebody has already read the beginning of their text.
        # The head of the line that does not fit holds up all behind it, so that nobody overtakes it.
        while budget and len(self.running) < self.config.max_num_seqs:
            queue = self.preempted or self.waiting
            if not queue or not self._start(queue[0]):
                break
            chunks.append(_next_chunk(queue.pop(0), budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def commit(self, chunk: Chunk, token_id: int | None) -> None:
        """Record that a chunk's KV is computed, and the token sampled at its end, if it had one."""
        request = chunk.request
        num_computed = request.num_computed_tokens + chunk.num_tokens
        self.pool.publish(request, num_computed)
        request.num_computed_tokens = num_computed
        if token_id is not None:
            request.append_output(token_id)

    def _reserve_slots(self) -> None:
        """Give every running request the slot that its newest token needs, preempting others where the pool is full."""
        for request in tuple(self.running):
            # An empty block table: the request was preempted in this very loop.
            while request.block_table and not self.pool.append(request):
                self._preempt(self._victim())

    def _victim(self) -> Request:
        """Lowest priority first, then fewest tokens to recompute; never the oldest, so that it always gets done."""
        return max(self.running[1:], key=lambda other: (other.priority, -other.num_computed_tokens, other.arrival))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        insort(self.preempted, request, key=_rank)

    def _start(self, request: Request) -> bool:
        """Let a request run, from behind what the prefix cache has of it; False if the pool has too few blocks."""
        matched = self.pool.match_prefix(request)
        if not self.pool.can_allocate(request, matched):
            return False
        self.pool.allocate(request, matched)
        request.num_computed_tokens = len(matched) * self.pool.block_size
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = perf_counter_ns()
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += request.num_cached_tokens
        insort(self.running, request, key=lambda other: other.arrival)
        return True


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _next_chunk(request: Request, budget: int) -> Chunk:
    pending = request.num_pending_tokens
    return Chunk(request, min(pending, budget), samples=pending <= budget)
