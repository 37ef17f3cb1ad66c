"""The promise: what a request gets depends on its prompt, its parameters and its seed alone.

Within one instruction set, logits have the same bits for a request alone and in a batch of 32, in chunks of any size
from 1 to 512, with a cold and a warm prefix cache, after a preemption, and with any number of threads. It is proved
here on tiny random models of every choice that a ``ModelSpec`` can express and on a real one: the executor shows its
logits, the engine its tokens and log-probabilities.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput, TokenLogprobs
from paceline.engine.sampling import SamplingParams, choice_seed
from paceline.executors.base import Float32
from paceline.executors.native import KVDType, NativeExecutor
from paceline.models.architectures import model_weights
from paceline.models.gguf import read_gguf
from paceline.models.quants import QuantType
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights
from tests.engine.fake_executor import ByteDecoder
from tests.executors.batches import Row, Sequence, logits_of_all, make_batch
from tests.executors.test_kernels import ISAS
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS


@dataclass(frozen=True)
class Subject:
    """A model under test, on one instruction set."""

    isa: str
    weights: ModelWeights
    kv_dtype: KVDType

    def executor(self, threads: int = 2, num_blocks: int = 256) -> NativeExecutor:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PACELINE_ISA", self.isa)
            return NativeExecutor(
                self.weights, num_blocks=num_blocks, max_model_len=1024, kv_dtype=self.kv_dtype, threads=threads
            )

    def random_tokens(self, count: int, seed: int = 7) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.weights.spec.vocab_size, count).tolist()


# Each type of the cache, with weights that read float and int8 activations.
TYPES: list[tuple[KVDType, QuantType]] = [("f32", QuantType.F32), ("f16", QuantType.Q4_1), ("int8", QuantType.Q8_0)]
ARCHITECTURES = {
    "grouped": TYPES[1],
    "alternating-windows": TYPES[0],
    "biases": TYPES[2],
    "parallel-residual": TYPES[1],
    "post-norms": TYPES[1],
}


# The real model is slow without vector instructions; tiny ones are not.
SUBJECTS = [f"{isa} {name}" for isa in ISAS for name in ARCHITECTURES]
SUBJECTS += [f"{isa} smollm2" for isa in ISAS if isa != "baseline" or ISAS == ["baseline"]]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    isa, name = str(request.param).split()
    if name == "smollm2":
        with read_gguf(request.getfixturevalue("smollm2_path")) as file:
            yield Subject(isa, model_weights(file), "f16")
    else:
        kv_dtype, kind = ARCHITECTURES[name]
        yield Subject(isa, tiny_weights(TINY_SPECS[name], kind), kv_dtype)


@pytest.fixture(scope="module")
def executor(subject: Subject) -> Iterator[NativeExecutor]:
    executor = subject.executor()
    yield executor
    executor.close()


# ---- logits, from the executor

CHUNKS = [1, 31, 32, 33, 128, 512]
TABLE = list(range(17))
SCATTERED = [40, 3, 22, 17, 55, 9, 31, 12, 60, 44, 29, 5, 50, 38, 11, 26, 33]


@dataclass(frozen=True)
class Alone:
    """A request by itself, on one thread, in the largest chunks."""

    ids: list[int]
    logits: dict[int, Float32]
    """Of some positions, on both sides of blocks, partitions and chunks."""


@pytest.fixture(scope="module")
def alone(subject: Subject) -> Alone:
    ids = subject.random_tokens(520)
    executor = subject.executor(threads=1)
    logits = in_chunks(executor, ids, 512, TABLE, {0, 31, 32, 255, 256, 263, 511, 512, 519})
    executor.close()
    assert all(np.isfinite(each).all() for each in logits.values())
    return Alone(ids, logits)


def in_chunks(
    executor: NativeExecutor, ids: list[int], chunk: int, table: list[int], positions: set[int]
) -> dict[int, Float32]:
    found = {}
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        here = sorted(p for p in positions if start <= p < start + len(part))
        logits = executor.logits(make_batch([Sequence(part, table, start)], [Row(0, p - start) for p in here]))
        found |= dict(zip(here, logits, strict=True))
    return found


def assert_same(got: dict[int, Float32], expected: dict[int, Float32]) -> None:
    assert got.keys() == expected.keys()
    for position, logits in got.items():
        np.testing.assert_array_equal(logits, expected[position], f"position {position}")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_are_the_same_in_chunks_of_any_size(executor: NativeExecutor, alone: Alone, chunk: int) -> None:
    length = len(alone.ids) if chunk >= 128 else 264  # beyond the first partition, or small chunks take long
    expected = {position: logits for position, logits in alone.logits.items() if position < length}
    assert_same(in_chunks(executor, alone.ids[:length], chunk, SCATTERED, set(expected)), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_logits_are_the_same_with_any_number_of_threads(subject: Subject, alone: Alone, threads: int) -> None:
    executor = subject.executor(threads)
    assert_same(in_chunks(executor, alone.ids, 33, TABLE, set(alone.logits)), alone.logits)
    executor.close()


def test_logits_are_the_same_in_a_batch_of_32(subject: Subject, executor: NativeExecutor, alone: Alone) -> None:
    """As a decoding request, and as a chunk of a prompt, among 31 others: some decode, some have a few tokens more."""
    in_chunks(executor, alone.ids, 512, TABLE, set())
    for position in alone.logits:
        for count in (1, 7):
            others = [Sequence(subject.random_tokens(1 + i % 4, seed=i), [64 + i], i % 29) for i in range(31)]
            first = max(0, position + 1 - count)
            mine = Sequence(alone.ids[first : position + 1], TABLE, first)
            logits = executor.logits(make_batch([*others[:16], mine, *others[16:]], [Row(3), Row(16), Row(20)]))
            np.testing.assert_array_equal(logits[1], alone.logits[position], f"position {position}, {count} tokens")


# ---- every choice of a model

LENGTH = 300  # crosses blocks of 32 and a partition of 256


def two_windows(head_dim: int, group: int, softcap: float | None) -> ModelSpec:
    spec = tiny_spec(heads=group * 2, kv_heads=2, head_dim=head_dim)
    rope = RopeSpec(theta=10000.0, dim=head_dim, pairing="half")
    return replace(spec, layers=(LayerSpec(rope, window=45), LayerSpec(rope)), attention_softcap=softcap)


# A head's share of a row that is no whole number of groups, and one that ends in half a group.
SPECS = TINY_SPECS | {"uneven-heads": two_windows(48, 1, 1.5), "half-groups": two_windows(80, 1, None)}


# Every one with every type; without vector instructions, which take long, with one.
CHOICES = [
    (isa, name, *types)
    for isa in ISAS
    for number, name in enumerate(SPECS)
    for types in (TYPES if isa != "baseline" else [TYPES[number % len(TYPES)]])
]


@pytest.mark.parametrize(("isa", "name", "kv_dtype", "kind"), CHOICES)
def test_no_choice_of_a_model_costs_equal_bits(isa: str, name: str, kv_dtype: KVDType, kind: QuantType) -> None:
    subject = Subject(isa, tiny_weights(SPECS[name], kind), kv_dtype)
    ids, table = subject.random_tokens(LENGTH), TABLE[: LENGTH // 32 + 1]
    expected = logits_of_all(subject.executor(threads=1), ids, LENGTH, table)
    assert np.isfinite(expected).all()
    model = subject.executor()
    np.testing.assert_array_equal(logits_of_all(model, ids, 37, table), expected)

    # One token at a time and a few at once, among others, in scattered blocks; what is computed twice is the same.
    for start, count in [(0, 63), (63, 1), (64, 1), (65, 190), (255, 1), (256, 1), (257, 13), (250, 50)]:
        part = Sequence(ids[start : start + count], SCATTERED[:10], start)
        others = [Sequence([5, 6, 7], [62]), Sequence([9], [63], 20)]
        got = model.logits(make_batch([others[0], part, others[1]], [Row(1, i) for i in range(count)]))
        np.testing.assert_array_equal(got, expected[start : start + count])


# ---- tokens and log-probabilities, from the engine

REQUESTS = 32


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


def prompts(subject: Subject) -> list[list[int]]:
    """Of 3 to 98 tokens; every other one begins with the same two blocks."""
    shared = subject.random_tokens(64, seed=100)
    own = [subject.random_tokens(3 + i, seed=i) for i in range(REQUESTS)]
    return [shared + ids if i % 2 else ids for i, ids in enumerate(own)]


def parameters(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=i, max_tokens=3 + i % 6, logprobs=3, ignore_eos=True
    )


def run(engine: Engine, requests: dict[int, list[int]]) -> dict[int, Answer]:
    """The answers to requests that come all at once."""
    numbers = {engine.submit(ids, parameters(i)).request_id: i for i, ids in requests.items()}
    answers = {i: Answer([], []) for i in requests}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answer = answers[numbers[output.request_id]]
            answer.token_ids.extend(output.token_ids)
            answer.logprobs.extend(output.logprobs)
    return answers


def make_engine(executor: NativeExecutor, **limits: int | bool) -> Engine:
    config = EngineConfig(**({"max_model_len": 256} | limits))  # type: ignore[arg-type]
    return Engine(executor, ByteDecoder(), config)


@pytest.fixture(scope="module")
def answers_alone(subject: Subject) -> dict[int, Answer]:
    """Each request by itself, on one thread, without a prefix cache."""
    executor = subject.executor(threads=1)
    engine = make_engine(executor, enable_prefix_caching=False)
    answers: dict[int, Answer] = {}
    for i, ids in enumerate(prompts(subject)):
        answers |= run(engine, {i: ids})
    executor.close()
    assert all(len(answer.logprobs) == len(answer.token_ids) == 3 + i % 6 for i, answer in answers.items())
    return answers


@pytest.mark.parametrize("budget", [512, 32], ids=["whole-prompts", "chunked-prompts"])
def test_answers_are_the_same_together_and_from_a_warm_cache(
    subject: Subject, answers_alone: dict[int, Answer], budget: int
) -> None:
    executor = subject.executor()
    engine = make_engine(executor, max_num_seqs=32, max_num_batched_tokens=budget)
    requests = dict(enumerate(prompts(subject)))
    assert run(engine, requests) == answers_alone
    cold_hits = engine.stats().prefix_hits
    assert run(engine, requests) == answers_alone
    assert engine.stats().prefix_hits - cold_hits > cold_hits
    executor.close()


def test_answers_are_the_same_after_preemptions(subject: Subject, answers_alone: dict[int, Answer]) -> None:
    executor = subject.executor(num_blocks=9)  # a few requests at a time, all of which grow
    engine = make_engine(executor)
    assert run(engine, dict(enumerate(prompts(subject)))) == answers_alone
    assert engine.stats().preemptions > 0
    executor.close()


def everything(engine: Engine, ids: list[int], params: SamplingParams) -> list[list[RequestOutput]]:
    """For each choice, all that its owner is told."""
    request = engine.submit(ids, params)
    news: dict[str, list[RequestOutput]] = {choice.request_id: [] for choice in request.choices}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            news[output.request_id].append(output)
    return [news[choice.request_id] for choice in request.choices]


def answer_of(outputs: list[RequestOutput]) -> Answer:
    return Answer(
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs],
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_prompt_lookup_changes_nothing(subject: Subject, temperature: float) -> None:
    executor = subject.executor()
    plain, speculating = make_engine(executor), make_engine(executor, prompt_lookup_tokens=8)
    for seed in range(8):
        # Text that repeats itself, so that there is something to propose.
        ids = subject.random_tokens(7, seed=seed) * 6
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=48, logprobs=2, ignore_eos=True)
        assert answer_of(*everything(speculating, ids, params)) == answer_of(*everything(plain, ids, params))
    assert speculating.stats().draft_tokens > 0
    executor.close()


def test_a_choice_is_what_its_seed_says_alone(subject: Subject) -> None:
    executor = subject.executor()
    engine = make_engine(executor)
    ids = subject.random_tokens(45)
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, logprobs=2, ignore_eos=True)
    choices = everything(engine, ids, params)
    engine.reset_prefix_cache()
    for index, outputs in enumerate(choices):
        alone = replace(params, n=1, seed=choice_seed(3, index))
        assert answer_of(*everything(engine, ids, alone)) == answer_of(outputs)
    executor.close()


def test_a_prompt_scores_what_it_was_given_when_it_was_generated(subject: Subject) -> None:
    """Whatever the chunks, and whatever part of it was cached."""
    executor = subject.executor()
    ids = subject.random_tokens(45)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, logprobs=2, ignore_eos=True)
    answer = answer_of(*everything(make_engine(executor), ids, params))
    for budget in (512, 16):
        engine = make_engine(executor, max_num_seqs=16, max_num_batched_tokens=budget)
        for _ in range(2):
            scoring = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_from=45)
            (outputs,) = everything(engine, ids + answer.token_ids, scoring)
            assert [entry for output in outputs for entry in output.prompt_logprobs] == answer.logprobs
        assert engine.stats().prefix_hits == 32
    executor.close()
