"""The cost of steps, learned from simulated ones: nothing here looks at a clock."""

from collections.abc import Callable

import pytest

from paceline.engine.blocks import BlockPool
from paceline.engine.config import EngineConfig
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Counters
from paceline.engine.step_cost import StepCost, StepWork
from tests.engine.drive import make_request

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

    def step(self, *, delay: float = 1.0) -> tuple[StepWork, float]:
        chunks = self.scheduler.schedule()
        work = StepWork.of(chunks)
        ms = self.machine(work) * delay
        for chunk in chunks:
            if chunk.samples:
                chunk.request.append_output(5)
            self.scheduler.commit(chunk, int(chunk.samples))
        self.cost.observe(work, ms)
        return work, ms

    def run_prompt(self, length: int) -> list[tuple[StepWork, float]]:
        """The steps that compute a prompt beside the others."""
        self.add(length)
        steps = [self.step()]
        while self.scheduler.running[-1].num_pending_tokens > 1:
            steps.append(self.step())
        return steps


@pytest.mark.parametrize(("simulated", "target"), [(FAST, 50), (FAST, 25), (SLOW, 500), (MEMORY_BOUND, 30)])
def test_a_prompt_stays_within_the_target_and_uses_it(simulated: Machine, target: float) -> None:
    simulation = Simulation(simulated, target)
    simulation.run_prompt(1000)
    steps = simulation.run_prompt(3300)
    assert max(ms for _, ms in steps) <= target
    full = [ms for work, ms in steps if work.num_prefill < 496][:-1]
    assert not full or sum(full) / len(full) > 0.5 * target


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
    simulation.step(delay=100)
    for _ in range(5):
        simulation.step()
    assert simulation.step()[0].num_prefill > before / 3


def test_the_affordable_chunk_costs_what_is_there() -> None:
    cost = StepCost()
    for context in (0, 512, 1024, 4096):
        cost.observe(StepWork(0, 512, 512 * (context + 256)), 0.5 * 512 + 1e-4 * 512 * (context + 256))
    assert cost.token_ms == pytest.approx(0.5)
    for context in (0, 2000):
        num_tokens = cost.affordable_tokens(80, context)
        assert cost.prefill_ms(num_tokens, context) <= 80 < cost.prefill_ms(num_tokens + 1, context)
    assert cost.affordable_tokens(0, 0) == cost.affordable_tokens(-5, 0) == 0
