"""The cost of steps, learned from simulated ones: nothing here looks at a clock."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.blocks import BlockPool
from paceline.engine.budget import StepBudget
from paceline.engine.config import EngineConfig
from paceline.engine.sampling import SamplingParams
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Counters
from paceline.engine.step_cost import StepCost, StepWork
from paceline.executors.base import Batch, StepResult
from tests.engine.drive import GREEDY, make_engine, make_request
from tests.engine.fake_executor import FakeExecutor

Machine = Callable[[StepWork], float]


def machine(fixed: float, decode: float, token: float, attention: float) -> Machine:
    """Milliseconds of a step on a machine with these costs."""
    return lambda w: fixed + decode * w.num_decoding + token * w.num_prefill + attention * w.num_attended


FAST = machine(4.0, 0.6, 0.45, 1e-4)
SLOW = machine(40.0, 3.0, 12.0, 2e-3)
MEMORY_BOUND = machine(25.0, 0.0, 0.05, 1e-5)


class Simulation:
    """Eight requests that decode, and prompts that come in between."""

    def __init__(self, simulated: Machine, target_ms: float | None) -> None:
        self.machine = simulated
        self.cost = StepCost()
        config = EngineConfig(max_model_len=8192, target_itl_ms=target_ms)
        self.scheduler = Scheduler(config, BlockPool(4096, 32), Counters(), self.cost)
        self.num_requests = 0
        for _ in range(8):
            self.add(128)
        for _ in range(30):
            self.step()

    def add(self, length: int) -> None:
        first = 100_000 * self.num_requests
        self.scheduler.add(make_request(range(first, first + length), arrival=self.num_requests))
        self.num_requests += 1

    def step(self, delay: float = 1.0) -> tuple[StepWork, float]:
        chunks = self.scheduler.schedule()
        work = StepWork.of(chunks)
        ms = self.machine(work) * delay
        for chunk in chunks:
            if chunk.samples:
                chunk.request.append_output(5)
            self.scheduler.commit(chunk, int(chunk.samples))
        self.cost.observe(work, ms)
        return work, ms

    def run_prompt(self, length: int, delay: Callable[[], float] = lambda: 1.0) -> list[tuple[StepWork, float]]:
        """The steps that compute a prompt beside the others."""
        self.add(length)
        steps = [self.step(delay())]
        while self.scheduler.running[-1].num_pending_tokens > 1:
            steps.append(self.step(delay()))
        return steps


@pytest.mark.parametrize(("simulated", "target"), [(FAST, 50), (FAST, 25), (SLOW, 500), (MEMORY_BOUND, 30)])
def test_a_prompt_stays_within_the_target_and_uses_it(simulated: Machine, target: float) -> None:
    simulation = Simulation(simulated, target)
    simulation.run_prompt(1000)
    steps = simulation.run_prompt(3300)
    assert max(ms for _, ms in steps) <= target
    full = [ms for work, ms in steps if work.num_prefill < 496][:-1]
    assert not full or sum(full) / len(full) > 0.5 * target


@settings(max_examples=50, deadline=None)
@given(
    fixed=st.floats(0, 40),
    decode=st.floats(0, 5),
    token=st.floats(0.02, 10),
    attention=st.floats(0, 2e-3),
    room=st.floats(1.5, 20),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
)
def test_any_machine_stays_within_the_target_once_it_is_known(
    fixed: float, decode: float, token: float, attention: float, room: float, noise: float, seed: int
) -> None:
    simulated = machine(fixed, decode, token, attention)
    # What the least share of the longest prompt takes: below that no target can be met.
    target = room * simulated(StepWork(8, 16, 16 * 3000))
    chance = random.Random(seed)
    simulation = Simulation(simulated, target)
    simulation.run_prompt(1500)
    simulation.step()  # what one more that decodes costs cannot be told before
    steps = simulation.run_prompt(3000, lambda: chance.uniform(1 - noise, 1 + noise))
    # Attention at contexts that no step has had yet is told from shorter ones.
    assert max(ms for _, ms in steps) <= target * (1.1 + 2 * noise)


def test_the_very_first_prompt_starts_small() -> None:
    simulation = Simulation(SLOW, 500)
    first, *_ = simulation.run_prompt(3300)
    assert first[1] <= 2 * 500


def test_without_a_target_prompts_take_the_whole_budget() -> None:
    steps = Simulation(FAST, None).run_prompt(3300)
    assert steps[0][0].num_prefill == 504


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    simulation = Simulation(FAST, 50)
    for request in tuple(simulation.scheduler.running):
        simulation.scheduler.remove(request)
    simulation.add(3300)
    assert simulation.step()[0].num_prefill == 512


def test_a_prompt_makes_progress_even_where_the_target_cannot_be_met() -> None:
    simulation = Simulation(SLOW, 1)
    steps = simulation.run_prompt(320)
    assert {work.num_prefill for work, _ in steps} == {16}


def test_a_slower_machine_is_noticed_after_two_steps() -> None:
    simulation = Simulation(FAST, 100)
    simulation.run_prompt(2000)
    simulation.machine = lambda work: FAST(work) * 3
    (_, first), (_, second), *steps = simulation.run_prompt(3000)
    assert first > second > 100
    assert max(ms for _, ms in steps) <= 100


@pytest.mark.parametrize("change", [0.2, 3.0])
def test_a_machine_that_changes_is_learned_again(change: float) -> None:
    simulation = Simulation(FAST, 100)
    simulation.run_prompt(2000)
    simulation.machine = lambda work: FAST(work) * change
    simulation.run_prompt(3000)
    for _ in range(30):
        simulation.step()
    steps = simulation.run_prompt(3000)
    assert max(ms for _, ms in steps) <= 100
    assert min(ms for _, ms in steps[:-1]) > 40


def test_one_step_that_was_held_up_is_no_news() -> None:
    simulation = Simulation(FAST, 50)
    simulation.run_prompt(2000)
    simulation.add(3000)
    before = simulation.step()[0].num_prefill
    simulation.step(100)
    for _ in range(5):
        simulation.step()
    assert simulation.step()[0].num_prefill > before / 3


def test_long_prompts_without_anybody_else_do_not_make_decoding_look_free() -> None:
    cost = StepCost()
    for place in range(16):
        cost.observe(StepWork(0, 512, 512 * (512 * place + 256)), 250)
    for _ in range(3):
        cost.observe(StepWork(8, 0, 0), 12)
    assert cost.decode_ms(8) == pytest.approx(12)


def test_small_chunks_are_learned_soon_after_large_ones() -> None:
    """The line goes through zero, the cost of few rows on a real processor does not."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(StepWork(0, 512, 512 * 256), 250)
    for _ in range(20):
        cost.observe(StepWork(0, 32, 32 * 16), 30)
    assert 25 < cost.prefill_ms(32, 0) < 35


def test_one_prompt_at_a_time_is_in_the_making() -> None:
    simulation = Simulation(FAST, 50)
    simulation.run_prompt(3000)
    simulation.add(3000)
    simulation.add(3000)
    *_, first, second = simulation.scheduler.waiting
    while first.num_pending_tokens > 1:
        assert second.num_computed_tokens == 0
        simulation.step()


def test_proposed_tokens_are_paid_for() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.observe(StepWork(0, 64, 64 * 32), 64)
    budget = StepBudget.beside(8, 512, cost, 100)
    before = budget.num_tokens
    budget.spend(32)
    assert budget.num_tokens == before - 32


def test_the_engine_times_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    class Timed(FakeExecutor):
        def execute(self, batch: Batch) -> StepResult:
            nonlocal now
            now += 5_000_000 + 1_000_000 * batch.num_tokens
            return super().execute(batch)

    monkeypatch.setattr("paceline.engine.engine.perf_counter_ns", lambda: now)
    executor = Timed(num_blocks=64)
    engine = make_engine(executor, max_model_len=1024, target_itl_ms=80)
    engine.submit([65], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.submit([66] * 300, GREEDY)
    for _ in range(5):
        engine.step()
    engine.submit([67] * 600, GREEDY)
    for _ in range(5):
        engine.step()
    assert engine.cost.token_ms == pytest.approx(1, rel=0.01)
    # 95 % of 80 ms, less 5 for the step itself.
    assert all(69 <= batch.num_tokens <= 71 for batch in executor.batches[-4:])


def test_the_affordable_chunk_costs_what_is_there() -> None:
    cost = StepCost()
    for context in (0, 512, 1024, 4096):
        cost.observe(StepWork(0, 512, 512 * (context + 256)), 0.5 * 512 + 1e-4 * 512 * (context + 256))
    assert cost.token_ms == pytest.approx(0.5)
    for context in (0, 2000):
        num_tokens = cost.affordable_tokens(80, context)
        assert cost.prefill_ms(num_tokens, context) <= 80 < cost.prefill_ms(num_tokens + 1, context)
    assert cost.affordable_tokens(0, 0) == cost.affordable_tokens(-5, 0) == 0
