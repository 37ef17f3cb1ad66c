"""The scheduler's promises over random arrivals, priorities, aborts and tiny pools."""

from collections import defaultdict
from dataclasses import dataclass, replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from paceline.engine.chunk import Chunk
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from tests.engine.drive import Answer, check_clean, collect, make_engine, run
from tests.engine.fake_executor import FakeExecutor

BLOCK = 4
VOCAB = 24


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str
    abort_after: int | None
    """Steps from its arrival to the abort of a choice."""
    aborted_choice: int


@dataclass(frozen=True)
class Scenario:
    num_blocks: int
    max_num_seqs: int
    budget: int
    caching: bool
    lookup: int
    """Longest proposal of prompt lookup."""
    arrivals: tuple[Arrival, ...]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    num_blocks = draw(st.integers(2, 7))
    max_num_seqs = draw(st.integers(1, 6))
    capacity = num_blocks * BLOCK
    # Few distinct beginnings, so that prefixes are shared.
    stems = [tuple((stem * 7 + i) % VOCAB for i in range(3 * BLOCK)) for stem in range(2)]

    def arrival() -> Arrival:
        stem = draw(st.sampled_from(stems))[: draw(st.integers(0, 3 * BLOCK))]
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2 * BLOCK))
        prompt = (stem + tuple(tail))[: capacity - 1]
        params = SamplingParams(
            max_tokens=draw(st.integers(1, min(12, capacity + 1 - len(prompt)))),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            presence_penalty=draw(st.sampled_from([0.0, 1.0])),
            logit_bias=draw(st.sampled_from([{}, {3: 1.0}])),
            ignore_eos=draw(st.booleans()),
            n=draw(st.sampled_from([1, 1, 1, 2, 4])),
            bad_words=draw(st.sampled_from([(), (), ("\x05",), ("\x05\x06",)])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            prompt_logprobs_from=draw(st.integers(1, 8)),
        )
        if draw(st.integers(0, 5)) == 0:
            params = replace(params, max_tokens=0, n=1)
        elif draw(st.booleans()):
            params = replace(params, min_tokens=draw(st.integers(0, params.max_tokens or 0)))
        return Arrival(
            step=draw(st.integers(0, 12)),
            prompt=prompt,
            params=params,
            priority=draw(st.integers(-1, 1)),
            cache_salt=draw(st.sampled_from(["", "", "salt"])),
            abort_after=draw(st.none() | st.none() | st.integers(0, 12)),
            aborted_choice=draw(st.integers(0, params.n - 1)),
        )

    count = draw(st.integers(1, 8))
    return Scenario(
        num_blocks,
        max_num_seqs,
        budget=draw(st.integers(max_num_seqs, 16)),
        caching=draw(st.booleans()),
        lookup=draw(st.sampled_from([0, 0, 1, 5])),
        arrivals=tuple(sorted((arrival() for _ in range(count)), key=lambda a: a.step)),
    )


def alone(arrival: Arrival) -> list[Answer]:
    """What the request's choices generate on an engine of its own with room for everything."""
    engine = make_engine(FakeExecutor(num_blocks=64, block_size=BLOCK, vocab_size=VOCAB))
    request = engine.submit(arrival.prompt, arrival.params)
    answers = run(engine)
    return [answers[choice.request_id] for choice in request.choices]


def record_chunks(engine: Engine) -> list[list[tuple[Chunk, int]]]:
    """Every plan of the engine's scheduler, as it is made: chunks and where they start."""
    plans: list[list[tuple[Chunk, int]]] = []
    schedule = engine._scheduler.schedule

    def recording() -> list[Chunk]:
        chunks = schedule()
        plans.append([(chunk, chunk.request.num_computed_tokens) for chunk in chunks])
        return chunks

    engine._scheduler.schedule = recording  # type: ignore[method-assign]
    return plans


@settings(max_examples=200, deadline=None)
@given(scenarios())
def test_any_load_makes_progress_leaks_nothing_and_changes_no_output(scenario: Scenario) -> None:
    solo = [alone(arrival) for arrival in scenario.arrivals]
    executor = FakeExecutor(num_blocks=scenario.num_blocks, block_size=BLOCK, vocab_size=VOCAB)
    executor.expect(
        [*arrival.prompt, *answer.token_ids]
        for arrival, choices in zip(scenario.arrivals, solo, strict=True)
        for answer in choices
    )
    engine = make_engine(
        executor,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.budget,
        enable_prefix_caching=scenario.caching,
        prompt_lookup_tokens=scenario.lookup,
    )
    executor.ref_count = engine._pool.ref_count
    plans = record_chunks(engine)
    answers: dict[str, Answer] = defaultdict(Answer)
    requests: list[Request] = []
    computed: set[tuple[str, int, int]] = set()
    # The oldest running request never loses its work, and between two ends the oldest one only changes for an older:
    # at most one pass over all work per end, after the last arrival.
    # Each time somebody starts, it may wait a step for the prefix that another one computes.
    every = [(arrival, answer) for arrival, choices in zip(scenario.arrivals, solo, strict=True) for answer in choices]
    work = sum(len(arrival.prompt) + len(answer.token_ids) + 1 for arrival, answer in every)
    bound = scenario.arrivals[-1].step + len(every) * work + 1
    step = 0
    while engine.has_work or len(requests) < len(scenario.arrivals):
        assert step < bound
        while len(requests) < len(scenario.arrivals) and scenario.arrivals[len(requests)].step <= step:
            new = scenario.arrivals[len(requests)]
            name = str(len(requests))
            requests.append(
                engine.submit(new.prompt, new.params, request_id=name, priority=new.priority, cache_salt=new.cache_salt)
            )
        for request, arrival in zip(requests, scenario.arrivals, strict=False):
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(request.choices[arrival.aborted_choice].request_id)
        collect(engine.step(), answers)
        assert executor.violations == []
        engine._pool.check_integrity()
        check_advance(plans[-1], computed)
        assert plans[-1] or not engine.has_work
        assert sum(chunk.num_tokens for chunk, _ in plans[-1]) <= scenario.budget
        assert len(engine._scheduler.running) <= scenario.max_num_seqs
        assert sum(request.num_pending_tokens > 1 for request in engine._scheduler.running) <= 1
        step += 1
    check_clean(engine)
    event("preempted" if engine.stats().preemptions else "not preempted")
    event("prefix hit" if engine.stats().prefix_hits else "no prefix hit")
    event("accepted drafts" if engine.stats().accepted_tokens else "no accepted drafts")
    for request, arrival, choices in zip(requests, scenario.arrivals, solo, strict=True):
        for index, (choice, expected) in enumerate(zip(request.choices, choices, strict=True)):
            answer = answers[choice.request_id]
            if arrival.abort_after is not None and index == arrival.aborted_choice:
                assert answer.last.finish_reason in ("stop", "length", "abort")
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            else:
                assert answer.last.finish_reason == expected.last.finish_reason
                assert answer.token_ids == expected.token_ids
                if index == 0 or arrival.abort_after is None:
                    assert answer.prompt_logprobs == expected.prompt_logprobs


def check_advance(plan: list[tuple[Chunk, int]], computed: set[tuple[str, int, int]]) -> None:
    """Every chunk of the step was computed, and nothing that had been since the last preemption."""
    for chunk, start in plan:
        request = chunk.request
        end = request.num_computed_tokens
        assert start < end <= start + chunk.num_tokens
        positions = {(request.request_id, request.num_preemptions, p) for p in range(start, end)}
        assert not positions & computed
        computed |= positions
