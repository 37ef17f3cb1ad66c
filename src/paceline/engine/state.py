"""The engine at one moment, for people: who runs, who waits and why, and who holds the KV cache."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.engine.blocks import BlockPool
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.trace import RequestRecord, request_record


@dataclass(frozen=True, slots=True)
class RequestState:
    request_id: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    computed_tokens: int
    """Prompt and output tokens whose KV is in the cache."""
    preemptions: int
    waits_for: str | None
    """Why it does not run; None if it does."""
    private_blocks: int
    shared_blocks: int
    """Those that other requests use, too."""


@dataclass(frozen=True, slots=True)
class PoolState:
    block_size: int
    """Tokens per block."""
    blocks: int
    used: int
    cached: int
    """Free, with a prefix that may be asked for again."""
    blank: int
    """Free, with nothing of use."""
    wasted_slots: int
    """Tokens for which there is room in the blocks of running requests, behind their last one."""


@dataclass(frozen=True, slots=True)
class EngineState:
    running: tuple[RequestState, ...]
    waiting: tuple[RequestState, ...]
    """In the order in which they will run."""
    pool: PoolState
    unfinished: tuple[RequestRecord, ...]
    """The times of all of them."""


def look_at(scheduler: Scheduler, pool: BlockPool) -> EngineState:
    """To be called between two steps."""
    queue = [*scheduler.preempted, *scheduler.waiting]
    forks = [fork for request in (*scheduler.running, *queue) for fork in request.forks]
    head = queue[0].request_id if queue else ""

    def reason(request: Request) -> str:
        return _head_waits_for(scheduler, request) if request.request_id == head else f"{head} is before it"

    waiting = [_request(request, pool, reason(request)) for request in queue]
    waiting += [_request(fork, pool, f"the first token of {_id_of(fork.forked_from)}") for fork in forks]
    return EngineState(
        tuple(_request(request, pool, None) for request in scheduler.running),
        tuple(waiting),
        PoolState(
            pool.block_size,
            pool.num_blocks,
            pool.num_used,
            pool.num_evictable,
            pool.num_free - pool.num_evictable,
            wasted_slots(scheduler.running, pool.block_size),
        ),
        tuple(request_record(request, None) for request in (*scheduler.running, *queue, *forks)),
    )


def wasted_slots(running: Iterable[Request], block_size: int) -> int:
    """Internal fragmentation: room behind the last token of each request, in the blocks it holds, in tokens."""
    return sum(max(len(request.block_table) * block_size - request.num_tokens, 0) for request in tuple(running))


def _head_waits_for(scheduler: Scheduler, request: Request) -> str:
    seats, pool = scheduler.config.max_num_seqs, scheduler.pool
    if len(scheduler.running) >= seats:
        return f"a place: max_num_seqs {seats} are running"
    matched = pool.match_prefix(request)
    if not pool.can_allocate(request, matched):
        needed = pool.blocks_for(request.num_tokens) - len(matched)
        return f"KV cache: it needs {needed} blocks more than are cached for it, {pool.num_free} are free"
    return "its turn: the next step has tokens left for it, or the one after"


def _request(request: Request, pool: BlockPool, waits_for: str | None) -> RequestState:
    shared = sum(pool.ref_count(block) > 1 for block in request.block_table)
    return RequestState(
        request.request_id,
        request.priority,
        len(request.prompt_ids),
        len(request.output_ids),
        request.max_output_tokens,
        request.num_computed_tokens,
        request.num_preemptions,
        waits_for,
        len(request.block_table) - shared,
        shared,
    )


def _id_of(request: Request | None) -> str:
    return "another choice" if request is None else request.request_id
