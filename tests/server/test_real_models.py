"""The catalog's larger models the whole way: a base model with a SentencePiece vocabulary, and one that writes code."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from paceline.models import catalog
from tests.server.serve_process import ROOT, ServeProcess


@contextmanager
def serving(model: str) -> Iterator[openai.OpenAI]:
    catalog.pull(model)
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", "serve", model, "--port=0", "--max-model-len=1024"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    server = ServeProcess(process, ours)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client
    finally:
        assert server.end(signal.SIGTERM) == 0
        os.close(ours)


@pytest.fixture(scope="module")
def gemma() -> Iterator[openai.OpenAI]:
    with serving("gemma3-270m") as client:
        yield client


@pytest.fixture(scope="module")
def qwen() -> Iterator[openai.OpenAI]:
    with serving("qwen2.5-coder-1.5b") as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ("1, 2, 3, 4,", 12, " 5, 6, 7,"),  # of the prompt's tokens the first is BOS; the answer's space is kept
        ("🎉🎉🎉🎉🎉🎉", 7, "🎉🎉🎉"),
    ],
)
def test_gemma_continues_text(gemma: openai.OpenAI, prompt: str, tokens: int, text: str) -> None:
    asked: dict[str, Any] = {"model": "gemma3-270m", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    whole = gemma.completions.create(**asked)
    assert whole.choices[0].text.startswith(text)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (tokens, 12)  # type: ignore[union-attr]
    streamed = "".join(chunk.choices[0].text for chunk in gemma.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text


def test_a_base_model_does_not_chat(gemma: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"no chat template.*/v1/completions"):
        gemma.chat.completions.create(model="gemma3-270m", messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (["Write a Python function is_even(n). Code only."], "return n % 2 == 0"),
        (["My name is Ada.", "Hello Ada.", "What is my name?"], "Ada"),
        (["Repeat exactly: 🎉👩‍👩‍👧 한국어 <|im_end|> done"], "🎉👩‍👩‍👧 한국어 <|im_end|> done"),
    ],
)
def test_qwen_answers(qwen: openai.OpenAI, messages: list[str], text: str) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(messages)]
    asked: dict[str, Any] = {"model": "qwen2.5-coder-1.5b", "messages": turns, "temperature": 0, "max_tokens": 100}
    whole = qwen.chat.completions.create(**asked).choices[0]
    assert text in (whole.message.content or "")
    assert whole.finish_reason == "stop"
    assert not (whole.message.content or "").endswith("<|im_end|>")
    chunks = qwen.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
