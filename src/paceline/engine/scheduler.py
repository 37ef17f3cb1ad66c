"""Who computes which tokens in the next step."""

from bisect import insort
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter_ns

from paceline.engine.blocks import BlockPool
from paceline.engine.budget import StepBudget
from paceline.engine.chunk import Chunk
from paceline.engine.config import EngineConfig
from paceline.engine.request import BlockKey, Request
from paceline.engine.stats import Counters
from paceline.engine.step_cost import StepCost


class Scheduler:
    """Lets every request's ``num_computed_tokens`` catch up with its ``num_tokens``, a token budget per step.

    That is the one invariant, vLLM v1's. Chunked prefill, prefix hits, decoding and coming back after a preemption are
    all cases of it. Blocks for all known tokens are taken when a request starts to run, so only a decoding request can
    find the pool empty, and at most one running request at a time is part-way through its prefill.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters, cost: StepCost) -> None:
        self.config = config
        self.pool = pool
        self.counters = counters
        self.cost = cost
        self.running: list[Request] = []
        """In order of arrival, so the first is the oldest."""
        self.preempted: list[Request] = []
        """In (priority, arrival) order, as the next."""
        self.waiting: list[Request] = []
        self.just_preempted: list[str] = []
        """Ids of those that the last ``schedule`` took the blocks of."""

    @property
    def num_requests(self) -> int:
        return len(self.running) + len(self.preempted) + len(self.waiting)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or aborted, in whatever state it is, and free its blocks.

        Choices that wait for it start by themselves: the first of them computes the prompt for the others.
        """
        if request.forked_from is not None:
            request.forked_from.forks.remove(request)
            return
        for queue in (self.running, self.preempted, self.waiting):
            with suppress(ValueError):
                queue.remove(request)
                break
        self.pool.free(request)
        if request.forks:
            heir, *others = request.forks
            heir.forked_from, heir.is_fork, heir.forks, request.forks = None, False, others, []
            for fork in others:
                fork.forked_from = heir
            self.add(heir)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only if there are no requests."""
        self.just_preempted = []
        self._reserve_slots()
        # Tokens of decoding requests come first, so that no prefill delays them by more than one step's budget.
        chunks = [_next_chunk(request, 1) for request in self.running if request.num_pending_tokens == 1]
        budget = StepBudget.beside(
            len(chunks), self.config.max_num_batched_tokens - len(chunks), self.cost, self.config.target_itl_ms
        )
        for request in self.running:
            if request.num_pending_tokens > 1 and (num_tokens := budget.grant(request)):
                chunks.append(_next_chunk(request, num_tokens))
        # Preempted ones go before waiting ones: somebody has already read the beginning of their text.
        # The head of the line that does not fit holds up all behind it, so that nobody overtakes it.
        prefixes: set[BlockKey] = set()
        new = chunks
        while budget and len(self.running) < self.config.max_num_seqs and (queue := self.preempted or self.waiting):
            prefixes.update(self._prefixes_in(new))
            if not self._start(queue[0], prefixes):
                break
            request = queue.pop(0)
            if not (num_tokens := budget.grant(request)):
                break
            new = [_next_chunk(request, num_tokens)]
            chunks += new
        return self._with_drafts(chunks, budget) if self.config.prompt_lookup_tokens else chunks

    def commit(self, chunk: Chunk, num_sampled: int) -> None:
        """Record that a chunk's KV is computed, as far as its draft was right.

        ``num_sampled`` tokens were sampled behind it and are in ``request.output_ids`` by now; all but the last of them
        are what the draft said.
        """
        request = chunk.request
        num_computed = request.num_computed_tokens + chunk.num_tokens - len(chunk.draft) + max(num_sampled - 1, 0)
        self.pool.publish(request, num_computed)
        request.num_computed_tokens = num_computed
        request.next_scored = max(request.next_scored, min(num_computed + 1, len(request.prompt_ids)))
        request.copy_from = None
        if chunk.draft:
            self.pool.truncate(request)
            assert request.drafter is not None
            request.drafter.learn(len(chunk.draft), num_sampled - 1)
            self.counters.draft_tokens += len(chunk.draft)
            self.counters.accepted_tokens += num_sampled - 1

    def start_fork(self, request: Request, fork: Request) -> None:
        """Let a further choice run on the prompt that ``request`` has just computed, or wait if there is no room."""
        request.forks.remove(fork)
        fork.forked_from = None
        fork.first_scheduled_ns = request.first_scheduled_ns
        fork.num_cached_tokens = request.num_cached_tokens
        fork.next_scored = len(fork.prompt_ids)
        if len(self.running) < self.config.max_num_seqs and self.pool.fork(request, fork):
            fork.num_computed_tokens = request.num_computed_tokens
            insort(self.running, fork, key=lambda other: other.arrival)
        else:
            insort(self.preempted, fork, key=_rank)

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
        self.just_preempted.append(request.request_id)
        insort(self.preempted, request, key=_rank)

    def _prefixes_in(self, chunks: Iterable[Chunk]) -> Iterator[BlockKey]:
        """Names of the blocks that the chunks of prompts fill."""
        for request, num_tokens, *_ in chunks:
            if num_tokens > 1:
                yield from self.pool.keys_filled(request, request.num_computed_tokens + num_tokens)

    def _start(self, request: Request, prefixes: Container[BlockKey]) -> bool:
        """Let a request run, from behind what the prefix cache has of it.

        False if the pool has too few blocks, or if this very step computes the block that it needs next (one of
        ``prefixes``): in the next step it can share that.
        """
        matched = self.pool.match_prefix(request)
        missing = self.pool.shareable_keys(request)[len(matched) : len(matched) + 1]
        if missing and missing[0] in prefixes:
            return False
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

    def _with_drafts(self, chunks: Sequence[Chunk], budget: StepBudget) -> list[Chunk]:
        """Decoding requests go on with tokens that are only proposed, where the budget and the pool have room left."""
        extended = []
        for chunk in chunks:
            if chunk.samples and chunk.num_tokens == 1 and budget:
                draft = chunk.request.propose(budget.num_tokens)
                draft = draft[: self.pool.extend(chunk.request, len(draft))]
                budget.spend(len(draft))
                chunk = Chunk(chunk.request, 1 + len(draft), samples=True, draft=tuple(draft))
            extended.append(chunk)
        return extended


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _next_chunk(request: Request, num_tokens: int) -> Chunk:
    samples = num_tokens == request.num_pending_tokens and request.max_output_tokens > 0
    return Chunk(request, num_tokens, samples)
