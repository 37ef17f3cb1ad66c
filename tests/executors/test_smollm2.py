"""The real model on the native executor, against transformers on the same dequantized weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.engine.request import SamplingParams
from paceline.executors.native import NativeExecutor
from paceline.llm import LLM
from paceline.models.architectures import model_weights
from paceline.models.gguf import read_gguf
from paceline.models.tokenizer import Tokenizer
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.float64_model import reference_logits

TEXT = (
    "The lighthouse keeper kept two clocks, one for the ships and one for herself. When a storm came, the first was "
    "right and the second was kind. def mean(values):\n    return sum(values) / len(values)\n\n"
    "Q: Why is the sky blue? A: Because air scatters short waves of light more than long ones. "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n",
    "In 1969, the first",
    "A recipe for pancakes: take",
    "The opposite of hot is",
    "SELECT name FROM users WHERE",
    "To be, or not to be,",
    "The quick brown fox",
    "My favourite season is",
    "Photosynthesis is the process by which",
    "class Stack:\n    def __init__(self):\n",
    "The meaning of the word 'ephemeral' is",
    "Q: What is 12 times 12?\nA:",
    "Breaking news: scientists have",
    "The mitochondria is",
    "import numpy as np\n",
]


@pytest.fixture(scope="module")
def executor(smollm2_path: Path) -> NativeExecutor:
    with read_gguf(smollm2_path) as file:
        return NativeExecutor(model_weights(file), num_blocks=256, max_model_len=8192, threads=2)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with read_gguf(smollm2_path) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module")
def transformers_model(smollm2_path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()


def reference(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].double())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def teacher_forced(executor: NativeExecutor, ids: list[int], table: list[int]) -> np.ndarray:
    parts = []
    for start in range(0, len(ids), 500):
        part = ids[start : start + 500]
        batch = make_batch([Sequence(part, table, start)], [Row(0, token) for token in range(len(part))])
        parts.append(executor.logits(batch))
    return np.concatenate(parts).astype(np.float64)


def test_two_thousand_tokens_of_text_are_as_likely_as_for_transformers(
    executor: NativeExecutor, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    ids = tokenizer.encode(TEXT * 40)[:2000]
    assert len(ids) == 2000
    # A loop of the same text would be too easy: every sentence is followed by random tokens.
    rng = np.random.default_rng(0)
    for at in range(50, 2000, 100):
        ids[at : at + 30] = rng.integers(17, 49000, 30).tolist()
    expected = log_softmax(reference(transformers_model, ids))
    got = log_softmax(teacher_forced(executor, ids, list(range(63))))
    divergence = (np.exp(expected) * (expected - got)).sum(-1)
    print(f"mean KL {divergence.mean():.5f} nat, 99th percentile {np.percentile(divergence, 99):.4f}")
    assert divergence.mean() <= 0.01


def test_greedy_continuations_are_those_of_transformers(
    smollm2_path: Path, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(smollm2_path), max_model_len=256, threads=2) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    excused = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        prompt_ids, ours = tokenizer.encode(prompt), list(result.outputs[0].token_ids)
        assert len(ours) == 64
        # One forward pass over our own continuation tells what transformers would have said after each prefix of it.
        expected = reference(transformers_model, prompt_ids + ours)[len(prompt_ids) - 1 : -1]
        differing = np.flatnonzero(expected.argmax(-1) != ours)
        if differing.size:
            second, best = np.sort(expected[differing[0]])[-2:]
            assert best - second < 0.25, f"{prompt!r}, token {differing[0]}: a gap of {best - second:.2f}"
            excused += 1
    print(f"{excused} of {len(PROMPTS)} continuations differ, all at near ties")
    assert excused <= 4


def test_logits_are_those_of_the_float64_model(executor: NativeExecutor, smollm2_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)[:40]
    with read_gguf(smollm2_path) as file:
        expected = log_softmax(reference_logits(model_weights(file), ids))
    got = log_softmax(teacher_forced(executor, ids, list(range(63))))
    assert (np.exp(expected) * (expected - got)).sum(-1).mean() <= 0.01


@pytest.fixture(scope="module")
def long_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT * 8)[:400]


@pytest.fixture(scope="module")
def alone(executor: NativeExecutor, long_ids: list[int]) -> np.ndarray:
    return executor.logits(make_batch([Sequence(long_ids, list(range(13)))]))[0]


@pytest.mark.parametrize("chunk", [1, 33, 256])
def test_bits_do_not_depend_on_chunks(
    executor: NativeExecutor, long_ids: list[int], alone: np.ndarray, chunk: int
) -> None:
    table = list(range(100, 113))
    for start in range(0, 400, chunk):
        last = executor.logits(make_batch([Sequence(long_ids[start : start + chunk], table, start)]))[0]
    np.testing.assert_array_equal(last, alone)


def test_bits_do_not_depend_on_company(executor: NativeExecutor, long_ids: list[int], alone: np.ndarray) -> None:
    table = list(range(20, 33))
    executor.execute(make_batch([Sequence(long_ids[:-1], table)]))
    company = [Sequence([17 + i] * (1 + i % 3), [40 + i], 0) for i in range(31)]
    batch = make_batch([*company[:16], Sequence(long_ids[-1:], table, 399), *company[16:]])
    np.testing.assert_array_equal(executor.logits(batch)[16], alone)


def test_bits_do_not_depend_on_threads(smollm2_path: Path, long_ids: list[int], alone: np.ndarray) -> None:
    for threads in (1, 3):
        with read_gguf(smollm2_path) as file:
            model = NativeExecutor(model_weights(file), num_blocks=16, max_model_len=512, threads=threads)
        np.testing.assert_array_equal(model.logits(make_batch([Sequence(long_ids, list(range(13)))]))[0], alone)
        model.close()


@pytest.fixture(scope="module")
def sampled_alone(smollm2_path: Path) -> Iterator[list[tuple[int, ...]]]:
    with LLM(str(smollm2_path), max_model_len=512, enable_prefix_caching=False, threads=2) as llm:
        yield [llm.generate(prompt, params(i), use_tqdm=False)[0].outputs[0].token_ids for i, prompt in enumerate(PROMPTS)]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=i, max_tokens=20 + 3 * i, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 20},
        # A pool for three contexts: preemption again and again
        {"max_model_len": 96, "kv_memory": 9 * 737280},
    ],
    ids=["batched", "tiny-chunks", "tiny-pool"],
)
def test_an_answer_is_the_same_whatever_the_engine_went_through(
    smollm2_path: Path, sampled_alone: list[tuple[int, ...]], options: dict[str, int]
) -> None:
    with LLM(str(smollm2_path), threads=2, **({"max_model_len": 512} | options)) as llm:
        for _round in range(2):  # the second one finds the prompts in the prefix cache
            results = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
            assert [result.outputs[0].token_ids for result in results] == sampled_alone
        if "kv_memory" in options:
            assert llm.model.engine.stats().preemptions > 0
