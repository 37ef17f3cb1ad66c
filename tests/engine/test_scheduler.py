from paceline.engine.blocks import BlockPool
from paceline.engine.chunk import Chunk
from paceline.engine.config import EngineConfig
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Counters
from paceline.engine.step_cost import StepCost
from tests.engine.drive import make_request


def make_scheduler(num_blocks: int = 64, *, max_num_seqs: int = 8, budget: int = 16) -> Scheduler:
    config = EngineConfig(max_model_len=256, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, BlockPool(num_blocks, 4), Counters(), StepCost())


def shares(chunks: list[Chunk]) -> dict[str, int]:
    return {chunk.request.request_id: chunk.num_tokens for chunk in chunks}


def step(scheduler: Scheduler) -> dict[str, int]:
    """Schedule and commit; every chunk that reaches the end of its request gets token 5."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        assert chunk.samples == (chunk.num_tokens == chunk.request.num_pending_tokens)
        if chunk.samples:
            chunk.request.append_output(5)
        scheduler.commit(chunk, int(chunk.samples))
    scheduler.pool.check_integrity()
    return shares(chunks)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def prompt(arrival: int, length: int) -> range:
    """Tokens that no other request has."""
    return range(1000 * arrival, 1000 * arrival + length)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(range(40)))
    assert [step(scheduler) for _ in range(4)] == [{"r0": 16}, {"r0": 16}, {"r0": 8}, {"r0": 1}]


def test_decoding_requests_get_their_token_before_any_prefill() -> None:
    scheduler = make_scheduler(budget=8, max_num_seqs=8)
    old = make_request(prompt(0, 100), arrival=0)
    add(scheduler, make_request(prompt(1, 3), arrival=1), make_request(prompt(2, 3), arrival=2))
    step(scheduler)
    add(scheduler, old)
    # The long one is older and still may not take the others' tokens.
    assert [step(scheduler) for _ in range(3)] == [{"r1": 1, "r2": 1, "r0": 6}] * 3


def test_the_budget_goes_first_come_first_served() -> None:
    scheduler = make_scheduler(budget=10, max_num_seqs=4)
    add(scheduler, *(make_request(prompt(i, 8), arrival=i) for i in range(3)))
    assert step(scheduler) == {"r0": 8, "r1": 2}
    assert step(scheduler) == {"r0": 1, "r1": 6, "r2": 3}


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(prompt(i, 2), arrival=i) for i in range(3)))
    assert step(scheduler) == {"r0": 2, "r1": 2}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"r1": 1, "r2": 2}


def test_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(
        scheduler,
        make_request(prompt(0, 2), arrival=0, priority=1),
        make_request(prompt(1, 2), arrival=1),
        make_request(prompt(2, 2), arrival=2, priority=-1),
        make_request(prompt(3, 2), arrival=3),
    )
    order: list[str] = []
    while scheduler.num_requests:
        order += step(scheduler)
        scheduler.remove(scheduler.running[0])
    assert order == ["r2", "r1", "r3", "r0"]


def test_nobody_overtakes_the_head_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, make_request(prompt(0, 8), arrival=0))
    step(scheduler)
    add(scheduler, make_request(prompt(1, 12), arrival=1), make_request(prompt(2, 2), arrival=2))
    assert step(scheduler) == {"r0": 1}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"r1": 12, "r2": 2}


def full_pool(*, priorities: tuple[int, int, int]) -> tuple[Scheduler, list[Request]]:
    """Three decoding requests that fill 6 blocks of 4: the first needs a seventh with its next token."""
    scheduler = make_scheduler(num_blocks=6, budget=32)
    lengths = (8, 7, 5)
    requests = [
        make_request(prompt(i, lengths[i]), arrival=i, priority=priority) for i, priority in enumerate(priorities)
    ]
    add(scheduler, *requests)
    assert len(step(scheduler)) == 3
    return scheduler, requests


def test_preemption_takes_the_fewest_tokens_to_recompute() -> None:
    scheduler, requests = full_pool(priorities=(0, 0, 0))
    assert step(scheduler) == {"r0": 1, "r1": 1}
    assert scheduler.preempted == [requests[2]]
    assert requests[2].num_computed_tokens == 0
    assert requests[2].num_preemptions == scheduler.counters.preemptions == 1


def test_preemption_takes_the_lowest_priority_first() -> None:
    scheduler, requests = full_pool(priorities=(0, 1, 0))
    assert step(scheduler) == {"r0": 1, "r2": 1}
    assert scheduler.preempted == [requests[1]]


def test_preemption_spares_the_oldest_whatever_its_priority() -> None:
    scheduler, requests = full_pool(priorities=(5, 0, 0))
    assert "r0" in step(scheduler)
    assert scheduler.preempted == [requests[2]]


def test_a_request_may_preempt_itself() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=32)
    add(scheduler, make_request(prompt(0, 9), arrival=0), make_request(prompt(1, 4), arrival=1))
    step(scheduler)
    assert step(scheduler) == {"r0": 1}
    assert [request.request_id for request in scheduler.preempted] == ["r1"]


def test_preempted_requests_come_back_before_waiting_ones_and_compute_their_output_again() -> None:
    scheduler, requests = full_pool(priorities=(0, 0, 0))
    add(scheduler, make_request(prompt(3, 1), arrival=3, priority=-9))
    assert step(scheduler) == {"r0": 1, "r1": 1}
    scheduler.remove(requests[0])
    # One block of its prompt is still cached; prompt and output behind it are one chunk.
    assert step(scheduler) == {"r1": 1, "r2": 2, "r3": 1}
    assert requests[2].num_cached_tokens == 0


def test_preempted_requests_keep_their_order() -> None:
    scheduler, requests = full_pool(priorities=(0, 0, 0))
    for request in (requests[2], requests[1]):
        scheduler._preempt(request)
    assert scheduler.preempted == [requests[1], requests[2]]


def test_several_unfinished_prefills_share_a_budget_first_come_first_served() -> None:
    scheduler = make_scheduler()
    add(scheduler, *(make_request(prompt(i, 8), arrival=i) for i in range(2)))
    for chunk in scheduler.schedule():
        scheduler.commit(Chunk(chunk.request, 2, samples=False), 0)
    scheduler.config = EngineConfig(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=6)
    assert shares(scheduler.schedule()) == {"r0": 6}


def test_a_prefix_hit_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(range(10), arrival=0))
    step(scheduler)
    add(scheduler, make_request(range(10), arrival=1))
    assert step(scheduler) == {"r0": 1, "r1": 2}
    assert scheduler.running[1].num_cached_tokens == 8
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (20, 8)


def test_nothing_to_do() -> None:
    assert make_scheduler().schedule() == []


def test_remove_frees_blocks_in_every_state() -> None:
    scheduler, _ = full_pool(priorities=(0, 0, 0))
    waiting = make_request(prompt(4, 3), arrival=4)
    add(scheduler, waiting)
    step(scheduler)
    for request in (waiting, scheduler.preempted[0], *tuple(scheduler.running)):
        scheduler.remove(request)
        scheduler.pool.check_integrity()
    assert scheduler.num_requests == 0
    assert scheduler.pool.num_used == 0


def test_a_prefix_that_this_step_computes_is_waited_for() -> None:
    scheduler = make_scheduler(budget=32)
    add(scheduler, *(make_request([*range(8), 100 + i, 200 + i], arrival=i) for i in range(3)))
    assert step(scheduler) == {"r0": 10}
    assert step(scheduler) == {"r0": 1, "r1": 2, "r2": 2}
    assert scheduler.counters.prefix_hits == 16


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    config = EngineConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32)
    scheduler = Scheduler(config, BlockPool(64, 4, enable_prefix_caching=False), Counters(), StepCost())
    add(scheduler, *(make_request(range(10), arrival=i) for i in range(3)))
    assert step(scheduler) == {"r0": 10, "r1": 10, "r2": 10}


def forked(scheduler: Scheduler, length: int, count: int) -> Request:
    """A request with other choices, of which those that wait for it have started."""
    request = make_request(range(length))
    request.fork(make_request(range(length), arrival=1 + i) for i in range(count))
    add(scheduler, request)
    step(scheduler)
    for fork in request.all_forks:
        scheduler.start_fork(request, fork)
        fork.append_output(5)
    scheduler.pool.check_integrity()
    return request


def test_forks_decode_beside_their_request() -> None:
    scheduler = make_scheduler()
    request = forked(scheduler, 6, 2)
    assert [fork.num_pending_tokens for fork in request.all_forks] == [1, 1]
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 1}


def test_forks_without_room_come_back_on_the_cached_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    request = forked(scheduler, 6, 2)
    assert scheduler.preempted == [request.all_forks[1]]
    scheduler.remove(request)
    assert step(scheduler) == {"r1": 1, "r2": 3}


def test_the_next_choice_takes_over_when_the_first_is_aborted() -> None:
    scheduler = make_scheduler(budget=8)
    request = make_request(range(20))
    request.fork(make_request(range(20), arrival=1 + i) for i in range(2))
    add(scheduler, request)
    step(scheduler)
    heir, other = request.all_forks
    scheduler.remove(request)
    assert (heir.forks, other.forked_from) == ([other], heir)
    assert step(scheduler) == {"r1": 8}
    scheduler.remove(other)
    assert heir.forks == []


def test_a_request_that_scores_takes_no_hits_from_there_on() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_from=9)
    add(scheduler, make_request(range(14), arrival=0))
    step(scheduler)
    add(scheduler, make_request(range(14), arrival=1, params=params))
    assert step(scheduler) == {"r0": 1, "r1": 6}
