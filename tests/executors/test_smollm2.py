"""The real model on the native executor, against transformers on the same dequantized weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.engine.sampling import SamplingParams
from paceline.executors.native import NativeExecutor
from paceline.llm import LLM
from paceline.models.architectures import model_weights
from paceline.models.chat import ChatTemplate
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
    assert divergence.mean() <= 0.01


SURE = [
    "Count from 1 to 30.",
    "List the days of the week.",
    "What is 2 + 2?",
    "Write 'yes' ten times.",
    "List the numbers from 1 to 50, separated by commas.",
]
SURE_COMPLETIONS = [
    "1, 2, 3, 4, 5, 6, 7,",
    "A, B, C, D, E, F,",
    "0 1 0 1 0 1 0 1",
    "2, 4, 6, 8, 10,",
    "10 9 8 7 6",
    "5, 10, 15, 20, 25,",
    "100, 200, 300, 400,",
    "a b a b a b a b a b",
    "red green blue red green blue red green blue",
    "1\n2\n3\n4\n5\n",
    "one, two, three, four, five,",
    "The sum of 1 and 1 is 2. The sum of 2 and 2 is 4. The sum of 3 and 3 is 6.",
    "Line 1\nLine 2\nLine 3\nLine 4\n",
    "x1 = 1\nx2 = 2\nx3 = 3\nx4 = 4\n",
    "Chapter 1\nChapter 2\nChapter 3\nChapter 4\n",
]


def first_gaps(path: Path, tokenizer: Tokenizer, transformers_model: Any, prompts: list[list[int]]) -> list[float]:
    """For each greedy continuation of 64 tokens that differs from transformers': how far the reference's best two
    logits are apart where it first does."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(path), max_model_len=512) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
    gaps = []
    for ids, result in zip(prompts, results, strict=True):
        ours = list(result.outputs[0].token_ids)
        assert len(ours) == 64
        # One forward pass over our own continuation tells what transformers would have said after each prefix of it.
        expected = reference(transformers_model, ids + ours)[len(ids) - 1 : -1]
        differing = np.flatnonzero(expected.argmax(-1) != ours)
        if differing.size:
            second, best = np.sort(expected[differing[0]])[-2:]
            gaps.append(float(best - second))
    return gaps


def test_greedy_continuations_that_the_model_is_sure_of_are_those_of_transformers(
    smollm2_path: Path, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    with read_gguf(smollm2_path) as file:
        template = ChatTemplate.from_gguf(file.metadata, tokenizer)
    assert template is not None
    prompts = [template.encode([{"role": "user", "content": question}]) for question in SURE]
    prompts += [tokenizer.encode(prompt) for prompt in SURE_COMPLETIONS]
    gaps = first_gaps(smollm2_path, tokenizer, transformers_model, prompts)
    assert len(prompts) == 20
    assert len(gaps) <= 4
    assert all(gap < 0.25 for gap in gaps)


def test_open_continuations_leave_transformers_only_at_near_ties(
    smollm2_path: Path, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    """Prose of a 135M model is full of near ties, which activations rounded to 8 bits decide by chance: most of these
    continuations differ somewhere (so do those of every engine with 8-bit activations). A fault in the forward pass
    would show as a wide gap."""
    gaps = first_gaps(smollm2_path, tokenizer, transformers_model, [tokenizer.encode(prompt) for prompt in PROMPTS])
    assert all(gap < 0.5 for gap in gaps)


def test_logits_are_those_of_the_float64_model(
    executor: NativeExecutor, smollm2_path: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)[:40]
    with read_gguf(smollm2_path) as file:
        expected = log_softmax(reference_logits(model_weights(file), ids))
    got = log_softmax(teacher_forced(executor, ids, list(range(63))))
    assert (np.exp(expected) * (expected - got)).sum(-1).mean() <= 0.01
