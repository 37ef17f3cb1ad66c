"""Log-probabilities of the prompt."""

import pytest

from paceline.engine.sampling import SamplingParams
from tests.engine.drive import make_engine, run
from tests.engine.fake_executor import FakeExecutor, context_hash, score

PROMPT = [(7 * i) % 250 + 2 for i in range(50)]


def expected(first: int) -> list[float]:
    return [score(context_hash(PROMPT[:position]), PROMPT[position]) for position in range(first, len(PROMPT))]


@pytest.mark.parametrize("first", [1, 2, 17, 33, 49, 50])
@pytest.mark.parametrize("budget", [4, 16, 512])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_each_token_is_scored_behind_those_before_it(first: int, budget: int, max_tokens: int) -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=budget)
    engine.submit(PROMPT, SamplingParams(max_tokens=1), request_id="warm")
    run(engine)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0, prompt_logprobs_from=first, ignore_eos=True)
    engine.submit(PROMPT, params, request_id="r")
    answer = run(engine)["r"]
    assert [entry.logprob for entry in answer.prompt_logprobs] == expected(first)
    assert [entry.token_id for entry in answer.prompt_logprobs] == PROMPT[first:]
    assert len(answer.token_ids) == max_tokens
    assert answer.last.finish_reason == "length"
    assert answer.last.usage is not None
    assert answer.last.usage.cached_tokens == (min(first, 50) - 1) // 32 * 32


def test_what_many_prompts_share_is_computed_once() -> None:
    executor = FakeExecutor(num_blocks=256)
    engine = make_engine(executor)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=64)
    for ending in range(100):
        engine.submit([*range(2, 66), ending + 100, 7], params)
    run(engine)
    assert sum(batch.num_tokens for batch in executor.batches) == 66 + 99 * 34


def test_a_whole_context_can_be_scored() -> None:
    engine = make_engine(max_model_len=50)
    engine.submit(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0), request_id="r")
    assert len(run(engine)["r"].prompt_logprobs) == 49


def test_preemption_repeats_no_score() -> None:
    executor = FakeExecutor(num_blocks=4)
    engine = make_engine(executor, max_num_seqs=2, max_num_batched_tokens=8)
    engine.submit([5] * 60, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.submit(PROMPT, SamplingParams(max_tokens=10, prompt_logprobs=0, ignore_eos=True), request_id="r")
    answer = run(engine)["r"]
    assert engine.stats().preemptions
    assert [entry.logprob for entry in answer.prompt_logprobs] == expected(1)
