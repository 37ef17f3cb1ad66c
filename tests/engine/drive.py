"""Making engines and running them to the end, for the tests of this folder."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput, TokenLogprobs
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from tests.engine.fake_executor import ByteDecoder, FakeExecutor

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass
class Answer:
    """All outputs of one request, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def add(self, output: RequestOutput) -> None:
        assert not self.outputs or self.last.finish_reason is None, "an output after the last one"
        self.text += output.text
        self.token_ids += output.token_ids
        self.prompt_logprobs += output.prompt_logprobs
        self.outputs.append(output)


def make_engine(executor: FakeExecutor | None = None, **limits: Any) -> Engine:
    defaults: dict[str, Any] = {"max_model_len": 512, "eos_ids": frozenset({ByteDecoder.EOS})}
    return Engine(executor or FakeExecutor(), ByteDecoder(), EngineConfig(**defaults | limits))


def collect(outputs: Iterable[RequestOutput], into: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = defaultdict(Answer) if into is None else into
    for output in outputs:
        answers[output.request_id].add(output)
    return answers


def run(engine: Engine, max_steps: int = 2000) -> dict[str, Answer]:
    """Step until there is no work; then every block is free and the executor has seen no violation."""
    answers: dict[str, Answer] = defaultdict(Answer)
    for _ in range(max_steps):
        if not engine.has_work:
            break
        collect(engine.step(), answers)
    assert not engine.has_work, f"not done after {max_steps} steps"
    check_clean(engine)
    return answers


def check_clean(engine: Engine) -> None:
    executor = engine._executor
    assert isinstance(executor, FakeExecutor)
    assert executor.violations == []
    engine._pool.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def make_request(prompt: Iterable[int], *, arrival: int = 0, priority: int = 0, **fields: Any) -> Request:
    params = fields.pop("params", GREEDY)
    return Request(
        fields.pop("request_id", f"r{arrival}"),
        list(prompt),
        params,
        seed=arrival,
        max_output_tokens=16,
        arrival=arrival,
        priority=priority,
        **fields,
    )
